"""The gates to exchange, the common task of all rungs, and the result of a rung."""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from hf_lgelu.comparing.comparison import LiveUnits, compare_outputs
from hf_lgelu.graph.layers import find_layers
from hf_lgelu.graph.recording import Recordings
from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.record import plan_gates
from hf_lgelu.models.surgery import TemporaryRelu, exchange_activations, relu_for
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import OutputReader, Outputs, agree, outputs_of
from hf_lgelu.networks.run import Inputs, run_example
from hf_lgelu.networks.sites import SMOOTH_KINDS, ActivationSite, check_kinds, find_sites
from hf_lgelu.processes import each_has
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.refusals import ConversionRefusedError
from hf_lgelu.refit.report import Evaluation, LayerRefit

progress_log = logging.getLogger("hf_lgelu.progress")
"""The progress of a conversion where it is not printed: a line per layer, at level INFO."""


@dataclass(frozen=True)
class Exchange:
    """The choice of the gates that become ReLU: all gates of the kinds, except the names in `keep`."""

    kinds: tuple[str, ...]
    keep: tuple[str, ...]

    def sites(self, model: nn.Module) -> list[ActivationSite]:
        """The gates of a model that are exchanged."""
        return [site for site in find_sites(model, self.kinds) if site.name not in self.keep]

    def recordings(self, read: OutputReader) -> Recordings:
        """Recordings of the original or of a wider copy, up to the outputs that count."""
        return Recordings(read.model, self.sites(read.model), read.counted)

    def plain_swap(self, model: nn.Module) -> TemporaryRelu:
        """A context in which the gates of `model` are ReLU; no weight changes."""
        return TemporaryRelu(model, kinds=self.kinds, include=lambda name: name not in self.keep)

    def carry_out(self, model: nn.Module) -> tuple[ConfigChange, ...]:
        """The changes of the config. Changes `model` in place: its gates become ReLU."""
        sites = self.sites(model)
        return exchange_activations(model, sites, list(map(relu_for, sites)), plan_gates).config_changes


def choose_exchange(read: OutputReader, folds: Folds, config: ConversionConfig) -> Exchange:
    """The exchange that the options ask for.

    A Softplus with no linear map after it stays, too: it makes a scale positive, and ReLU would give zeros. Raises
    ValueError where all gates stay, and ConversionRefusedError where a gate works in place on an input that is used
    again, because a recording has no in-place operations.
    """
    model = read.model
    exchange = Exchange(check_kinds(config.kinds or SMOOTH_KINDS), tuple(dict.fromkeys(config.keep)))
    sites = exchange.sites(model)
    if any(site.kind == "softplus" for site in sites):
        recording = exchange.recordings(read).of(folds.first)
        without_map = set().union(*find_layers(recording, model, sites).unfit.values())
        scales = [site.name for index, site in enumerate(sites) if site.kind == "softplus" and index in without_map]
        exchange = replace(exchange, keep=(*exchange.keep, *scales))
    if not exchange.sites(model):
        raise ValueError(
            f"{', '.join(exchange.keep[:4])}: there is nothing to convert. Each gate is kept, or is a "
            "Softplus without a linear map after it"
        )
    if reused := reused_inputs(model, exchange.sites(model), folds.samples.few.inputs):
        raise ConversionRefusedError(
            f"{', '.join(reused)} of {type(model).__name__} works in place, and its input is used again after it: the "
            "maps after it cannot be refitted. Give it inplace=False if the code means the input, not the gate's output"
        )
    return exchange


def reused_inputs(model: nn.Module, sites: Sequence[ActivationSite], inputs: Inputs) -> list[str]:
    """The names of activations that work in place on an input that is used again; the outputs show this."""
    in_place = [site for site in sites if getattr(site.module, "inplace", False)]
    expected = outputs_of(model, inputs) if in_place else []

    def matters(some: Sequence[ActivationSite]) -> bool:
        for site in some:
            site.module.inplace = False
        try:
            return not agree(expected, outputs_of(model, inputs))
        finally:
            for site in some:
                site.module.inplace = True

    return [site.name for site in in_place if matters([site])] if in_place and matters(in_place) else []


@dataclass(frozen=True)
class Student:
    """The converted network of one rung and its report; `gaps` are its distances on the held-out samples."""

    model: nn.Module
    layers: tuple[LayerRefit, ...]
    held_out: Evaluation | None
    gaps: tuple[float, ...]
    config_changes: tuple[str, ...]
    width_share: float


@dataclass(frozen=True)
class Task:
    """The common inputs of all rungs: the original that `read` reads, the samples, the gates, the options."""

    read: OutputReader
    folds: Folds
    exchange: Exchange
    config: ConversionConfig
    progress: bool = False
    warnings: tuple[str, ...] = ()  # about the data

    @property
    def model(self) -> nn.Module:
        """The original."""
        return self.read.model

    def tell(self, line: str) -> None:
        """Print a line on stderr if `progress` is set, else log it."""
        if self.progress:
            print(line, file=sys.stderr, flush=True)
        else:
            progress_log.info(line)

    @cached_property
    def recordings(self) -> Recordings:
        """The original's recordings, one for each shape of inputs."""
        return self.exchange.recordings(self.read)

    @cached_property
    def few(self) -> Outputs:
        """The original's outputs for a few samples."""
        return self.read(self.folds.samples.few.inputs)

    def evaluate(self, student: nn.Module, batches: Iterable[Batch]) -> tuple[Evaluation | None, tuple[float, ...]]:
        """`evaluate_conversion` of original, plain swap and student, on this process's batches."""
        return evaluate_conversion(self.read, student, self.exchange.plain_swap(self.model), batches)


def evaluate_conversion(
    read: OutputReader, student: nn.Module, substitution: TemporaryRelu, batches: Iterable[Batch]
) -> tuple[Evaluation | None, tuple[float, ...]]:
    """(the evaluation of the three networks, the distance of the converted network from the original on each sample).

    The result is (None, ()) if every prediction of all processes is padding. `read` reads the original, and
    `substitution` makes its plain swap. Every process must call, with batches of its own.
    """

    def swapped(inputs: Any) -> Outputs:
        with substitution.applied():
            return read(inputs)

    live = LiveUnits({name: student.get_submodule(name) for name in substitution.gates})

    def counted(model: nn.Module, inputs: Any) -> Any:
        with live.counting(inputs):
            return run_example(model, inputs)

    runs: dict[str, Callable[[Any], Outputs]] = {"direct": swapped, "refitted": partial(read.of(student), call=counted)}
    metrics, found = compare_outputs(read, runs, batches, over_processes=True)
    direct, refitted = found["direct"], found["refitted"]
    counts = zip(*each_has((live.live, live.outputs)), strict=True)
    live.live, live.outputs = (sum(part, Counter()) for part in counts)
    if not refitted.rows:
        return None, ()
    gaps = refitted.gaps
    return Evaluation(refitted.rows, len(gaps), metrics, direct.distance, refitted.distance, live.shares), gaps
