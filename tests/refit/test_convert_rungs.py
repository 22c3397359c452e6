"""A network is nearer where the mean of the paired differences is below zero, by so many standard errors."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from hf_lgelu.comparing.comparison import NetComparison
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import Outputs
from hf_lgelu.refit.convert import climb, is_nearer


@pytest.mark.parametrize("samples", [10, 19, 400])
def test_at_least_four_samples_must_come_nearer(samples):
    """Of -1 on m of n samples: mean m/n, variance (m/n)(1 - m/n)·n/(n - 1), so √(m(n - 1)/(n - m)) standard errors."""
    for fallen in range(samples):
        gaps = [0.0] * fallen + [1.0] * (samples - fallen)
        errors = math.sqrt(fallen * (samples - 1) / (samples - fallen))
        assert is_nearer(gaps, [1.0] * samples, 2) == (errors > 2 + 1e-9) == (fallen > 3)
    # One alone is one error, however far it falls.
    assert not is_nearer([-99.0] + [1.0] * (samples - 1), [1.0] * samples, 2)


def test_it_is_the_paired_t_of_scipy():
    draws, decided = np.random.default_rng(3), []
    for shift in np.linspace(-1, 0.5, 40):
        before = draws.lognormal(0, 1.5, 30)
        after = before * np.exp(0.5 * draws.standard_normal(30) + shift / 2)
        decided.append(is_nearer(after.tolist(), before.tolist(), 2))
        assert decided[-1] == (stats.ttest_rel(after, before).statistic < -2)
    assert {*decided} == {True, False}


def test_what_says_nothing_is_not_nearer():
    assert is_nearer([0.5, 1.5], [1.0, 2.0], 2)  # all by as much
    assert not is_nearer([0.0], [1.0], 2)  # of one unit there is no error
    for gaps, than in (([], []), ([1.0, 2.0], [1.0, 2.0]), ([1.5, 2.5], [1.0, 2.0]),
                       ([math.nan, 0.0], [1.0, 1.0]), ([math.inf, 0.0], [1.0, 1.0])):  # fmt: skip
        assert not is_nearer(gaps, than, 2)
        assert not is_nearer(gaps, than)


def test_the_mean_alone_decides_on_samples_that_had_no_part():
    draws, decided = np.random.default_rng(5), []
    for _ in range(40):
        before, after = draws.lognormal(0, 1.5, (2, 7)).tolist()
        decided.append(is_nearer(after, before))
        assert decided[-1] == (math.fsum(after) < math.fsum(before))
    assert {*decided} == {True, False}
    assert is_nearer([0.5], [1.0])


@pytest.mark.parametrize("masked", [False, True])
def test_the_gap_of_a_sample_is_what_the_sums_over_all_are_made_of(masked, monkeypatch):
    # Four predictions at once: a sample lies in several slices.
    monkeypatch.setattr("hf_lgelu.comparing.comparison._NUMBERS_AT_ONCE", 12)
    draws = torch.Generator().manual_seed(4)
    of_classes, of_numbers, of_both, kls, errors = NetComparison(), NetComparison(), NetComparison(), [], []
    for count in (5, 3):
        networks = [{"logits": torch.randn(count, 6, 3, generator=draws)} for _ in range(2)]
        mask = torch.rand(count, 6, generator=draws) < 0.6
        mask[:, 0] = True
        inputs = {"input_ids": torch.zeros(count, 6, dtype=torch.long)} | ({"attention_mask": mask} if masked else {})
        kinds = ("scores", "values", "scores" if count == 5 else "values")
        for comparison, kind in zip((of_classes, of_numbers, of_both), kinds, strict=True):
            comparison.add(Batch(inputs), *(Outputs(network, {"logits": kind}) for network in networks))
        for sample in range(count):
            rows = [value["logits"][sample][mask[sample]] if masked else value["logits"][sample] for value in networks]
            p, q = (value.double().log_softmax(-1) for value in rows)
            kls.append(float((p.exp() * (p - q)).sum()))
            errors.append(float((rows[1].double() - rows[0].double()).square().sum()))
    assert of_classes.gaps == pytest.approx([kl / of_classes.rows for kl in kls], rel=1e-9)
    assert of_classes.distance.kl == pytest.approx(sum(of_classes.gaps), rel=1e-9)
    for comparison in (of_numbers, of_both):  # no class scores in one batch, so in none
        share = comparison.distance.relative_error / sum(errors)
        assert comparison.gaps == pytest.approx([share * error for error in errors], rel=1e-9)


@dataclass
class Rung:
    """A rung whose student is so far from the original on three samples."""

    effort: str
    kl: float
    given: list = field(default_factory=list)

    def make(self, best):
        self.given.append(None if best is None else best.effort)
        held_out = SimpleNamespace(refitted=SimpleNamespace(value=self.kl))
        return SimpleNamespace(effort=self.effort, held_out=held_out, gaps=[2 * self.kl, self.kl / 2, self.kl / 2])


def test_each_rung_is_kept_only_where_it_is_nearer():
    rungs = [Rung("refit", 0.5), Rung("place", 0.3), Rung("distill", 0.4)]
    best, steps = climb(rungs)
    assert (best.effort, [rung.given for rung in rungs]) == ("place", [[None], ["refit"], ["place"]])
    assert [step.is_kept for step in steps] == [True, True, False]
    # After steps, the mean alone does not decide.
    best, steps = climb([Rung("refit", 0.5), Rung("distill", 0.4)])
    assert ([step.is_kept for step in steps], best.effort) == ([True, False], "refit")
