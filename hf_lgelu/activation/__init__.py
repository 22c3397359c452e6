"""λ-GELU itself: the function, its hardness, its kernels and its module. Imports only torch."""
