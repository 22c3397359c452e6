import pytest
from lgelu_lab.report.figures.grid import draw_grid
from lgelu_lab.report.grid import EXPECTED_RUNS, grid_of
from lgelu_lab.report.tables.grid import grid_table

# Drift: |3 − 1| over one site between the two epochs.
PATH = [{"a": 1.0}, {"a": 3.0}]


@pytest.fixture
def grid_run(record_of):
    def build(t, c, *, seed=0, mode="uniform", scores=(0.5, 0.7), path=None, benchmark="mlp-fmnist", **config):
        record = record_of(
            activation="lambda_gelu", init_mode=mode, seed=seed, scores=scores, relu_scores=scores,
            hardness=path or PATH, benchmark=benchmark, name=f"grid/{benchmark}/{mode}-t{t}-c{c}-seed{seed}",
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


def test_a_cell_is_the_mean_over_seeds_and_modes_paired_by_seed(grid_run, baseline):
    runs = [
        grid_run(0.1, 9.0, seed=0, scores=(0.5, 0.70)),  # 0.70 − 0.60
        grid_run(0.1, 9.0, seed=1, scores=(0.9, 0.70)),  # 0.90 − 0.50, at its best epoch
        grid_run(0.1, 9.0, seed=1, mode="increasing", scores=(0.4, 0.45), path=[{"a": 5.0}, {"a": 4.0}]),
        baseline(seed=0, scores=(0.4, 0.6)),
        baseline(seed=1, scores=(0.5, 0.3)),
    ]
    cell = grid_of(runs, "mlp-fmnist").cells[0.1, 9.0]
    assert cell.gains == pytest.approx((0.1, 0.4, -0.05))
    assert cell.gain == pytest.approx(0.15)
    assert cell.drifts == pytest.approx((2.0, 2.0, 1.0))
    assert cell.drift == pytest.approx(5 / 3)


def test_planned_cells_without_a_run_are_there_and_empty(grid_run, baseline):
    grid = grid_of([grid_run(0.3, 6.0), baseline()], "mlp-fmnist")
    assert grid.temperatures == (0.1, 0.3, 0.6, 0.9)
    assert grid.multipliers == (1.0, 3.0, 6.0, 9.0)
    empty = [cell for cell in grid.cells.values() if cell.drift is None]
    assert len(empty) == 15
    assert all(cell.gain is None for cell in empty)


def test_the_resnet_grid_has_one_temperature(grid_run):
    grid = grid_of([grid_run(0.1, 6.0, benchmark="resnet18-cifar100")], "resnet18-cifar100")
    assert (grid.temperatures, grid.multipliers) == ((0.1,), (1.0, 3.0, 6.0, 9.0))


def test_no_baseline_of_the_seed_or_of_another_recipe_is_no_gain(grid_run, baseline, record_of):
    other = baseline(seed=0)
    other.config["learning_rate"] = 0.1
    outside = record_of(seed=0, benchmark="mlp-fmnist")  # a baseline of the profiles, not of the grid
    cell = grid_of([grid_run(0.1, 1.0), baseline(seed=2), other, outside], "mlp-fmnist").cells[0.1, 1.0]
    assert cell.gain is None
    assert cell.drift == 2.0


def test_a_run_twice_is_refused(grid_run):
    with pytest.raises(ValueError, match="is there twice"):
        grid_of([grid_run(0.1, 1.0), grid_run(0.1, 1.0)], "mlp-fmnist")


def test_without_runs_there_is_no_grid(record_of, baseline):
    assert grid_of([record_of(), baseline()], "mlp-fmnist") is None
    assert grid_table([record_of()]) is None


def test_the_table_counts_runs_and_calls_missing_cells_missing(grid_run, baseline):
    table = grid_table([grid_run(0.1, 1.0), grid_run(0.1, 3.0, seed=1), baseline()])
    rows = {(t, c): rest for _, t, c, *rest in table.texts}
    assert rows["0.1", "1"] == [f"1 of {EXPECTED_RUNS}", "2.00", "+0.1000"]
    assert rows["0.1", "3"] == [f"1 of {EXPECTED_RUNS}", "2.00", "baseline missing"]
    assert rows["0.9", "9"] == ["missing", "–", "–"]
    assert len(rows) == 16


def test_of_perplexity_a_gain_above_zero_is_worse(grid_run, baseline):
    fields = {"metric": "perplexity", "greater_is_better": False}
    runs = [grid_run(0.1, 1.0, scores=(31.0, 40.0)), baseline(scores=(35.0, 30.5), **fields)]
    runs[0] = type(runs[0])(**{**vars(runs[0]), **fields})
    (cell,) = [row[-1] for row in grid_table(runs).rows if row[3] != "missing" and row[1:3] == ("0.1", "1")]
    assert (cell.text, cell.tone) == ("+0.50", "worse")


def test_the_heatmap_writes_gains_and_names_what_is_missing(grid_run, baseline):
    runs = [grid_run(0.1, c, seed=s) for c in (1.0, 9.0) for s in range(3)] + [baseline(seed=s) for s in range(3)]
    (axis, _) = draw_grid(grid_of(runs, "mlp-fmnist")).figure.axes
    texts = [text.get_text() for text in axis.texts]
    assert sorted(texts) == ["+0.1000\n3 of 9 runs"] * 2 + ["missing"] * 14
    hatched = [patch for patch in axis.patches if patch.get_hatch()]
    assert len(hatched) == 14
