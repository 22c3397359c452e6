"""A data set's rows as a model takes them: which column, which rows, which labels, and what is refused."""

import json

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from word_tokenizer import word_tokenizer

from hf_lgelu.cli.arguments import CompareArguments
from hf_lgelu.cli.checkpoint import Checkpoint
from hf_lgelu.cli.data import Rows, load_splits
from hf_lgelu.cli.inputs import FEWEST_SEQUENCES, read_rows, sample_numbers, text_blocks, tokenizer_of
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
TEXTS = [" ".join(WORDS[(i + j) % 8] for j in range(3 + i % 4)) + f" {i}\n" for i in range(200)]
TOKENS = 8192  # a fourth of what the command takes
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer, and the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    word_tokenizer([*WORDS, *map(str, range(200))], 64).save_pretrained(folder)
    return str(folder), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=300, n_positions=16))


@pytest.fixture(scope="module")
def bert():
    config = BertConfig(
        vocab_size=300, max_position_embeddings=16, **SMALL, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}
    )
    return BertForSequenceClassification(config)


@pytest.fixture(scope="module")
def mlp():
    return MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_labels=3))


def inputs(rows, model, source="nowhere", name="rows", **options):
    """`rows`: a data set, or its columns."""
    rows = datasets.Dataset.from_dict(rows) if isinstance(rows, dict) else rows
    wanted = options.pop("wanted", None)
    given = Checkpoint(source, model)
    asked = CompareArguments(model=source, converted=source, data=name, **options)
    return read_rows(Rows(name, rows, asked, split="train", wanted=wanted), given)


def vit(**options):
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=16, patch_size=8, **options))


def whole(made):
    return made.read([*range(len(made))])


def test_a_language_model_gets_blocks_of_the_text_as_it_was_written(tokenizer, gpt2):
    _, tokens = tokenizer
    made = text_blocks(TEXTS, tokens, 16, None, 0)
    batch = whole(made)
    text = torch.tensor([token for line in TEXTS for token in tokens(line)["input_ids"]])
    blocks = text[: len(text) // 16 * 16].view(-1, 16)
    assert {tuple(row) for row in batch["input_ids"].tolist()} == {tuple(row) for row in blocks.tolist()}
    assert len(made) == len(blocks) > 20
    with_none = text_blocks([*TEXTS, None], tokens, 16, None, 0)  # as a cell of a table that holds nothing
    assert torch.equal(whole(with_none)["input_ids"], batch["input_ids"])
    rows = {"text": TEXTS}
    assert inputs(rows, gpt2, tokenizer[0]).whole
    assert not inputs(rows, gpt2, tokenizer[0], wanted=5).whole
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
    assert (batch["labels"][:, 0] == -100).all()
    assert "labels" not in made.first(2)


def test_columns_that_hold_no_features_are_named(mlp, caplog):
    rows = {"name": ["x", "y"], "a": [1.0, 2.0], "b": [3, 4], "c": [5.0, 6.0], "kind": [0, 1]}
    with pytest.raises(
        ValueError, match=r"4 columns of numbers, .* takes 3 features; .* left out: name\. .*--label_column"
    ):
        inputs(rows, mlp)
    made = inputs(rows, mlp, label_column="kind")
    assert torch.equal(made.first(2)["features"].sort(0).values, torch.tensor([[1.0, 3, 5], [2, 4, 6]]))
    assert "3 columns of rows, split train are the features; without numbers, and left out: name" in caplog.text


def test_blocks_begin_as_every_text_of_the_model_does(tokenizer, gpt2, tmp_path):
    """Llama's and Gemma's tokenizers put a token before a text, without which their models are at a loss."""
    source, tokens = tokenizer
    framed = PreTrainedTokenizerFast.from_pretrained(source, bos_token="<begin>")
    begin = framed.bos_token_id
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", begin)]
    )
    framed.save_pretrained(tmp_path)
    rows = {"text": TEXTS}
    batch = whole(inputs(rows, gpt2, str(tmp_path)))
    assert (batch["input_ids"][:, 0] == begin).all()
    assert begin not in batch["input_ids"][:, 1:]
    assert batch["input_ids"].shape[1] == 16
    assert (batch["labels"][:, 0] == -100).all()
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
    text = [token for line in TEXTS for token in tokens(line)["input_ids"]]
    blocks = whole(text_blocks(TEXTS, framed, 16, None, 0))["input_ids"]
    expected = torch.tensor(text[: len(text) // 15 * 15]).view(-1, 15)
    assert {tuple(row) for row in blocks[:, 1:].tolist()} == {tuple(row) for row in expected.tolist()}


def test_a_batch_has_no_padding_behind_all_of_its_rows(tokenizer, bert):
    """One long text among thousands of short ones had every batch as long as it."""
    texts = ["one two"] * 9 + ["three " * 14]
    made = inputs({"text": texts, "label": [0] * 9 + [1]}, bert, tokenizer[0])
    padded = whole(made)
    labels = padded["labels"].tolist()
    long = labels.index(1)
    short = [number for number in range(10) if number != long]
    batch = made.read(short)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (9, 2)
    assert batch["labels"].shape == (9,)
    assert made.read([short[0], long])["input_ids"].shape == (2, 14)
    expected = bert.eval()(padded["input_ids"][short], attention_mask=padded["attention_mask"][short]).logits
    found = bert(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(found, expected)


def test_sequences_are_taken_by_the_tokens_that_they_have(tokenizer, monkeypatch):
    """The tokens that the model could take do not count: of 300 short texts, 64 were taken then."""
    source, _ = tokenizer
    model = BertForSequenceClassification(BertConfig(vocab_size=300, max_position_embeddings=4096, **SMALL))
    monkeypatch.setattr("hf_lgelu.cli.inputs.TOKENS", TOKENS)
    texts = [f"{TEXTS[i % 200]} {i % 200}" for i in range(2000)]
    rows = datasets.Dataset.from_dict({"text": texts})
    made = inputs(rows, model, source)
    counted = whole(made)["attention_mask"].sum(1)
    assert counted[:-1].sum() < TOKENS <= counted.sum()
    assert not made.whole
    few = inputs(rows.select(range(300)), model, source)
    assert len(few) == 300
    assert few.whole
    assert not inputs({"text": ["one two", " "]}, model, source).whole
    long = datasets.Dataset.from_dict({"text": ["seven " * 2000] * 40})
    assert len(inputs(long, model, source, sequence_length=2000)) == FEWEST_SEQUENCES
    assert len(inputs(long, model, source, wanted=3)) == 3


def test_a_length_that_is_asked_for_is_more_than_the_tokenizers(tokenizer, gpt2, tmp_path):
    PreTrainedTokenizerFast.from_pretrained(tokenizer[0], model_max_length=4).save_pretrained(tmp_path)
    for asked, taken in ((None, 4), (8, 8)):
        batch = whole(inputs({"text": TEXTS}, gpt2, str(tmp_path), wanted=2, sequence_length=asked))
        assert batch["input_ids"].shape == (2, taken)


def test_other_models_get_a_sequence_a_text_with_its_class(tokenizer, bert):
    source, tokens = tokenizer
    classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    texts = ["", "one two", "  ", "three " * 40, "four"]
    rows = datasets.Dataset.from_dict({"text": texts, "label": [0, 0, 1, 1, 0]}, features=classes)
    made = inputs(rows, bert, source)
    assert len(made) == 3  # without the empty ones
    expected = {
        tuple(tokens(text, truncation=True, max_length=16)["input_ids"]): label
        for text, label in ((texts[1], 1), (texts[3], 0), (texts[4], 1))  # "yes" is the model's 1
    }
    batch = whole(made)
    lengths = batch["attention_mask"].sum(1).tolist()
    found = {
        tuple(ids[:length]): label
        for ids, length, label in zip(batch["input_ids"].tolist(), lengths, batch["labels"].tolist(), strict=True)
    }
    assert found == expected
    bert(**made.first(3))


def test_classes_of_another_task_are_no_labels(tokenizer, bert, monkeypatch):
    said = []
    monkeypatch.setattr("hf_lgelu.cli.inputs.logger.warning", said.append)
    names = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["sun", "rain"])})
    rows = datasets.Dataset.from_dict({"text": TEXTS[:4], "label": [0, 1, 0, 1]}, features=names)
    assert "labels" not in whole(inputs(rows, bert, tokenizer[0]))
    assert len(said) == 1
    assert "does not hold the model's classes, by name (no, yes) or number (0 to 1): there will be no score" in said[0]
    three = BertForSequenceClassification(BertConfig(vocab_size=300, **SMALL, num_labels=3))  # folders were splits
    assert "labels" not in whole(inputs(rows, three, tokenizer[0]))
    plain = datasets.Dataset.from_dict({"text": TEXTS[:4], "label": [0, 1, 2, 1]})
    assert "labels" not in whole(inputs(plain, bert, tokenizer[0]))
    base = BertModel(BertConfig(vocab_size=300, max_position_embeddings=16, **SMALL))
    assert "labels" not in whole(inputs(plain, base, tokenizer[0]))


def test_rows_without_a_class_are_no_labels(tokenizer, bert):
    """-1 is how a ClassLabel says that a row has none, as in test splits whose classes are secret."""
    names = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["yes", "no"])})
    for labels in ([0, -1, 1], [0, None, 1]):
        rows = datasets.Dataset.from_dict({"text": TEXTS[:3], "label": labels}, features=names)
        assert "labels" not in whole(inputs(rows, bert, tokenizer[0]))


def test_classes_by_their_names_in_a_file(tokenizer, bert):
    rows = datasets.Dataset.from_dict({"text": TEXTS[:4], "label": ["yes", "no", "no", "yes"]})
    batch = whole(inputs(rows, bert, tokenizer[0]))
    assert batch["labels"].tolist() == [[1, 0, 0, 1][i] for i in sample_numbers(4, None, 0)]
    other = datasets.Dataset.from_dict({"text": TEXTS[:4], "label": ["sun", "rain", "sun", "sun"]})
    assert "labels" not in whole(inputs(other, bert, tokenizer[0]))
    with pytest.raises(ValueError, match=r"'label'.*\(no, yes\)"):
        inputs(other, bert, tokenizer[0], label_column="label")


@pytest.fixture(scope="module")
def pictures():
    random = np.random.RandomState(0)
    images = [Image.fromarray(random.randint(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(6)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    return images, datasets.Dataset.from_dict({"img": images, "label": [0, 1, 1, 0, 1, 0]}, features=features)


def test_images_go_through_the_models_own_processor(pictures, tmp_path):
    images, rows = pictures
    model = vit(id2label={0: "b", 1: "a"}, label2id={"b": 0, "a": 1})
    with pytest.raises(ValueError, match="image processor"):
        inputs(rows, model, str(tmp_path))
    processor = ViTImageProcessor(size={"height": 16, "width": 16}, image_mean=[0.1] * 3, image_std=[0.5] * 3)
    processor.save_pretrained(tmp_path)
    batch = whole(inputs(rows, model, str(tmp_path), wanted=4, seed=1))
    numbers = sample_numbers(6, 4, 1).tolist()
    expected = processor([images[i] for i in numbers], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(batch["pixel_values"], expected)
    assert batch["labels"].tolist() == [1 - [0, 1, 1, 0, 1, 0][i] for i in numbers]


def test_a_folder_of_images_has_its_folders_as_classes(pictures, tmp_path):
    for number, image in enumerate(pictures[0]):
        folder = tmp_path / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")
    rows = load_splits(str(tmp_path))["train"]
    assert sorted(rows["label"]) == [0, 0, 0, 1, 1, 1]
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "model")
    batch = whole(inputs(rows, vit(id2label={0: "b", 1: "a"}, label2id={"b": 0, "a": 1}), str(tmp_path / "model")))
    assert batch["pixel_values"].shape == (6, 3, 16, 16)
    assert sorted(batch["labels"].tolist()) == [0, 0, 0, 1, 1, 1]


BOTH = {"a": TEXTS, "b": TEXTS}
REFUSED = [  # (fixture of the model, columns of the set, options, what is said)
    ("gpt2", BOTH, {}, r"--column.*a \(text\), b \(text\)"),
    ("gpt2", BOTH, {"column": "c"}, r"'c'.*a \(text\), b"),
    ("gpt2", {"n": [1]}, {}, r"GPT2LMHeadModel.*n \(number\)"),
    ("gpt2", {"id": ["1"], "words": [["one", "two"]]}, {}, r"words \(nested\)"),
    ("gpt2", {"id": ["1"], "messages": [[{"role": "x"}]]}, {}, r"messages \(nested\)"),
    ("gpt2", {"text": TEXTS}, {"sequence_length": 17}, "--sequence_length.*2 to 16, got 17"),
    ("gpt2", {"text": ["one"]}, {}, "do not fill one sequence"),
    ("gpt2", {"text": TEXTS, "kind": [0] * 200}, {"label_column": "kind"}, "--label_column.*gives none"),
    ("gpt2", BOTH, {"column": "a", "pair_column": "b"}, "--pair_column.*GPT2LMHeadModel"),
    ("bert", BOTH, {"pair_column": "c", "column": "a"}, "no column 'c'"),
    ("bert", {"text": ["", " "]}, {}, "empty"),
    ("mlp", {"x": [1.0], "y": [2.0]}, {}, r"rows, split train has 2 columns of numbers, and the model takes 3"),
    ("mlp", {"x": [1.0], "y": [float("nan")], "z": [1.0]}, {}, r"1 of 3.* feature 1 "),
    ("mlp", {"name": ["a"]}, {}, r"MLP\w+.*name \(text\)"),
    (
        "mlp",
        {"x": [1.0], "y": [2.0], "z": [3]},
        {"column": "x"},
        r"'x'.*x \(number\)",
    ),
    ("mlp", {"row": [[1.0, 2.0, 3.0]]}, {"label_column": "kind"}, "no column 'kind'"),
    ("mlp", {"x": []}, {}, "has no rows"),
    ("t5", {"text": TEXTS}, {}, r"T5For.*hf_lgelu\.convert_to_relu"),
    ("whisper", {"text": TEXTS}, {}, r"Whisper.*hf_lgelu\.convert_to_relu"),
]


@pytest.fixture(scope="module")
def t5():
    return T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=300))


@pytest.fixture(scope="module")
def whisper():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=60, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes, **ids)
    return WhisperForConditionalGeneration(config)


@pytest.mark.parametrize(("name", "columns", "options", "told"), REFUSED)
def test_what_is_refused(name, columns, options, told, tokenizer, request):
    model = request.getfixturevalue(name)
    with pytest.raises(ValueError, match=told):
        inputs(columns, model, tokenizer[0], **options)


@pytest.mark.parametrize("family", ["bert", "t5", "whisper"])
def test_a_tokenizer_without_words_is_none(family, tmp_path):
    """transformers makes one of special tokens alone: every text would be unknown, or empty."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no file of one.*Save"):
        tokenizer_of(Checkpoint(str(tmp_path), None))


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_a_tokenizer_whose_words_are_missing_is_none(family, tmp_path):
    config = AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    name = AutoTokenizer.from_pretrained(tmp_path).__class__.__name__
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(ValueError, match="vocabulary"):
        tokenizer_of(Checkpoint(str(tmp_path), None))


def test_a_smaller_sample_is_part_of_a_larger_one():
    larger = sample_numbers(50, 20, 4)
    assert sample_numbers(50, 10, 4).tolist() == larger[:10].tolist()
    assert len(set(larger.tolist())) == 20
    assert sorted(sample_numbers(50, None, 4)) == list(range(50))


def test_texts_need_a_tokenizer(gpt2, tmp_path):
    with pytest.raises(ValueError, match="tokenizer"):
        inputs({"text": TEXTS}, gpt2, str(tmp_path))


@pytest.fixture
def picture_folder(tmp_path):
    for number in range(4):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("fault", ["half a file", "too many pixels"])
def test_a_broken_picture_is_named_by_file_and_row(fault, picture_folder, monkeypatch):
    if fault == "too many pixels":
        Image.new("RGB", (64, 64)).save(picture_folder / "2.png")
        monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1024)
    else:
        whole = (picture_folder / "2.png").read_bytes()
        (picture_folder / "2.png").write_bytes(whole[: len(whole) // 2])
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(picture_folder / "model")
    with pytest.raises(ValueError, match=r"row 2.*2\.png"):
        inputs(load_splits(str(picture_folder))["train"], vit(), str(picture_folder / "model"))
