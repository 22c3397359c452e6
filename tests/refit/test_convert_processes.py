"""Two processes, whether each has all rows or a share, convert to what one process converts to."""

import convert_run
import pytest
import torch


@pytest.fixture(scope="module")
def launched(two_processes):
    """What each of two processes found."""
    return [torch.load(two_processes / f"{process}.pt", weights_only=False) for process in range(2)]


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


@pytest.mark.parametrize(("name", "way"), convert_run.CASES)
def test_two_processes_convert_as_one_does(launched, name, way):
    weights, report = convert_run.converted(name, convert_run.given(name, way, 0) + convert_run.given(name, way, 1))
    (first, first_report), (second, second_report) = (found[name, way] for found in launched)
    assert first.keys() == second.keys() == weights.keys()
    for key, value in weights.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value, rtol=1e-9, atol=1e-10)
    assert first_report == second_report
    assert_like(first_report, report)


def test_what_one_process_meets_is_refused_on_both(launched):
    one, other = (found["refused"] for found in launched)
    assert one == other
    assert one.startswith("what reaches 2 is not finite")
