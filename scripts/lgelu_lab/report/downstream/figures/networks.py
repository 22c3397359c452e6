"""The colours of the networks, the same in every figure on the measurements."""

COLOURS = {
    "gelu": "#000000",
    "relu": "#E69F00",
    "lambda_gelu": "#009E73",
    "hardened": "#56B4E9",
    "hardened_relu": "#0072B2",
}


def colour_of(model: str) -> str:
    """A network's colour; grey for one that is not known."""
    return COLOURS.get(model, "#666666")
