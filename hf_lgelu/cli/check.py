"""`hf-lgelu check`: what a checkpoint is, what ReLU would cost, and what prevents a conversion. Nothing is written."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from hf_lgelu.cli.arguments import CheckArguments, named
from hf_lgelu.cli.checkpoint import GivenCheckpoint, read_checkpoint
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.inputs import read_rows, why_not_read
from hf_lgelu.cli.rows import InputSet
from hf_lgelu.comparing.net_change import networks_table
from hf_lgelu.comparing.net_comparison import compare_networks_on
from hf_lgelu.comparing.output_comparison import compare_models
from hf_lgelu.formats import counted, text_table
from hf_lgelu.graph.layers import Layers, find_layers
from hf_lgelu.graph.recording import Recording
from hf_lgelu.models.config_keys import runtime_warnings
from hf_lgelu.models.hardening import is_hardened, smallest_by_site, swap_errors
from hf_lgelu.models.surgery import put_relu, reused_inputs
from hf_lgelu.networks.batches import cut_batches, read_batches
from hf_lgelu.networks.network import Network
from hf_lgelu.networks.outputs import OutputReader, task_outputs
from hf_lgelu.networks.random_inputs import random_inputs
from hf_lgelu.networks.run import run_example
from hf_lgelu.networks.sites import LEARNED_KINDS, SMOOTH_KINDS, ActivationSite, find_sites, sites_in_words
from hf_lgelu.networks.smooth_calls import find_smooth_calls, unused_modules
from hf_lgelu.refit.config import FAR_KL, SAMPLES_TO_RANK
from hf_lgelu.refit.gate_costs import gate_costs
from hf_lgelu.refit.weights import why_not_writable
from hf_lgelu.refit.widen import can_be_wider

_EXAMPLE_ROWS = 8
_LONGEST_LIST = 12


@dataclass(frozen=True)
class Examined:
    """What the answers are read from: a checkpoint, one batch, and the data set of the batch, if it has one."""

    given: GivenCheckpoint
    inputs: Mapping[str, Tensor]
    evaluation: InputSet | None
    outputs: list[str] | None
    arguments: CheckArguments

    @property
    def sites(self) -> list[ActivationSite]:
        """The smooth gates."""
        return find_sites(self.given.network)

    @property
    def learns_hardness(self) -> bool:
        """Whether there is a λ-gate."""
        return any(site.kind in LEARNED_KINDS for site in self.sites)

    def counted(self, output: Any) -> list[Tensor]:
        """The tensors of an output that count."""
        return list(task_outputs(output, self.outputs).values())

    @cached_property
    def layers(self) -> tuple[Recording, Layers] | str:
        """The trace and the layers that a conversion refits, or the reason why a conversion is refused."""
        network, sites = self.given.network, self.sites
        reason = why_not_writable(network)
        if reason is not None:
            return f"No: {reason}"
        if reused := reused_inputs(network, sites, dict(self.inputs)):
            return f"No: {', '.join(reused)} works in place, and its input is read again"
        try:
            traced = Recording(network, sites, dict(self.inputs), self.counted)
            return traced, find_layers(traced, network, sites)
        except ValueError as error:
            return f"No: {' '.join(str(error).split())}"


def check(arguments: CheckArguments, evaluation: Rows | None) -> None:
    """Print the answers, section by section. Raises the errors of loading and reading. Nothing is changed."""
    given = read_checkpoint(arguments.model, **arguments.reading)
    rows = None if evaluation is None else read_rows(evaluation, given)
    print(f"{given.name}: {given.kind}, {sites_in_words(given.network)}")
    try:
        inputs = random_inputs(given.model) if rows is None else rows.first(_EXAMPLE_ROWS)
    except ValueError as error:
        print(f"\nIt cannot be run here, so nothing more is known: {error}")
        return
    examined = Examined(given, inputs, rows, named(arguments.outputs), arguments)
    if any(tensor.isnan().any() for tensor in examined.counted(run_example(given.network, inputs))):
        where = "random inputs" if rows is None else rows.description
        raise ValueError(f"{given.name} gives NaN on {where}: look for NaN in its weights and among the inputs")
    network = given.network
    with Network(network) as looked:
        looked.take_calls(inputs)
        for title, lines in (
            ("Is it piecewise linear?", _linearity(examined)),
            ("What would ReLU instead of its gates cost?", _swap(examined)),
            ("Can it be converted without training?", _conversion(examined)),
            ("Before anything is written", _notes(examined)),
            ("What to do", _advice(examined)),
        ):
            found = list(lines)
            if found:
                print(f"\n{title}", *(f"  {line}" for line in found), sep="\n", flush=True)


def _linearity(examined: Examined) -> Iterator[str]:
    network, inputs = examined.given.network, examined.inputs
    calls = find_smooth_calls(network, inputs)
    unused = unused_modules(network, inputs, [call.module for call in calls if call.module], examined.outputs)
    calls = [call for call in calls if call.module not in unused]
    if unused:
        yield f"Not counted, because no output that counts depends on it: {', '.join(sorted(unused))}."
    if calls:
        yield "No. On the path of these inputs it computes smoothly:"
        yield from _shortened([f"- {call}" for call in calls])
        others = sum(call.role not in ("gate", "call") for call in calls)
        if others and examined.sites:
            yield f"{counted(others, 'call')} of these would stay smooth, because a conversion exchanges gates alone."
    else:
        yield "Yes: no smooth activation was seen on the path of these inputs."
    yield (
        "Softmax, normalization and products of activations are not gates and not listed. A formula of powers, "
        "quotients or exponentials in a forward is not seen."
    )


def _swap(examined: Examined) -> Iterator[str]:
    network, evaluation = examined.given.network, examined.evaluation
    if not examined.sites:
        return
    if examined.learns_hardness:
        smallest = smallest_by_site(examined.given.model)
        yield (
            f"The smallest λ of {len(smallest)} gates is {min(smallest.values()):.4g}: ReLU changes a unit by at most "
            f"κ/λ = {max(swap_errors(examined.given.model, smallest).values()):.3g}"
        )
    swapped = copy.deepcopy(network)
    put_relu(swapped, kinds=SMOOTH_KINDS, rewrite_config=False)
    if evaluation is None:
        yield f"On random inputs, swapped without a refit: {compare_models(network, swapped, examined.inputs)}"
        yield "Random inputs say little; give real ones by --evaluation DATA."
        return
    asked, outputs = examined.arguments, examined.outputs
    score, found = compare_networks_on(
        OutputReader(network, outputs),
        {"swapped": OutputReader(swapped, outputs)},
        cut_batches(read_batches(evaluation.batches("evaluation", progress=asked.progress))),
    )
    change = found["swapped"].change
    yield f"On {evaluation.description}, {len(evaluation):,} inputs, swapped without a refit:"
    yield from text_table(*networks_table(score.values, {"plain swap": change}, main=True), text_columns=1)
    if change.kl is not None and not change.kl <= FAR_KL:
        yield f"That is far from the original: KL {change.kl:.3g} nat, and {FAR_KL} is far."
    if len(examined.sites) < 2:
        return
    inputs = evaluation.batches("gates", progress=False)
    costs = gate_costs(network, inputs, max_samples=SAMPLES_TO_RANK, outputs=outputs)
    three = ", ".join(f"{name} {cost:.3g}" for name, cost in list(costs.items())[:3])
    keep = min(3, len(examined.sites) - 1)  # one gate is left to convert
    way = "" if examined.given.sentences is not None else f" --keep {keep} leaves {keep} smooth."  # refused there
    yield f"These gates cost most when each is swapped alone, on at most {SAMPLES_TO_RANK} inputs: {three}.{way}"


def _conversion(examined: Examined) -> Iterator[str]:
    if not examined.sites:
        return
    if isinstance(examined.layers, str):
        yield examined.layers
        return
    (traced, layers), sites = examined.layers, examined.sites
    unfit = set().union(*layers.unfit.values())
    maps = sum(len(layer.maps) for layer in layers.layers)
    yield f"{len(sites) - len(unfit)} of {len(sites)} gates can be converted, with {maps} linear maps after them."
    if layers.uncounted:
        yield f"{len(layers.uncounted)} of them lead to outputs that do not count, and are exchanged alone."
    lines = []
    for (name, reason), before in layers.unfit.items():
        names = ", ".join(sites[index].name for index in sorted(before))
        reason = reason if reason.startswith(name) else f"{name}: {reason}"
        lines.append(f"- not {names}: {reason}")
    yield from _shortened(lines)
    if unfit:
        yield "These gates are exchanged too, but the weights after them stay as they are."
    if can_be_wider(examined.given.network, traced, layers):
        yield (
            "More hidden units usually help most: --width 1.25 adds a quarter to each block, and takes about three "
            "times as long."
        )


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _LONGEST_LIST
    return lines if more <= 1 else [*lines[:_LONGEST_LIST], f"- and {more} more"]


def _notes(examined: Examined) -> Iterator[str]:
    given = examined.given
    if examined.learns_hardness:
        yield (
            "- This checkpoint has λ-GELU only where hf_lgelu is installed and imported. `hf-lgelu export` makes "
            "checkpoints that need no hf_lgelu."
        )
    if given.sentences is not None:
        yield (
            f"- A {given.sentences.network_class} of sentence-transformers: the modules after its encoder are copied "
            f"unchanged, and networks are compared by their {'embeddings' if given.embeds else 'scores'}."
        )
    for warning in runtime_warnings(given.model):
        yield f"- With ReLU in its config: {warning}."
    output = run_example(given.network, examined.inputs)
    counted = list(task_outputs(output, examined.outputs))
    by_name = output.items() if isinstance(output, Mapping) else ()  # caches are neither tensors nor tuples
    others = [name for name, value in by_name if isinstance(value, Tensor | tuple | list) and name != "loss"]
    if len(others) > 1:
        yield (
            f"- It gives {', '.join(others)}: networks are compared by {counted[0]}, and {', '.join(counted)} count. "
            "--outputs chooses others."
        )


def _advice(examined: Examined) -> Iterator[str]:
    name = examined.given.name
    if not examined.sites:
        yield "Nothing: it has no gate that hf-lgelu could exchange."
    elif examined.learns_hardness and is_hardened(examined.given.model):
        yield f"hf-lgelu export {name} --output_dir FOLDER"
    elif examined.learns_hardness:
        yield "Its gates are soft. Train it on with harden=True, or keep its function as GELU with"
        yield f"  hf-lgelu export {name} --to gelu --output_dir FOLDER"
        yield f"or refit it: {_how_to_convert(examined)}"
    else:
        yield _how_to_convert(examined)


def _how_to_convert(examined: Examined) -> str:
    layers, reason = examined.layers, why_not_read(examined.given.model)
    if isinstance(layers, str):
        return (
            "It cannot be converted as it is. Load it by hf_lgelu.from_pretrained with the activation lambda_gelu, "
            "train it with harden=True, then call hf-lgelu export"
        )
    if reason is not None:
        return f"Call hf_lgelu.convert_to_relu(model, data) in Python: this command reads no inputs for {reason}"
    trusted = " --trust_remote_code" * examined.arguments.trust_remote_code
    return f"hf-lgelu convert {examined.given.name}{trusted} --data DATA --output_dir FOLDER --compare"
