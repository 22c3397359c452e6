"""Files of rows."""

import datasets
import pytest

from hf_lgelu.cli.arguments import RowArguments
from hf_lgelu.cli.data import Rows, load_splits


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl", "parquet", "txt"])
def test_files_of_every_kind(ending, tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["one two", "three"]})
    file = tmp_path / f"Rows.{ending}"
    if ending == "txt":
        file.write_text("one two\nthree\n")
    elif ending == "json":
        file.write_text('[{"text": "one two"}, {"text": "three"}]')
    else:
        {"csv": rows.to_csv, "jsonl": rows.to_json, "parquet": rows.to_parquet}[ending](file)
    assert load_splits(str(file))["train"]["text"][:] == ["one two", "three"]
    assert Rows(str(file), rows, RowArguments(model="m"), split="train").description == f"Rows.{ending}"
    other = file.rename(tmp_path / "rows.xyz")
    with pytest.raises(ValueError, match=r"\.xyz.*\.csv, \.json"):
        load_splits(str(other))
