"""Every hardening schedule against its closed form, and Algorithm 1's counting against exact integers."""

from fractions import Fraction

import mpmath
import pytest
from closed_forms import SCHEDULE_FORMS, progress_at

from hf_lgelu.models.hardening import SCHEDULES, hardening_progress, scheduled_hardness, switch_position

PROGRESS = [Fraction(k, 97) for k in range(98)]
WAYS = [(1.0067, 159.577), (1.0 + 1e-6, 1e4), (9.3, 40.0), (200.0, 40.0)]


def path(schedule, start, target):
    return [scheduled_hardness(schedule, start, target, float(progress)) for progress in PROGRESS]


@pytest.mark.parametrize(("start", "target"), WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_is_its_closed_form(schedule, start, target):
    for progress, hardness in zip(PROGRESS, path(schedule, start, target), strict=True):
        share = mpmath.mpf(float(progress))
        assert hardness == pytest.approx(float(SCHEDULE_FORMS[schedule](start, target, share)), rel=1e-13)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_end_is_the_target_to_the_last_bit_from_anywhere(schedule):
    """The formulas alone miss it by a rounding from most starts."""
    starts = [1 + k / 137 for k in range(1, 300)]
    assert [scheduled_hardness(schedule, start, 159.5769121605731, 1.0) for start in starts] == [
        159.5769121605731
    ] * 299


# Algorithm 1's counting


@pytest.mark.parametrize("denominator", [100, 1000, 3, 7, 64])
def test_switch_is_the_floor_of_the_fraction_that_was_meant(denominator):
    """k/100 as a float times T lies on either side of an integer; k·T//100 cannot."""
    for total in (*range(1, 201), 12_345, 10**6, 10**7, 10**9):
        for k in range(denominator):
            assert switch_position(total, k / denominator) == k * total // denominator, (k, denominator, total)


@pytest.mark.parametrize("fraction", [1 - 1e-9, 1 - 1e-13, 1 - 2**-53])
def test_the_last_epoch_is_hardened_however_late_the_switch(fraction):
    for total in (1, 2, 50, 10**6):
        assert switch_position(total, fraction) <= total - 1
        assert hardening_progress(total, total, fraction) == 1


def test_progress_is_algorithm_1():
    for total in range(1, 61):
        by_hand = [progress_at(position, total, total // 4) for position in range(1, total + 1)]
        expected = [None if share is None else float(share) for share in by_hand]
        assert [hardening_progress(position, total) for position in range(1, total + 1)] == expected
