"""Graphs that Marabou's ONNX parser takes for others (2.0.0), told from the file before it reads them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hf_lgelu.extras import require

# These hand on the variables of their input, not new ones.
_SAME_VARIABLES = frozenset(
    ("Reshape", "Flatten", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Dropout", "Cast", "Split", "Slice")
)
# These have variables of their own that no linear equation defines.
_NO_EQUATION = frozenset(("Relu", "LeakyRelu", "Sigmoid", "Tanh", "MaxPool", "Clip", "Sign", "Abs"))


def misread(file: str) -> str | None:
    """Why an ONNX file would be read as another network, or None where nothing of the kind is known.

    A constant is added to a tensor by editing the equation that defines it, which changes all others that use it; of
    convolutions the dilations are not read, of max-pooling neither padding, dilations nor ceil_mode.
    """
    return next(_reasons(require("onnx", "verify").load(file).graph), None)


def _reasons(graph: Any) -> Iterator[str]:
    for node in graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Conv" and any(step != 1 for step in _whole_numbers(attributes, "dilations")):
            yield f"{node.output[0]} is a convolution with dilation, which its parser ignores"
        if node.op_type == "MaxPool":
            automatic = attributes["auto_pad"].s if "auto_pad" in attributes else b"NOTSET"
            is_padded = any(_whole_numbers(attributes, "pads")) or automatic not in (b"NOTSET", b"VALID")
            is_spread = any(step != 1 for step in _whole_numbers(attributes, "dilations"))
            if is_padded or is_spread or ("ceil_mode" in attributes and attributes["ceil_mode"].i):
                yield f"{node.output[0]} is max-pooling with padding, dilation or ceil_mode, which its parser ignores"
    yield from _edited_equations(graph)


def _edited_equations(graph: Any) -> Iterator[str]:
    constants = {tensor.name for tensor in graph.initializer}
    maker: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def origin(name: str) -> str:
        return origins.get(name, name)

    for node in graph.node:
        if all(name in constants for name in node.input):
            constants.update(node.output)
        maker.update(dict.fromkeys(node.output, node))
        if node.op_type in _SAME_VARIABLES and node.input and node.input[0] not in constants:
            origins.update(dict.fromkeys(node.output, origin(node.input[0])))
    users = Counter(origin(name) for node in graph.node if node.op_type not in _SAME_VARIABLES for name in node.input)
    users.update(origin(output.name) for output in graph.output)
    for node in graph.node:
        varying = [origin(name) for name in node.input if name not in constants]
        if node.op_type != "Add" or len(varying) != 1 or varying[0] not in maker:
            continue
        if users[varying[0]] > 1 and maker[varying[0]].op_type not in _NO_EQUATION:
            yield (
                f"{node.output[0]} adds a constant to {varying[0]}, which is used elsewhere too, and its parser adds "
                "it there as well. Compute the sum by a layer of its own, with the constant as its bias"
            )


def _whole_numbers(attributes: dict[str, Any], name: str) -> list[int]:
    return list(attributes[name].ints) if name in attributes else []
