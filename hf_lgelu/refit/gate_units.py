"""Gates whose input is a map's output, each with that map and with the other half of a gated unit."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from hf_lgelu.models.dataflow import COPIES, RESHAPES, AffineOperation, operation_name, read_affine, shape_of, users
from hf_lgelu.refit.aim import BATCH_NORMS
from hf_lgelu.refit.program import Program


@dataclass(frozen=True)
class GateUnit:
    """A gate, the operation that makes its input, and the other half of a gated unit, or None.

    `owns_other` says whether the other half alone uses its parameters.
    """

    site: int
    before: AffineOperation
    other: AffineOperation | None
    owns_other: bool = False

    @property
    def maps(self) -> tuple[AffineOperation, ...]:
        """The maps of the unit: before the gate, and the other half where the unit owns it."""
        return (self.before, self.other) if self.other is not None and self.owns_other else (self.before,)

    @property
    def parameters(self) -> Iterator[str]:
        """The names of the weights and biases."""
        for operation in self.maps:
            yield from operation.parameters


def find_gate_units(program: Program) -> list[GateUnit]:
    """The gates whose input is the output of an affine map with parameters of its own, by site."""
    found, used_once = [], program.flow.are_used_once
    for site, calls in sorted(program.flow.calls.items()):
        before = affine_source(program, calls[0].args[0], calls[0]) if len(calls) == 1 else None
        if before is None or before.weight is None or not (before.is_direct and used_once(*before.parameters)):
            continue
        other = _other_half(program, calls[0])
        # Of a module, which computes no more: its hooks then see the values. A block that multiplies by parameters of
        # its own does not call them "weight".
        if not all(each is None or each.weight_name.rpartition(".")[2] == "weight" for each in (before, other)):
            continue
        found.append(GateUnit(site, before, other, other is not None and used_once(*other.parameters)))
    return found


def affine_source(program: Program, node: Node, user: Node) -> AffineOperation | None:
    """The affine operation whose output only `user` takes, perhaps through reshapes that keep the last axis."""
    is_reshaped = False
    while users(node) == [user]:
        operation = read_affine(node, program.flow) or _read_norm(program, node)
        if operation is not None:
            if operation.channel_axis is not None:
                return None if is_reshaped and operation.channel_axis != -1 else operation
            # A weight with a number for each channel, unlike that of a LayerNorm over several axes.
            weights = [each for each in operation.node.all_input_nodes
                       if program.flow.parameter(each) == operation.weight]  # fmt: skip
            return operation if all(shape_of(each) == shape_of(operation.node)[-1:] for each in weights) else None
        name = operation_name(node)
        if name in RESHAPES and shape_of(node)[-1:] == shape_of(node.args[0])[-1:]:
            is_reshaped = True
        elif name not in COPIES:
            return None
        node, user = node.args[0], node
    return None


def _read_norm(program: Program, node: Node) -> AffineOperation | None:
    """The BatchNorm with fixed statistics whose first output is `node`, as an affine operation, or None."""
    norm = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if norm is None or operation_name(norm) not in BATCH_NORMS:
        return None
    weight, bias = (program.flow.parameter(operand) for operand in norm.args[1:3])
    if weight is None or bias is None:
        return None
    return AffineOperation(norm, norm.args[0], weight, bias, channel_axis=1 - len(shape_of(node)), output_axis=0)


def _other_half(program: Program, call: Node) -> AffineOperation | None:
    """The map whose output is multiplied by the gate's output, or None."""
    product = product_behind(call)
    if product is None:
        return None
    node = next(operand for operand in product.args[:2] if [*views_back(operand, call)][-1] is not call)
    operation = affine_source(program, node, product)
    return operation if operation is not None and operation.mixes and operation.is_direct else None


def product_behind(call: Node) -> Node | None:
    """The product of a gate's output with another tensor of its shape, if nothing else uses the gate's output."""
    current = call
    while len(users(current)) == 1:
        user = users(current)[0]
        if operation_name(user) == "mul":
            operands = [operand for operand in user.args[:2] if isinstance(operand, Node)]
            alike = len(operands) == 2 and shape_of(operands[0]) == shape_of(operands[1]) == shape_of(user)
            return user if alike and operands[0] is not operands[1] else None
        if operation_name(user) not in COPIES:
            return None
        current = user
    return None


def views_back(node: Node, source: Node | None = None) -> Iterator[Node]:
    """A node, and those that it is a view or a copy of, back to `source` at most."""
    yield node
    while node is not source and operation_name(node) in COPIES | RESHAPES:
        node = node.args[0]
        yield node
