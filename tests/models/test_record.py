"""Checkpoints that no activation string describes: gates of two forms, or at some sites only."""

import json

import pytest
import torch
import transformers
from families import BY_NAME
from family import Family, logits_of
from small_networks import put_gates_of_two_forms
from torch import nn
from transformers.activations import ACT2FN

from hf_lgelu import from_pretrained, replace_activations, substitute_relu
from hf_lgelu.activation.module import LambdaGate

MODELS = ["gpt2", "timm-wrapper-resnet18", "bert", "t5", "mpt", "clip", "openai-gpt"]
MLP_SITES = ("encoder.layer.0.intermediate.intermediate_act_fn", "encoder.layer.1.intermediate.intermediate_act_fn")
BERT_HEAD = "cls.predictions.transform.transform_act_fn"


@torch.no_grad()
def learn(model: nn.Module) -> nn.Module:
    """Another λ for every site."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, LambdaGate):
            module.raw_hardness.uniform_(-0.2, 0.6, generator=generator)
    return model


def operated(family: Family, **more) -> nn.Module:
    model = family.build()
    put_gates_of_two_forms(model, **more)
    return learn(model)


def raw_values(model: nn.Module) -> dict[str, list]:
    return {name: m.raw_hardness.tolist() for name, m in model.named_modules() if isinstance(m, LambdaGate)}


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_comes_back_exactly_and_can_be_saved_again(name, tmp_path):
    family = BY_NAME[name]
    model = operated(family)
    expected = logits_of(model, family.inputs())
    assert (expected - logits_of(family.build(), family.inputs())).abs().max() > 1e-4
    for generation in ("first", "second"):
        model.save_pretrained(tmp_path / generation)
        model, info = from_pretrained(family.model_class, tmp_path / generation, output_loading_info=True)
        assert type(model) is family.model_class
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(logits_of(model, family.inputs()), expected)
    if name != "mpt":  # which has no key for a guard
        with pytest.raises((RuntimeError, KeyError), match=r"hf_lgelu\.from_pretrained"):
            family.model_class.from_pretrained(tmp_path / "second")


@pytest.mark.parametrize("as_path", [True, False])
def test_a_config_can_be_given(as_path, tmp_path):
    family = BY_NAME["bert"]
    model = operated(family)
    model.save_pretrained(tmp_path)
    elsewhere = tmp_path / "config"
    elsewhere.mkdir()
    (tmp_path / "config.json").rename(elsewhere / "config.json")
    config = str(elsewhere) if as_path else family.build().config.from_pretrained(elsewhere)
    loaded = from_pretrained(family.model_class, tmp_path, config=config)
    assert torch.equal(logits_of(loaded, family.inputs()), logits_of(model, family.inputs()))


def test_with_another_head_and_without_one(tmp_path):
    # BERT's record names bert.encoder... and the head's site; the base model has encoder... and no head.
    model = operated(BY_NAME["bert"])
    learned = raw_values(model)
    model.save_pretrained(tmp_path / "mlm")
    base = from_pretrained(transformers.BertModel, tmp_path / "mlm")
    base.save_pretrained(tmp_path / "base")
    classifier = from_pretrained(transformers.BertForSequenceClassification, tmp_path / "base")
    classifier.save_pretrained(tmp_path / "classifier")
    again = from_pretrained(transformers.BertForSequenceClassification, tmp_path / "classifier")
    body = [learned[f"bert.{name}"] for name in MLP_SITES]
    assert raw_values(base) == dict(zip(MLP_SITES, body, strict=True))
    for loaded in (classifier, again):
        assert raw_values(loaded) == {f"bert.{name}": value for name, value in zip(MLP_SITES, body, strict=False)}
    head = from_pretrained(transformers.BertForMaskedLM, tmp_path / "base")
    assert raw_values(head) == raw_values(classifier)


def test_an_encoder_alone_is_taken_from_an_encoder_decoder(tmp_path):
    model = operated(BY_NAME["t5"])
    model.save_pretrained(tmp_path)
    encoder = from_pretrained(transformers.T5EncoderModel, tmp_path)
    expected = {name: value for name, value in raw_values(model).items() if name.startswith("encoder.")}
    assert len(expected) == 2
    assert raw_values(encoder) == expected


def test_a_model_with_none_of_the_sites_is_refused(tmp_path):
    operated(BY_NAME["bert"], include=lambda name: name == BERT_HEAD).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{BERT_HEAD}.*BertForSequenceClassification"):
        from_pretrained(transformers.BertForSequenceClassification, tmp_path)


def test_a_family_without_a_key_is_warned_of(caplog):
    operated(BY_NAME["mpt"])
    assert "MptConfig has no key for its activations: load the saved checkpoint by hf_lgelu.from_" in caplog.text
    caplog.clear()
    operated(BY_NAME["bert"])
    assert "no key" not in caplog.text


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            lambda record: record[0].update(site="bert.encoder.layer.0.output.dense"),
            r"bert\.encoder\.layer\.0\.output\.dense",
        ),
        (lambda record: record[1].pop("site"), "no record"),
        (lambda record: record[0].update(raw_shape=[24]), "says raw_shape of the gate"),
        (lambda record: record[0].update(gate="no gate"), "no gate"),
        (lambda record: record[0].update(call=-1), "no readable call"),
        (lambda record: record.append("text"), "no record"),
    ],
)
def test_a_damaged_record_is_refused(edit, told, tmp_path):
    operated(BY_NAME["bert"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(config["lambda_gelu"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=told):
        from_pretrained(BY_NAME["bert"].model_class, tmp_path)


def test_records_of_0_2_are_read(tmp_path):
    """They give the shape of each gate's one λ."""
    family = BY_NAME["bert"]
    model = operated(family)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for entry in config["lambda_gelu"]:
        entry["raw_shape"] = [1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = from_pretrained(family.model_class, tmp_path)
    assert raw_values(loaded) == raw_values(model)
    assert "raw_shape" not in str(loaded.config.lambda_gelu)


def test_repeated_surgery_is_remembered_whole(tmp_path):
    family = BY_NAME["bert"]
    model = family.build()
    for site in (f"bert.{MLP_SITES[1]}", BERT_HEAD):
        replace_activations(model, include=site.__eq__)
    learn(model).save_pretrained(tmp_path)
    loaded = from_pretrained(family.model_class, tmp_path)
    assert raw_values(loaded) == raw_values(model)
    assert len(raw_values(loaded)) == 2


def test_going_back_to_gates_of_one_form_forgets_the_record(tmp_path):
    family = BY_NAME["bert"]
    model = operated(family)
    replace_activations(model, kinds=("lambda_silu",), gate="lambda_gelu")
    assert not hasattr(model.config, "lambda_gelu")
    learn(model).save_pretrained(tmp_path)
    loaded = family.model_class.from_pretrained(tmp_path)
    assert raw_values(loaded) == raw_values(model)


def test_substitution_forgets_the_record_and_plain_loading_works(tmp_path):
    family = BY_NAME["bart"]
    model = operated(family)
    substitute_relu(model)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["activation_function"] == "relu"
    assert "lambda_gelu" not in saved
    loaded = family.model_class.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded, family.inputs()), logits_of(model, family.inputs()))


@pytest.fixture
def composite():
    """An encoder-decoder whose encoder had surgery on its own, so that the record is in a sub-config."""
    sizes = BY_NAME["bert"].sizes
    encoder = transformers.BertModel(transformers.BertConfig(**sizes))
    put_gates_of_two_forms(encoder)
    decoder_config = transformers.BertConfig(
        **sizes, is_decoder=True, add_cross_attention=True, hidden_act="lambda_gelu"
    )
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(decoder_config))
    return learn(model)


def test_a_record_in_a_sub_config_is_found(composite, tmp_path):
    composite.save_pretrained(tmp_path)
    loaded = from_pretrained(transformers.EncoderDecoderModel, tmp_path)
    assert raw_values(loaded) == raw_values(composite)
    assert len(raw_values(loaded)) == 5


@pytest.mark.parametrize("is_of_two_configs", [True, False])
def test_a_part_of_which_only_the_whole_config_tells_is_not_loaded_alone(is_of_two_configs, tmp_path):
    if is_of_two_configs:
        torch.manual_seed(0)
        small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
        tower = transformers.ViTModel(transformers.ViTConfig(**small, image_size=8, patch_size=4))
        sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 0}
        writer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, add_cross_attention=True))
        model = transformers.VisionEncoderDecoderModel(encoder=tower, decoder=writer)
        replace_activations(model)  # λ-gates of two forms, which is a record
        part = model.encoder
    else:
        model = operated(BY_NAME["clip"])
        part = model.vision_model
    part.save_pretrained(tmp_path / "part")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("part", "whole")[: 1 if is_of_two_configs else 2]:
        with pytest.raises(RuntimeError, match="whole network"):
            from_pretrained(transformers.CLIPVisionModel if folder == "whole" else type(part), tmp_path / folder)
    loaded = from_pretrained(type(model), tmp_path / "whole")
    assert raw_values(loaded) == raw_values(model)
    substitute_relu(model)
    part.save_pretrained(tmp_path / "part")
    torch.testing.assert_close(type(part).from_pretrained(tmp_path / "part").state_dict(), part.state_dict())


class SharedActConfig(transformers.PreTrainedConfig):
    """Of `SharedAct`."""

    model_type = "shared_act"
    hidden_act: str = "gelu"


class SharedAct(transformers.PreTrainedModel):
    """One activation object, at two places."""

    config: SharedActConfig
    base_model_prefix = ""

    def __init__(self, config):
        super().__init__(config)
        act = ACT2FN[config.hidden_act]
        self.net = nn.Sequential(nn.Linear(4, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 2))
        self.post_init()

    def forward(self, x):
        return self.net(x)


def test_two_gates_of_one_activation_come_back_as_two(tmp_path):
    model = SharedAct(SharedActConfig()).eval()
    replace_activations(model)
    with torch.no_grad():
        model.net[1].raw_hardness.fill_(0.2)
        model.net[3].raw_hardness.fill_(3.0)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(SharedAct, tmp_path).eval()
    x = torch.randn(16, 4)
    assert torch.equal(loaded(x), model(x))
    assert raw_values(loaded) == {"net.1": [pytest.approx(0.2)], "net.3": [3.0]}


def test_gates_of_blocks_whose_weights_are_tied_come_back_each_with_its_hardness(tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "mamba_d_state": 4}
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_mamba_heads"), 2)
    kinds = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mamba_kernels": False}
    model = transformers.ZambaForCausalLM(transformers.ZambaConfig(**sizes, **kinds))
    replace_activations(model, include=lambda name: "shared_transf" in name)
    learn(model).save_pretrained(tmp_path)
    assert raw_values(from_pretrained(transformers.ZambaForCausalLM, tmp_path)) == raw_values(model)
    assert len({str(values) for values in raw_values(model).values()}) == 2
