"""`skip_zeros`: weights of dead units are NaN here, so an output is finite only if they were not read."""

import copy

import pytest
import small_networks as networks
import torch
import transformers
from torch import nn

import hf_lgelu
from hf_lgelu.activation.kernels.cpu import rows

SIZES = {"hidden_size": 20, "intermediate_size": 37, "max_position_embeddings": 32}


def llama(**more):
    return networks.llama(hidden_act="relu", eos_token_id=None, **SIZES | more)


def opt():
    sizes = {"vocab_size": 40, "hidden_size": 20, "ffn_dim": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=20, eos_token_id=None))


# A network, and the parts of its modules' names: before the gate, beside it, behind it.
DECODERS = {
    "gated": (llama, "gate_proj", "up_proj", "down_proj"),
    "gated, with biases": (lambda: llama(mlp_bias=True), "gate_proj", "up_proj", "down_proj"),
    "plain": (opt, "fc1", None, "fc2"),
    "plain, stored transposed": (lambda: networks.gpt2(activation_function="relu"), "mlp.c_fc", None, "mlp.c_proj"),
}
TOKEN = torch.tensor([[3]])


def units_first(module):
    """The weight of a map, with the axis of its outputs first."""
    return module.weight.data.t() if "Conv1D" in type(module).__name__ else module.weight.data


@pytest.fixture(params=DECODERS)
def decoder(request):
    """(a network of which half of the units are dead, the same with NaN in all weights that only these units use)."""
    build, gate, up, down = DECODERS[request.param]
    torch.manual_seed(0)
    clean = build().eval()
    for parameter in clean.parameters():
        nn.init.normal_(parameter, 0, 0.4)
    poisoned = copy.deepcopy(clean)
    for model in (clean, poisoned):
        for name, module in model.named_modules():
            if name.endswith(gate):
                units_first(module)[::2] = 0
                if module.bias is not None:
                    module.bias.data[::2] = 0
            elif up is not None and name.endswith(up) and model is poisoned:
                units_first(module)[::2] = torch.nan
            elif name.endswith(down) and model is poisoned:
                units_first(module)[:, ::2] = torch.nan
    return clean, poisoned


def decoded(model):
    found = model.generate(
        TOKEN, max_new_tokens=9, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    return found.sequences, torch.cat(found.logits)


def is_finite(model, ids, context=torch.no_grad):
    with context():
        return bool(model(input_ids=ids).logits.isfinite().all())


def test_generate_reads_live_units_alone_and_gives_the_same_tokens(decoder, tmp_path):
    clean, model = decoder
    tokens, logits = decoded(clean)
    model.save_pretrained(tmp_path / "before")
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    assert not is_finite(model, TOKEN)
    assert len(hf_lgelu.skip_zeros(model)) == 2
    for network in (model, copy.deepcopy(model)):
        found, values = decoded(network)
        assert torch.equal(found, tokens)
        torch.testing.assert_close(values, logits, rtol=1e-5, atol=1e-5)
    # dense: several tokens, several sequences, gradients, training
    assert not is_finite(model, TOKEN.expand(1, 2))
    assert not is_finite(model, TOKEN.expand(2, 1))
    assert not is_finite(model, TOKEN, torch.enable_grad)
    assert not is_finite(model.train(), TOKEN)
    model.eval()
    # in a checkpoint it leaves no trace
    state = model.state_dict()
    assert [(name, held.stride()) for name, held in state.items()] == [(name, held.stride())
                                                                       for name, held in before.items()]  # fmt: skip
    assert all(torch.equal(state[name].nan_to_num(7), before[name].nan_to_num(7)) for name in before)
    assert model.config.to_dict() == config
    model.save_pretrained(tmp_path / "skipping")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "skipping")]
    assert files[0] == files[1]
    # a second call undoes it
    assert hf_lgelu.skip_zeros(model, False) == []
    assert not is_finite(model, TOKEN)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(held.is_contiguous() for held in model.parameters())


@pytest.mark.parametrize("loading", [{}, {"assign": True}])
def test_weights_that_change_later_are_the_ones_that_count(decoder, loading):
    clean, model = decoder
    hf_lgelu.skip_zeros(model)
    for parameter in clean.parameters():
        parameter.data.mul_(1.25)
    model.load_state_dict(copy.deepcopy(clean.state_dict()), **loading)
    torch.testing.assert_close(decoded(model)[1], decoded(clean)[1], rtol=1e-5, atol=1e-5)


def test_a_pass_that_an_error_ended_leaves_nothing_behind():
    model = llama().eval()
    first = hf_lgelu.skip_zeros(model)[0]
    texts = torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        expected = model(texts).logits
        behind = model.get_submodule(first.replace("act_fn", "down_proj"))
        handle = behind.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(TOKEN)
        handle.remove()
        assert torch.equal(model(texts).logits, expected)


@pytest.mark.parametrize(("units", "inputs", "outputs"), [(3000, 130, 129), (100, 3, 40), (7, 16, 1)])
@pytest.mark.parametrize("live", [0.0, 0.01, 0.4, 1.0])
def test_the_loop_against_float64(units, inputs, outputs, live):
    gates = torch.rand(1, units) * (torch.rand(units) < live)
    up, down, x = torch.randn(units, inputs), torch.randn(units, outputs), torch.randn(1, 1, inputs)
    up_bias, bias = torch.randn(units), torch.randn(outputs)
    wide = [part.double() for part in (gates, down, bias, x, up, up_bias)]
    expected = wide[2] + (wide[0] * (wide[4] @ wide[3][0, 0] + wide[5])) @ wide[1]
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(rows.run_rows(x, gates, up, up_bias, down, bias))
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5 * (inputs * units) ** 0.5)
    assert torch.equal(*found)
    plain = rows.run_rows(None, gates, None, None, down)
    torch.testing.assert_close(plain.double(), wide[0] @ wide[1], rtol=1e-5, atol=1e-5 * units**0.5)
    whole = rows.run_rows(x, None, up, up_bias)
    torch.testing.assert_close(whole.double(), wide[3] @ wide[4].t() + wide[5], rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_without_a_compiler_the_model_stays_dense_with_a_word(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("LGELU_CACHE_DIR", str(tmp_path))
    rows.load_loop.cache_clear()
    model = llama().eval()
    try:
        assert hf_lgelu.skip_zeros(model) == []
    finally:
        rows.load_loop.cache_clear()
    assert not any("forward" in vars(module) for module in model.modules())
    assert "Maps around ReLUs are read whole: their C++ kernel is not to be had: CXX names" in caplog.text


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Doubled(8, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double(),
    ],
)
def test_blocks_that_compute_something_else_are_refused(network):
    inputs = torch.randn(3, 4, dtype=next(network.parameters()).dtype)
    with pytest.raises(ValueError, match="has no ReLU module in a feed-forward block"):
        hf_lgelu.skip_zeros(network, inputs=inputs)
