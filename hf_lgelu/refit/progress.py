"""How far a conversion is, and what is left of it over all rungs of the ladder."""

from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from hf_lgelu.refit.dials import Effort
from hf_lgelu.refit.ladder import RUNGS


class Progress:
    """One bar a rung, each with the time that all rungs together may still take."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._efforts: Sequence[Effort] = ()
        self._seconds: dict[Effort, float] = {}

    def plan(self, efforts: Sequence[Effort]) -> None:
        """The rungs that there may be, in order."""
        self._efforts = efforts

    def bar(self, effort: Effort, total: int) -> tqdm:
        """For `total` steps of a rung; its postfix names what is done, and says what is left of all rungs."""
        return _RungBar(self, effort, total=total, desc=effort, unit="batch", disable=not self._shown)

    def took(self, effort: Effort, seconds: float) -> None:
        """A rung has ended."""
        self._seconds[effort] = seconds

    def left(self, effort: Effort, elapsed: float, share: float) -> float:
        """Seconds left of the rung under way, of which a share is done, and of all behind it."""
        whole = elapsed / share
        refit = [seconds / RUNGS[name].usual_time for name, seconds in (self._seconds | {effort: whole}).items()]
        behind = self._efforts[self._efforts.index(effort) + 1 :] if effort in self._efforts else ()
        return whole - elapsed + sum(RUNGS[name].usual_time for name in behind) * sum(refit) / len(refit)


class _RungBar(tqdm):
    def __init__(self, progress: Progress, effort: Effort, **options: Any) -> None:
        self._progress, self._effort = progress, effort
        super().__init__(**options)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        if not self.disable and self.total and self.n:
            elapsed = self.format_dict["elapsed"]
            left = self._progress.left(self._effort, elapsed, self.n / self.total)
            s = f"{s}, about {self.format_interval(left)} left in all"
        super().set_postfix_str(s, refresh)

    def close(self) -> None:
        if not self.disable:
            self._progress.took(self._effort, self.format_dict["elapsed"])
        super().close()
