"""hf-lgelu check and profile: what they say, and that check writes nothing."""

import re

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_lgelu.models.checkpoint import load_checkpoint

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_hardened_checkpoint_with_data(place, test_rows, call):
    before = files(place)
    status, said, errors = call("check", place / "hard", "--evaluation", place / "test.csv", "--disable_tqdm")
    assert (status, errors) == (0, "")
    features, labels = test_rows
    accuracy = (load_checkpoint(place / "hard")(features).logits.argmax(-1) == labels).double().mean().item()
    assert "MLPForClassification, λ-GELU × 2" in said
    assert "layers.0.activation (LambdaGELU): erf × 1" in said
    assert "The smallest λ of 2 gates is 159.6: ReLU changes a unit by at most κ/λ = 0.00107" in said
    assert re.search(rf"\n  original +0 +100 % +{accuracy:.4f}\n", said)
    assert "2 of 2 gates can be converted, with 2 linear maps after them" in said
    assert "only where hf_lgelu is installed" in said
    assert f"hf-lgelu export {place / 'hard'} --output_dir" in said
    assert files(place) == before


def test_a_gelu_checkpoint_is_sent_to_convert(place, call):
    status, said, _ = call("check", place / "gelu", "--disable_tqdm")
    assert status == 0
    assert "No. On the path of these inputs it computes smoothly" in said
    assert "give real ones by --evaluation DATA" in said
    assert f"hf-lgelu convert {place / 'gelu'} --data DATA" in said
    assert "hf_lgelu is installed" not in said


def test_a_relu_network_has_nothing_to_do(tmp_path, call):
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8, activation_function="relu")
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    status, said, _ = call("check", tmp_path / "gpt2", "--disable_tqdm")
    assert status == 0
    assert "Yes: no smooth activation was seen" in said
    assert "Nothing: it has no gate" in said
    assert "With ReLU in its config: llama.cpp ignores the activation that the config of a gpt2 names" in said


def test_what_cannot_be_refitted_is_named(tmp_path, call):
    """The map after the gate is tied, and a smooth pooler is no gate."""
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **SIZES))
    model.save_pretrained(tmp_path / "bert")
    _, said, _ = call("check", tmp_path / "bert", "--disable_tqdm")
    assert "bert.pooler.activation (Tanh): tanh × 1" in said  # the classifier reads it
    assert "--width 1.25 adds a quarter to each block, and takes about three times as long" in said
    assert "llama.cpp" not in said  # it runs no classifier
    assert "1 of 1 gates can be" in said
    masked = BertForMaskedLM(BertConfig(vocab_size=20, **SIZES))
    masked.save_pretrained(tmp_path / "masked")
    _, said, _ = call("check", tmp_path / "masked", "--disable_tqdm")
    assert "1 of 2 gates can be" in said
    assert "bert.embeddings.word_embeddings.weight is tied: several modules hold it" in said
    assert "These gates are exchanged too, but the weights after them stay as they are." in said
    assert "hf-lgelu convert" in said


def test_what_the_output_never_uses_is_not_counted(sentence_folder, call):
    """The encoder of a sentence encoder has a pooler, with tanh, and its embedding is of another pooling."""
    model, texts = sentence_folder
    words = ("--evaluation", texts, "--max_eval_samples", 8, "--disable_tqdm")
    _, said, _ = call("check", model, *words)
    assert "Not counted, because no output that counts depends on it: encoder.pooler.activation." in said
    assert "Tanh" not in said
    assert "would stay smooth" not in said
    assert "These gates cost most when each is swapped alone" in said
    assert "--keep" not in said  # which sentence-transformers could not load
    assert "intermediate_act_fn (GELUActivation): gelu" in said


def test_what_is_not_read_from_files_is_sent_to_the_function(tmp_path, call):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    T5ForConditionalGeneration(
        T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    ).save_pretrained(tmp_path / "t5")
    status, said, _ = call("check", tmp_path / "t5", "--disable_tqdm")
    assert status == 0
    assert "2 of 2 gates can be" in said
    assert "It gives logits, encoder_last_hidden_state: networks are compared by logits, and logits count." in said
    assert (
        "Call hf_lgelu.convert_to_relu(model, data) in Python: this command reads no inputs for encoder-decoders"
        in said
    )


def test_a_network_that_gives_nan_is_told_as_such(place, tmp_path, call):
    model = load_checkpoint(place / "gelu")
    with torch.no_grad():
        model.classifier.bias.fill_(float("nan"))
    model.save_pretrained(tmp_path / "nan")
    status, _, errors = call("check", tmp_path / "nan", "--evaluation", place / "test.csv", "--disable_tqdm")
    assert status == 1
    assert "gives NaN on test.csv: look for NaN in its weights" in errors


def test_the_dearest_gates_are_said(place, call):
    rows = place / "rows.csv"
    status, said, _ = call("check", place / "gelu", "--evaluation", rows, "--disable_tqdm")
    assert status == 0
    (line,) = [line for line in said.splitlines() if "These gates cost most when each is swapped alone" in line]
    assert line.endswith("--keep 1 leaves 1 smooth.")  # of two gates; the third of --keep 3 is not there
    assert "layers.0.activation" in line
    assert "layers.1.activation" in line
