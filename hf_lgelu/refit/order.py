"""In which order the operations of a forward pass are run when it stops at every layer, and what is kept until when."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from hf_lgelu.refit.layers import Layer
from hf_lgelu.refit.program import Program, upstream


@dataclass(frozen=True)
class Stage:
    """One layer: the operations up to its maps' features, and those from its maps to the target.

    `later` are the nodes whose values later stages use, `features` those that `behind` uses: with the refitted
    weights it is run a second time.
    """

    before: tuple[Node, ...]
    behind: tuple[Node, ...]
    later: frozenset[Node]
    features: frozenset[Node]


def plan_stages(program: Program, layers: Sequence[Layer]) -> list[Stage]:
    """One stage a layer. Nothing that no target depends on is run."""
    done: set[Node] = set()
    parts: list[tuple[list[Node], list[Node]]] = []
    for layer in layers:
        needed_for = upstream(layer.target)
        behind = _downstream(_maps_and_weights(layer, program), needed_for, program)
        before = [node for node in program.operations if node in needed_for and node not in done and node not in behind]
        parts.append((before, [node for node in program.operations if node in behind]))
        done |= set(before) | behind
    needed: set[Node] = set()
    stages: list[Stage] = []
    for before, behind in reversed(parts):
        features = _operands(behind)
        stages.append(Stage(tuple(before), tuple(behind), frozenset(needed), frozenset(features)))
        needed |= features | _operands(before)
    return stages[::-1]


def differing_nodes(program: Program, layers: Sequence[Layer]) -> frozenset[Node]:
    """The operations whose values are not the same in the original and in the ReLU network under way."""
    calls = [call for calls in program.flow.calls.values() for call in calls]
    maps = [node for layer in layers for node in _maps_and_weights(layer, program)]
    return frozenset(_downstream([*calls, *maps], set(program.operations), program))


def _maps_and_weights(layer: Layer, program: Program) -> Iterator[Node]:
    """A layer's maps, and the views through which they take their weights: what a refit changes first."""
    for consumer in layer.maps:
        yield consumer.node
        for operand in consumer.node.all_input_nodes:
            while operand.op != "placeholder" and program.flow.parameter(operand) is not None:
                yield operand
                operand = operand.args[0]


def _downstream(starts: Iterable[Node], within: set[Node], program: Program) -> set[Node]:
    found = set(starts)
    for node in program.operations:
        if node in within and any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def _operands(nodes: Iterable[Node]) -> set[Node]:
    return {operand for node in nodes for operand in node.all_input_nodes}
