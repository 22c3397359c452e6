"""Texts of a sentence encoder are read as sentence-transformers reads them."""

import json
import shutil

from hf_lgelu.cli.arguments import ConvertArguments
from hf_lgelu.cli.checkpoint import read_checkpoint
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
        batch = made.read([*range(len(made))])
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
