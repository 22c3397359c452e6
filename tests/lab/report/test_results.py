"""The main results, the sentences on them, and what holds of the paper's claims, by hand."""

import pytest
from lgelu_lab.report.claims import CLAIMS
from lgelu_lab.report.paper import PaperValues
from lgelu_lab.report.results import conclusions, results_of

HARD = [{"a": 160.0, "b": 160.0}] * 3


def hardened(record_of, relu=0.85, **fields):
    return record_of(activation="lambda_gelu", harden=True, hardness=HARD, relu_scores=(0.1, 0.1, relu), **fields)


def converted(measurement_of, score, original, *, rows=64, seed=0, metric="accuracy", benchmark="mlp-adult"):
    models = {"gelu": {"run": "g", "metric": metric, "score": original, "relu_score": 0.5, "target_hardness": None}}
    row = {"model": "gelu", "method": "refit", "original_score": original, "refusal": None}
    more = {**row, "rows": 2 * rows, "score": score}
    return measurement_of(
        "conversion", [{**row, "rows": rows, "score": 0.1}, more], seed=seed, models=models, benchmark=benchmark
    )


def test_a_row_has_every_way_and_the_refit_on_the_most_rows(record_of, measurement_of, table_of, relufied):
    runs = [record_of(), hardened(record_of), relufied(), record_of(activation="relu", relu_scores=(None,) * 3)]
    paper = PaperValues({"mlp-adult": {"gelu": {"as_is": (0.85, None), "substituted": (0.8, None)}}}, "cited")
    table = table_of("results", runs, [converted(measurement_of, 0.8125, 0.85)], paper=paper)
    (row,) = table.texts
    assert row[0] == "mlp-adult [a]"
    assert [text.partition(" (")[0] for text in row[1:7]] == [
        "0.8500",
        "0.7000",
        "0.8125",
        "0.8500",
        "0.8500",
        "0.8500",
    ]
    assert row[7] == "0.85, 0.8, –"
    assert table.notes[0].startswith("Paper: cited")


def test_what_is_not_there_is_called_missing_and_not_measured_is_a_dash(record_of, table_of):
    (row,) = table_of("results", [record_of()]).texts
    assert row[3:] == ["–", "missing", "missing", "missing"]


@pytest.mark.parametrize(("seed", "original"), [(1, 0.85), (0, 0.83)])
def test_converted_networks_that_are_not_those_of_the_row_are_marked(
    record_of, measurement_of, table_of, seed, original
):
    table = table_of("results", [record_of()], [converted(measurement_of, 0.8125, original, seed=seed)])
    assert table.texts[0][3].endswith("‡")
    assert f"that score, smooth: mlp-adult {original:.4f}." in table.notes[0]


def test_a_refit_that_was_refused_has_no_score(record_of, measurement_of, data_of):
    data = data_of([record_of()], [converted(measurement_of, None, 0.85)])
    assert not len(results_of(data, "mlp-adult")["Converted, no training"])


def test_three_sentences_say_what_each_way_changes(record_of, measurement_of, data_of):
    perplexity = {"metric": "perplexity", "greater_is_better": False, "benchmark": "gpt2-wikitext2"}
    runs = [
        record_of(),
        hardened(record_of, relu=0.8501),
        record_of(scores=(90.0, 30.0, 31.0), relu_scores=(99.0, 95.0, 92.0), **perplexity),
    ]
    text = conclusions(data_of(runs, [converted(measurement_of, 0.845, 0.85)]))
    assert text == [
        "Putting ReLU into a finished GELU network changes the score of mlp-adult −15.00 points, gpt2-wikitext2 "
        "perplexity 31.00 → 92.00.",
        "Refitting the linear maps behind the gates, without training or labels, changes the score of mlp-adult −0.50 "
        "points.",
        "After hardening, ReLU with the same weights changes the score of mlp-adult +0.01 points.",
    ]
    assert conclusions(data_of([record_of(activation="relu", relu_scores=(None,) * 3)])) == []


def judged(table_of, claim, *arguments, **options):
    table = table_of("claims", *arguments, **options)
    (row,) = [row for row in table.texts if row[0] == CLAIMS[claim].says]
    return row[1], row[2]


def learned(record_of, mode, last, **fields):
    path = [{"a": 1.0, "b": 1.1, "c": 1.2}] * 2 + [dict(zip("abc", last, strict=True))]
    return record_of(activation="lambda_gelu", init_mode=mode, hardness=path, **fields)


def test_the_order_of_layers_is_judged_by_its_worst_pair(record_of, table_of):
    runs = [learned(record_of, mode, (1, 2, 3), benchmark="mlp-fmnist") for mode in ("uniform", "increasing")]
    assert judged(table_of, "order", runs) == ("holds", "mlp-fmnist: ρ_S +1.00")
    runs.append(learned(record_of, "decreasing", (1, 3, 2), benchmark="mlp-fmnist"))
    assert judged(table_of, "order", runs) == ("holds", "mlp-fmnist: ρ_S +0.50 to +1.00")
    runs[-1] = learned(record_of, "decreasing", (3, 2, 1), benchmark="mlp-fmnist")
    runs += [learned(record_of, mode, (1, 2, 3), benchmark="resnet18-cifar10") for mode in ("uniform", "increasing")]
    assert judged(table_of, "order", runs)[0] == "in part: 1 of 2"
    adult = [learned(record_of, mode, (1, 2, 3)) for mode in ("uniform", "increasing")]
    assert judged(table_of, "order", adult) == ("not measured", "–"), "the claim is on vision"


def test_lambda_gelu_is_compared_with_gelu_seed_by_seed(record_of, table_of):
    gelu = record_of(scores=(0.5, 0.9, 0.8))
    better = learned(record_of, "uniform", (1, 2, 3), scores=(0.5, 0.91, 0.8))
    worse = learned(record_of, "increasing", (1, 2, 3), scores=(0.5, 0.89, 0.8))
    assert judged(table_of, "at-least-gelu", [gelu, better]) == ("holds", "mlp-adult: accuracy +0.0100")
    found = judged(table_of, "at-least-gelu", [gelu, better, worse])
    assert found == ("does not hold", "mlp-adult: accuracy −0.0100 to +0.0100")


def test_a_swap_is_free_up_to_a_thousandth(record_of, table_of):
    assert judged(table_of, "swap", [record_of(), hardened(record_of, relu=0.8495)]) == (
        "holds", "mlp-adult: hardened accuracy −0.0005, GELU −0.1500",
    )  # fmt: skip
    assert judged(table_of, "swap", [hardened(record_of, relu=0.845)])[0] == "does not hold"


def test_gpt2_can_be_swapped_if_it_is_hard(record_of, table_of):
    fields = {"metric": "perplexity", "greater_is_better": False, "benchmark": "gpt2-wikitext2"}
    run = hardened(record_of, relu=100.01, scores=(200.0, 150.0, 100.0), **fields)
    assert judged(table_of, "gpt2", [run]) == ("does not hold", "gpt2-wikitext2: hardened perplexity +0.01 %")
    broken = hardened(record_of, relu=200.0, scores=(200.0, 150.0, 100.0), **fields)
    assert judged(table_of, "gpt2", [broken])[0] == "holds"


def test_t_and_c_are_judged_pair_by_pair(record_of, table_of):
    def point(t, c, drift):
        path = [{"a": 1.0}, {"a": 1.0}, {"a": 1.0 + drift}]
        name = f"grid/{t}-{c}"
        run = record_of(activation="lambda_gelu", hardness=path, benchmark="mlp-fmnist", name=name)
        run.config.update(temperature=t, hardness_lr_multiplier=c)
        return run

    runs = [point(0.1, 1.0, 1.0), point(0.1, 9.0, 3.0), point(0.3, 1.0, 0.5), point(0.3, 9.0, 2.0)]
    assert judged(table_of, "grid", runs)[0] == "holds"
    assert "4 of 4 pairs of settings; largest drift at t = 0.1, c = 9" in judged(table_of, "grid", runs)[1]
    runs[-1] = point(0.3, 9.0, 4.0)
    assert judged(table_of, "grid", runs)[1].startswith("mlp-fmnist: 3 of 4 pairs")


def test_the_papers_drift_is_put_over_ours(record_of, table_of):
    values = {"drift": (3.0, None), "mean_hardness": (2.5, None)}
    paper = PaperValues({"mlp-adult": {"lambda_gelu-uniform": values}})
    path = [{"a": 1.0}, {"a": 1.0}, {"a": 2.5}]
    run = record_of(activation="lambda_gelu", hardness=path)  # from 1: drift 1.5, all of it on the way
    verdict, numbers = judged(table_of, "drift", [run], paper=paper)
    assert verdict == "does not hold"
    assert "2.0 to 2.0 times ours; its way is 2.0 times the net one from a uniform start, ours 1.0" in numbers
