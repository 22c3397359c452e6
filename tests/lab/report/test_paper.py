import pytest
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.report.paper import PAPER_RECIPES, PAPER_TARGET_HARDNESS, differences, model_size, read_paper_values
from lgelu_lab.studies.experiments import STUDIES


@pytest.fixture
def faithful(record_of):
    """A run of mlp-adult with the paper's settings, but for what a test changes."""

    def build(epochs=50, data=(), **config):
        scores = (0.8,) * epochs
        record = record_of(scores=scores, relu_scores=scores)
        record.data.update({"train_samples": 32_561, "eval_samples": 16_281, **dict(data)})
        record.config.update({"weight_decay": 1e-4, **config})
        return record

    return build


def test_the_papers_own_settings_are_no_difference(faithful):
    hardened = {"activation": "lambda_gelu", "harden": True, "temperature": 0.1, "hardness_lr_multiplier": 9.0}
    hardening = {"target_hardness": PAPER_TARGET_HARDNESS, "switch_fraction": 0.25, "hardening_schedule": "linear"}
    assert differences(faithful()) == ()
    assert differences(faithful(**hardened, **hardening, hardening_strategy="epoch")) == ()
    assert pytest.approx(159.57691216057307) == PAPER_TARGET_HARDNESS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 4}, "4 of 50 epochs"),
        ({"data": {"train_samples": 5000}}, "5,000 of 32,561 training samples"),
        ({"data": {"eval_samples": 100}}, "100 of 16,281 evaluation samples"),
        ({"optim": "adamw_torch"}, "optimizer adamw_torch, not sgd"),
        ({"learning_rate": 0.1}, "learning rate 0.1, not 0.05"),
        ({"weight_decay": 0.0}, "weight decay 0, not 0.0001"),
        ({"activation": "lambda_gelu", "temperature": 0.3}, "t 0.3, not 0.1"),
        ({"activation": "lambda_gelu", "hardness_lr_multiplier": 1.0}, "c 1, not 9"),
        ({"harden": True, "target_hardness": 40.0}, "target λ 40, not 159.6"),
        ({"harden": True, "hardening_schedule": "geometric"}, "schedule geometric, not linear"),
        ({"harden": True, "hardening_strategy": "steps"}, "hardening by steps, not epoch"),
        ({"relufication": True, "switch_fraction": 0.5}, "switch at 0.5, not 0.25"),
    ],
)
def test_each_setting_that_differs_is_named(faithful, changes, words):
    assert differences(faithful(**changes)) == (words,)


def test_a_small_model_in_gpt2s_place_is_named_with_its_size(record_of):
    run = record_of(benchmark="gpt2-wikitext2", scores=(1.0,) * 10, relu_scores=(1.0,) * 10)
    run.data["copy_of"] = None
    run.config.update(optim="adamw_torch", learning_rate=5e-5, weight_decay=1e-2, num_layers=4, width=128)
    run.config["max_eval_samples"] = None
    assert differences(run) == ("a model from scratch (4 layers, width 128) in place of GPT-2",)
    run.config["pretrained"] = "openai-community/gpt2"
    assert differences(run) == ()
    run.config["max_eval_samples"] = 50
    assert differences(run) == ("50 evaluation samples only",)
    del run.config["max_eval_samples"]  # a record of before 0.2.0
    assert differences(run) == ("50 evaluation samples only",)
    assert model_size({"image_size": 64, "patch_size": 8}) == "images 64 × 64, patches 8 × 8"


def test_every_benchmark_of_the_paper_has_its_recipe_and_trains_by_it():
    assert set(PAPER_RECIPES) == set(STUDIES["profiles"].benchmarks)
    for name in PAPER_RECIPES.keys() & BENCHMARKS.keys():
        recipe, row = PAPER_RECIPES[name], BENCHMARKS[name]
        defaults = {**row.defaults, **row.pretrained_defaults}  # the paper fine-tunes what can be
        assert str(defaults["optim"]).startswith(recipe.optimizer)
        assert (defaults["learning_rate"], defaults["weight_decay"]) == (recipe.learning_rate, recipe.weight_decay)


def test_the_committed_values_are_of_every_benchmark_and_cited():
    """Some by hand from the paper's Tables I and II."""
    values = read_paper_values()
    assert "2603.21991" in values.citation
    assert set(values.values) == set(PAPER_RECIPES)
    assert values.text("mlp-adult", "lambda_gelu-increasing", "mean_hardness") == "8.67 ± 0.1"
    assert values.text("resnet18-cifar100", "gelu", "substituted") == "0.67"
    assert values.text("gpt2-wikitext2", "relu", "best_validation_score") == "30.48 ± 0.04"
