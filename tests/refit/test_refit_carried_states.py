"""Carried states: what is in memory, what is on disk, and for how long."""

import contextlib
import tempfile

import pytest
import torch

from hf_lgelu.refit.carry import CarriedStates


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def files(folder):
    return sorted(folder.glob("*/*"))


def numbers(count):
    return {"x": torch.arange(float(count))}


def test_what_is_taken_makes_room(folder):
    with contextlib.closing(CarriedStates(memory_limit=80)) as states:
        for key in range(5):  # 40 bytes each
            states.put(key, numbers(10))
            states.put((key, "b"), numbers(10))
            assert files(folder) == []
            assert torch.equal(states.take(key)["x"], torch.arange(10.0))
            states.take((key, "b"))


def test_what_is_beyond_the_limit_is_on_disk_until_it_is_taken(folder):
    with contextlib.closing(CarriedStates(memory_limit=80)) as states:
        for key in range(4):
            states.put(key, numbers(10) | {"y": (torch.tensor([key]), key)})
        assert len(files(folder)) == 3  # 48 bytes each
        for left, key in ((2, 3), (1, 1), (1, 0), (0, 2)):
            state = states.take(key)
            assert torch.equal(state["x"], torch.arange(10.0))
            assert state["y"] == (torch.tensor([key]), key)
            assert len(files(folder)) == left
        assert states.take(0) == {}
    assert list(folder.iterdir()) == []


def test_views_of_one_storage_count_once(folder):
    whole = torch.arange(10.0)
    with contextlib.closing(CarriedStates(memory_limit=40)) as states:
        states.put(0, {"x": whole, "y": whole[3:], "z": (whole.view(2, 5),)})
        assert files(folder) == []
