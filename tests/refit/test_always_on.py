"""Units always on: the constant that they give, the best of low rank, and their size."""

import copy

import numpy as np
import pytest
import torch
from loud_nets import bert, gpt2, tokens, traced
from small_networks import convert_with
from transformers import MistralConfig, MistralForCausalLM

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.refit.always_on import constant_direction, low_rank
from hf_lgelu.refit.moments import Moments


def sums(rows: torch.Tensor) -> Moments:
    nothing = rows.new_zeros(len(rows), 1, 1)
    found = Moments.zeros(1, rows.shape[1], 1)
    found.add(rows[:, None], nothing, nothing)
    return found


def drawn(mean: float, seed: int) -> torch.Tensor:
    return torch.randn(4000, 6, generator=torch.Generator().manual_seed(seed)) * 0.1 + mean * torch.arange(1.0, 7.0)


def test_the_direction_is_that_of_least_squares():
    rows, others = drawn(0.5, seed=0), drawn(0.5, seed=1)
    found = constant_direction(sums(rows), sums(others))
    x = rows.double().numpy()
    penalty = np.sqrt(1e-3 * np.trace(x.T @ x) / len(x) / 6 * len(x))
    wanted = np.linalg.lstsq(np.vstack([x, penalty * np.eye(6)]), np.r_[np.ones(len(x)), np.zeros(6)], rcond=None)[0]
    assert found.numpy() == pytest.approx(wanted, rel=1e-4)
    assert (others.double() @ found).numpy() == pytest.approx(np.ones(4000), abs=0.1)


@pytest.mark.parametrize(("mean", "of_others"), [(0.0, 0.0), (0.5, -0.5)])
def test_inputs_without_one_have_none(mean, of_others):
    assert constant_direction(sums(drawn(mean, seed=0)), sums(drawn(of_others, seed=1))) is None
    assert constant_direction(sums(drawn(0.5, seed=0)), Moments.zeros(1, 6, 1)) is None


def mistral(constant: float) -> MistralForCausalLM:
    """16 wide with SwiGLU of 32; the first channel of the stream is `constant` throughout."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=None, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.5)
        model.lm_head.weight.normal_(std=0.4)
        for layer in model.model.layers:
            for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight):
                weight.normal_(std=0.4)
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = constant
    return model


def sequences() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(60, (48, 12), generator=generator)} for _ in range(4)]


@pytest.fixture(scope="module")
def widened():
    """The network, and what wider blocks make of it."""
    model = mistral(3.0)
    return model, *convert_with(model, sequences(), max_kl=None, effort="place", width=1.5)


def mean_kl(model, network) -> float:
    ids = torch.randint(60, (200, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, found = (each(input_ids=ids).logits.double().log_softmax(-1) for each in (model, network))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_wider_blocks_are_nearer_without_a_bias(widened):
    model, network, report = widened
    assert mean_kl(model, network) < 0.2 * report.steps[0].distance  # of the refit, in the shape there was
    assert network.config.intermediate_size == 48
    assert not [name for name, _ in network.named_parameters() if name.endswith("bias")]


def test_where_no_direction_is_constant_blocks_stay_as_wide_as_they_are():
    model = mistral(0.0)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ConversionRefusedError, match="no block can be widened"):
        convert_to_relu(model, sequences()[:2], effort="place", width=1.5)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("count", "inputs"), [(300, 7), (16, 1152)])
def test_low_rank_is_the_best_in_the_metric_of_the_inputs(count, inputs):
    torch.manual_seed(3)
    matrix = torch.randn(5, inputs, dtype=torch.float64)
    rows = torch.randn(count, inputs).double() * torch.randn(inputs).exp()
    single = rows.float()  # as sums are made: of few rows, rounding leaves eigenvalues below 0
    left, right = low_rank(matrix, (single.T @ single).double() / count, 2)
    error = ((matrix - left @ right) @ rows.T).square().sum() / count
    tail = torch.linalg.svdvals(matrix @ rows.T)[2:].square().sum() / count
    torch.testing.assert_close(error, tail, rtol=1e-4, atol=0)
    torch.testing.assert_close((rows @ right.T).square().mean(0), torch.ones(2, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("build", [gpt2, bert])
def test_units_always_on_are_no_louder_than_the_others(build):
    """int8 has one range for all units of a layer: the loudest sets it."""
    model, inputs = build(layers=1), tokens(60)
    _, _, _, (block,) = traced(model, inputs)
    converted, rows = convert_to_relu(model, inputs, width=1.25).model, []
    down = converted.get_submodule(block.down.operation.weight_name.rpartition(".")[0])
    down.register_forward_pre_hook(lambda layer, given: rows.append(given[0].detach().flatten(0, -2)))
    converted(**inputs)
    (units,) = rows
    always_on, loudness = units.amin(0) > 0, units.amax(0)
    assert always_on.sum() >= 5
    assert loudness[always_on].max() < 1.5 * loudness[~always_on].max()
