"""Finding and rewriting the config key that decides a model's activations."""

import json

import pytest
import torch
from families import BY_NAME
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    TimmWrapperConfig,
    ViTConfig,
)
from transformers.activations import ACT2FN

from hf_lgelu import from_pretrained, replace_activations, substitute_relu
from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    _candidates,
    activation_strings,
    apply_changes,
    plan_config_changes,
    runtime_warnings,
    write_config_changes,
)
from hf_lgelu.networks.sites import KINDS, find_sites

BERT = BY_NAME["bert"]


def plan(model, activation):
    return plan_config_changes(model, {site.name for site in find_sites(model)}, activation)


class TwoKeysConfig(PreTrainedConfig):
    """A config with decoys: an activation's name under keys that decide nothing, and two keys that do."""

    model_type = "two_keys"
    inner_act: str = "gelu"
    outer_act: str = "gelu"
    label_style: str = "gelu"
    extras: dict | None = None


class TwoKeys(PreTrainedModel):
    config_class = TwoKeysConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.inner = ACT2FN[config.inner_act]
        self.outer = ACT2FN[config.outer_act]
        self.fixed = nn.GELU()
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, x):
        return self.fixed(self.outer(self.linear(self.inner(x))))


def test_only_keys_that_decide_are_chosen():
    model = TwoKeys(TwoKeysConfig(extras={"act": "gelu"}))
    model.fixed = nn.ReLU()  # or no key could say ReLU everywhere
    changes = plan_config_changes(model, {"inner", "outer"}, "lambda_gelu")
    assert sorted(changes, key=str) == [
        ConfigChange(("inner_act",), "gelu", "lambda_gelu"),
        ConfigChange(("outer_act",), "gelu", "lambda_gelu"),
    ]


def test_one_of_two_keys_is_enough_for_one_of_two_sites():
    model = TwoKeys(TwoKeysConfig())
    assert plan_config_changes(model, {"outer"}, "relu") == [ConfigChange(("outer_act",), "gelu", "relu")]


def test_a_site_that_no_key_reaches_is_named():
    model = TwoKeys(TwoKeysConfig())
    with pytest.raises(UnsupportedConfigError, match="'relu' at fixed"):
        plan(model, "relu")


class Noted(TwoKeys):
    """Keeps the name of an activation and never looks it up."""

    def __init__(self, config):
        super().__init__(config)
        self.activation = config.inner_act


class LookedUp(Noted):
    """Runs a gate by that name, too, as the convolutions of Qwen3-Next and of Mamba's kin do."""

    def forward(self, x):
        return super().forward(ACT2FN[self.activation](x))


def test_a_key_whose_name_a_module_looks_up_when_it_runs_is_none(tmp_path):
    model, x = LookedUp(TwoKeysConfig()).eval(), torch.randn(3, 4)
    config = model.config.to_dict()
    with pytest.raises(UnsupportedConfigError, match=r"'relu' at inner.*activation"):
        plan_config_changes(model, {"inner"}, "relu")
    assert plan_config_changes(model, {"outer"}, "relu") == [ConfigChange(("outer_act",), "gelu", "relu")]
    assert model.config.to_dict() == config
    replace_activations(model)  # the config then remembers the sites
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(LookedUp, tmp_path).eval()
    assert (loaded.activation, len(find_sites(loaded, ("lambda_gelu",)))) == ("gelu", 3)
    assert torch.equal(loaded(x), model(x))


def test_a_key_that_reaches_too_much_is_not_chosen():
    with pytest.raises(UnsupportedConfigError, match="BertConfig"):
        plan_config_changes(BERT.build(), {"bert.encoder.layer.0.intermediate.intermediate_act_fn"}, "relu")


def test_a_config_that_cannot_be_built_is_no_candidate_and_the_reason_is_kept():
    model = BY_NAME["openai-gpt"].build()
    with pytest.raises(UnsupportedConfigError) as caught:
        plan(model, "lambda_gelu")
    assert isinstance(caught.value.__cause__, KeyError)
    assert plan(model, "relu") == [ConfigChange(("afn",), "gelu", "relu")]


def test_t5_ends_with_both_of_its_keys_saying_the_same(tmp_path):
    for name, gate in (("t5", ""), ("t5-gated", "gated-")):
        model = BY_NAME[name].build()
        replace_activations(model)
        substitute_relu(model)
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert (saved["feed_forward_proj"], saved["dense_act_fn"]) == (f"{gate}relu", "relu")


@pytest.mark.parametrize("gate", ["relu", "lambda_gelu_tanh"])
def test_each_key_of_gemma_alone_says_the_new_gate(gate, tmp_path):
    """Files of its first time have two keys; a reader of hidden_activation is the class of Gemma 2."""
    BY_NAME["gemma"].build().save_pretrained(tmp_path)
    file, second = tmp_path / "config.json", {"hidden_activation": "gelu_pytorch_tanh", "pooler_act": "tanh"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "gelu_pytorch_tanh"} | second))
    model = GemmaForCausalLM.from_pretrained(tmp_path)
    replace_activations(model)
    if gate == "relu":
        substitute_relu(model)
    model.save_pretrained(tmp_path)
    saved = json.loads(file.read_text())
    for key, family in (("hidden_act", "gemma"), ("hidden_activation", "gemma2")):
        alone = BY_NAME[family].build(saved[key])
        assert {site.kind for site in find_sites(alone, KINDS)} == ({gate} - {"relu"}), key
    assert saved["pooler_act"] == "tanh"


@pytest.mark.parametrize("model_args", [None, {"act_layer": "gelu"}])
def test_timm_wrappers_get_an_act_layer(model_args):
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    config = TimmWrapperConfig(architecture="test_vit", model_args=model_args, num_labels=2)
    model = TimmWrapperForImageClassification(config)
    changed = apply_changes(model.config, plan(model, "relu"))
    assert changed.model_args == {"act_layer": "relu"}
    rebuilt = TimmWrapperForImageClassification(changed)
    assert sum(isinstance(module, nn.ReLU) for module in rebuilt.modules()) == len(find_sites(model))


def test_sub_configs_that_modules_hold_are_copied_with_the_whole():
    model = BY_NAME["clip"].build()
    old = model.config
    write_config_changes(model, [ConfigChange(("text_config", "hidden_act"), "gelu", "relu")])
    assert model.text_model.config is model.config.text_config
    assert model.text_model.config.hidden_act == "relu"
    assert model.vision_model.config is model.config.vision_config
    assert old.text_config.hidden_act == "gelu"


def test_what_is_gelu_whatever_the_config_says_needs_no_key():
    model = BY_NAME["mpt"].build()
    replace_activations(model)
    assert plan(model, "gelu") == []


def test_a_key_that_decides_nothing_is_left_where_gelu_is_fixed():
    model = TwoKeys(TwoKeysConfig(inner_act="relu", outer_act="relu", label_style="gelu_new"))
    assert plan_config_changes(model, {"fixed"}, "gelu") == []


def test_a_family_that_reads_gelu_as_the_tanh_form_is_refused_under_that_name():
    if GemmaConfig(hidden_act="gelu").hidden_act != "gelu":  # transformers 5.17 did not yet rewrite it
        with pytest.raises(UnsupportedConfigError, match=r"GemmaConfig.*'gelu'"):
            plan(BY_NAME["gemma"].build("lambda_gelu"), "gelu")
    with pytest.raises(UnsupportedConfigError, match=r"OpenAIGPTConfig.*'gelu'"):
        plan(with_surgery("openai-gpt"), "gelu")
    assert plan(BY_NAME["gemma"].build("lambda_gelu"), "gelu_python") == [
        ConfigChange(("hidden_act",), "lambda_gelu", "gelu_python")
    ]


def with_surgery(name):
    model = BY_NAME[name].build()
    replace_activations(model)
    return model


def test_the_tanh_form_of_the_gated_t5_is_avoided_in_both_of_its_keys():
    changes = plan(BY_NAME["t5-gated"].build("lambda_gelu"), "gelu")
    assert sorted(map(str, changes)) == [
        "dense_act_fn: 'lambda_gelu' → 'gelu'",
        "feed_forward_proj: 'gated-lambda_gelu' → 'gated-gelu_python'",
    ]


def test_the_boolean_key_of_xlm():
    model = with_surgery("xlm")
    assert plan(model, "gelu") == []  # as it says already
    assert plan(model, "relu") == [ConfigChange(("gelu_activation",), True, False)]
    model.config.gelu_activation = False
    assert plan(model, "gelu") == [ConfigChange(("gelu_activation",), False, True)]


def test_a_part_with_a_copy_of_the_config_says_the_same():
    """T5's encoder, saved alone, would say the gate that it does not have any more."""
    model = BY_NAME["t5-gated"].build()
    before = model.encoder.config
    substitute_relu(model, kinds=tuple({site.kind for site in find_sites(model)}))
    said = {path[-1]: name for path, name in activation_strings(model.config)}
    assert set(said.values()) == {"relu", "gated-relu"}
    for part in (model.encoder, model.decoder):
        assert {path[-1]: name for path, name in activation_strings(part.config)} == said
    assert model.encoder.config is not before
    assert all(part.config is model.encoder.config for part in model.encoder.modules() if hasattr(part, "config"))


def test_a_tower_of_timm_inside_another_model_has_its_key():
    """As Gemma 3n's: a config that holds a timm wrapper's, whose `model_args` are none or others."""

    class Outer(PreTrainedConfig):
        sub_configs = {"vision_config": TimmWrapperConfig}  # noqa: RUF012

    config = Outer()
    for args, change in (
        (None, ConfigChange(("vision_config", "model_args"), None, {"act_layer": "relu"})),
        ({"depth": 1}, ConfigChange(("vision_config", "model_args", "act_layer"), None, "relu")),
    ):
        config.vision_config = TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=args)
        assert change in _candidates(config, "relu")


def warned(config):
    """The sentences about the model without a head, up to what happens."""
    with torch.device("meta"):
        return [sentence.partition(" has ")[0] for sentence in runtime_warnings(AutoModel.from_config(config))]


def test_families_that_are_known_to_be_ignored_are_warned_of():
    inner = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    assert warned(GPT2Config(n_layer=1)) == ["in llama.cpp, a gpt2"]
    assert warned(BertConfig(num_hidden_layers=1)) == ["in llama.cpp, a bert"]
    assert warned(inner) == ["in CTranslate2, llama.cpp, MLX and TGI, a llama"]
    assert warned(LlavaConfig(text_config=inner)) == warned(inner)
    classifier = BertForSequenceClassification(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
    assert runtime_warnings(classifier)[0].startswith("in llama.cpp, a bert")  # which ranks texts with it


def test_other_runtimes_are_not():
    assert warned(ViTConfig(num_hidden_layers=1)) == []
    assert runtime_warnings(nn.GELU()) == ()
