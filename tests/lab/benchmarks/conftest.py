"""Small data folders in the Hub's layout, and caches of their own."""

import datasets
import pytest

datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path, monkeypatch):
    """No data directory from outside, and no trace of a test in the user's cache."""
    monkeypatch.delenv("LGELU_DATA_DIR", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def write_splits(tmp_path):
    """(folder name, {split: datasets.Dataset}) → data directory that holds the folder."""

    def write(folder, splits):
        target = tmp_path / "data" / folder / "data"
        target.mkdir(parents=True)
        for split, rows in splits.items():
            rows.to_parquet(str(target / f"{split}-00000-of-00001.parquet"))
        return tmp_path / "data"

    return write


@pytest.fixture
def adult_rows():
    """Rows of Adult as {column: list}; `fnlwgt` numbers them, and changes replace whole columns."""

    def rows(count, **changes):
        columns = {
            "age": [20 + 3 * i % 41 for i in range(count)],
            "workclass": [["Private", "State-gov", "?"][i % 3] for i in range(count)],
            "fnlwgt": [100_000 + i for i in range(count)],
            "education": [["Bachelors", "HS-grad"][i % 2] for i in range(count)],
            "education.num": [[13, 9][i % 2] for i in range(count)],
            "marital.status": ["Divorced"] * count,
            "occupation": [["Sales", "?", "Tech-support", "Craft-repair"][i % 4] for i in range(count)],
            "relationship": [["Wife", "Husband"][i % 2] for i in range(count)],
            "race": ["White"] * count,
            "sex": [["Male", "Female"][i % 2] for i in range(count)],
            "capital.gain": [2174 * (i % 5 == 0) for i in range(count)],
            "capital.loss": [0] * count,
            "hours.per.week": [35 + i % 7 for i in range(count)],
            "native.country": [["United-States", "Cuba"][i % 5 == 4] for i in range(count)],
            "income": [["<=50K", ">50K"][i % 4 == 0] for i in range(count)],
        }
        return columns | {name.replace("_", "."): values for name, values in changes.items()}

    return rows
