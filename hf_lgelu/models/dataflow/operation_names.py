"""ATen operations that are alike for whoever walks a graph, by the names that `operation_name` gives."""

COPIES = frozenset(("clone", "contiguous", "alias", "detach", "_to_copy", "to", "dropout"))
"""In eval mode they leave every value, but for rounding to another dtype, where it is."""

RESHAPES = frozenset(("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
"""They leave the order of the elements."""

CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
