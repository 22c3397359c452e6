import pytest
from lgelu_lab.report.configurations import (
    benchmarks_of,
    configuration_key,
    configuration_label,
    grouped,
    same_recipe,
    seed_count,
)

HARD = [{"a": 2.0}, {"a": 80.0}, {"a": 160.0}]


def with_config(record, **config):
    record.config.update(config)
    return record


def test_labels_and_keys_name_what_tells_configurations_apart(record_of):
    cases = {
        ("GELU", "gelu"): record_of(),
        ("PReLU", "prelu"): record_of(activation="prelu"),
        ("Swish, learnable β", "learnable_swish"): record_of(activation="learnable_swish"),
        ("λ-GELU uniform, hardened", "lambda_gelu-uniform-hardened"): record_of(activation="lambda_gelu", harden=True),
        ("GELU → ReLU at 25%, trained on", "gelu-relufied"): with_config(record_of(), relufication=True),
        ("λ-GELU uniform, t = 0.3, c = 6", "lambda_gelu-uniform"): with_config(
            record_of(activation="lambda_gelu"), temperature=0.3, hardness_lr_multiplier=6.0
        ),
    }
    for (label, key), record in cases.items():
        assert (configuration_label(record), configuration_key(record)) == (label, key)
    tenth = with_config(record_of(), relufication=True, switch_fraction=0.1)
    assert configuration_label(tenth) == "GELU → ReLU at 10%, trained on"


def test_groups_keep_benchmarks_apart_and_put_baselines_first(record_of):
    runs = [
        with_config(record_of(), relufication=True),
        record_of(activation="lambda_gelu", harden=True, hardness=HARD),
        record_of(activation="lambda_gelu", init_mode="decreasing", hardness=HARD),
        record_of(activation="relu"),
        record_of(seed=1),
        record_of(seed=0),
        record_of(benchmark="mlp-fmnist"),
    ]
    assert list(grouped(runs)) == [
        ("mlp-adult", "GELU"),
        ("mlp-adult", "ReLU"),
        ("mlp-adult", "λ-GELU decreasing"),
        ("mlp-adult", "λ-GELU uniform, hardened"),
        ("mlp-adult", "GELU → ReLU at 25%, trained on"),
        ("mlp-fmnist", "GELU"),
    ]
    assert [record.config["seed"] for record in grouped(runs)["mlp-adult", "GELU"]] == [0, 1]


def test_a_seed_that_is_there_twice_is_refused(record_of):
    with pytest.raises(ValueError, match=r"mlp-adult, GELU: more than one record of a seed \(1, 1\)"):
        grouped([record_of(seed=1), record_of(seed=1)])


def test_benchmarks_stand_in_the_papers_order_whatever_the_order_of_the_records(record_of):
    names = ["own", "gpt2-wikitext2", "mlp-fmnist", "mlp-adult"]
    assert benchmarks_of(record_of(benchmark=name) for name in names) == [
        *("mlp-adult", "mlp-fmnist", "gpt2-wikitext2", "own"),
    ]


def test_only_runs_that_trained_alike_on_as_much_data_are_compared(record_of):
    assert same_recipe(record_of(), record_of(activation="lambda_gelu", harden=True, seed=2))
    assert same_recipe(record_of(), with_config(record_of(), pretrained=None)), "older records lack the later keys"
    for change in ({"learning_rate": 0.1}, {"num_train_epochs": 2}, {"bf16": True}, {"num_layers": 2}):
        assert not same_recipe(record_of(), with_config(record_of(), **change))
    fewer = record_of()
    fewer.data["train_samples"] = 10
    assert not same_recipe(record_of(), fewer)


def test_fewer_seeds_than_the_paper_has_are_counted_out_loud(record_of):
    assert [seed_count([record_of()] * n) for n in (1, 2, 3, 4)] == ["1 of 3", "2 of 3", "3", "4"]
