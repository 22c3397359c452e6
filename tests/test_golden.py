"""Conversions, λ over trainings, ONNX graphs and refusals are what they were before the library was made smaller.

`tests/golden/recorded.py` makes them and writes `golden.json`. The networks compute in float64, so numbers agree to
many digits on any processor; trainings are float32.
"""

import json
import sys
from pathlib import Path

import pytest
from two_processes import run_in_two_processes

FOLDER = Path(__file__).with_name("golden")
sys.path.append(str(FOLDER))

import recorded  # noqa: E402
from refusals import REFUSALS  # noqa: E402

pytestmark = pytest.mark.golden
GOLDEN = json.loads(recorded.FILE.read_text(encoding="utf-8"))


def same(found, expected, relative=1e-6, where=""):
    """Whether two values agree, number by number; fails with the place where they do not."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, relative, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            same(found[index], value, relative, f"{where}/{index}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=relative, abs=1e-9), where
    else:
        assert found == expected, where


def plain(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", GOLDEN["conversions"])
def test_conversions(name):
    same(plain(recorded.conversion(name)), GOLDEN["conversions"][name])


@pytest.mark.parametrize("name", GOLDEN["options"])
def test_options(name):
    network, options = recorded.OPTIONS[name]
    same(plain(recorded.conversion(network, **options)), GOLDEN["options"][name])


def test_two_processes(tmp_path):
    run_in_two_processes(FOLDER / "recorded.py", tmp_path)
    for process in range(2):
        same(json.loads((tmp_path / f"{process}.json").read_text(encoding="utf-8")), GOLDEN["two processes"])


@pytest.mark.parametrize("name", GOLDEN["trainings"])
def test_trainings(name):
    same(recorded.training(name), GOLDEN["trainings"][name], relative=2e-5)


@pytest.mark.parametrize("name", GOLDEN["graphs"])
def test_graphs(name):
    assert recorded.graph(name) == GOLDEN["graphs"][name]


@pytest.mark.parametrize("name", GOLDEN["refusals"])
def test_refusals(name):
    assert recorded.refusal(REFUSALS[name]) == GOLDEN["refusals"][name]
