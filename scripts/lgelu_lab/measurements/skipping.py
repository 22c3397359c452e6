"""What a network computes when units are skipped: its distance to the original by the share of units that are live.

A unit is live at a token if it is not zero there. Rules say which other units are set to zero, too:

- gate: where |gate output| is below a threshold, one for each gate. Of a gated block (gate, up and down projection) the
  gate's map is then read whole, and of the other two what belongs to live units: (1 + 2·live) / 3 of the weights.
- product: at each token the smallest |gate output × up projection| of a layer. Both maps before are read whole:
  (2 + live) / 3. In a plain block of two maps both rules read (1 + live) / 2.
- shift: the gate's ReLU(x) becomes ReLU(x - c), one c for each gate, which a plain ReLU network can carry in a bias.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu import ConversionConfig
from hf_lgelu.comparing.net_change import NetChange
from hf_lgelu.comparing.net_comparison import compare_networks_on
from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.surgery import exchange_activations
from hf_lgelu.networks.batches import Batch, read_batches
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.networks.run import forward_hooks, plain_evaluation, run_example
from hf_lgelu.refit.folds import Folds, deal_folds
from hf_lgelu.refit.layers import Layers, find_layers
from hf_lgelu.refit.layerwise import Refit
from hf_lgelu.refit.place import Place
from hf_lgelu.refit.samples import read_samples
from hf_lgelu.refit.task import Exchange, Task, Work, choose_exchange
from hf_lgelu.refit.traced import TracedNetwork, TracedNetworks
from lgelu_lab.benchmarks.real_inputs import Inputs

RULES = ("gate", "product", "shift")
FORMS = ("shift", "cut", "smooth", "place")
"""Gates whose threshold is chosen before the refit: ReLU(x - c); x where x > c; the original's where that is large; and
a kink and a slope for each channel, as the rung `place` fits them."""

_UNION = (8, 32)


@dataclass(frozen=True)
class Wiring:
    """The gates of a network that a conversion exchanges, by name: the map behind each, and whether it is gated."""

    behind: Mapping[str, str]
    is_gated: bool
    folds: Folds
    exchange: Exchange

    def read(self, rule: str, live: float, width: float) -> float:
        """The share of the original blocks' weights that one token reads, of blocks with `width` times the units."""
        if not self.is_gated:
            return width * (1 + live) / 2
        return width * ((2 + live) if rule == "product" else (1 + 2 * live)) / 3


def read_wiring(model: nn.Module, batches: Sequence[Inputs]) -> Wiring:
    """The wiring of a smooth network, and its data as a conversion deals them."""
    with plain_evaluation(model):
        read = OutputReader(model)
        folds = deal_folds(read_samples(read_batches(batches, model=model), model=model), read)
        exchange = choose_exchange(read, folds, ConversionConfig())
        found = find_layers(exchange.traces(read).of(folds.first), model, exchange.sites(model))
    names = [site.name for site in exchange.sites(model)]
    gated = {unit.site for unit in found.fed_gates if unit.other is not None}
    behind = {names[index]: layer.maps[0].name for layer in found.layers for index in layer.sites}
    return Wiring(behind, {names[index] for index in gated} == set(behind), folds, exchange)


@dataclass
class Used:
    """Units that are live, counted over tokens without padding, and over the first 8 and 32 tokens of each row."""

    live: int = 0
    units: int = 0
    unions: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in _UNION})

    @property
    def share(self) -> float:
        return self.live / self.units

    def add(self, values: Tensor, inputs: Any, name: str) -> None:
        """Count the values (..., tokens, units) that belong to `inputs`."""
        is_live = values != 0
        counted = counted_rows(inputs if isinstance(inputs, Mapping) else {}, values, name)
        kept = is_live if counted is None else is_live[counted]
        self.live, self.units = self.live + int(kept.sum()), self.units + kept.numel()
        for count, shares in self.unions.items():
            if values.ndim == 3 and values.shape[1] >= count and counted is None:
                shares.append(is_live[:, :count].any(1).float().mean().item())

    def union(self, count: int) -> float | None:
        """The mean share of units that are live at one of the first `count` tokens; None of padded rows."""
        shares = self.unions[count]
        return sum(shares) / len(shares) if shares else None


@torch.no_grad()
def quantiles(network: nn.Module, gates: Sequence[str], inputs: Inputs, live: Sequence[float]) -> dict[str, Tensor]:
    """{gate: for each share, the threshold above which that share of its outputs' absolute values lies}."""
    found = {}

    def see(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        counted = counted_rows(inputs, output, name)
        values = (output if counted is None else output[counted]).abs().flatten().sort().values
        places = [min(len(values) - 1, round((1 - share) * len(values))) for share in live]
        found[name] = values[places]

    with ExitStack() as hooks:
        for name in gates:
            hooks.enter_context(forward_hooks([network.get_submodule(name)], partial(see, name)))
        run_example(network, inputs)
    return found


@contextmanager
def skipping(
    network: nn.Module, wiring: Wiring, rule: str, live: float | None, thresholds: Mapping[str, Tensor], used: Used,
    inputs: Any,
) -> Iterator[None]:  # fmt: skip
    """A block in which units of the network are skipped by a rule, and those that are live are counted.

    Without `live` none is skipped; the rule still says which values count.
    """

    def at_gate(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if live is not None:
            kept = output.abs() >= thresholds[name].clamp(min=torch.finfo(output.dtype).tiny)
            output = (output - thresholds[name]).clamp(min=0) if rule == "shift" else torch.where(kept, output, 0)
        used.add(output, inputs, name)
        return output

    def at_map(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (values,) = args
        if live is not None:
            least = values.abs().topk(max(1, round(live * values.shape[-1])), -1).values[..., -1:]
            values = torch.where(values.abs() >= least, values, 0)
        used.add(values, inputs, name)
        return (values,)

    with ExitStack() as hooks:
        for gate, behind in wiring.behind.items():
            if rule == "product":
                handle = network.get_submodule(behind).register_forward_pre_hook(partial(at_map, behind))
                hooks.callback(handle.remove)
            else:
                hooks.enter_context(forward_hooks([network.get_submodule(gate)], partial(at_gate, gate)))
        yield


def measure(
    original: nn.Module, network: nn.Module, wiring: Wiring, asked: Sequence[tuple[str, float | None]],
    batches: Sequence[Inputs], calibration: Inputs,
) -> list[tuple[NetChange, Used]]:  # fmt: skip
    """How far the network is from the original under each (rule, live share), and the units used; one pass for all."""
    wanted = [(rule, live) for rule, live in asked if rule != "product" and live is not None]
    found = quantiles(network, list(wiring.behind), calibration, [live for _, live in wanted]) if wanted else {}
    useds = [Used() for _ in asked]

    def run(number: int, inputs: Any) -> Any:
        rule, live = asked[number]
        place = wanted.index((rule, live)) if (rule, live) in wanted else 0
        thresholds = {name: values[place] for name, values in found.items()}
        with skipping(network, wiring, rule, live, thresholds, useds[number], inputs):
            return OutputReader(network)(inputs)

    units = []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        units.append(Batch(inputs, batch.get("labels", batch.get("input_ids"))))
    runs = {str(number): partial(run, number) for number in range(len(asked))}
    _, changes = compare_networks_on(OutputReader(original), runs, units)
    return [(changes[str(number)].change, used) for number, used in enumerate(useds)]


def score_of(change: NetChange) -> tuple[str, float]:
    """The name of a network's score, and its value where higher is better: perplexity is inverted."""
    if change.embedding:
        return "same_neighbour", change.embedding["same_neighbour"]
    ((name, value),) = change.metrics.items()
    return name, 1 / value if name == "perplexity" else value


class SkippingGate(nn.Module):
    """A gate of one of the FORMS, with its threshold."""

    def __init__(self, form: str, smooth: nn.Module) -> None:
        super().__init__()
        self.form, self.smooth = form, smooth
        self.register_buffer("threshold", torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        """The gate's output; what is below the threshold is zero."""
        if self.form == "shift":
            return (values - self.threshold).clamp(min=0)
        if self.form == "cut":
            return torch.where(values > self.threshold, values, 0)
        smooth = self.smooth(values)
        return torch.where(smooth.abs() > self.threshold, smooth, 0)


class _SkippingExchange(Exchange):
    """An exchange whose gates become `SkippingGate`s of one form; no config says so."""

    form = "shift"

    def carry_out(self, model: nn.Module) -> tuple[ConfigChange, ...]:
        sites = self.sites(model)
        return exchange_activations(
            model, sites, [SkippingGate(self.form, site.module) for site in sites], None
        ).config_changes


class _ReachedError(Exception):
    pass


class SkippingRefit(Refit):
    """The refit of a network whose gates get the threshold of a live share, each before the map behind is solved."""

    def __init__(self, task: Task, live: float, inputs: Inputs) -> None:
        super().__init__(task)
        self._live, self._inputs = live, inputs

    def prepare(self, traces: TracedNetworks, traced: TracedNetwork, found: Layers) -> None:
        """Note the gates before each layer."""
        names = [site.name for site in traces.sites]
        self._gates = [[names[index] for index in layer.sites] for layer in found.layers]

    def write_after(self, student: nn.Module, index: int | None) -> None:
        """Set the thresholds of the gates before the next layer, on what the student computes there by now."""
        following = 0 if index is None else index + 1
        for name in self._gates[following] if following < len(self._gates) else ():
            self._set(student, name)

    @torch.no_grad()
    def _set(self, student: nn.Module, name: str) -> None:
        gate = student.get_submodule(name)

        def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            counted = counted_rows(self._inputs, args[0], name)
            values = args[0] if counted is None else args[0][counted]
            values = (gate.smooth(values).abs() if gate.form == "smooth" else values).flatten().sort().values
            gate.threshold.copy_(values[round((1 - self._live) * (len(values) - 1))])
            raise _ReachedError

        with forward_hooks([gate], see):
            try:
                run_example(student, self._inputs)
            except _ReachedError:
                return


def refit_skipping(model: nn.Module, wiring: Wiring, form: str, live: float, inputs: Inputs) -> nn.Module:
    """The network refitted behind gates of a form, each with the threshold that leaves this share of units live.

    "place" is the rung of the library with this `live`; "width" the same, where `live` is the width.
    """
    if form in ("place", "width"):
        config = ConversionConfig(**({"width": live} if form == "width" else {"live": live}))
        with plain_evaluation(model):
            task = Task(OutputReader(model), wiring.folds, wiring.exchange, config, Work, True)
            return Place(task).make(None, float("inf")).model
    exchange = _SkippingExchange(wiring.exchange.kinds, wiring.exchange.keep, wiring.exchange.target)
    object.__setattr__(exchange, "form", form)
    with plain_evaluation(model):
        task = Task(OutputReader(model), wiring.folds, exchange, ConversionConfig(), Work, True)
        return SkippingRefit(task, live, inputs).make(None, float("inf")).model
