"""Two processes, whether each has all rows or a share, plan, convert and take steps of Adam as one process does.

One launch for all, which takes longer than they do; hence one file, whose tests stay in one worker.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import two_processes_run as run
from two_processes import run_in_two_processes
from two_processes_run import PLANS, WAYS

from hf_lgelu.refit.folds import deal_folds


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    run_in_two_processes(Path(__file__).parent / "two_processes_run.py", folder)
    return [torch.load(folder / f"{process}.pt", weights_only=False) for process in range(2)]


def alone(case):
    """The plan of one process that was given what both were."""
    batches = [batch for process in range(2) for batch in run.samples_given(case, process)]
    return run.described(deal_folds(batches, batch_size=run.CHUNK_SIZE))


def samples_of(part):
    """(seed, what belongs to it) of each sample of a part."""
    found = []
    for batch in part:
        for row, seed in enumerate(batch["seeds"]):
            inputs = batch["inputs"]
            sample = {name: value[row] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[row]
            length = sum(sample["attention_mask"]) if isinstance(inputs, dict) else None
            if length is not None:  # what it is padded to depends on what it is run with
                sample = {name: value[:length] for name, value in sample.items()}
            found.append((seed, json.dumps(sample), batch["labels"] and json.dumps(batch["labels"][row][:length])))
    return Counter(found)


@pytest.mark.parametrize("case", PLANS)
def test_two_processes_share_the_plan_of_one(found, case):
    expected, shares = alone(case), [each["plans"][case] for each in found]
    assert shares[0]["counts"] == shares[1]["counts"] == expected["counts"]
    assert len(expected["parts"]) == 5
    for number, part in enumerate(expected["parts"]):
        together = samples_of(shares[0]["parts"][number]) + samples_of(shares[1]["parts"][number])
        assert together == samples_of(part)
        assert len(together) > 0


@pytest.mark.parametrize("case", ["all hold all", "overlapping"])
def test_samples_that_both_processes_were_given_are_shared_out(found, case):
    counts = [sum(len(batch["seeds"]) for part in each["plans"][case]["parts"] for batch in part) for each in found]
    assert sum(counts) == 200
    assert all(85 <= count <= 115 for count in counts)


def test_both_processes_refuse(found):
    for report in (each["plans"] for each in found):
        assert "got 13 in 13 distinct samples of 17 given" in report["too few"]
        assert "float32" in report["of two dtypes"]
        assert "float64" in report["of two dtypes"]
        assert "process 0 was given no inputs" in report["one has none"]


def assert_like(actual, expected):
    """The same but for the order of float64 sums."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_like(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_like(one, other)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-12)
    else:
        assert actual == expected


def test_two_processes_convert_as_one_does(found):
    weights, report = run.converted([part for process in range(2) for part in run.given(*run.CONVERSION, process)])
    (first, first_report), (second, second_report) = (each["converted"] for each in found)
    assert first.keys() == second.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value, rtol=1e-9, atol=1e-10)
    assert first_report == second_report
    assert_like(first_report, report)


def test_what_one_process_meets_is_refused_on_both(found):
    one, other = (each["refused"] for each in found)
    assert one == other
    assert one.startswith("what reaches 2 is not finite")


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_shared_out_whole(found, way):
    batches = run.planned(way, None).together
    first, second = (each["shares", way] for each in found)
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == [
        sorted(batch.numbers) for batch in batches
    ]
    assert any(len(one) != len(other) for one, other in zip(first, second, strict=True))


def test_two_processes_climb_the_whole_ladder(found):
    first, second = (each["climbed"] for each in found)
    for (one, report), (other, other_report), (_, whole) in zip(first, second, run.climbed(None), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
        assert report == other_report
        assert [step["effort"] for step in report["steps"]] == ["refit", "place", "distill"]
        for given, expected in zip(report["steps"], whole["steps"], strict=True):  # 1e-14 was seen
            assert given["distance"] == pytest.approx(expected["distance"], rel=1e-9)
            assert given["is_kept"] == expected["is_kept"]
