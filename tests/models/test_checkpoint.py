import json

import pytest
import timm
import torch
from family import rewrite_tensors
from full_disk import full_disk
from transformers import BertConfig, BertForSequenceClassification

from hf_lgelu import anneal_hardness, export_relu, hardness_profile, initialize_hardness, replace_activations
from hf_lgelu.models.checkpoint import copy_processor_files, load_checkpoint
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

BERT = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=20)


def saved_bert(folder, **changes):
    """Save a BERT in the folder, whose config is then changed."""
    BertForSequenceClassification(BERT).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_the_class_is_the_one_that_was_saved_with_every_hardness(tmp_path):
    model = BertForSequenceClassification(BERT)
    replace_activations(model, include=lambda name: ".0." in name)
    initialize_hardness(model, "increasing", 1.5, 3.0)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert type(loaded) is BertForSequenceClassification
    assert hardness_profile(loaded) == hardness_profile(model)
    assert not loaded.training
    MLPForClassification(MLPConfig(num_features=3)).save_pretrained(tmp_path / "mlp")
    assert type(load_checkpoint(tmp_path / "mlp")) is MLPForClassification


def test_a_folder_as_timm_saves_it_is_loaded(tmp_path):
    model = timm.create_model("test_vit").eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("model_args", None)  # newer timm writes what transformers gives too, and fails
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "architectures" not in config
    loaded = load_checkpoint(tmp_path)
    pixels = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixel_values=pixels).logits, model(pixels), rtol=0, atol=1e-5)


def test_code_that_a_checkpoint_carries_is_neither_run_nor_offered(tmp_path, monkeypatch):
    saved_bert(tmp_path, model_type="foreign", auto_map={"AutoConfig": "carried.CarriedConfig"})
    (tmp_path / "carried.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass CarriedConfig: pass\n")
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with pytest.raises(ValueError, match="custom code"):
        load_checkpoint(tmp_path)
    assert questions == []
    assert not (tmp_path / "ran").exists()


def test_code_that_was_not_run_is_told_and_not_named_in_what_is_saved(tmp_path, caplog):
    of_tokenizer = {"AutoTokenizer": ["own.Own", None]}
    for entries, is_told in (({"AutoModel": "modeling_own.Own"}, True), (of_tokenizer, False), (["AutoModel"], False)):
        saved_bert(tmp_path, auto_map=entries)
        caplog.clear()
        load_checkpoint(tmp_path).save_pretrained(tmp_path / "saved")
        assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())
        told = "code of its own (modeling_own.Own), which is not run" in caplog.text
        assert told == is_told
        assert ("transformers' BertForSequenceClassification" in caplog.text) == is_told


def test_what_is_no_checkpoint_is_told_with_what_it_is_and_not_looked_for_on_the_hub(tmp_path):
    for name, files in {"empty": (), "onnx": ("config.json", "model.onnx"), "bin": ("pytorch_model.bin",)}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "file").write_text("x")
    for name, said in (
        ("empty", r"but a folder with no file, and has no config\.json"),
        ("onnx", r"but a folder with config\.json, model\.onnx, and has no \*\.safetensors"),
        ("bin", r"with pytorch_model\.bin, and has no config\.json and no .* Give"),
        ("file", r"but a file, and has no config\.json"),
        ("none", "there is no folder"),
    ):
        with pytest.raises(OSError, match=said):
            load_checkpoint(tmp_path / name)
    for name in ("./none", "runs/paper/none"):
        with pytest.raises(OSError, match="no folder"):
            load_checkpoint(name)


def test_a_class_that_nobody_has_is_named(tmp_path):
    for names, said in ((["BertForFlying"], "BertForFlying"), (["AdamW", "__name__"], "AdamW, __name__"), ([], "none")):
        saved_bert(tmp_path, architectures=names)
        with pytest.raises(ValueError, match=f"architectures {said}"):
            load_checkpoint(tmp_path)


def test_processor_files_are_copied_byte_for_byte_and_nothing_else(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "additional_chat_templates").mkdir(parents=True)
    wanted = [
        "additional_chat_templates/tool.jinja", "bpe.codes", "dict.txt", "emoji.json", "entity_vocab.json",
        "merges.txt", "normalizer.json", "preprocessor_config.json", "prophetnet.tokenizer", "source.spm",
        "spiece.model", "target_vocab.json", "tokenizer.json", "vocab.txt", "word_shape.json",
    ]  # fmt: skip
    for name in (*wanted, "config.json", "model.safetensors", "README.md", "training_args.bin"):
        (source / name).write_bytes(name.encode())
    assert copy_processor_files(source, target) == wanted
    assert sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()) == wanted
    assert (target / "spiece.model").read_bytes() == b"spiece.model"
    assert copy_processor_files(target / "additional_chat_templates", tmp_path / "c") == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("layers.0.linear.weight"), r"1 missing \(layers\.0\.linear\.weight\)"),
        (lambda t: t.update({"layers.9.linear.bias": torch.zeros(3)}), r"1 unexpected \(layers\.9\.linear\.bias\)"),
        (lambda t: t.update({"classifier.scale": torch.zeros(3)}), r"1 unexpected \(classifier\.scale\)"),
        (
            lambda t: t.update({"old": t.pop("classifier.bias")}),
            r"1 missing \(classifier\.bias\) and 1 unexpected \(old\)",
        ),
        (lambda t: t.pop("layers.1.activation.raw_hardness"), r"1 missing \(layers\.1\.activation\.raw_hardness\)"),
        (
            lambda t: [t.pop(name) for name in list(t) if ".activation." in name],
            r"6 missing \(layers\.0\.activation\.hardness_override, layers\.0\.activation\.raw_hardness, ",
        ),
    ],
    ids=["a weight", "a layer more", "a tensor more", "renamed", "one hardness", "no hardness"],
)  # fmt: skip
def test_missing_and_unexpected_tensors_are_refused(tmp_path, change, told):
    MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=2)).save_pretrained(tmp_path)
    rewrite_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=f"MLPForClassification.*{told}"):
        load_checkpoint(tmp_path)


def test_links_out_of_a_checkpoint_are_not_copied(tmp_path):
    (tmp_path / "secret").write_text("mine")
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "merges.txt").symlink_to("tokenizer.json")
    assert copy_processor_files(source, tmp_path / "a") == ["merges.txt", "tokenizer.json"]
    assert not (tmp_path / "a" / "merges.txt").is_symlink()
    (source / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"vocab\.txt.*link"):
        copy_processor_files(source, tmp_path / "b")
    (source / "vocab.txt").unlink()
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "x.jinja").write_text("mine")
    (source / "additional_chat_templates").symlink_to(tmp_path / "templates")
    with pytest.raises(ValueError, match=r"additional_chat_templates/x\.jinja in"):
        copy_processor_files(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_snapshot_of_the_hubs_cache_is_made_of_links(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0a1b", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "77").write_text("a b")
    (snapshot / "vocab.txt").symlink_to("../../blobs/77")
    assert copy_processor_files(snapshot, tmp_path / "c") == ["vocab.txt"]
    assert (tmp_path / "c" / "vocab.txt").read_text() == "a b"


def test_a_disk_that_fills_up_is_told_and_leaves_nothing(tmp_path):
    model = MLPForClassification(MLPConfig(num_features=3, hidden_size=64, num_hidden_layers=2))
    anneal_hardness(model, 1.0)
    (tmp_path / "relu").mkdir()
    for _ in range(2):  # the rerun finds the same, not the leavings of the first
        with full_disk(), pytest.raises(OSError, match=r"could not be written|File too large"):
            export_relu(model, tmp_path / "relu")
        assert [path.name for path in tmp_path.iterdir()] == ["relu"]
        assert list((tmp_path / "relu").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "told"), [({"hidden_act": "my_act"}, "'my_act'"), ({"num_hidden_layers": "two"}, "num_hidden_layers")]
)
def test_a_config_that_transformers_does_not_take_is_told(changed, told, tmp_path):
    saved_bert(tmp_path, **changed)
    with pytest.raises(ValueError, match=f"config.json.*{told}"):
        load_checkpoint(tmp_path)
