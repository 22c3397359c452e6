"""Units that are skipped: networks whose zeros are known, and thresholds that leave as many as were asked for."""

import pandas as pd
import pytest
import torch
from lgelu_lab.measurements.skipping import measure, read_wiring, refit_skipping
from lgelu_lab.report.zeros import critical_sparsities
from small_networks import gpt2, llama


def of(family):
    torch.manual_seed(0)
    network = family().eval()
    for parameter in network.parameters():
        parameter.data *= 3
    tokens = {"input_ids": torch.randint(1, 30, (40, 16), generator=torch.Generator().manual_seed(1))}
    return network, tokens, read_wiring(network, [tokens])


@pytest.mark.parametrize(("family", "is_gated"), [(llama, True), (gpt2, False)])
def test_units_that_are_skipped_are_counted_and_change_the_output(family, is_gated):
    network, tokens, wiring = of(family)
    assert wiring.is_gated == is_gated
    assert [wiring.read("gate", 0.25, 1.0), wiring.read("product", 0.25, 2.0)] == (
        [0.5, 1.5] if is_gated else [0.625, 1.25]
    )
    asked = [("gate", None), ("gate", 0.5), ("gate", 0.25), ("product", 0.25)]
    whole, *skipped = measure(network, network, wiring, asked, [tokens], tokens)
    assert (whole[0].kl, whole[1].share, whole[1].union(8)) == (0, 1, 1)
    assert [used.share for _, used in skipped] == pytest.approx([0.5, 0.25, 0.25], abs=0.01)
    near, far, product = (change.kl for change, _ in skipped)
    assert 0 < near < far
    assert (product < 0.9 * far) == is_gated  # a plain block has no other half that the rule could look at
    assert skipped[1][1].share < skipped[1][1].union(8) < 1
    assert skipped[1][1].union(32) is None


@pytest.mark.parametrize("form", ["shift", "cut", "smooth", "place"])
def test_a_threshold_that_is_chosen_first_leaves_the_share_and_is_made_up_for(form):
    network, tokens, wiring = of(gpt2)
    found = refit_skipping(network, wiring, form, 0.25, tokens)
    ((change, used),) = measure(network, found, wiring, [("gate", None)], [tokens], tokens)
    ((on_top, _),) = measure(network, network, wiring, [("gate", used.share)], [tokens], tokens)
    assert used.share == pytest.approx(0.25, abs=0.03)
    assert change.kl < 0.8 * on_top.kl


def test_the_critical_sparsity_lies_between_measured_shares():
    rows = [("", 0.4, 50.0), (0.3, 0.3, 50.25), (0.2, 0.2, 51.0), (0.1, 0.1, 90.0)]
    curve = pd.DataFrame(rows, columns=["asked", "live", "score"])
    curve = curve.assign(network="a", made="b", rule="gate", metric="perplexity")
    kept = [50 / 50.25, 50 / 51]
    expected = 0.7 + 0.1 * (kept[0] - 0.99) / (kept[0] - kept[1])
    assert critical_sparsities(curve).values.tolist() == [["a", "b", "gate", pytest.approx(expected, abs=1e-4)]]
