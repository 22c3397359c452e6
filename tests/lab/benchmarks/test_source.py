"""Where data comes from, and what is said when it is not there."""

import json
import re
from dataclasses import asdict

import datasets
import pytest
from lgelu_lab.benchmarks.source import Origin, load_splits


def table(*columns):
    return datasets.Dataset.from_dict({column: [1, 2, 3] for column in columns})


def load(data_dir=None, folder="pets", **changes):
    return load_splits(folder, "someone/pets", data_dir, **({"splits": ("train",), "columns": ("a", "b.c")} | changes))


def test_a_folder_gives_the_splits_asked_for(write_splits):
    data_dir = write_splits("pets", {split: table("a", "b.c", "d") for split in ("train", "test", "other")})
    assert set(load(data_dir).splits) == {"train"}
    found = load(str(data_dir), optional_splits=("test", "validation")).splits
    assert set(found) == {"train", "test"}
    assert found["train"]["b.c"][:] == [1, 2, 3]


def test_a_missing_folder_never_falls_back_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("loaded something else"))
    looked_for = re.escape(str(tmp_path / "pets"))
    with pytest.raises(ValueError, match=rf"{looked_for}.*someone/pets.*LGELU"):
        load(tmp_path)


def test_the_origin_of_a_folder_is_what_was_read_and_not_the_hubs_name(write_splits):
    data_dir = write_splits("pets", {"train": table("a", "b.c")})
    (data_dir / "pets" / "README.md").write_text("---\nlicense: mit\n---\n# pets\n\nThe test split, as train.\n")
    origin = load(data_dir).origin
    file = "data/train-00000-of-00001.parquet"
    sizes = {name: (data_dir / "pets" / name).stat().st_size for name in ("README.md", file)}
    assert origin == Origin(
        "local folder pets", "someone/pets", "pets", sizes, readme="# pets\n\nThe test split, as train."
    )


@pytest.fixture
def copy(tmp_path):
    """A copy of a data set, and what a record says of it when it has been read back."""
    folder = tmp_path / "first" / "ones"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("a,b")
    (folder / "README.md").write_text("# ones\nEvery row is 1.")
    return folder, json.loads(json.dumps(asdict(Origin.of_folder(folder, "some/ones"))))


def test_a_copy_that_was_moved_is_the_same_and_one_that_was_changed_is_not(copy, tmp_path):
    folder, recorded = copy
    elsewhere = folder.rename(tmp_path / "others")
    Origin.of_folder(elsewhere, "some/ones").require_same(recorded, "the run")
    (elsewhere / "README.md").write_text("---\nlicense: mit\n---\n# ones\nEvery row is 1.")
    Origin.of_folder(elsewhere, "some/ones").require_same(recorded, "the run")
    (elsewhere / "train.csv").rename(elsewhere / "test.csv")
    message = r"^the run read other data: .* with {'train.csv': 3}, and now .* with {'test.csv': 3}. Point data_dir or"
    with pytest.raises(ValueError, match=message):
        Origin.of_folder(elsewhere, "some/ones").require_same(recorded, "the run")


def test_without_a_directory_the_hub_is_asked(monkeypatch):
    asked = []
    monkeypatch.setenv("LGELU_DATA_DIR", "")
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or {"train": table("a", "b.c")})
    assert load().origin == Origin("someone/pets")
    load(hub_config="dogs")
    assert asked == [("someone/pets", None), ("someone/pets", "dogs")]


def test_what_is_missing_is_named(write_splits):
    data_dir = write_splits("pets", {"train": table("a", "e")})
    with pytest.raises(ValueError, match=r"'valid', 'b\.c', 'd'"):
        load(data_dir, splits=("train", "valid"), columns=("a", "b.c", "d"))
