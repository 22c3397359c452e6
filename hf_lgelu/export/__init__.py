"""How a network leaves: ReLU and GELU checkpoints, ONNX, its card, the Hub."""
