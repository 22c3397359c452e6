"""A checkpoint that a command was given is saved as what it was, or there is an error."""

import json
import shutil

from huggingface_hub.utils import filter_repo_objects

from hf_lgelu.cli.arguments import ConvertArguments
from hf_lgelu.cli.checkpoint import read_checkpoint, read_sentence_folder
from hf_lgelu.cli.data import data_set
from hf_lgelu.cli.inputs import read_rows


def test_texts_are_cut_where_sentence_transformers_cuts_them(sentence_folder, tmp_path):
    import sentence_transformers

    model, texts = sentence_folder
    shutil.copytree(model, tmp_path / "short")
    (tmp_path / "short" / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    arguments = ConvertArguments(model=str(model), data=str(texts), output_dir="out", disable_tqdm=True)
    for folder, longest in ((tmp_path / "short", 6), (model, 9)):
        made = read_rows(data_set(arguments), read_checkpoint(str(folder), progress=False))
        batch = made.rows.__getitems__(range(len(made)))
        assert batch["input_ids"].shape[1] == longest
        whole = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        lines = texts.read_text().splitlines()
        expected = {tuple(ids) for ids in whole.tokenize(lines)["input_ids"].tolist()}
        assert {tuple(ids) for ids in batch["input_ids"].tolist()} == expected
    arguments.sequence_length = 4
    assert read_rows(data_set(arguments), read_checkpoint(str(tmp_path / "short"))).first(1)["input_ids"].shape == (
        1,
        4,
    )


def test_other_networks_in_a_folder_of_sentence_transformers_do_not_go_along(folder_of_old, tmp_path):
    """They would still be the smooth one, or what was made of it before."""
    folder = folder_of_old
    for place in (
        "0_Transformer/onnx/model.onnx",
        "0_Transformer/tf_model.h5",
        "onnx/model.onnx",
        "relu/model.safetensors",
        "model_quantized.onnx",
        "0_Transformer/model.onnx",
        "openvino_model.xml",
        "smooth-F16.gguf",
    ):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text("smooth")
    read_sentence_folder(str(folder)).copy_rest(tmp_path / "rest")
    found = {
        path.relative_to(tmp_path / "rest").as_posix() for path in (tmp_path / "rest").rglob("*") if path.is_file()
    }
    left_out = ("onnx", ".h5", ".safetensors", "openvino", ".gguf")
    assert not any(part in name for name in found for part in left_out)
    assert {"modules.json", "1_Pooling/config.json", "0_Transformer/tokenizer.json"} <= found


def test_modules_behind_an_encoder_are_downloaded_with_their_weights(monkeypatch, tmp_path):
    """Older ones have pytorch_model.bin alone; of the encoder safetensors alone are read."""
    asked, place = {}, tmp_path / "there"
    place.mkdir()
    (place / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]))
    monkeypatch.setattr("hf_lgelu.cli.checkpoint.hf_hub_download", lambda *words: str(place / "modules.json"))
    monkeypatch.setattr(
        "hf_lgelu.cli.checkpoint.snapshot_download", lambda name, **options: asked.update(options) or tmp_path
    )
    assert read_sentence_folder("someone/encoder") is None  # nothing was put there
    files = ["modules.json", "model.safetensors", "2_Dense/pytorch_model.bin", "2_Dense/config.json"]
    others = ["pytorch_model.bin", "0_BERT/pytorch_model.bin", "onnx/model.onnx", "model_O4.onnx", "a/b.gguf"]
    others += ["openvino_model.xml", "tf_model.h5", "rust_model.ot"]
    assert list(filter_repo_objects(files + others, allow_patterns=asked["allow_patterns"])) == files
