"""The tables on ReLU without training, from records small enough to count by hand."""

import pytest
from lgelu_lab.measurements.conversion import CONVERSION_COLUMNS
from lgelu_lab.measurements.conversion_finetuning import FINETUNING_COLUMNS
from lgelu_lab.report.downstream.tables.conversion import conversion_overview_table, conversion_table
from lgelu_lab.report.downstream.tables.conversion_finetuning import finetuning_overview_table, finetuning_table
from lgelu_lab.report.write import readme_tables


def converted(method, score, rows=None, *, original=0.75, model="gelu", **fields):
    row = dict.fromkeys(CONVERSION_COLUMNS) | {"kl": 0.0125, "agreement": 0.875, "max_logit_change": 2.0}
    row |= {"model": model, "method": method, "rows": rows, "score": score, "original_score": original}
    return row | fields


def refused(rows):
    return dict.fromkeys(CONVERSION_COLUMNS) | {
        "model": "gelu", "method": "refit", "rows": rows, "original_score": 0.75, "refusal": "too few",
    }  # fmt: skip


def tuned(start, steps, rate, score, **fields):
    row = dict.fromkeys(FINETUNING_COLUMNS) | {"model": "gelu", "start": start, "steps": steps, "seconds": 1.0}
    return row | {"learning_rate": rate, "score": score} | fields


def only(table, *first):
    (row,) = (row for row in table.texts if tuple(row[: len(first)]) == first)
    return dict(zip(table.header, row, strict=True))


@pytest.fixture
def conversions(measurement_of, summaries):
    def rows(shift, seconds):
        return [
            converted("original", 0.75, kl=0.0),
            converted("direct", 0.5 + shift),
            converted("bias-fold", 0.625, 1438, seconds=1.0),
            refused(8) if seconds == 1.0 else converted("refit", 0.625, 8, seconds=1.0),
            converted("refit", 0.75 - shift, 64, seconds=seconds),
            converted("refit", 0.75 + shift, 1438, seconds=seconds),
            converted("hardened", 0.8125, model="hardened_relu", seconds=60.0),
        ]

    models = summaries | {"hardened_relu": summaries["hardened"]}
    return [
        measurement_of("conversion", rows(shift, seconds), seed=seed, models=models)
        for seed, (shift, seconds) in enumerate(((0.0, 1.0), (0.125, 2.0)))
    ]


def test_ways_stand_beside_the_original_seed_by_seed(conversions):
    table = conversion_table(conversions)
    assert only(table, "mlp-digits", "GELU", "refit", "64") == {
        "Benchmark": "mlp-digits", "Network": "GELU", "Way": "refit", "Calibration rows": "64",
        "Score": "0.6875 ± 0.0884", "Against the original": "−0.0625 ± 0.0884", "KL, nats": "0.0125 ± 0.0000",
        "Same prediction, %": "87.5 ± 0.0", "Largest logit change": "2", "Seeds": "2 of 3",
    }  # fmt: skip
    assert only(table, "mlp-digits", "GELU", "refit", "1,438")["Against the original"] == "+0.0625 ± 0.0884"
    assert only(table, "mlp-digits", "GELU", "original", "–")["Against the original"] == "–"
    hardened = only(table, "mlp-digits", "hardened, swapped", "hardened in training", "–")
    assert hardened["Score"] == "0.8125 ± 0.0000"


def test_a_refusal_is_a_dash_of_its_seed_and_a_note(conversions):
    few = only(conversion_table(conversions), "mlp-digits", "GELU", "refit", "8")
    assert few["Score"] == "0.6250 (1 of 2 seeds)"
    assert few["Against the original"] == "−0.1250 (1 of 2 seeds)"
    assert conversion_table(conversions).notes == ("Refused, GELU: “too few”.",)
    alone = only(conversion_table(conversions[:1]), "mlp-digits", "GELU", "refit", "8")
    assert alone["Score"] == alone["Against the original"] == "–"


def test_perplexity_is_compared_in_per_cent_and_a_change_that_rounds_to_nothing_has_no_sign(measurement_of, summaries):
    models = {"gelu": summaries["gelu"] | {"metric": "perplexity"}}
    rows = [converted("refit", 101.5, 64, original=100.0), converted("direct", 99.999, original=100.0)]
    table = conversion_table([measurement_of("conversion", rows, benchmark="gpt2-wikitext2", models=models)])
    assert [row[4:6] for row in table.texts] == [["101.50", "+1.50 %"], ["100.00", "0.00 %"]]


def test_the_readmes_table_has_a_row_per_benchmark(conversions, measurement_of):
    elsewhere = measurement_of("int8", [{}], benchmark="mlp-adult")
    table = conversion_overview_table([*conversions, elsewhere])
    assert only(table, "mlp-digits") == {
        "Benchmark": "mlp-digits", "Original": "0.7500 ± 0.0000", "Direct swap": "0.5625 ± 0.0884",
        "Bias fold": "0.6250 ± 0.0000", "Refit, 64 rows": "0.6875 ± 0.0884", "Refit, 256 rows": "–",
        "Refit, 1,024 rows": "–", "Refit, most rows": "0.8125 ± 0.0884 (1,438)",
        "Hardened in training": "0.8125 ± 0.0000", "Seeds": "2 of 3",
    }  # fmt: skip
    assert "missing" in table.texts[1]
    assert conversion_overview_table([elsewhere]).rows == ()


@pytest.fixture
def tunings(measurement_of):
    def rows(shift):
        return [
            *(tuned("direct", 0, None, 0.25), tuned("refit", 0, None, 0.5), tuned("gelu", 0, None, 0.75)),
            tuned("direct", 10, 0.05, 0.5 + shift),
            tuned("direct", 10, 0.005, 0.5 - shift),
            tuned("anneal", 10, 0.05, 0.625),
            tuned("anneal", 10, 0.005, None, refusal="no"),
        ]

    return [measurement_of("conversion-finetuning", rows(shift), seed=i) for i, shift in enumerate((0.0, 0.125))]


def test_a_row_per_steps_and_learning_rate_and_a_column_per_start(tunings):
    assert finetuning_table(tunings).header[3:7] == (
        "direct swap, then tuned", "refit, then tuned", "annealed, then swapped", "GELU tuned, never swapped",
    )  # fmt: skip
    assert finetuning_table(tunings).texts == [
        ["mlp-digits", "0", "–", "0.2500 ± 0.0000", "0.5000 ± 0.0000", "–", "0.7500 ± 0.0000", "2 of 3"],
        ["mlp-digits", "10", "0.05", "0.5625 ± 0.0884", "–", "0.6250 ± 0.0000", "–", "2 of 3"],
        ["mlp-digits", "10", "0.005", "0.4375 ± 0.0884", "–", "–", "–", "2 of 3"],
    ]
    assert finetuning_table(tunings).notes == ("Refused, GELU: “no”.",)


@pytest.mark.parametrize(("metric", "better"), [("accuracy", "0.5625 ± 0.0884"), ("perplexity", "0.44 ± 0.09")])
def test_the_readmes_table_takes_the_learning_rate_with_the_better_mean(measurement_of, tunings, metric, better):
    models = {"gelu": {"run": "g", "metric": metric, "score": 1.0, "relu_score": None, "target_hardness": None}}
    records = [
        measurement_of("conversion-finetuning", record.rows, seed=record.seed, models=models) for record in tunings
    ]
    table = finetuning_overview_table(records)
    assert table.header == ("Benchmark", "Start", "0 steps", "10 steps", "Seeds")
    assert only(table, "mlp-digits", "direct swap, then tuned")["10 steps"] == better
    assert only(table, "mlp-digits", "refit, then tuned")["10 steps"] == "–"
    assert "mlp-digits 0.05, 0.005" in table.caption
    assert finetuning_overview_table([]).rows == ()


def test_both_tables_go_into_the_readme_where_they_were_measured(conversions, tunings, record_of, measurement_of):
    records = [record_of(name="downstream/mlp-digits/gelu-seed0")]
    titles = ("**ReLU without training**", "**A few training steps around the swap**")
    text = readme_tables(records, [*conversions, *tunings])
    assert [title in text for title in titles] == [True, True]
    other = readme_tables(records, conversions)
    assert [title in other for title in titles] == [True, False]
