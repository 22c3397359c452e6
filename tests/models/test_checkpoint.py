import json

import pytest
import safetensors
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from hf_lgelu import hardness_profile, initialize_hardness, replace_activations
from hf_lgelu.models.checkpoint import copy_processor_files, load_checkpoint, save_checkpoint
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

BERT = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=20)


def test_the_class_is_the_one_that_was_saved_with_every_hardness(tmp_path):
    model = BertForSequenceClassification(BERT)
    replace_activations(model, granularity="channel", inputs={"input_ids": torch.ones(1, 4, dtype=torch.long)})
    initialize_hardness(model, "increasing", 1.5, 3.0)
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert type(loaded) is BertForSequenceClassification
    assert hardness_profile(loaded) == hardness_profile(model)
    assert not loaded.training
    MLPForClassification(MLPConfig(num_features=3)).save_pretrained(tmp_path / "mlp")
    assert type(load_checkpoint(tmp_path / "mlp")) is MLPForClassification


def test_a_pickle_is_not_read(tmp_path):
    model = BertForSequenceClassification(BERT)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path) is not None  # transformers would
    with pytest.raises(OSError, match="safetensors"):
        load_checkpoint(tmp_path)


def test_code_that_a_checkpoint_carries_is_neither_run_nor_offered(tmp_path, monkeypatch):
    BertForSequenceClassification(BERT).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    foreign = {**config, "model_type": "foreign", "auto_map": {"AutoConfig": "carried.CarriedConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    (tmp_path / "carried.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass CarriedConfig: pass\n")
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with pytest.raises(ValueError, match="custom code"):
        load_checkpoint(tmp_path)
    assert questions == []
    assert not (tmp_path / "ran").exists()


def test_code_that_was_not_run_is_not_named_in_what_is_saved(tmp_path):
    BertForSequenceClassification(BERT).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "other/one--code.Model"}}))
    load_checkpoint(tmp_path).save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_what_is_no_checkpoint_is_not_looked_for_on_the_hub(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, said in (("empty", "has no config.json"), ("file", "is a file"), ("none", "there is no folder")):
        with pytest.raises(OSError, match=said):
            load_checkpoint(tmp_path / name)
    for name in ("./none", "runs/paper/none"):
        with pytest.raises(OSError, match="there is no folder"):
            load_checkpoint(name)


def test_a_class_that_nobody_has_is_named(tmp_path):
    BertForSequenceClassification(BERT).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for names, said in ((["BertForFlying"], "BertForFlying"), (["AdamW", "__name__"], "AdamW, __name__"), ([], "none")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(ValueError, match=f"names the architectures {said}, and"):
            load_checkpoint(tmp_path)


def test_processor_files_are_copied_byte_for_byte_and_nothing_else(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "chat_templates").mkdir(parents=True)
    wanted = ["chat_templates/tool.jinja", "preprocessor_config.json", "spiece.model", "tokenizer.json", "vocab.txt"]
    for name in (*wanted, "config.json", "model.safetensors", "README.md", "training_args.bin"):
        (source / name).write_bytes(name.encode())
    assert copy_processor_files(source, target) == wanted
    assert sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()) == wanted
    assert (target / "spiece.model").read_bytes() == b"spiece.model"
    assert copy_processor_files(target / "chat_templates", tmp_path / "c") == []


def test_a_link_out_of_the_folder_is_not_copied(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "model" / "merges.txt").write_text("own")
    (tmp_path / "model" / "vocab.txt").symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"vocab\.txt in .* is a link that leads out of the folder"):
        copy_processor_files(tmp_path / "model", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_hubs_cache_is_links_and_is_copied(tmp_path):
    """snapshots/REVISION/vocab.txt → ../../blobs/DIGEST."""
    snapshot = tmp_path / "models--me--bert" / "snapshots" / "123"
    (tmp_path / "models--me--bert" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--me--bert" / "blobs" / "abc").write_text("words")
    (snapshot / "vocab.txt").symlink_to("../../blobs/abc")
    (tmp_path / "out").mkdir()
    assert copy_processor_files(snapshot, tmp_path / "out") == ["vocab.txt"]
    assert not (tmp_path / "out" / "vocab.txt").is_symlink()
    assert (tmp_path / "out" / "vocab.txt").read_text() == "words"


def test_weights_that_cannot_be_written_are_an_error_of_the_system(tmp_path, monkeypatch):
    def full(*_, **__):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    model = MLPForClassification(MLPConfig(num_features=3))
    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(OSError, match=r"the weights cannot be written .*No space left on device"):
        save_checkpoint(model, tmp_path / "out")
