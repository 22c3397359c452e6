"""What a conversion says of itself: distances on samples that chose nothing, time, and where its inputs come from."""

import copy
import threading
import time

import pytest
import torch
from small_networks import bert, convert_with, gpt2, llama, mlp
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.formats import percent
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit import convert, distill
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.output_loss import output_loss
from hf_lgelu.refit.samples import read_samples, sampled_text


def rows(count, seed=0):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return mlp().eval()


def rows_in(*parts):
    return sorted(tuple(row) for part in parts for batch in part for row in batch.load().inputs.tolist())


@pytest.mark.parametrize("count", [400, 200, 60])
def test_of_many_samples_held_out_half_choose_and_half_measure(count):
    batches = [Batch(rows(count))]
    whole, split = deal_folds(read_samples(batches)), deal_folds(read_samples(batches), is_choice=True)
    assert whole.choosing == whole.held_out
    assert [rows_in(fold) for fold in whole.folds] == [rows_in(fold) for fold in split.folds]
    assert whole.held_out_samples == split.held_out_samples
    if split.held_out_samples < 32:
        assert split.choosing == split.held_out
        return
    assert rows_in(split.choosing, split.held_out) == rows_in(whole.held_out)
    assert abs(len(rows_in(split.choosing)) - len(rows_in(split.held_out))) <= 1


def test_the_distance_is_that_of_samples_that_chose_nothing(model):
    data = rows(600)
    converted, report = convert_with(model, data, effort="place")
    folds = deal_folds(read_samples([Batch(data)]), is_choice=True)
    for part, said in ((folds.held_out, report.held_out.refitted.kl), (folds.choosing, report.steps[-1].distance)):
        x = torch.cat([batch.load().inputs for batch in part])
        p, q = (network(x).double().log_softmax(-1).detach() for network in (model, converted))
        if part is folds.held_out or report.steps[-1].is_kept:
            assert said == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    # The zeros on the samples that measure.
    x = torch.cat([batch.load().inputs for batch in folds.held_out])
    first = converted[1](converted[0](x))
    live = [(gate != 0).double().mean().item() for gate in (first, converted[3](converted[2](first)))]
    assert [layer.live for layer in report.layers] == pytest.approx(live)
    assert report.live_units == pytest.approx(sum(live) / 2)
    assert f"units that are not zero: {percent(report.live_units)}\n" in str(report)
    assert report.choosing_samples + report.held_out.samples == folds.held_out_samples
    assert f"{report.choosing_samples} to choose the rung" in str(report)
    few = convert_with(model, rows(200), effort="place", max_kl=None).report
    assert few.choosing_samples == 0
    assert any("the same inputs chose the rung and measured the distance" in line for line in few.warnings)


def test_steps_end_early_where_none_comes_nearer(monkeypatch):
    original, steps = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), []

    def counted(*given, **options):
        steps.extend([1] * torch.is_grad_enabled())
        return output_loss(*given, **options)

    monkeypatch.setattr(distill, "output_loss", counted)
    monkeypatch.setattr(distill, "_RATES", (1e5, 1e3))  # far too high
    other = copy.deepcopy(original)
    other[2].bias.data[0] += 0.01
    distill.distill(
        OutputReader(original), other, deal_folds(read_samples([Batch(torch.randn(200, 4))])), names=["2.weight"]
    )
    assert len(steps) == 2 * 50


def test_threads_convert_one_model_and_two_as_each_alone(model, monkeypatch):
    """The first is inside when the others begin: a gate of the same model is never seen exchanged."""
    data, inside, found = rows(200), threading.Event(), {}
    others = {"same": model, "other": copy.deepcopy(model)}
    deal = convert.deal_folds

    def slow(*given, **options):
        inside.set()
        time.sleep(0.1)
        return deal(*given, **options)

    def convert_it(name, network):
        found[name] = convert_to_relu(network, data).model.state_dict()

    monkeypatch.setattr(convert, "deal_folds", slow)
    threads = [threading.Thread(target=convert_it, args=each) for each in (("first", model), *others.items())]
    threads[0].start()
    inside.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    for name in others:
        assert all(torch.equal(value, found["first"][key]) for key, value in found[name].items())


@pytest.mark.parametrize("family", [gpt2, llama])
def test_a_language_model_without_data_samples_text(family):
    network = family()
    del (network.transformer.h if family is gpt2 else network.model.layers)[1:]
    network.train().config.num_hidden_layers = 1
    network.lm_head.weight.data *= 8 if family is gpt2 else 40  # so that another temperature would tell
    state = torch.get_rng_state()
    network.generation_config.top_k = network.generation_config.repetition_penalty = 1  # narrow no text
    text = sampled_text(network, 70)
    assert torch.equal(state, torch.get_rng_state())
    assert network.training
    assert text.shape == (70, 16)
    assert len({tuple(row) for row in text.tolist()}) > 60
    # The tokens are drawn from the model's own probabilities: their mean surprise is its entropy.
    scores = network.eval()(text).logits[:, :-1].detach().log_softmax(-1)
    scores = scores.masked_fill(torch.arange(40) == network.config.eos_token_id, -torch.inf).log_softmax(-1)
    surprise = -scores.gather(2, text[:, 1:, None]).mean()
    entropy = -(scores.exp() * scores.clamp(min=-99)).sum(-1).mean()
    assert surprise == pytest.approx(float(entropy), rel=0.1)
    if family is gpt2:
        _, report = convert_with(network, None, max_samples=70, max_kl=None)
        assert (report.samples, report.rows) == (70, len({tuple(row) for row in text.tolist()}) * 16)
        told = "no data were given: the model sampled 1,120 tokens of text itself"
        assert any(told in warning for warning in report.warnings)


def test_without_data_other_models_are_refused(model):
    for network in (model, bert()):
        with pytest.raises(ValueError, match="causal language model"):
            convert_to_relu(network)
