"""Where data comes from, and what is said when it is not there."""

import re
import sys

import datasets
import pytest
from lgelu_lab.benchmarks.locate import load_splits, require_package


def table(*columns):
    return datasets.Dataset.from_dict({column: [1, 2, 3] for column in columns})


def load(data_dir=None, folder="pets", **changes):
    return load_splits(folder, "someone/pets", data_dir, **({"splits": ("train",), "columns": ("a", "b.c")} | changes))


def test_a_folder_gives_the_splits_asked_for(write_splits):
    data_dir = write_splits("pets", {split: table("a", "b.c", "d") for split in ("train", "test", "other")})
    assert set(load(data_dir)) == {"train"}
    found = load(str(data_dir), optional_splits=("test", "validation"))
    assert set(found) == {"train", "test"}
    assert found["train"]["b.c"][:] == [1, 2, 3]


def test_the_environment_names_the_directory_and_the_argument_goes_first(write_splits, monkeypatch, tmp_path):
    data_dir = write_splits("pets", {"train": table("a", "b.c")})
    monkeypatch.setenv("LGELU_DATA_DIR", str(data_dir))
    assert set(load()) == {"train"}
    monkeypatch.setenv("LGELU_DATA_DIR", str(tmp_path / "elsewhere"))
    assert set(load(data_dir)) == {"train"}
    with pytest.raises(ValueError, match="elsewhere"):
        load()


def test_without_a_directory_the_hub_is_asked(monkeypatch):
    asked = []
    monkeypatch.setenv("LGELU_DATA_DIR", "")
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or {"train": table("a", "b.c")})
    assert set(load()) == {"train"}
    assert asked == ["someone/pets"]


def test_one_of_several_data_sets_under_a_name_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or {"train": table("a", "b.c")})
    load(hub_config="dogs")
    assert asked == [("someone/pets", "dogs")]


def test_of_several_folder_names_the_first_that_is_there_counts(write_splits):
    small = write_splits("pets_small", {"train": table("a", "b.c")})
    assert load(small, folder=("pets", "pets_small"))["train"].num_rows == 3
    both = write_splits("pets", {"train": table("a", "b.c").select([0])})
    assert load(both, folder=("pets", "pets_small"))["train"].num_rows == 1
    assert load(both, folder=("pets_small", "pets"))["train"].num_rows == 3


def test_where_no_accepted_folder_is_there_the_first_name_is_told(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"no folder {tmp_path / 'pets'}")):
        load(tmp_path, folder=("pets", "pets_small"))


def test_a_missing_folder_never_falls_back_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("loaded something else"))
    looked_for = re.escape(str(tmp_path / "pets"))
    with pytest.raises(ValueError, match=rf"no folder {looked_for}, which should hold a copy of someone/pets.*LGELU"):
        load(tmp_path)


def test_an_empty_folder_is_named(tmp_path):
    (tmp_path / "pets").mkdir()
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path / 'pets'))} holds no data files"):
        load(tmp_path)


def test_a_missing_split_is_named_with_those_that_are_there(write_splits):
    data_dir = write_splits("pets", {"train": table("a", "b.c")})
    with pytest.raises(ValueError, match="has no split 'valid', 'test'; it has 'train'"):
        load(data_dir, splits=("train", "valid", "test"))


def test_a_missing_column_is_named_with_its_split(write_splits):
    data_dir = write_splits("pets", {"train": table("a", "e")})
    with pytest.raises(ValueError, match=r"split 'train' of .*pets has no column 'b.c', 'd'; it has 'a', 'e'"):
        load(data_dir, columns=("a", "b.c", "d"))


def test_splits_with_different_columns_are_refused(write_splits):
    data_dir = write_splits("pets", {"train": table("a", "b.c"), "test": table("a", "e")})
    with pytest.raises(ValueError, match=r"(?s)data.pets cannot be read by datasets: .*'b.c'.*column names"):
        load(data_dir)


@pytest.mark.parametrize("error", [ConnectionError("no route"), FileNotFoundError("no such data set")])
def test_an_unreachable_hub_tells_of_the_data_directory(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        RuntimeError, match=rf"someone/pets could not be loaded .*{error}.*set data_dir or LGELU_DATA_DIR"
    ):
        load()


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"need sklearn, .*pip install hf-lgelu\[benchmarks\]"):
        require_package("sklearn.datasets")
