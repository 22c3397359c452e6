"""What other programs do with a checkpoint's activation: who is warned."""

from transformers import BertConfig, GPT2Config, LlamaConfig, LlavaConfig, PreTrainedConfig, ViTConfig

from hf_lgelu.models.config_keys import runtime_warnings


def test_the_family_inside_another_is_warned_of_too():
    inner = LlamaConfig(hidden_size=8, num_attention_heads=2)
    assert set(runtime_warnings(inner)) <= set(runtime_warnings(LlavaConfig(text_config=inner)))
    assert runtime_warnings(inner)


def test_families_that_are_known_to_be_ignored_are_warned_of():
    gpt2, bert, llama = (runtime_warnings(config()) for config in (GPT2Config, BertConfig, LlamaConfig))
    assert [sentence.split()[:2] for sentence in gpt2] == [["llama.cpp", "ignores"]]
    assert [sentence.split()[:2] for sentence in bert] == [["llama.cpp", "ignores"]]
    assert [sentence.split()[:2] for sentence in llama] == [
        ["CTranslate2", "ignores"], ["llama.cpp", "ignores"], ["vLLM", "refuses"],
    ]  # fmt: skip


def test_others_are_not():
    for config in (ViTConfig(), PreTrainedConfig(), None, object()):
        assert runtime_warnings(config) == ()
