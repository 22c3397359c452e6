"""The tables of the training runs, from records small enough to count by hand."""

import pytest
from lgelu_lab.report.run_tables import grid_cells

# Over the two sites: |2 − 1| + |4 − 2| = 3 and 0, so V = 1.5; mean λ in the last epoch 2.5.
PATH = [{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 1.0}]


def rows(table):
    return {tuple(row[:2]): dict(zip(table.header, row, strict=True)) for row in table.rows}


def test_table_one_by_hand(table_of, record_of):
    gelu = [record_of(seed=seed, scores=(0.1, 0.9 - 0.01 * seed, 0.8)) for seed in range(3)]
    soft = [record_of(activation="lambda_gelu", hardness=PATH, seed=seed) for seed in range(2)]
    found = rows(table_of("profiles", [*gelu, *soft]))
    assert found["mlp-adult", "GELU"] == {
        "Benchmark": "mlp-adult", "Activation": "GELU", "Seeds": "3", "Epochs × samples": "3 × 100 [a]",
        "Best validation score": "0.8900 ± 0.0100", "Its epoch": "2 ± 0", "Mean λ, last epoch": "–", "Drift V_λ": "–",
    }  # fmt: skip
    uniform = found["mlp-adult", "λ-GELU uniform"]
    assert (uniform["Seeds"], uniform["Mean λ, last epoch"], uniform["Drift V_λ"]) == (
        *("2 of 3", "2.50 ± 0.00", "1.50 ± 0.00"),
    )


def test_related_activations_are_compared_by_seed(table_of, record_of):
    runs = [
        record_of(seed=0, scores=(0.5, 0.5, 0.80)),
        record_of(seed=1, scores=(0.5, 0.5, 0.60)),
        record_of(seed=1, activation="mish", scores=(0.5, 0.7, 0.65)),
        record_of(seed=2, activation="mish", scores=(0.5, 0.9, 0.65)),
    ]
    table = table_of("related", runs)
    found = rows(table)
    assert found["mlp-adult", "Mish"]["Best validation score"] == "0.8000 ± 0.1414"
    assert found["mlp-adult", "Mish"]["Minus GELU"].startswith("+0.1000 (")  # seed 1 alone has a GELU run
    assert found["mlp-adult", "GELU"]["Minus GELU"] == "–"
    assert found["mlp-adult", "PReLU"]["Best validation score"] == "missing"
    assert [label for _, label in found] == [
        *("ReLU", "GELU", "SiLU", "Mish", "PReLU", "Swish, learnable β"),
        *("λ-GELU uniform", "λ-GELU increasing", "λ-GELU decreasing"),
    ]
    assert table_of("related", [record_of(), record_of(activation="relu")]).rows == []


# Substitution

HARD = [{"a": 2.0, "b": 9.0}, {"a": 70.0, "b": 90.0}, {"a": 160.0, "b": 160.0}]


def hardened(record_of, **fields):
    return record_of(activation="lambda_gelu", harden=True, **{"hardness": HARD, **fields})


def test_the_tables_numbers_by_hand(record_of, table_of):
    runs = [hardened(record_of, seed=seed, relu_scores=(0.5, 0.5, 0.6 + 0.1 * seed)) for seed in (0, 1)]
    row = rows(table_of("substitution-last", runs))["mlp-adult", "λ-GELU uniform, hardened"]
    assert row == {
        "Benchmark": "mlp-adult", "Activation": "λ-GELU uniform, hardened", "Seeds": "2 of 3",
        "Epochs × samples": "3 × 100 [a]", "Epoch": "3 ± 0", "Smallest λ": "160.0 ± 0.0",
        "As is": "0.8500 ± 0.0000", "ReLU substituted": "0.6500 ± 0.0707", "Change": "−0.2000 ± 0.0707",
        "Largest logit change": "0.75", "Unchanged predictions": "0.5000 ± 0.0000",
    }  # fmt: skip


def test_the_rival_shows_one_network(table_of, relufied):
    label = "GELU → ReLU at 25%, trained on"
    after = rows(table_of("substitution-last", [relufied()]))["mlp-adult", label]
    assert after["As is"] == after["ReLU substituted"] == "0.8500 (0.726 to 0.924)"
    assert after["Change"] == after["Largest logit change"] == after["Unchanged predictions"] == "–"
    assert "→ ReLU: from the switch on" in " ".join(table_of("substitution-last", [relufied()]).notes)


# The grid of t and c

# Drift: |3 − 1| over one site between the two epochs.
TWO_EPOCHS = [{"a": 1.0}, {"a": 3.0}]


@pytest.fixture
def grid_run(record_of):
    def build(t, c, *, seed=0, mode="uniform", scores=(0.5, 0.7), path=None, benchmark="mlp-fmnist", **config):
        record = record_of(
            activation="lambda_gelu", init_mode=mode, seed=seed, scores=scores, relu_scores=scores,
            hardness=path or TWO_EPOCHS, benchmark=benchmark, name=f"grid/{benchmark}/{mode}-t{t}-c{c}-seed{seed}",
        )  # fmt: skip
        record.config.update(temperature=t, hardness_lr_multiplier=c, **config)
        return record

    return build


@pytest.fixture
def baseline(record_of):
    def build(seed=0, scores=(0.4, 0.6), benchmark="mlp-fmnist", **fields):
        name = f"grid/{benchmark}/gelu-seed{seed}"
        return record_of(seed=seed, scores=scores, relu_scores=scores, benchmark=benchmark, name=name, **fields)

    return build


def test_a_cell_is_the_mean_over_seeds_and_modes_paired_by_seed(grid_run, baseline, data_of):
    runs = [
        grid_run(0.1, 9.0, seed=0, scores=(0.5, 0.70)),  # 0.70 − 0.60
        grid_run(0.1, 9.0, seed=1, scores=(0.9, 0.70)),  # 0.90 − 0.50, at its best epoch
        grid_run(0.1, 9.0, seed=1, mode="increasing", scores=(0.4, 0.45), path=[{"a": 5.0}, {"a": 4.0}]),
        baseline(seed=0, scores=(0.4, 0.6)),
        baseline(seed=1, scores=(0.5, 0.3)),
    ]
    cell = grid_cells(data_of(runs), "mlp-fmnist")[0.1, 9.0]
    assert list(cell["gain"]) == pytest.approx([0.1, 0.4, -0.05])
    assert list(cell["drift"]) == pytest.approx([2.0, 2.0, 1.0])


def test_no_baseline_of_the_seed_or_of_another_recipe_is_no_gain(grid_run, baseline, record_of, data_of):
    other = baseline(seed=0)
    other.config["learning_rate"] = 0.1
    outside = record_of(seed=0, benchmark="mlp-fmnist")  # a baseline of the profiles, not of the grid
    data = data_of([grid_run(0.1, 1.0), baseline(seed=2), other, outside])
    cell = grid_cells(data, "mlp-fmnist")[0.1, 1.0]
    assert cell["gain"].isna().all()
    assert list(cell["drift"]) == [2.0]
