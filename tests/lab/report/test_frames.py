"""Records → frames: what the seeds of a configuration have in common, what is paired, and what is refused."""

import math

import pytest
from lgelu_lab.report.frames import hardness_path, of_measurement, paired, recipe_of, run_frame
from lgelu_lab.report.run_tables import correlation_curve


def with_config(record, **config):
    record.config.update(config)
    return record


def test_a_seed_that_is_there_twice_is_refused_unless_it_belongs_to_another_study(record_of):
    with pytest.raises(ValueError, match=r"mlp-adult, GELU.*\(1, 1\)"):
        run_frame([record_of(seed=1), record_of(seed=1)])
    parts = run_frame([record_of(), record_of(name="grid/mlp-adult/gelu-seed0"), record_of(name="downstream/x")])[
        "part"
    ]
    assert list(parts) == ["", "grid", "downstream"]


def test_seeds_that_were_judged_on_different_rows_have_no_mean(record_of):
    few, all_rows, of_another = record_of(seed=0), record_of(seed=1), record_of(activation="relu", seed=1)
    few.data["eval_samples"], all_rows.data["eval_samples"], of_another.data["eval_samples"] = 300, 2509, 2509
    assert len(run_frame([few, of_another])) == 2
    with pytest.raises(ValueError, match=r"mlp-adult, GELU.* 300.* 2,509"):
        run_frame([few, all_rows])


def test_a_measurement_of_a_network_that_was_trained_anew_is_refused(record_of, measurement_of, data_of):
    run = record_of(name="g")  # its last score is 0.85
    models = {"gelu": {"run": "g", "metric": "accuracy", "score": 0.85}}
    elsewhere = {"gelu": {"run": "h", "metric": "accuracy", "score": 0.5}}
    records = [measurement_of("int8", [{"model": "gelu"}], models=m, seed=s) for s, m in enumerate((models, elsewhere))]
    assert list(data_of([run], records).measured["seed"]) == [0, 1]
    old = {"gelu": models["gelu"] | {"score": 0.75}}
    with pytest.raises(ValueError, match=r"mlp-digits, seed 1.* 0.75.* g .*0.85"):
        data_of([run], [records[0], measurement_of("int8", [{"model": "gelu"}], models=old, seed=1)])


def test_only_runs_that_trained_alike_on_as_much_data_are_compared(record_of):
    def pairs(first, second):
        return len(paired(run_frame([first]), run_frame([second])))

    assert pairs(record_of(), record_of(activation="lambda_gelu", harden=True)) == 1
    assert pairs(record_of(), record_of(activation="lambda_gelu", seed=2)) == 0
    assert pairs(record_of(), with_config(record_of(), pretrained=None)) == 1, "older records lack the later keys"
    six, the_same = (with_config(record_of(), num_train_epochs=epochs) for epochs in (6, 6.0))
    assert pairs(six, the_same) == 1
    assert pairs(record_of(), with_config(record_of(), adam_beta2=0.999, label_smoothing_factor=0.0, fp16=False)) == 1
    for change in (
        *({"learning_rate": 0.1}, {"num_train_epochs": 2}, {"bf16": True}, {"num_layers": 2}, {"warmup_steps": 0.2}),
        *({"label_smoothing_factor": 0.1}, {"lr_scheduler_kwargs": {"min_lr": 0.1}}),
    ):
        assert pairs(record_of(), with_config(record_of(), **change)) == 0, change
    for optim, alike in (("adamw_torch", 0), ("sgd", 1), ("nmuon", 1)):  # of which Adam alone reads it
        runs = (with_config(record_of(), optim=optim, adam_beta2=beta) for beta in (0.99, None))
        assert pairs(*runs) == alike, optim
    for name, value in (("train_samples", 10), ("eval_samples", 10), ("eval_split", "validation")):
        other = record_of()
        other.data[name] = value
        assert pairs(record_of(), other) == 0, name
    copied = record_of()
    copied.data.update(copy_of=copied.data["source"], folder="copy")
    assert pairs(record_of(), copied) == 0


# Hardness over depth and epochs


def run(record_of, paths, seed=0, initial=(1.0, 1.0, 1.0)):
    sites = ("z", "a", "m")  # not in alphabetical order: the order of depth is the record's
    hardness = [dict(zip(sites, path, strict=True)) for path in paths]
    scores = (0.5,) * len(paths)
    record = record_of(activation="lambda_gelu", seed=seed, hardness=hardness, scores=scores, relu_scores=scores)
    record.initial_hardness.update(zip(sites, initial, strict=True))
    return record


def test_layers_keep_the_order_of_depth_and_start_at_epoch_0(record_of):
    record = run(record_of, [(1, 2, 3), (4, 5, 6)], initial=(7, 8, 9))
    record.epochs[1].hardness["z"] = record.epochs[1].hardness.pop("z")  # now last in this epoch
    assert {epoch: list(row) for epoch, row in hardness_path(record).iterrows()} == {
        0.0: [7, 8, 9], 1.0: [1, 2, 3], 2.0: [4, 5, 6],
    }  # fmt: skip


def test_the_curve_has_a_column_per_shared_seed_and_a_gap_where_it_is_undefined(record_of):
    up, down, mixed, flat = (1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 2, 2)
    first = run_frame(
        [run(record_of, [up, flat], seed=0), run(record_of, [up, up], seed=1), run(record_of, [up], seed=5)]
    )
    second = run_frame(
        [run(record_of, [up, up], seed=0, initial=up), run(record_of, [down, mixed], seed=1, initial=down)]
    )
    curve = correlation_curve(first, second)
    assert list(curve.columns) == [0, 1], "seed 5 has no partner"
    assert curve.loc[0.0].isna().all(), "every λ is equal at a uniform start"
    assert list(curve.loc[1.0]) == pytest.approx([1.0, -1.0])
    assert math.isnan(curve.loc[2.0, 0])
    assert curve.loc[2.0, 1] == pytest.approx(0.5)
    assert not len(correlation_curve(first, run_frame([run(record_of, [up], seed=9)])))


# Measurements


def test_records_are_sorted_by_benchmark_and_seed_and_a_seed_twice_is_refused(data_of, measurement_of):
    places = [("mlp-fmnist", 1), ("elsewhere", 0), ("mlp-fmnist", 0), ("mlp-digits", 2)]
    records = [measurement_of("int8", [{"model": "gelu"}], benchmark=name, seed=seed) for name, seed in places]
    data = data_of(measurements=records)
    assert [(name, list(frame["seed"])) for name, frame in of_measurement(data, "int8").items()] == [
        *(("mlp-digits", [2]), ("mlp-fmnist", [0, 1]), ("elsewhere", [0]))
    ]
    with pytest.raises(ValueError, match=r"mlp-fmnist.*\(0, 1, 1\)"):
        data_of(measurements=[*records, records[0]])


def test_a_resnet_on_several_processes_is_another_recipe(record_of):
    """BatchNorm normalizes by what one process runs at once; an MLP makes the same steps."""
    for benchmark, alike in (("resnet18-cifar10", False), ("mlp-adult", True)):
        one, eight = (record_of(benchmark=benchmark) for _ in range(2))
        eight.hardware["processes"] = 8
        assert (recipe_of(one) == recipe_of(eight)) is alike
