"""The λ-gates in C++ for the CPU: one fused, vectorized pass forward and one backward.

`gate.cpp` is compiled for a gate on its first use, in a second or two, by the compiler at hand, and kept in the
user's cache; nothing is built at install time. Without a compiler the automatic choice goes on to "aten".
"""
