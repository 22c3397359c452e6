"""λ-GELU in C++ for the CPU: one fused, vectorized pass forward and one backward.

`lambda_gelu.cpp` is compiled on first use, in a second or two, by the compiler at hand, and kept in the
user's cache; nothing is built at install time. Without a compiler the automatic choice goes on to "aten".
"""
