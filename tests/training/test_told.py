"""What a training says, or refuses, where λ or a gate would not be what one thinks."""

import json
import logging

import pytest
import torch
from torch import nn

from hf_lgelu import (
    HardeningCallback,
    LambdaGELUTrainer,
    LambdaGELUTrainingArguments,
    MLPConfig,
    MLPForClassification,
    anneal_hardness,
    from_pretrained,
    hardness_modules_to_save,
    hardness_profile,
    release_hardness,
    replace_activations,
    substitute_relu,
    write_card,
)

ROWS = [
    {"features": torch.randn(4, generator=torch.Generator().manual_seed(row)), "labels": row % 2} for row in range(16)
]
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def mlp(layers=2, act="lambda_gelu", by=3.0):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=layers, hidden_act=act))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(by)
    return model.eval()


def mixed(layers=2, silu="layers.0."):
    """λ-SiLU at one site, λ-GELU at the others, as no activation string can say it."""
    model = mlp(layers, "gelu")
    replace_activations(model, gate="lambda_silu", include=lambda name: silu in name)
    replace_activations(model)
    return model


def arguments(folder, **options):
    options = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **options}
    return LambdaGELUTrainingArguments(str(folder), **options)


def trainer(model, folder, callbacks=None, optimizers=(None, None), **options):
    return LambdaGELUTrainer(
        model, arguments(folder, **options), train_dataset=ROWS, callbacks=callbacks, optimizers=optimizers
    )


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return lambda: " ".join(record.getMessage() for record in caplog.records)


def test_a_config_of_surgery_builds_no_other_network():
    model = mixed()
    twin = MLPForClassification(model.config).eval()
    twin.load_state_dict(model.state_dict())  # every key matches
    with pytest.raises(RuntimeError, match=r"hf_lgelu\.from_pretrained\(model class, folder\)"):
        twin(X)
    anneal_hardness(twin, 1.0)
    for swap in (substitute_relu, replace_activations):
        with pytest.raises(RuntimeError, match="it would be another network of the same weights"):
            swap(twin)
    assert MLPForClassification(mlp().config).eval()(X).logits.isfinite().all()  # a string says these


def test_a_layer_that_is_dropped_is_dropped_from_the_record(tmp_path):
    model = mixed(3, silu="layers.1.")
    model.layers[0].linear.weight.data = torch.randn(8, 4)
    model.layers = nn.ModuleList([model.layers[0], model.layers[2]])
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(MLPForClassification, tmp_path).eval()
    assert [type(layer.activation).__name__ for layer in loaded.layers] == ["LambdaGELU", "LambdaGELU"]
    torch.testing.assert_close(loaded(X).logits, model(X).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("trained", "resumed"),
    [
        ({}, {"gate": "lambda_silu"}),
        ({"gate": "lambda_silu"}, {}),
    ],
)
def test_surgery_of_another_kind_does_not_go_on_from_a_checkpoint(trained, resumed, tmp_path):
    def make(gate="lambda_gelu"):
        model = mlp(act="gelu")
        replace_activations(model, gate=gate, granularity="channel", inputs=torch.zeros(1, 4))
        return model

    options = {"num_train_epochs": 2, "save_strategy": "epoch"}
    trainer(make(**trained), tmp_path, **options).train()
    (checkpoint,) = tmp_path.glob("checkpoint-4")
    trainer(make(**trained), tmp_path, **options).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(ValueError, match=r"at layers\.0\.activation, layers\.1\.activation, which is another function"):
        trainer(make(**resumed), tmp_path, **options).train(resume_from_checkpoint=str(checkpoint))


def test_options_of_hardening_beside_a_callback_of_ones_own_are_refused(tmp_path):
    callback = HardeningCallback(schedule="geometric")
    with pytest.raises(ValueError, match="target_hardness would do nothing, since a HardeningCallback was passed"):
        trainer(mlp(), tmp_path, [callback], harden=True, target_hardness=400.0)
    asking = trainer(mlp(), tmp_path, [callback], harden=True)  # for what there is
    asking.args.target_hardness = 400.0
    for _ in range(2):  # a second call is not taken for one that nothing has changed for
        with pytest.raises(ValueError, match="target_hardness would do nothing, since a HardeningCallback was passed"):
            asking.train()


class Writing(MLPForClassification):
    """Changes its batch in place, and counts its rows."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, features, labels=None):
        features.mul_(2.0)
        self.rows += len(features)
        return super().forward(features=features, labels=labels)


def test_an_evaluation_with_the_substitution_says_of_the_model_what_one_without_says(tmp_path):
    found = []
    for compares in (True, False):
        torch.manual_seed(0)
        model = Writing(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
        rows = [{**row, "features": row["features"].clone()} for row in ROWS]
        run = LambdaGELUTrainer(model, arguments(tmp_path, report_substitution=compares), eval_dataset=rows)
        found.append((run.evaluate(), model.rows.item()))
    (both, counted), (alone, once) = found
    assert (both["eval_loss"], counted) == (pytest.approx(alone["eval_loss"], abs=1e-7), once)
    assert once == len(ROWS)
    twice = substitute_relu(model) and model(torch.stack([row["features"] for row in ROWS]), torch.arange(16) % 2)
    assert both["eval_relu_loss"] == pytest.approx(twice.loss.item(), abs=1e-6)


@pytest.mark.parametrize("form", ["relu", "gelu"])
def test_no_card_says_of_a_folder_with_gates_that_they_are_gone(form, tmp_path):
    model = mlp()
    for folder, network in (("named", model), ("recorded", mixed())):
        network.save_pretrained(tmp_path / folder)
        with pytest.raises(ValueError, match=rf"config\.json says .*a card of form='{form}' would say"):
            write_card(network, tmp_path / folder, form=form)
        assert not (tmp_path / folder / "README.md").exists()
        write_card(network, tmp_path / folder)


def test_one_gate_at_two_places_goes_into_no_adapter():
    model = mlp()
    model.layers[1].activation = model.layers[0].activation
    with pytest.raises(ValueError, match=r"the λ-gate at layers\.1\.activation stands at another place too"):
        hardness_modules_to_save(model)


def test_what_is_said_of_an_optimizer_that_does_not_hold_s_is_true(tmp_path, said):
    model = mlp(act="gelu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    replace_activations(model, init_hardness=2.0)
    trainer(model, tmp_path, optimizers=(optimizer, None), num_train_epochs=1).train()
    assert list(hardness_profile(model).values()) == [2.0, 2.0]
    assert "the raw hardness is in none, and stays as it is" in said()


def test_a_training_on_from_half_hardened_gates_says_that_they_do_not_learn(tmp_path, said):
    model = mlp()
    anneal_hardness(model, 0.2)
    trainer(model, tmp_path, num_train_epochs=1, learning_rate=0.5).train()
    assert [round(value, 2) for value in hardness_profile(model).values()] == [32.76, 32.76]
    assert "λ of 2 gates was set by hardening (from 32.76 on) and stays there" in said()


def test_a_hardening_run_that_is_resumed_without_harden_says_where_its_gates_stay(tmp_path, said):
    trainer(mlp(), tmp_path, num_train_epochs=4, harden=True, save_strategy="epoch").train()
    before = said()
    again = trainer(mlp(), tmp_path, num_train_epochs=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    value = min(hardness_profile(again.model).values())
    assert 1 < value < 159
    assert "set by hardening" not in before
    assert f"λ of 2 gates was set by hardening (from {value:.4g}" in said().removeprefix(before)


@pytest.mark.parametrize("ready", [release_hardness, lambda model: anneal_hardness(model, 1.0)])
def test_of_gates_that_learn_or_are_hard_nothing_is_said(ready, tmp_path, said):
    model = mlp()
    ready(model)
    trainer(model, tmp_path, num_train_epochs=1).train()
    assert "set by hardening" not in said()


def test_a_run_that_is_resumed_with_more_epochs_says_that_its_gates_are_softer(tmp_path, said):
    options = {"harden": True, "save_strategy": "epoch"}
    trainer(mlp(), tmp_path, num_train_epochs=4, **options).train()
    steps = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["global_step"]
    assert steps == 8
    trainer(mlp(), tmp_path, num_train_epochs=4, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert "goes on with" not in said()
    trainer(mlp(), tmp_path, num_train_epochs=8, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert "Hardening had come to λ = 159.6 and goes on with 80.31" in said()


def test_gates_that_do_not_learn_are_named(tmp_path, said):
    model = mlp()
    model.layers[0].activation.raw_hardness.requires_grad_(False)
    trainer(model, tmp_path, num_train_epochs=1).train()
    assert "λ of 1 of 2 gates does not learn: their raw hardness is frozen (layers.0.activation)" in said()
    assert model.layers[1].activation.hardness.item() != pytest.approx(model.layers[0].activation.hardness.item())


@pytest.mark.parametrize("named", [False, True])
def test_an_adapter_without_its_gates_is_told(tmp_path, said, named):
    peft = pytest.importorskip("peft")
    model = mlp()
    saved = {"modules_to_save": hardness_modules_to_save(model)} if named else {}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["linear"], r=2, **saved))
    before = hardness_profile(adapted)
    trainer(adapted, tmp_path, num_train_epochs=1, label_names=["labels"]).train()
    assert ("λ of 2 of 2 gates does not learn" in said()) != named
    assert (hardness_profile(adapted) != before) == named
