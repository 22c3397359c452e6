"""Two processes plan, convert and take steps of Adam as one process does.

One launch for all, which takes longer than they do; hence one file, whose tests stay in one worker.
"""

from pathlib import Path

import pytest
import torch
import two_processes_run as run
from two_processes import run_in_two_processes
from two_processes_run import PLANS

from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.samples import read_samples


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    run_in_two_processes(Path(__file__).parent / "two_processes_run.py", folder)
    return [torch.load(folder / f"{process}.pt", weights_only=False) for process in range(2)]


@pytest.mark.parametrize("case", PLANS)
def test_two_processes_have_the_plan_of_one_in_whatever_order_they_read(found, case):
    expected = run.described(deal_folds(read_samples(run.samples_given(case, 0)), batch_size=run.CHUNK_SIZE))
    assert len(expected["parts"]) == 5
    assert all(part for part in expected["parts"])
    assert [each["plans"][case] for each in found] == [expected, expected]


def test_both_processes_refuse(found):
    for report in (each["plans"] for each in found):
        assert "the 17 samples given have 13" in report["too few"]
        for case in ("of two dtypes", "one has none", "shares"):
            assert "the processes were given different data" in report[case]


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
    weights, report = run.converted()
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


def test_a_batch_is_shared_out_whole(found):
    batches = run.planned().fitted
    first, second = (each["shares"] for each in found)
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == [
        sorted(batch.numbers) for batch in batches
    ]
    assert any(len(one) != len(other) for one, other in zip(first, second, strict=True))


def test_two_processes_climb_the_whole_ladder(found):
    first, second = (each["climbed"] for each in found)
    for (one, report), (other, other_report), (_, whole) in zip(first, second, run.climbed(), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
        assert report == other_report
        assert [step["effort"] for step in report["steps"]] == ["refit", "place", "distill"]
        for given, expected in zip(report["steps"], whole["steps"], strict=True):  # 1e-14 was seen
            assert given["distance"] == pytest.approx(expected["distance"], rel=1e-9)
            assert given["is_kept"] == expected["is_kept"]
