"""The tables of int8, zeros, pruning, linear pieces and certificates, from records small enough to count by hand."""

import pytest
from lgelu_lab.measurements.certificate import CERTIFICATE_COLUMNS
from lgelu_lab.measurements.int8 import INT8_COLUMNS
from lgelu_lab.measurements.linear_pieces import LINEAR_PIECES_COLUMNS
from lgelu_lab.measurements.pruning import PRUNING_COLUMNS
from lgelu_lab.measurements.zeros import ZEROS_COLUMNS
from lgelu_lab.report.downstream.sections import PARTS, downstream_sections
from lgelu_lab.report.downstream.tables.certificate import certificate_table
from lgelu_lab.report.downstream.tables.int8 import int8_table
from lgelu_lab.report.downstream.tables.linear_pieces import linear_pieces_table
from lgelu_lab.report.downstream.tables.overview import overview_table
from lgelu_lab.report.downstream.tables.pruning import pruning_table
from lgelu_lab.report.downstream.tables.zeros import zeros_table


def timed(model, precision, batch_size, median, **fields):
    row = dict.fromkeys(INT8_COLUMNS, 0) | {"file_bytes": 1_250_000, "score": 0.5, "max_logit_difference": 0.00025}
    row |= {"quartile1_ms": median - 0.1, "quartile3_ms": median + 0.1, "min_ms": median - 0.2, "metric": "accuracy"}
    return row | {"model": model, "precision": precision, "batch_size": batch_size, "median_ms": median} | fields


def zeros(model, layer, **fields):
    row = dict.fromkeys(ZEROS_COLUMNS, 0) | {"gate": "relu", "units": 256, "values": 10_000, "mean_absolute": 0.5}
    return row | {"model": model, "layer": layer} | fields


def pruned(model, criterion, fraction=None, **fields):
    row = dict.fromkeys(PRUNING_COLUMNS) | {"parameters_before": 1000, "score_before": 0.5}
    rule = None if fraction is None else "fraction"
    return row | {"model": model, "criterion": criterion, "rule": rule, "fraction": fraction} | fields


def done(model, criterion, fraction=None, *, widths="8-8", parameters=500, finetuned=0.5):
    changes = dict.fromkeys(("calibration_max_logit_change", "eval_max_logit_change"), 0.25)
    scores = {"score_pruned": 0.25, "score_finetuned": finetuned}
    return pruned(model, criterion, fraction, widths=widths, parameters=parameters, **changes, **scores)


def piece(model, step, **fields):
    row = dict.fromkeys(LINEAR_PIECES_COLUMNS) | {"points": 100, "max_error_everywhere": 0.125}
    return row | {"model": model, "perturbation": step} | fields


def exact(step, **fields):
    return piece("hardened_relu", step, inside=0.75, distinct_regions=90, seconds=2.0) | fields


def only(table, *first):
    (row,) = (row for row in table.texts if tuple(row[: len(first)]) == first)
    return dict(zip(table.header, row, strict=True))


def test_int8_has_a_column_per_batch_size(measurement_of):
    first = [
        timed("gelu", "int8-all", 1, 0.5, float_activations=4),
        timed("gelu", "int8-all", 64, 20.0, float_activations=4),
    ]
    second = [
        timed("gelu", "int8-all", 1, 1.5, float_activations=5, score=0.75, max_logit_difference=0.5),
        timed("gelu", "int8-all", 64, 30.0, float_activations=4, score=0.75),
    ]
    records = [measurement_of("int8", rows, seed=seed) for seed, rows in enumerate((first, second))]
    table = int8_table(records)
    assert table.texts == [
        [
            *("mlp-digits", "GELU", "int8", "0.6250 ± 0.1768", "1.00 ± 0.71", "25.0 ± 7.1", "0", "4 or 5", "0", "0"),
            *("0", "0.0 ± 0.0", "0.5", "0", "1.25", "2 of 3"),
        ]
    ]
    assert table.header[4:6] == ("Median ms, batch 1", "Median ms, batch 64")


def test_a_batch_size_that_was_not_timed_is_a_dash(measurement_of):
    small = measurement_of("int8", [timed("gelu", "float32", 1, 0.5)])
    large = measurement_of("int8", [timed("gelu", "float32", 64, 0.5)], benchmark="mlp-fmnist")
    table = int8_table([small, large])
    assert only(table, "mlp-digits")["Median ms, batch 64"] == "–"
    assert only(table, "mlp-fmnist")["Median ms, batch 1"] == "–"


def test_zeros_by_hand(measurement_of):
    rows = [zeros("relu", "layers.0", apoz=0.25, off_fraction=0.25, near_zero_fraction=0.5, dead_units=3)]
    found = only(zeros_table([measurement_of("zeros", rows)]), "mlp-digits", "ReLU from the start", "layers.0")
    assert list(found.values())[3:] == ["256", "25.0", "25.0", "50.0", "0.500", "0", "3", "10,000", "1 of 3"]


def test_pruning_by_hand_with_what_was_refused(measurement_of):
    first = [pruned("gelu", "dead", refusal="smooth"), done("relu", "dead", parameters=900)]
    second = [pruned("gelu", "dead", refusal="smooth"), pruned("relu", "dead", refusal="none is dead")]
    records = [measurement_of("pruning", rows, seed=seed) for seed, rows in enumerate((first, second))]
    table = pruning_table(records)
    assert only(table, "mlp-digits", "ReLU from the start", "dead units")["Parameters left, %"] == "90.0 (1 of 2 seeds)"
    assert list(only(table, "mlp-digits", "GELU").values())[2:5] == ["dead units", "–", "–"]
    assert table.rows[0][2].tone == "warning"
    assert table.rows[1][2] == "dead units", "one seed was pruned"
    assert table.notes == ("Refused, GELU: “smooth”.", "Refused, ReLU from the start: “none is dead”.")


def test_linear_pieces_show_the_largest_error_and_the_mean_share_inside(measurement_of):
    first = [piece("gelu", 0.01, refusal="smooth", max_error_float64=2e-5), exact(0.01, max_error_float64=1e-14)]
    second = [
        piece("gelu", 0.01, refusal="smooth", max_error_float64=3e-5),
        exact(0.01, max_error_float64=None, inside=0.25),
    ]
    records = [measurement_of("linear_pieces", rows, seed=seed) for seed, rows in enumerate((first, second))]
    table = linear_pieces_table(records)
    smooth = only(table, "mlp-digits", "GELU", "first order")
    assert (smooth["Largest error, float64"], smooth["Still inside the region, %"]) == ("3e−05", "–")
    found = only(table, "mlp-digits", "hardened, swapped", "exact piece")
    assert found["Still inside the region, %"] == "50.0 ± 35.4"
    assert found["Largest error, float64"] == "1e−14"
    assert found["Inside or not, float64"] == "0.12"


def test_certificates_by_hand(measurement_of):
    row = dict.fromkeys(CERTIFICATE_COLUMNS, 0.5) | {"model": "hardened", "rows": 359, "bound": 13.748, "ratio": 5587.6}
    found = only(certificate_table([measurement_of("certificate", [row])]), "mlp-digits", "λ-GELU hardened")
    assert list(found.values())[2:] == [
        *("359", "0.5", "0.5", "13.7", "0.500", "0.500", "5588", "0.50", "50.0", "50.0", "1 of 3"),
    ]


def test_the_overview_has_a_row_per_measurement_that_can_be_made(measurement_of):
    half = {"finetuned": 0.75}
    records = [
        measurement_of(
            "int8",
            [
                timed(model, precision, size, median, score=0.25 if precision == "int8-all" else 0.5)
                for model in ("gelu", "hardened_relu")
                for size in (1, 64)
                for precision, median in (("float32", 4.0 * size), ("int8-all", 1.0 * size))
            ],
        ),
        measurement_of("pruning", [done("relu", "apoz", 0.5), done("relu", "magnitude", 0.5, **half)]),
        measurement_of("linear_pieces", [exact(0.01, max_error_float64=2e-14), exact(0.1, max_error_float64=0.5)]),
        measurement_of("int8", [timed("gelu", "float32", 1, 1.0)], benchmark="gpt2-wikitext2"),
    ]
    texts = overview_table(records).texts
    assert texts[0] == [
        *("mlp-digits", "float32 → int8: score; batch of 64", "0.5000 → 0.2500; 256 → 64 ms", "–"),
        *("0.5000 → 0.2500; 256 → 64 ms", "1 of 3"),
    ]
    assert texts[1] == ["mlp-digits", "images proved", "missing", "–", "–", "–"]
    assert texts[2][2:] == ["–", "0.5000, 0.7500", "–", "1 of 3"]
    assert texts[3][2:] == ["–", "–", "2e−14 (75 % inside)", "1 of 3"]
    assert [row[0] for row in texts[4:]] == ["gpt2-wikitext2"], "nothing but int8 can be measured there"


def test_the_overview_shows_a_transformer_with_its_products_alone_in_int8(measurement_of):
    medians = {"float32": 8.0, "int8-layers": 4.0, "int8-all": 2.0}
    rows = [timed("gelu", precision, 64, median) for precision, median in medians.items()]
    shown = {
        benchmark: overview_table([measurement_of("int8", rows, benchmark=benchmark)]).texts[0][1:3]
        for benchmark in ("gpt2-wikitext2", "deit-tiny-imagenet", "resnet18-cifar10")
    }
    products = ["float32 → int8 products: score; batch of 64", "0.5000 → 0.5000; 8 → 4 ms"]
    assert shown["gpt2-wikitext2"][0] == products[0]
    assert shown["gpt2-wikitext2"][1].endswith("8 → 4 ms")
    assert shown["deit-tiny-imagenet"] == products
    assert shown["resnet18-cifar10"][1].endswith("8 → 2 ms")


@pytest.mark.parametrize("name", PARTS)
def test_a_measurement_that_was_not_made_is_called_missing(measurement_of, name):
    sections = {section.key: section for section in downstream_sections([], [measurement_of("other", [{}])])}
    section = sections[f"downstream-{name.replace('_', '-')}"]
    assert "missing, not zero" in section.text
    assert not section.tables
    assert not section.drawings
