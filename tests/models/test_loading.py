"""Checkpoints: what a missing hardness becomes, what a saved one stays, and what is said about it."""

import copy
import inspect
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import BY_NAME
from family import logits_of, rewrite_tensors
from peft import LoraConfig, get_peft_model
from small_networks import put_gates_of_two_forms
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    initialization,
)

from hf_lgelu import LambdaGELU, from_pretrained, replace_activations
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.checkpoint import load_checkpoint

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


HOW = [
    {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"device_map": "auto", "dtype": torch.float16},
    {"low_cpu_mem_usage": True},
]  # fmt: skip
NAMES = ["bert", "gpt2", "t5", "vit", "clip", "timm-wrapper-resnet18"]


@pytest.mark.usefixtures("polluted")
@pytest.mark.parametrize(("name", "how"), [*(("bert", how) for how in HOW), *((name, {}) for name in NAMES)], ids=str)
def test_a_gelu_checkpoint_gets_initial_hardness_which_stays_what_it_has_learned(name, how, tmp_path):
    family = BY_NAME[name]
    family.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config).replace('"gelu"', '"lambda_gelu"'))
    model, info = family.model_class.from_pretrained(tmp_path, **how, output_loading_info=True)
    modules = {key: module for key, module in model.named_modules() if isinstance(module, LambdaGELU)}
    assert len(modules) == family.sites
    assert set(info["missing_keys"]) >= {f"{key}.raw_hardness" for key in modules}  # as transformers reports all
    for module in modules.values():
        assert_initial(module)
    learned = raw_values(learn(model))
    model.init_weights()
    assert raw_values(model) == learned
    model.save_pretrained(tmp_path / "learned", max_shard_size="10KB")
    assert len([*(tmp_path / "learned").glob("*.safetensors")]) > 1
    again = family.model_class.from_pretrained(tmp_path / "learned", **how)
    again.init_weights()
    assert raw_values(again) == learned


@pytest.mark.usefixtures("polluted")
def test_a_gate_that_did_not_answer_would_have_what_memory_held(tmp_path, monkeypatch):
    BERT.build().save_pretrained(tmp_path)
    monkeypatch.setattr(LambdaGate, "_is_hf_initialized", True)
    model = BertForMaskedLM.from_pretrained(tmp_path, hidden_act="lambda_gelu")
    assert set(raw_values(model).values()) == {torch.tensor(POISON).item()}


def test_a_gate_is_initial_where_a_load_with_deepspeed_empties_the_functions_of_initialization():
    with initialization.no_init_weights():
        assert_initial(LambdaGELU())


LOOKS = {
    "inspect": lambda model: [inspect.getmembers(module) for module in model.modules()],
    "copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "peft": lambda model: get_peft_model(
        copy.deepcopy(model), LoraConfig(target_modules=["query"], modules_to_save=["intermediate_act_fn"])
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_gate_that_is_looked_at_outside_a_load_stays_as_it_is(name):
    """Also one that was built without memory, whose values transformers has not asked for."""
    values = learn(BERT.build("lambda_gelu")).state_dict()
    with torch.device("meta"):
        model = BertForMaskedLM(_bert(hidden_act="lambda_gelu"))
    model.to_empty(device="cpu").load_state_dict(values)
    looked = LOOKS[name](model)
    assert all(torch.equal(tensor, values[key]) for key, tensor in model.state_dict().items())
    if isinstance(looked, torch.nn.Module):
        assert {*raw_values(looked).values()} == {*raw_values(model).values()}


@pytest.mark.usefixtures("polluted")
def test_one_lost_hardness_alone_is_initial_and_is_reported(tmp_path):
    learn(BERT.build("lambda_gelu")).save_pretrained(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: tensors.pop(f"{SITES[1]}.raw_hardness"))
    model, info = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {f"{SITES[1]}.raw_hardness"}
    assert raw_values(model) == pytest.approx({SITES[0]: 0.1, SITES[1]: INITIAL_RAW, SITES[2]: 0.3}, rel=1e-6)


@pytest.mark.parametrize("has_record", [False, True])
def test_a_checkpoint_that_lacks_the_hardness_of_its_gates_is_reported(has_record, tmp_path, host_log):
    """transformers says it of gates that the config names; an error says it of gates that its record describes."""
    model = BERT.build()
    put_gates_of_two_forms(model) if has_record else replace_activations(model)
    model.save_pretrained(tmp_path)
    of_gates = ("raw_hardness", "temperature", "hardness_override")
    rewrite_tensors(tmp_path, lambda t: {name: t[name] for name in t if not name.endswith(of_gates)})
    if has_record:
        with pytest.raises(ValueError, match=f"λ.*{SITES[0]}"):
            from_pretrained(BertForMaskedLM, tmp_path)
    else:
        _, info = from_pretrained(BertForMaskedLM, tmp_path, output_loading_info=True)
        assert {f"{name}.raw_hardness" for name in SITES} <= set(info["missing_keys"])
    assert "MISSING" in host_log.text
    with pytest.raises(ValueError, match=SITES[0]):
        load_checkpoint(tmp_path)


def test_a_site_that_is_gone_is_named_by_the_load(tmp_path):
    model = BERT.build()
    put_gates_of_two_forms(model)
    del model.bert.encoder.layer[1:]
    model.config.num_hidden_layers = 1
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{SITES[1]}.*BertForMaskedLM"):
        from_pretrained(BertForMaskedLM, tmp_path)


def test_threads_load_at_once_each_its_own_gates(tmp_path):
    families = [BY_NAME[name] for name in ("bert", "gpt2", "clip")]
    wanted = {}
    for family in families:
        model = family.build()
        put_gates_of_two_forms(model)
        wanted[family.name] = logits_of(learn(model), family.inputs())
        model.save_pretrained(tmp_path / family.name)

    def load(family):
        return logits_of(from_pretrained(family.model_class, tmp_path / family.name), family.inputs())

    with ThreadPoolExecutor(3) as pool:
        for family, logits in zip(families * 3, pool.map(load, families * 3), strict=True):
            assert torch.equal(logits, wanted[family.name])


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
    torch.nn.init.constant_(model.get_submodule(HEAD).raw_hardness, 0.1234567)
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.bert.embeddings.word_embeddings.weight.dtype == dtype
    assert torch.equal(loaded.get_submodule(HEAD).raw_hardness, torch.tensor([0.1234567]))


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
