"""Networks of sentence-transformers and their texts, held to how that package itself reads a folder."""

import csv
import functools
import json
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from small_networks import put_gates_of_two_forms
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BloomConfig, BloomModel

from hf_lgelu import from_pretrained, hardness_profile
from hf_lgelu.cli.arguments import ConvertArguments
from hf_lgelu.cli.checkpoint import read_checkpoint
from hf_lgelu.cli.data import data_set
from hf_lgelu.cli.inputs import read_rows
from hf_lgelu.export.card import loading_code
from hf_lgelu.models.checkpoint import CheckpointFacts


@functools.cache
def package():
    return pytest.importorskip("sentence_transformers")  # a second of imports, of one worker


@pytest.fixture(scope="module")
def classes(sentence_folder, tmp_path_factory):
    """{name of a class: a folder that the package wrote of it}."""
    place = tmp_path_factory.mktemp("classes")
    config = BertConfig.from_pretrained(sentence_folder[0])
    torch.manual_seed(1)
    networks = {
        "CrossEncoder": BertForSequenceClassification(BertConfig(**{**config.to_dict(), "num_labels": 1})),
        "SparseEncoder": BertForMaskedLM(config),
    }
    for name, network in networks.items():
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(3)  # or its gates hardly matter
        network.save_pretrained(place / "encoder")
        for file in sentence_folder[0].glob("tokenizer*"):
            shutil.copy(file, place / "encoder")
        getattr(package(), name)(str(place / "encoder"), device="cpu").save(str(place / name))
        shutil.rmtree(place / "encoder")
    return {name: place / name for name in networks}


@pytest.fixture(scope="module")
def pairs(sentence_folder, tmp_path_factory):
    """A CSV file with the columns query, passage and other, and its pairs of the first two."""
    texts = sentence_folder[1].read_text().splitlines()
    found = [[text, f"{other} {text}"] for text, other in zip(texts, texts[5:], strict=False)]
    file = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([["query", "passage", "other"], *([*pair, "the cat"] for pair in found)])
    return file, found


def rows_of(folder, data, **options):
    arguments = ConvertArguments(model=str(folder), data=str(data), output_dir="out", disable_tqdm=True, **options)
    made = read_rows(data_set(arguments), read_checkpoint(str(folder), progress=False))
    return made.read([*range(len(made))])


def as_set(batch):
    """Every row's tokens and their types, without padding."""
    kept = batch["attention_mask"].bool()
    return {
        (tuple(ids[mask].tolist()), tuple(types[mask].tolist()))
        for ids, types, mask in zip(batch["input_ids"], batch["token_type_ids"], kept, strict=True)
    }


def test_texts_are_cut_where_the_package_cuts_them(sentence_folder, tmp_path):
    model, texts = sentence_folder
    short = shutil.copytree(model, tmp_path / "short")
    (short / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    for folder, longest in ((short, 6), (model, 9)):
        made = rows_of(folder, texts)
        assert made["input_ids"].shape[1] == longest
        whole = package().SentenceTransformer(str(folder), device="cpu")
        assert as_set(made) == as_set(whole.preprocess(texts.read_text().splitlines()))
    assert rows_of(short, texts, sequence_length=4)["input_ids"].shape[1] == 4


def test_pairs_are_read_as_the_package_reads_them(classes, pairs):
    file, expected = pairs
    folder = classes["CrossEncoder"]
    made = rows_of(folder, file, column="query", pair_column="passage")
    own = as_set(package().CrossEncoder(str(folder), device="cpu").preprocess(expected))
    assert as_set(made) == own
    assert len(own) > 100
    assert any(1 in types for _, types in own)


def test_long_pairs_are_cut_as_the_package_cuts_them(classes, pairs, tmp_path):
    folder = shutil.copytree(classes["CrossEncoder"], tmp_path / "short")
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps({**settings, "max_seq_length": 9}))
    made = rows_of(folder, pairs[0], column="query", pair_column="passage")
    assert made["input_ids"].shape[1] == 9
    assert as_set(made) == as_set(package().CrossEncoder(str(folder), device="cpu").preprocess(pairs[1]))


def test_a_cross_encoder_is_converted_on_its_scores(classes, pairs, tmp_path, call):
    folder, (file, both) = classes["CrossEncoder"], pairs
    words = ("convert", folder, "--data", file, "--column", "query", "--pair_column", "passage")
    status, said, errors = call(*words, "--output_dir", tmp_path / "relu", "--disable_tqdm")
    assert status == 0, errors
    assert "outputs that counted: `scores`\n" in said
    before, after = (package().CrossEncoder(str(path), device="cpu") for path in (folder, tmp_path / "relu"))
    gates = [layer.intermediate.intermediate_act_fn for layer in after[0].model.bert.encoder.layer]
    assert [type(gate) for gate in gates] == [nn.ReLU, nn.ReLU]
    assert before.num_labels == after.num_labels == 1
    old, new = (torch.tensor(network.predict(both)) for network in (before, after))
    assert (old - new).abs().max() < 1e-3
    assert not torch.equal(old, new)
    card = ModelCard.load(tmp_path / "relu" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("sentence-transformers", "text-ranking")
    assert "from sentence_transformers import CrossEncoder" in card.text
    assert f'model = CrossEncoder("{tmp_path.name}' not in card.text  # no local path
    assert (tmp_path / "relu" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.slow  # a cross encoder is converted below, and a sentence encoder in test_convert.py
def test_a_sparse_encoder_is_converted_on_its_own_embeddings(classes, sentence_folder, tmp_path, call):
    """Its pooling takes the logits of a masked language model, whose decoder is shared with the embeddings."""
    folder, texts = classes["SparseEncoder"], sentence_folder[1]
    network = read_checkpoint(str(folder), progress=False).network
    lines = texts.read_text().splitlines()
    whole = package().SparseEncoder(str(folder), device="cpu")
    given = {name: value for name, value in whole.preprocess(lines).items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        own = network(given)["sentence_embedding"]
    assert torch.equal(own, whole.encode(lines, convert_to_sparse_tensor=False, batch_size=len(lines)))
    assert own.shape == (len(lines), 15)
    words = ("convert", folder, "--data", texts, "--output_dir", tmp_path / "relu", "--disable_tqdm")
    status, said, errors = call(*words)
    assert status == 0, errors
    assert "word_embeddings.weight is tied: several modules hold it or its memory" in said
    assert "outputs that counted: `sentence_embedding`" in said
    after = package().SparseEncoder(str(tmp_path / "relu"), device="cpu")
    assert isinstance(after[0].model.cls.predictions.transform.transform_act_fn, nn.ReLU)
    card = ModelCard.load(tmp_path / "relu" / "README.md")
    assert card.data.pipeline_tag == "feature-extraction"
    assert "from sentence_transformers import SparseEncoder" in card.text


def test_a_default_prompt_is_put_before_the_texts(sentence_folder, classes, pairs, tmp_path):
    """As `encode` and `predict` put it there; of a pair before the first."""
    texts = sentence_folder[1].read_text().splitlines()
    options = {"column": "query", "pair_column": "passage"}
    for name, source, data, given in (
        ("SentenceTransformer", sentence_folder[0], sentence_folder[1], {}),
        ("CrossEncoder", classes["CrossEncoder"], pairs[0], options),
    ):
        folder = shutil.copytree(source, tmp_path / name)
        path = folder / "config_sentence_transformers.json"
        settings = {**json.loads(path.read_text()), "prompts": {"ask": "red dog "}}
        for default, prompt in (("ask", "red dog "), (None, "")):
            path.write_text(json.dumps({**settings, "default_prompt_name": default}))
            whole = getattr(package(), name)(str(folder), device="cpu")
            own = whole.preprocess(texts if name == "SentenceTransformer" else pairs[1], prompt=prompt)
            assert as_set(rows_of(folder, data, **given)) == as_set(own)
            assert read_checkpoint(str(folder), progress=False).prompt == prompt


def test_what_is_read_from_no_folder_is_named(classes, tmp_path):
    other = shutil.copytree(classes["SparseEncoder"], tmp_path / "late")
    path = other / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "MultiVectorEncoder"}))
    with pytest.raises(ValueError, match=r"MultiVectorEncoder.*convert_to_relu\("):
        read_checkpoint(str(other))


def test_an_encoder_is_what_the_package_runs_and_not_what_its_config_says(sentence_folder, tmp_path):
    """Published encoders keep the class of the language model that they were: Qwen3ForCausalLM of Qwen3 embeddings."""
    from transformers import Qwen3Config, Qwen3Model

    shutil.copytree(sentence_folder[0], tmp_path / "folder")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    encoder = Qwen3Model(Qwen3Config(vocab_size=15, intermediate_size=24, head_dim=8, **sizes))
    encoder.save_pretrained(tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    given = read_checkpoint(str(tmp_path / "folder"), progress=False)
    assert type(given.model) is Qwen3Model
    texts = ["the cat saw a dog", "a big red dog ate"]
    whole = package().SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    features = {name: value for name, value in whole.tokenize(texts).items() if name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found = given.network(features)["sentence_embedding"]
    torch.testing.assert_close(found, whole.encode(texts, convert_to_tensor=True), rtol=1e-5, atol=1e-6)


def test_gates_behind_an_encoder_are_converted_too(sentence_folder, tmp_path, call):
    from sentence_transformers.sentence_transformer.modules import Dense

    whole = package().SentenceTransformer(str(sentence_folder[0]), device="cpu")
    for layer in (Dense(16, 16, activation_function=nn.GELU()), Dense(16, 8, activation_function=nn.Identity())):
        whole.append(layer)
    whole.save(str(tmp_path / "dense"))
    words = ("--data", sentence_folder[1], "--output_dir", tmp_path / "relu", "--disable_tqdm")
    status, said, errors = call("convert", tmp_path / "dense", *words)
    assert status == 0, errors
    assert said.startswith("SentenceTransformer: 3 gates (2 GELUActivation, 1 GELU) became ReLU\n")
    after = package().SentenceTransformer(str(tmp_path / "relu"), device="cpu")
    assert isinstance(after[3].activation_function, nn.ReLU)


def test_gates_that_sentence_transformers_would_build_as_they_were_are_refused(sentence_folder, tmp_path, call):
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    torch.manual_seed(0)
    encoder = BloomModel(BloomConfig(vocab_size=15, hidden_size=16, n_layer=1, n_head=2, pad_token_id=0))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(3)
    encoder.save_pretrained(tmp_path / "bloom")
    for file in sentence_folder[0].glob("tokenizer*"):
        shutil.copy(file, tmp_path / "bloom")
    modules = [Transformer(str(tmp_path / "bloom")), Pooling(16)]
    package().SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "folder"))
    words = ("--data", sentence_folder[1], "--output_dir", tmp_path / "relu", "--disable_tqdm")
    status, _, errors = call("convert", tmp_path / "folder", *words)
    assert status == 1
    assert "no key of the config of BloomModel says its gates" in errors
    assert not (tmp_path / "relu").exists()


def test_classes_of_pairs_are_compared_as_classes(classes, pairs, tmp_path, call):
    """As of an NLI model: predictions, not values."""
    config = BertConfig.from_pretrained(classes["CrossEncoder"], num_labels=3)
    torch.manual_seed(1)
    network = BertForSequenceClassification(config)
    network.save_pretrained(tmp_path / "three")
    for file in classes["CrossEncoder"].glob("tokenizer*"):
        shutil.copy(file, tmp_path / "three")
    package().CrossEncoder(str(tmp_path / "three"), device="cpu").save(str(tmp_path / "cross"))
    words = ("--data", pairs[0], "--column", "query", "--pair_column", "passage", "--output_dir", tmp_path / "relu")
    _, said, errors = call("convert", tmp_path / "cross", *words, "--dry_run", "--disable_tqdm")
    assert "KL to the original (nats)" in said, errors


def test_gates_that_no_key_says_come_back_in_the_whole_and_in_the_command(sentence_folder, tmp_path):
    kind = package().SentenceTransformer
    whole = kind(str(sentence_folder[0]), device="cpu")
    put_gates_of_two_forms(whole[0].auto_model, init_hardness=3.0)
    whole.save(str(tmp_path / "soft"))
    again = from_pretrained(kind, str(tmp_path / "soft"), device="cpu")
    assert (again.encode("the cat") == whole.encode("the cat")).all()
    assert hardness_profile(read_checkpoint(str(tmp_path / "soft")).model) == hardness_profile(whole[0].auto_model)
    code = loading_code(CheckpointFacts(kind.__name__), "soft", activation=None)["lgelu_code"]
    assert f'hf_lgelu.from_pretrained({kind.__name__}, "soft")' in code
    with pytest.raises(RuntimeError, match=r"hf_lgelu\.from_pretrained"):
        kind(str(tmp_path / "soft"), device="cpu")
