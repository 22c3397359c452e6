"""Measuring what ReLU networks allow: the library's analysis on the networks that the benchmarks train."""
