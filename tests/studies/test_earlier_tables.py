import statistics

import pytest

from hf_lgelu.studies.earlier_tables import basis, mean_and_deviation, substitution_table, validation_table

HARD = [{"a": 2.0}, {"a": 80.0}, {"a": 160.0}]


def cells(table):
    header, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert set(rule) == {"---"}
    assert all(len(row) == len(header) for row in rows)
    return [dict(zip(header, row, strict=True)) for row in rows]


def three(record_of, **fields):
    return [record_of(seed=seed, scores=(0.1, 0.9 - 0.01 * seed, 0.8), **fields) for seed in range(3)]


def test_mean_and_deviation_against_statistics():
    values = [0.91, 0.93, 0.98]
    assert mean_and_deviation(values, 4) == f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
    assert mean_and_deviation([0.5], 2) == "0.50"
    assert mean_and_deviation([-0.00004, 0.0], 4) == "0.0000 ± 0.0000"
    assert mean_and_deviation([-0.0123], 2) == "-0.01"
    assert mean_and_deviation([0.5, None], 2) == "–"
    assert mean_and_deviation([], 2) == "–"


def test_validation_table_numbers_by_hand(record_of):
    runs = three(record_of) + three(record_of, activation="lambda_gelu", hardness=HARD)
    gelu, soft = cells(validation_table(runs))
    assert gelu["Activation"] == "GELU"
    assert gelu["Seeds"] == "3"
    assert gelu["Best validation score"] == "0.8900 ± 0.0100"
    assert gelu["Its epoch"] == "2 ± 0"
    assert gelu["Mean λ, last epoch"] == gelu["Drift V_λ"] == "–"
    assert soft["Activation"] == "λ-GELU uniform"
    assert soft["Mean λ, last epoch"] == "160.00 ± 0.00"
    assert soft["Drift V_λ"] == "158.00 ± 0.00"


@pytest.mark.parametrize(
    ("at", "epoch", "as_is", "relu", "smallest", "change"),
    [("last", 3, "0.8500", "0.7000", "160.0", "0.75"), ("best", 2, "0.9000", "0.6000", "80.0", "0.5")],
)
def test_substitution_table_reads_the_evaluation_it_is_asked_for(record_of, at, epoch, as_is, relu, smallest, change):
    run = record_of(activation="lambda_gelu", harden=True, hardness=HARD)
    (row,) = cells(substitution_table([run], at=at))
    assert row["Activation"] == "λ-GELU uniform, hardened"
    assert (row["Epoch"], row["As is"], row["ReLU substituted"]) == (str(epoch), as_is, relu)
    assert row["Change"] == f"{float(relu) - float(as_is):.4f}"
    assert row["Smallest λ"] == smallest
    assert row["Largest logit change"] == change
    assert row["Unchanged predictions"] == "0.5000"


def test_substitution_table_leaves_out_what_has_no_smooth_gate(record_of):
    relu = record_of(activation="relu", relu_scores=(None, None, None))
    assert cells(substitution_table([relu])) == []
    assert [row["Activation"] for row in cells(validation_table([relu]))] == ["ReLU"]


def test_an_unknown_evaluation_is_refused(record_of):
    with pytest.raises(ValueError, match="accepted: last, best, best_substituted"):
        substitution_table([record_of()], at="first")


def test_basis_names_what_the_numbers_rest_on(record_of):
    text = basis([record_of(seed=0), record_of(seed=2)])
    for fact in ("seeds 0, 2", "3 epochs", "100 training rows", "50 rows of test", "abacus", "torch 1"):
        assert fact in text
