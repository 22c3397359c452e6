"""Checkpoints: what a missing hardness becomes, what a saved one stays, and what is said about it."""

import json
import math

import pytest
import torch
from families import BY_NAME
from family import logits_of, rewrite_tensors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    CLIPTextModel,
    EncoderDecoderModel,
    PreTrainedModel,
)

from hf_lgelu import LambdaGELU, from_pretrained, replace_activations, substitute_relu
from hf_lgelu.models.checkpoint import load_checkpoint
from hf_lgelu.models.sites import lambda_gelu_modules
from hf_lgelu.models.surgery import TemporaryRelu

POISON = -3e30
INITIAL_RAW = 0.1 * math.log(math.expm1(0.05))  # λ = 1.05 at t = 0.1
BERT = BY_NAME["bert"]
HEAD = "cls.predictions.transform.transform_act_fn"
SITES = [f"bert.encoder.layer.{i}.intermediate.intermediate_act_fn" for i in range(2)] + [HEAD]


@pytest.fixture
def polluted(monkeypatch):
    """Fresh memory holds a huge negative number: as s, a GELU that never learns."""
    empty_like = torch.empty_like

    def poisoned(tensor, *args, **kwargs):
        fresh = empty_like(tensor, *args, **kwargs)
        return fresh.fill_(POISON) if fresh.is_floating_point() and fresh.device.type != "meta" else fresh

    monkeypatch.setattr(torch, "empty_like", poisoned)


def raw_values(model) -> dict[str, float]:
    return {name: m.raw_hardness.item() for name, m in model.named_modules() if isinstance(m, LambdaGELU)}


@torch.no_grad()
def learn(model):
    for index, module in enumerate(m for m in model.modules() if isinstance(m, LambdaGELU)):
        module.raw_hardness.fill_(0.1 * (index + 1))
    return model


def assert_initial(module: LambdaGELU) -> None:
    assert module.raw_hardness.item() == pytest.approx(INITIAL_RAW, rel=1e-6)
    assert module.raw_hardness.requires_grad
    assert module.temperature.item() == pytest.approx(0.1)
    assert module.hardness_override.item() == 0
    assert {t.dtype for t in (module.raw_hardness, module.temperature, module.hardness_override)} == {torch.float32}
    assert module.hardness.item() == pytest.approx(1.05, abs=1e-6)


HOW = [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"device_map": "auto", "dtype": torch.float16}]


@pytest.mark.usefixtures("polluted")
@pytest.mark.parametrize(
    ("name", "how"),
    [*(("bert", how) for how in HOW), *((name, {}) for name in ("gpt2", "t5", "timm-wrapper-resnet18", "clip"))],
    ids=str,
)
def test_a_gelu_checkpoint_gets_initial_hardness(name, how, tmp_path):
    family = BY_NAME[name]
    family.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config).replace('"gelu"', '"lambda_gelu"'))
    model = family.model_class.from_pretrained(tmp_path, **how)
    modules = [module for module in model.modules() if isinstance(module, LambdaGELU)]
    assert len(modules) == family.sites
    for module in modules:
        assert_initial(module)


@pytest.mark.usefixtures("polluted")
def test_without_the_extension_the_hardness_would_be_what_memory_held(tmp_path, monkeypatch):
    BERT.build().save_pretrained(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "_initialize_weights", PreTrainedModel._initialize_weights.__wrapped__)
    with pytest.raises(RuntimeError, match=r"no valid hardness for .*intermediate_act_fn: temperature holds -2\.99"):
        BertForMaskedLM.from_pretrained(tmp_path, hidden_act="lambda_gelu")


@pytest.mark.usefixtures("polluted")
def test_one_lost_hardness_alone_is_initial_and_is_reported(tmp_path):
    learn(BERT.build("lambda_gelu")).save_pretrained(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: tensors.pop(f"{SITES[1]}.raw_hardness"))
    model, info = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {f"{SITES[1]}.raw_hardness"}
    assert raw_values(model) == pytest.approx({SITES[0]: 0.1, SITES[1]: INITIAL_RAW, SITES[2]: 0.3}, rel=1e-6)


def test_a_gelu_checkpoint_is_not_reported_as_incomplete(tmp_path, host_log):
    BERT.build().save_pretrained(tmp_path)
    _, info = BertForMaskedLM.from_pretrained(tmp_path, hidden_act="lambda_gelu", output_loading_info=True)
    assert set(info["missing_keys"]) == set()
    assert "MISSING" not in host_log.text


def test_a_lost_weight_is_still_reported(tmp_path, host_log):
    BERT.build().save_pretrained(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: tensors.pop("bert.encoder.layer.0.output.dense.weight"))
    _, info = BertForMaskedLM.from_pretrained(tmp_path, hidden_act="lambda_gelu", output_loading_info=True)
    assert set(info["missing_keys"]) == {"bert.encoder.layer.0.output.dense.weight"}
    assert "MISSING" in host_log.text


@pytest.mark.parametrize("granularity", ["layer", "channel"])
def test_a_checkpoint_that_lacks_the_hardness_of_its_gates_is_reported(granularity, tmp_path, host_log, caplog):
    """Those that the config names, and those that its record describes."""
    model = BERT.build()
    replace_activations(model, granularity=granularity, inputs=BERT.inputs())
    model.save_pretrained(tmp_path)
    of_gates = ("raw_hardness", "temperature", "hardness_override")
    rewrite_tensors(tmp_path, lambda t: {name: t[name] for name in t if not name.endswith(of_gates)})
    _, info = from_pretrained(BertForMaskedLM, tmp_path, output_loading_info=True)
    assert {f"{name}.raw_hardness" for name in SITES} <= set(info["missing_keys"])
    assert "says that it has λ-GELU, and it holds no hardness" in caplog.text
    assert "MISSING" in host_log.text
    with pytest.raises(ValueError, match=r"missing .*raw_hardness"):
        load_checkpoint(tmp_path)


def test_gates_that_a_record_describes_are_not_saved_while_relu_is_in_their_place(tmp_path):
    model = BERT.build()
    replace_activations(model, granularity="channel", inputs=BERT.inputs())
    with TemporaryRelu(model).applied(), pytest.raises(RuntimeError, match="no longer those that its config remembers"):
        model.save_pretrained(tmp_path)


def test_a_checkpoint_that_fits_nothing_is_not_made_to_look_as_if_it_did(tmp_path):
    BERT.build().save_pretrained(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: {f"other.{name}": tensor for name, tensor in tensors.items()})
    _, info = BertForMaskedLM.from_pretrained(tmp_path, hidden_act="lambda_gelu", output_loading_info=True)
    assert {f"{name}.raw_hardness" for name in SITES} <= set(info["missing_keys"])


@pytest.mark.parametrize(("activation", "warns"), [("relu", True), ("lambda_gelu", False)])
def test_lambda_gelu_weights_read_as_another_function_are_warned_of(activation, warns, tmp_path, caplog):
    learn(BERT.build("lambda_gelu")).save_pretrained(tmp_path)
    BertForMaskedLM.from_pretrained(tmp_path, hidden_act=activation)
    assert ("holds the hardness of 3 λ-GELU activations" in caplog.text) is warns


@pytest.mark.parametrize(
    ("saved", "read", "warns"),
    [
        ("lambda_gelu", "lambda_silu", True),
        ("lambda_gelu_tanh", "lambda_gelu", True),
        ("lambda_silu", "lambda_silu", False),
        ("silu", "lambda_gelu", False),  # no λ is lost
    ],
)
def test_hardness_read_into_another_gate_is_warned_of(saved, read, warns, tmp_path, caplog):
    BERT.build(saved).save_pretrained(tmp_path)
    BertForMaskedLM.from_pretrained(tmp_path, hidden_act=read)
    text = f"The gates of the checkpoint are {saved} and those of this model {read}: with the same λ they are another"
    assert (text in caplog.text) is warns


def test_gates_of_two_kinds_and_a_record_of_gates_are_the_checkpoints_own(tmp_path, caplog):
    model = BERT.build()
    replace_activations(model, granularity="channel", inputs={"input_ids": torch.zeros(1, 3, dtype=int)})
    model.save_pretrained(tmp_path / "channels")
    from_pretrained(BertForMaskedLM, tmp_path / "channels")
    clip = BY_NAME["clip"]
    model = clip.build()
    model.config.text_config.hidden_act, model.config.vision_config.hidden_act = "lambda_gelu", "lambda_silu"
    type(model)(model.config).save_pretrained(tmp_path / "two")
    clip.model_class.from_pretrained(tmp_path / "two")
    CLIPTextModel.from_pretrained(tmp_path / "two")
    assert "gates of the checkpoint" not in caplog.text


@pytest.mark.usefixtures("polluted")
def test_temperature_and_override_come_back(tmp_path):
    model = BERT.build()
    replace_activations(model, temperature=0.3, init_hardness=1.7)
    with torch.no_grad():
        model.get_submodule(SITES[0]).hardness_override.fill_(42.0)  # in the middle of hardening
    expected = logits_of(model, BERT.inputs())
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    modules = [loaded.get_submodule(name) for name in SITES]
    assert [m.temperature.item() for m in modules] == pytest.approx([0.3] * 3)
    assert [m.hardness.item() for m in modules] == pytest.approx([42.0, 1.7, 1.7], rel=1e-6)
    assert [m.raw_hardness.item() for m in modules] == pytest.approx([0.3 * math.log(math.expm1(0.7))] * 3, rel=1e-6)
    assert torch.equal(logits_of(loaded, BERT.inputs()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_saved_hardness_stays_float32_in_half_precision(dtype, tmp_path):
    model = BERT.build("lambda_gelu")
    with torch.no_grad():
        model.get_submodule(HEAD).raw_hardness.fill_(0.1234567)
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.bert.embeddings.word_embeddings.weight.dtype == dtype
    assert loaded.get_submodule(HEAD).raw_hardness.dtype == torch.float32
    assert loaded.get_submodule(HEAD).raw_hardness.item() == model.get_submodule(HEAD).raw_hardness.item()


@pytest.mark.usefixtures("polluted")
def test_between_base_model_and_head(tmp_path):
    learn(BERT.build("lambda_gelu")).save_pretrained(tmp_path / "head")
    base = BertModel.from_pretrained(tmp_path / "head")
    assert list(raw_values(base).values()) == pytest.approx([0.1, 0.2])
    base.save_pretrained(tmp_path / "base")
    classifier = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    assert list(raw_values(classifier).values()) == pytest.approx([0.1, 0.2])
    head, info = BertForMaskedLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert list(raw_values(head).values()) == pytest.approx([0.1, 0.2, INITIAL_RAW])
    # The base was λ-GELU, so the head's site is news to the user, unlike the sites of a GELU checkpoint.
    assert f"{HEAD}.raw_hardness" in info["missing_keys"]


def _bert(**more) -> BertConfig:
    return BertConfig(**BERT.sizes, **more)


@pytest.mark.usefixtures("polluted")
def test_a_composite_of_two_checkpoints_keeps_what_they_learned(tmp_path):
    learn(BertModel(_bert(hidden_act="lambda_gelu"))).save_pretrained(tmp_path / "encoder")
    learn(BertLMHeadModel(_bert(hidden_act="lambda_gelu", is_decoder=True))).save_pretrained(tmp_path / "decoder")
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "encoder", tmp_path / "decoder")
    learned = pytest.approx([0.1, 0.2, 0.1, 0.2, 0.3])
    assert list(raw_values(model).values()) == learned
    model.init_weights()
    assert list(raw_values(model).values()) == learned
    model.save_pretrained(tmp_path / "both")
    assert list(raw_values(EncoderDecoderModel.from_pretrained(tmp_path / "both")).values()) == learned


def _by_string(path):
    return BERT.build("lambda_gelu")


def _by_checkpoint(path):
    BERT.build().save_pretrained(path)
    return BertForMaskedLM.from_pretrained(path, hidden_act="lambda_gelu")


@pytest.mark.parametrize("make", [_by_string, _by_checkpoint])
def test_init_weights_does_not_undo_what_was_learned(make, tmp_path):
    model = learn(make(tmp_path))
    model.init_weights()
    assert list(raw_values(model).values()) == pytest.approx([0.1, 0.2, 0.3])


INNER = {
    "put": ({}, replace_activations),
    "a λ per channel": ({}, lambda part: replace_activations(part, granularity="channel", inputs=BERT.inputs())),
    "substituted": ({"hidden_act": "lambda_gelu"}, substitute_relu),
    "swapped": ({}, lambda part: substitute_relu(part, kinds=("gelu",))),
}


@pytest.mark.parametrize("name", INNER)
def test_surgery_on_a_part_is_not_saved_with_the_config_of_the_whole(name, tmp_path):
    """The config of the whole would build the activations from before."""
    options, operate = INNER[name]
    model = BertForSequenceClassification(_bert(**options)).eval()
    operate(model.bert)
    with pytest.raises(RuntimeError, match=r"of bert \(BertModel\).*outermost model, this BertForSequenceClassif"):
        model.save_pretrained(tmp_path / "part")
    assert not (tmp_path / "part").exists()
    part = model.bert
    part.save_pretrained(tmp_path / "alone")  # whose config knows
    again = from_pretrained(BertModel, tmp_path / "alone").eval()
    torch.testing.assert_close(again(**BERT.inputs()).pooler_output, part(**BERT.inputs()).pooler_output)


def test_a_part_with_a_copy_of_the_config_is_told_from_one_with_surgery(tmp_path):
    """T5 gives its encoder and decoder copies, which surgery on the whole does not reach."""
    model = BY_NAME["t5"].build()
    replace_activations(model)
    model.save_pretrained(tmp_path / "whole")
    again = type(model).from_pretrained(tmp_path / "whole")
    assert {name for name, _ in lambda_gelu_modules(again)} == {name for name, _ in lambda_gelu_modules(model)}
    substitute_relu(again.encoder)  # whose gates are those that the decoder still has
    with pytest.raises(RuntimeError, match=r"activations of encoder .* were exchanged in that part alone"):
        again.save_pretrained(tmp_path / "part")


def test_a_part_of_a_composite_whose_neighbour_says_the_same_gates_is_found(tmp_path):
    decoder = BertLMHeadModel(_bert(is_decoder=True, add_cross_attention=True, hidden_act="lambda_gelu"))
    model = EncoderDecoderModel(encoder=BertModel(_bert()), decoder=decoder)
    model.save_pretrained(tmp_path)
    replace_activations(model.encoder)
    with pytest.raises(RuntimeError, match=r"activations of encoder .* were exchanged in that part alone"):
        model.save_pretrained(tmp_path)
    replace_activations(model, kinds=("lambda_gelu",))
    model.save_pretrained(tmp_path)
    assert len(raw_values(EncoderDecoderModel.from_pretrained(tmp_path))) == len(raw_values(model)) == 5


@pytest.mark.parametrize(
    ("saved", "read", "differs"),
    [("silu", "lambda_gelu", "0.19"), ("quick_gelu", "lambda_gelu", "0.02"), ("relu", "lambda_silu", "0.28")],
)
def test_a_gate_of_another_function_than_the_checkpoints_is_warned_of(saved, read, differs, tmp_path, caplog):
    BERT.build(saved).save_pretrained(tmp_path)
    BertForMaskedLM.from_pretrained(tmp_path, hidden_act=read)
    assert f"was trained with '{saved}' (hidden_act), and '{read}' at λ = 1 differs from that by up to {differs}" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("saved", "read"), [("silu", "lambda_silu"), ("gelu", "lambda_gelu"), ("gelu_new", "lambda_gelu")]
)
def test_a_gate_of_the_same_function_is_not(saved, read, tmp_path, caplog):
    """The tanh form of GELU is the same to a thousandth, as the paper's GPT-2 has it."""
    BERT.build(saved).save_pretrained(tmp_path)
    BertForMaskedLM.from_pretrained(tmp_path, hidden_act=read)
    assert "differs from that" not in caplog.text
