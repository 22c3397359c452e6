"""Measurements of what ReLU networks allow, on the networks that the benchmarks train and on others."""
