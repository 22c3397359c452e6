"""Pruned networks, against weight matrices cut by hand and nets whose dead units are known."""

import dataclasses
import functools
import sys

import pytest
import timm
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import (
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.analysis.pruning import same_outputs
from hf_lgelu.analysis.pruning.prunable import Pruner
from hf_lgelu.analysis.pruning.units import PrunedModel, prune_units, remove_dead_units
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.registry import register_auto_classes

DEAD = {0: [1, 4], 1: [], 2: [0, 2, 5]}


def mlp(hidden_act="relu"):
    torch.manual_seed(0)
    config = MLPConfig(num_features=3, hidden_size=6, num_hidden_layers=3, hidden_act=hidden_act, num_labels=4)
    model = MLPForClassification(config).double().eval()
    with torch.no_grad():
        for layer, units in DEAD.items():
            model.layers[layer].linear.bias.fill_(0.5)
            model.layers[layer].linear.bias[units] = -1000.0
    return model


def batches(rows=(20, 7)):
    generator = torch.Generator().manual_seed(1)
    return [{"features": torch.randn(n, 3, generator=generator, dtype=torch.float64)} for n in rows]


def kept(removed, units=6):
    return [unit for unit in range(units) if unit not in removed]


def cut_by_hand(model, removed, features):
    """Logits with the rows and columns of the removed units left out of the weight matrices."""
    inputs, hidden = list(range(3)), features
    for index, layer in enumerate(model.layers):
        units = kept(removed.get(f"layers.{index}.linear", ()))
        hidden = (hidden @ layer.linear.weight[units][:, inputs].T + layer.linear.bias[units]).clamp(min=0)
        inputs = units
    return hidden @ model.classifier.weight[:, inputs].T + model.classifier.bias


def test_dead_units_are_removed_and_the_logits_stay():
    model, data = mlp(), batches()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pruned = remove_dead_units(model, data)
    assert pruned.removed == {f"layers.{i}.linear": units for i, units in DEAD.items() if units}
    assert list(pruned.widths.values()) == [4, 6, 3]
    assert pruned.max_change <= 1e-14
    for batch in data:
        torch.testing.assert_close(pruned.model(**batch).logits, model(**batch).logits, rtol=0, atol=1e-14)
    assert pruned.parameters == (3 * 4 + 4) + (4 * 6 + 6) + (6 * 3 + 3) + (3 * 4 + 4)
    assert pruned.parameters_before == (3 * 6 + 6) + 2 * (6 * 6 + 6) + (6 * 4 + 4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.hidden_size == 6


def test_a_pruned_mlp_is_saved_and_read_again(tmp_path):
    register_auto_classes()
    data = batches()
    pruned = remove_dead_units(mlp(), data)
    assert pruned.config_key == "hidden_size"
    pruned.model.save_pretrained(tmp_path)
    reloaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert reloaded.config.hidden_size == [4, 6, 3]
    assert torch.equal(reloaded(**data[0]).logits, pruned.model(**data[0]).logits)


def test_a_unit_that_fires_in_the_last_batch_alone_is_kept():
    model, data = mlp(), batches()
    with torch.no_grad():
        model.layers[0].linear.weight[1] = torch.tensor([1.0, 0.0, 0.0])
    data.append({"features": torch.tensor([[1001.0, 0.0, 0.0]], dtype=torch.float64)})
    assert remove_dead_units(model, data).removed["layers.0.linear"] == [4]


def test_a_layer_that_is_wholly_dead_keeps_one_unit():
    model, data = mlp(), batches()
    with torch.no_grad():
        model.layers[1].linear.bias.fill_(-1000.0)
    pruned = remove_dead_units(model, data)
    assert pruned.widths["layers.1.linear"] == 1
    assert pruned.max_change <= 1e-14


def test_logits_are_compared_and_not_the_loss_alone(monkeypatch):
    """Labels in a batch make the loss the first output; a shift of all logits leaves it as it is."""
    labelled = [batch | {"labels": torch.zeros(len(batch["features"]), dtype=torch.int64)} for batch in batches()]
    remove = Pruner.remove

    def remove_and_shift(self, layer, units):
        remove(self, layer, units)
        with torch.no_grad():
            self.model.classifier.bias.add_(1.0)

    monkeypatch.setattr(Pruner, "remove", remove_and_shift)
    with pytest.raises(RuntimeError, match="changed an output by 2, where rounding explains"):
        remove_dead_units(mlp(), labelled)


def test_what_is_not_zero_behind_a_dead_unit_is_noticed_and_the_model_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias[2] = -100.0
        model[2].bias.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"changed an output by .*not keep 0 at 0"):
        remove_dead_units(model, [torch.randn(9, 3, dtype=torch.float64)])
    assert model[0].weight.shape == (4, 3)


def test_classes_that_cannot_be_stay_impossible_without_the_dead_units():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
            self.register_buffer("impossible", torch.tensor([False, True]))

        def forward(self, x):
            return self.net(x).masked_fill(self.impossible, -torch.inf)

    torch.manual_seed(0)
    model = Masked()
    with torch.no_grad():
        model.net[0].bias[2] = -100.0
    pruned = remove_dead_units(model, [torch.randn(9, 3)])
    assert pruned.removed == {"net.0": [2]}
    assert pruned.max_change < 1e-5


@pytest.mark.parametrize("criterion", ["apoz", "magnitude"])
def test_a_fraction_takes_the_units_a_loop_would_take(criterion):
    model, data = mlp(), batches()
    pruned = prune_units(model, data, fraction=0.5, criterion=criterion)
    features = torch.cat([batch["features"] for batch in data])
    hidden = features
    for index, layer in enumerate(model.layers):
        weight = layer.linear.weight.detach()
        hidden = (hidden @ weight.T + layer.linear.bias).clamp(min=0)
        if criterion == "apoz":
            score = [sum(v == 0 for v in column) for column in hidden.T.tolist()]
        else:
            score = [-sum(abs(w) for w in row) for row in weight.tolist()]
        worst = sorted(sorted(range(6), key=lambda unit: -score[unit])[:3])
        assert pruned.removed[f"layers.{index}.linear"] == worst
    torch.testing.assert_close(
        pruned.model(features).logits, cut_by_hand(model, pruned.removed, features), rtol=0, atol=1e-13
    )
    assert pruned.model.config.hidden_size == 3
    assert pruned.max_change is None


def test_thresholds_by_number_and_by_one_sigma():
    model, data = mlp(), batches()
    by_number = prune_units(model, data, threshold=0.999)
    assert by_number.removed == {f"layers.{i}.linear": units for i, units in DEAD.items() if units}
    hidden = torch.cat([batch["features"] for batch in data])
    by_sigma = prune_units(model, data, threshold="one-sigma")
    for index, layer in enumerate(model.layers):
        hidden = layer(hidden).detach()
        apoz = [sum(v == 0 for v in column) / len(hidden) for column in hidden.T.tolist()]
        mean = sum(apoz) / 6
        deviation = (sum((value - mean) ** 2 for value in apoz) / 6) ** 0.5
        above = [unit for unit in range(6) if apoz[unit] > mean + deviation]
        assert by_sigma.removed.get(f"layers.{index}.linear", []) == above
    assert by_sigma.removed


def firing(rows):
    """A net of one hidden layer whose unit u is on in `rows[u]` of 100 rows; the rows."""
    model = nn.Sequential(nn.Linear(1, len(rows)), nn.ReLU(), nn.Linear(len(rows), 1)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.copy_(torch.tensor(rows, dtype=torch.float64) - 99.5)
    return model, [torch.arange(100, dtype=torch.float64)[:, None]]


def test_the_most_active_unit_stays_where_a_threshold_would_take_all():
    model, data = firing([10, 5, 40, 30])
    assert prune_units(model, data, threshold=0.5).removed == {"0": [0, 1, 3]}
    assert prune_units(model, data, threshold=0.65).removed == {"0": [0, 1, 3]}
    assert prune_units(model, data, threshold=0.7).removed == {"0": [0, 1]}  # 0.7 is not above 0.7
    model, data = firing([0, 0, 0])
    assert prune_units(model, data, threshold=0.0).removed == {"0": [1, 2]}


@pytest.mark.parametrize(("fraction", "removed"), [(0.29, 29), (0.57, 57), (0.999, 99), (1 - 1e-12, 99), (0.295, 29)])
def test_a_decimal_fraction_is_the_number_that_is_meant(fraction, removed):
    model, data = firing(list(range(1, 101)))
    assert prune_units(model, data, fraction=fraction).removed == {"0": list(range(removed))}


def small_gpt2():
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16, activation_function="relu", bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval(), {"input_ids": torch.arange(10).reshape(2, 5)}, "mlp.c_fc", "n_inner", 32


def small_vit():
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4,
        hidden_act="gelu",
    )  # fmt: skip
    images = {"pixel_values": torch.randn(3, 3, 8, 8)}
    return ViTForImageClassification(config).eval(), images, "fc1", "intermediate_size", 12


def small_falcon():
    config = FalconConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=8, vocab_size=32, activation="relu", ffn_hidden_size=24,
    )  # fmt: skip
    tokens = {"input_ids": torch.arange(10).reshape(2, 5)}
    return FalconForCausalLM(config).eval(), tokens, "dense_h_to_4h", "ffn_hidden_size", 24


def small_t5():
    config = T5Config(
        d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, vocab_size=20, feed_forward_proj="relu",
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.arange(10).reshape(2, 5)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :3]}
    return T5ForConditionalGeneration(config).eval(), inputs, "DenseReluDense.wi", "d_ff", 12


def small_bart():
    """Two keys for the width of its two sides, and a token whose number is the width."""
    sides = {f"{side}_{what}": count for side in ("encoder", "decoder")
             for what, count in (("layers", 1), ("ffn_dim", 12), ("attention_heads", 2))}  # fmt: skip
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 12, "forced_eos_token_id": 12}
    config = BartConfig(
        d_model=8, vocab_size=20, max_position_embeddings=16, activation_function="relu", decoder_start_token_id=2,
        **sides, **tokens,
    )  # fmt: skip
    # Sentences end with eos.
    inputs = {"input_ids": torch.tensor([[0, 5, 6, 12]]), "decoder_input_ids": torch.tensor([[2, 0, 7]])}
    return BartForConditionalGeneration(config).eval(), inputs, "fc1", "encoder_ffn_dim, decoder_ffn_dim", 12


def small_llama():
    config = LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, hidden_act="relu", mlp_bias=True,
    )  # fmt: skip
    tokens = {"input_ids": torch.arange(10).reshape(2, 5)}
    return LlamaForCausalLM(config).eval(), tokens, "gate_proj", "intermediate_size", 12


def small_gated_t5():
    config = T5Config(
        d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, vocab_size=20, feed_forward_proj="gated-relu",
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.arange(10).reshape(2, 5)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :3]}
    return T5ForConditionalGeneration(config).eval(), inputs, "DenseReluDense.wi_0", "d_ff", 12


@pytest.mark.parametrize(
    "build", [small_gpt2, small_vit, small_falcon, small_t5, small_bart, small_llama, small_gated_t5]
)
@pytest.mark.parametrize("criterion", ["apoz", "magnitude"])
def test_feed_forward_layers_of_transformers_are_cut_and_reload(build, criterion, tmp_path):
    torch.manual_seed(0)
    model, inputs, layer, key, units = build()
    model.requires_grad_(False)
    pruned = prune_units(model, [inputs], fraction=0.5, criterion=criterion)
    assert len(pruned.widths) == 2
    assert all(layer in name for name in pruned.widths)
    assert set(pruned.widths.values()) == {units // 2}
    assert pruned.config_key == key
    assert not any(parameter.requires_grad for parameter in pruned.model.parameters())
    assert getattr(model.config, "use_cache", None) == getattr(pruned.model.config, "use_cache", None)
    with torch.no_grad():  # the given model with the same units silenced behind their activation
        expected = silenced(model, pruned.removed)(**inputs).logits
        torch.testing.assert_close(pruned.model(**inputs).logits, expected, rtol=1e-5, atol=1e-6)
    changed = {name for name, value in pruned.model.config.to_dict().items() if value != model.config.to_dict()[name]}
    assert changed == set(key.split(", "))
    pruned.model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path).eval()
    assert all(torch.equal(tensor, pruned.model.state_dict()[name]) for name, tensor in reloaded.state_dict().items())
    torch.testing.assert_close(reloaded(**inputs).logits, pruned.model(**inputs).logits, rtol=1e-5, atol=1e-5)


def silenced(model, removed):
    for name, units in removed.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        gate = next(getattr(parent, name) for name in ("act", "activation_fn", "act_fn") if hasattr(parent, name))
        gate.register_forward_hook(lambda _, __, out, units=units: out.index_fill(-1, torch.tensor(units), 0.0))
    return model


def test_a_resnet_loses_inner_channels_and_never_the_residual_streams():
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=3).eval().double()
    with torch.no_grad():
        for block in (model.layer1[0], model.layer3[1]):
            block.bn1.bias[:5] = -1000.0
    data = [torch.randn(2, 3, 32, 32, dtype=torch.float64)]
    pruned = remove_dead_units(model, data)
    assert all(name.endswith("conv1") and name.startswith("layer") for name in pruned.widths)
    assert len(pruned.widths) == 8
    assert pruned.removed["layer1.0.conv1"][:5] == pruned.removed["layer3.1.conv1"][:5] == [0, 1, 2, 3, 4]
    assert pruned.model.layer1[0].conv2.weight.shape[1] == 64 - len(pruned.removed["layer1.0.conv1"])
    assert pruned.config_key is None


def test_a_layer_that_runs_twice_keeps_what_fires_in_either_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.relu, self.last = nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)

        def forward(self, x):
            return self.last(self.relu(self.hidden(x)) + self.relu(self.hidden(-x)))

    model = Twice().double()
    with torch.no_grad():
        model.hidden.weight.copy_(torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]))
        model.hidden.bias.copy_(torch.tensor([0.0, 0.0, -9.0, -9.0]))
    data = [torch.tensor([[1.0], [2.0]], dtype=torch.float64)]  # positive: unit 1 fires in the second call alone
    pruned = remove_dead_units(model, data)
    assert pruned.removed == {"hidden": [2, 3]}
    assert prune_units(model, data, threshold=0.75).removed == {"hidden": [2, 3]}  # the shares are 1/2, 1/2, 1, 1


def test_the_norm_is_l1_and_the_deviation_that_of_the_units_at_hand():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.5, -1.5, 0.5], [3.0, 0.0, 0.0]]))  # L1: 3.5 and 3; L2: 2.2 and 3
    assert prune_units(model, [torch.randn(4, 3)], fraction=0.5, criterion="magnitude").removed == {"0": [1]}
    # Shares of zeros 0, 0.4, 0.7: mean 0.367, deviation 0.287 over three units (0.351 as an estimate over many).
    model, data = firing([100, 60, 30])
    assert prune_units(model, data, threshold="one-sigma").removed == {"0": [2]}


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_change_is_that_of_all_batches(monkeypatch, order):
    remove = Pruner.remove

    def remove_and_disturb(self, layer, units):
        remove(self, layer, units)
        with torch.no_grad():
            self.model.classifier.weight[0] += 1e-14  # more or less, as the rows' hidden units are

    monkeypatch.setattr(Pruner, "remove", remove_and_disturb)
    model = mlp()
    with torch.no_grad():
        model.classifier.bias[0] = 0.0
        model.classifier.weight[0] = 0.0
    changes = []
    run = same_outputs.run_example
    monkeypatch.setattr(same_outputs, "run_example", lambda *args: changes.append(run(*args).logits) or changes[-1])
    pruned = remove_dead_units(model, batches()[::order])
    changes = changes[1:]  # the first tells what the model gives
    by_batch = [(first - second).abs().max().item() for first, second in zip(changes[::2], changes[1::2], strict=True)]
    assert pruned.max_change == max(by_batch) > min(by_batch) > 0


def test_units_with_a_hardness_each_stay():
    hidden = LambdaGELU(raw_shape=(6,))
    model = nn.Sequential(nn.Linear(3, 6), hidden, nn.Linear(6, 2))
    with pytest.raises(ValueError, match="no hidden layer that can be pruned"):
        prune_units(model, [torch.randn(4, 3)], fraction=0.5)


class Parts(nn.Module):
    """first → ReLU, and then what `join` makes of the layers and the hidden units."""

    def __init__(self, join, last=None):
        super().__init__()
        self.first, self.relu, self.second = nn.Linear(3, 4), nn.ReLU(), nn.Linear(3, 4)
        self.last, self.other, self.join = last or nn.Linear(4, 2), nn.Linear(4, 2), join

    def forward(self, x):
        return self.join(self, self.relu(self.first(x)), x)


class Between(nn.Module):
    """A layer of 8, ReLU, and what `between` makes of its units before the last layer."""

    def __init__(self, between, first=None, last=None):
        super().__init__()
        self.first, self.relu = first or nn.Linear(3, 8), nn.ReLU()
        self.last, self.between = last or nn.Linear(8, 2), between
        self.register_buffer("mask", torch.rand(8))

    def forward(self, x):
        return self.last(self.between(self, self.relu(self.first(x))))


def convolutions(between):
    return Between(between, nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1))


@pytest.mark.parametrize("fraction", [0.25, 0.5])
@pytest.mark.parametrize(
    "model",
    [
        Between(lambda m, h: h.flip(-1)),
        Between(lambda m, h: h.view(-1, 2, 4).transpose(1, 2).flatten(1)),
        convolutions(lambda m, h: torch.channel_shuffle(h, 2)),
        Between(lambda m, h: h * m.mask),
        Between(lambda m, h: h.view(-1, 8)),
        Between(lambda m, h: h + 1),
    ],
    ids=["turned round", "heads", "shuffled", "a buffer", "a size in the forward", "not 0 at 0"],
)
def test_what_cannot_be_cut_is_an_error_and_no_other_network(model, fraction):
    """torch-pruning takes what it takes: another unit's weights, or too few for what follows."""
    torch.manual_seed(0)
    inputs = torch.randn(5, 3, *([] if isinstance(model.first, nn.Linear) else (4, 4)))
    for layer in (model.first, model.last):
        layer.reset_parameters()  # the table was built in the order of all tables
    with torch.no_grad():
        model.first.weight[[3, 6]] = 1e-9  # the least important: without them almost nothing changes
        model.first.bias[[3, 6]] = 0.0
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"such a layer cannot be cut|cannot remove units of first"):
        prune_units(model, [inputs], fraction=fraction, criterion="magnitude")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_each_channel_passes_alone_may_stand_between():
    torch.manual_seed(0)
    model = Between(lambda m, h: m.pool(m.norm(h)).flatten(1), nn.Conv2d(3, 8, 3, bias=False), nn.Linear(8, 2))
    model.pool, model.norm = nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8)
    with torch.no_grad():
        model.norm.bias.copy_(torch.rand(8))  # a unit at 0 is not 0 behind it, and is gone all the same
    pruned = prune_units(model.eval(), [torch.randn(4, 3, 8, 8)], fraction=0.5, criterion="magnitude")
    left = kept(pruned.removed["first"], 8)
    assert pruned.widths == {"first": 4}
    x = torch.randn(3, 3, 8, 8)
    hidden = model.norm(model.first(x).relu()).mean((2, 3))[:, left]
    torch.testing.assert_close(pruned.model(x), hidden @ model.last.weight[:, left].T + model.last.bias)


def test_units_that_feed_a_grouped_convolution_stay():
    sizes = {"cardinality": 2, "base_width": 8}
    model = timm.models.resnet.ResNet(timm.models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=3, **sizes).eval()
    with pytest.raises(ValueError, match="no hidden layer that can be pruned"):
        prune_units(model, [torch.randn(2, 3, 32, 32)], fraction=0.25, criterion="magnitude")


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[4].weight = model[0].weight
    with pytest.raises(ValueError, match="no hidden layer that can be pruned"):
        prune_units(model, [torch.randn(4, 6)], fraction=0.5, criterion="magnitude")
    model[4].weight = nn.Parameter(model[0].weight.detach().clone())
    assert prune_units(model, [torch.randn(4, 6)], fraction=0.5, criterion="magnitude").widths == {"0": 3, "2": 3}


@pytest.mark.parametrize(
    "model",
    [
        Parts(lambda m, h, x: h),
        Parts(lambda m, h, x: h * m.second(x)),
        Parts(lambda m, h, x: m.last(2 * h * m.second(x))),
        Parts(lambda m, h, x: m.last(h * m.relu(m.second(x)))),
        Parts(lambda m, h, x: m.last(h * m.second(x)) + m.last(h)),
        Parts(lambda m, h, x: m.last(h * m.second(x)) + m.last(m.second(x))),
        Parts(lambda m, h, x: m.last(h * m.second(x)) + m.other(m.second(x))),
        Parts(lambda m, h, x: m.last(h + m.second(x))),
        Parts(lambda m, h, x: m.last(h) + m.other(h)),
        Parts(lambda m, h, x: (m.last(h), h)),
        Parts(lambda m, h, x: m.last(h), nn.LayerNorm(4)),
        Parts(lambda m, h, x: m.last(h), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))),
        nn.Sequential(nn.Conv2d(2, 4, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1)),
    ],
    ids=[
        "output",
        "gated output",
        "scaled",
        "two activations",
        "ungated once",
        "partner alone",
        "partner elsewhere",
        "sum",
        "two layers",
        "also an output",
        "norm",
        "norm between",
        "groups",
    ],
)
@pytest.mark.parametrize("criterion", ["apoz", "magnitude"])
def test_units_that_are_used_elsewhere_stay(model, criterion):
    inputs = torch.randn(5, 2, 3, 3) if isinstance(model, nn.Sequential) else torch.randn(5, 3)
    with pytest.raises(ValueError, match="no hidden layer that can be pruned"):
        prune_units(model, [inputs], fraction=0.5, criterion=criterion)


def gated(seed=0):
    torch.manual_seed(seed)
    return Parts(lambda m, h, x: m.last(h * m.second(x)))


def test_a_gated_unit_goes_with_what_it_multiplies():
    """Against the weights cut by hand: the rows of both layers, the columns of the one behind."""
    model, data = gated(), torch.randn(9, 3)
    with torch.no_grad():
        model.first.bias[1] = -50.0
    pruned = remove_dead_units(model, data)
    assert pruned.removed == {"first": [1]}
    assert pruned.widths == {"first": 3}
    keep = [0, 2, 3]
    for layer in ("first", "second"):
        torch.testing.assert_close(pruned.model.get_submodule(layer).weight, model.get_submodule(layer).weight[keep])
        torch.testing.assert_close(pruned.model.get_submodule(layer).bias, model.get_submodule(layer).bias[keep])
    torch.testing.assert_close(pruned.model.last.weight, model.last.weight[:, keep])
    torch.testing.assert_close(pruned.model(data), model(data))


def test_the_weights_of_a_gated_unit_are_those_of_both_layers():
    model = gated()
    with torch.no_grad():
        for layer, sizes in ((model.first, [1, 2, 3, 4]), (model.second, [9, 1, 9, 9])):
            layer.weight.copy_(torch.tensor(sizes)[:, None].expand(4, 3))
    assert prune_units(model, torch.randn(5, 3), fraction=0.25, criterion="magnitude").removed == {"first": [1]}


def test_smooth_gates_have_no_dead_units_and_can_be_pruned_by_rank():
    data = batches()
    with pytest.raises(ValueError, match=r"smooth gates \(gelu\).*Harden"):
        remove_dead_units(mlp("gelu"), data)
    assert prune_units(mlp("gelu"), data, fraction=0.5).model.config.hidden_size == 3
    layers = nn.Sequential(nn.Linear(3, 6), LambdaGELU(), nn.Linear(6, 2))
    assert prune_units(layers, [torch.randn(4, 3)], fraction=0.5).model[0].weight.shape == (3, 3)


def test_nothing_to_prune_is_an_error():
    alive = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        alive[0].bias.fill_(100.0)
    with pytest.raises(ValueError, match="no unit is dead"):
        remove_dead_units(alive, [torch.ones(3, 1)])
    with pytest.raises(ValueError, match=r"no unit is chosen by fraction=0\.1"):
        prune_units(alive, [torch.ones(3, 1)], fraction=0.1)
    with pytest.raises(ValueError, match="no hidden layer that can be pruned"):
        prune_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [torch.ones(1, 2)], fraction=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give fraction or threshold"),
        ({"fraction": 0.5, "threshold": 0.5}, "give fraction or threshold"),
        ({"fraction": 1.0}, "between 0 and 1, got 1.0"),
        ({"fraction": 0.5, "criterion": "luck"}, "unknown criterion 'luck'; accepted: apoz, magnitude"),
        ({"threshold": 0.5, "criterion": "magnitude"}, "threshold goes with criterion='apoz'"),
        ({"threshold": "two-sigma"}, "'one-sigma', got 'two-sigma'"),
        ({"threshold": 1.0}, r"must lie in \[0, 1\), got 1\.0"),
        ({"threshold": -0.1}, r"must lie in \[0, 1\), got -0\.1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        prune_units(mlp(), batches(), **arguments)


def test_batches_that_can_be_read_once_are_refused():
    with pytest.raises(TypeError, match="read twice, got generator"):
        remove_dead_units(mlp(), (batch for batch in batches()))
    with pytest.raises(ValueError, match="data is empty"):
        remove_dead_units(mlp(), [])


@pytest.mark.parametrize("prune", [remove_dead_units, functools.partial(prune_units, fraction=0.5)])
def test_data_without_rows_or_with_nan_remove_nothing(prune):
    (good, _), none = batches(), {"features": torch.zeros(0, 3).double()}
    rows = good["features"]
    for data, message in (
        ([none], "batch 0 of data has no rows"),
        (none, "batch 0 of data has no rows"),
        ([good, {"features": rows * torch.nan}], "batch 1 of data holds NaN or infinity"),
        ([good, {"features": rows / 0}], "batch 1 of data holds NaN or infinity"),
    ):
        with pytest.raises(ValueError, match=message):
            prune(mlp(), data)
    for data in ("rows.csv", 3, None, TensorDataset(rows)):
        with pytest.raises(TypeError, match="data must be batches"):
            prune(mlp(), data)


def test_weights_that_are_nan_have_no_order_of_importance():
    broken = mlp()
    with torch.no_grad():
        broken.layers[0].linear.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weights that are NaN"):
        prune_units(broken, batches(), fraction=0.5, criterion="magnitude")


def test_without_torch_pruning_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-lgelu\[prune\]'"):
        remove_dead_units(mlp(), batches())


def test_what_was_pruned_can_be_printed():
    pruned = PrunedModel(nn.Identity(), {"first": [1, 4]}, {"first": 3, "second": 5}, 1234, 1000, "hidden_size", 1e-7)
    assert str(pruned).splitlines() == [
        "1,234 parameters → 1,000",
        "  first: 2 of 5 units removed",
        "  second: 0 of 5 units removed",
        "  outputs on these data changed by at most 1e-07",
        "  config.hidden_size holds the widths",
    ]
    pruned = dataclasses.replace(pruned, max_change=None, config_key=None)
    assert str(pruned).splitlines()[3:] == ["  no config key holds these widths"]


def test_a_gate_whose_units_cannot_be_told_keeps_no_other_layer_from_being_pruned():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu, self.second = nn.Conv1d(3, 6, 1), nn.ReLU(), nn.Conv1d(6, 4, 1)
            self.gate = nn.ReLU()

        def forward(self, x):
            return self.gate(self.second(self.relu(self.first(x))).reshape(len(x), 2, -1))

    model, rows = Mixed(), torch.randn(4, 3, 5)
    model.first.bias.data[1] = -100.0
    pruned = remove_dead_units(model, rows)
    assert pruned.removed == {"first": [1]}
    assert prune_units(model, rows, fraction=0.2).widths["first"] == 5
