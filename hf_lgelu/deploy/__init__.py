"""After hardening: plain checkpoints, ONNX, int8, pruning, verification, exact linear pieces, the Hub."""
