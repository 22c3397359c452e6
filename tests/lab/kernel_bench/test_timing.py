"""The order of turns, repetitions and quantiles, against numbers by hand."""

import pandas
import pytest
from lgelu_lab.kernel_bench import timing


def test_each_round_begins_with_another_call_and_warms_each_just_before_its_timed_call():
    seen = []
    names = ("a", "b", "c")
    calls = {name: (lambda name=name: seen.append(name)) for name in names}

    def clock(call, repetitions):
        seen.append(f"{len(seen)}")  # a mark, replaced below
        seen[-1] = "timed"
        call()
        return 1e-2

    seconds, repetitions = timing.interleave(calls, clock, rounds=4, budget_seconds=60.0)
    order = "abc bca cab abc".replace(" ", "")
    assert seen[-len(order) * 3 :] == [word for name in order for word in (name, "timed", name)]
    assert repetitions.to_dict() == dict.fromkeys(names, 1)
    assert seconds.shape == (4, 3)


def test_ratios_are_taken_within_a_round():
    seconds = pandas.DataFrame({"gelu": [1.0, 2.0, 4.0], "other": [3.0, 1.0, 4.0]})
    summary = timing.summarize(seconds, "gelu")
    other = summary.loc["other"]
    # Rounds give 3, 0.5 and 1; sorted 0.5, 1, 3. A fifth of the way from first to last lies at 0.4 of the first gap.
    ratios = (0.5 + 0.4 * 0.5, 1.0, 1.0 + 0.6 * 2.0)
    assert [other[f"ratio_{name}"] for name in timing.QUANTILES] == pytest.approx(ratios)
    times = (1e3 * (1.0 + 0.4 * 2.0), 3e3, 1e3 * (3.0 + 0.6 * 1.0))
    assert [other[f"milliseconds_{name}"] for name in timing.QUANTILES] == pytest.approx(times)
    assert other["rounds"] == 3
    assert {summary.loc["gelu", f"ratio_{name}"] for name in timing.QUANTILES} == {1.0}
