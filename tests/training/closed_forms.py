"""λ, its target, its schedules and Algorithm 1 from their formulas, in 50 decimal digits and exact fractions."""

from fractions import Fraction

import mpmath

mpmath.mp.dps = 50


def hardness(raw_hardness: float, temperature: float) -> mpmath.mpf:
    """λ(s) = 1 + log(1 + e^(s/t))."""
    return 1 + mpmath.log1p(mpmath.exp(mpmath.mpf(raw_hardness) / mpmath.mpf(temperature)))


def target(tolerance: float = 5e-3) -> mpmath.mpf:
    """2/(ε√(2π))."""
    return 2 / (mpmath.mpf(tolerance) * mpmath.sqrt(2 * mpmath.pi))


def linear(start, end, progress):
    return (1 - progress) * start + progress * end


def geometric(start, end, progress):
    return mpmath.exp((1 - progress) * mpmath.log(start) + progress * mpmath.log(end))


SCHEDULE_FORMS = {"linear": linear, "geometric": geometric}


def progress_at(position: int, total: int, switch: int) -> Fraction | None:
    """(e − e_s)/(T − e_s), or None up to e_s."""
    return None if position <= switch else Fraction(position - switch, total - switch)


def hardened(schedule: str, start: float, end: float, progress: Fraction) -> float:
    """λ at `progress`, rounded to a double."""
    share = mpmath.mpf(progress.numerator) / progress.denominator
    return float(SCHEDULE_FORMS[schedule](mpmath.mpf(start), mpmath.mpf(end), share))
