"""The λ-gates in Triton for CUDA and ROCm devices: one fused pass forward and one backward.

Written and tested in Triton's interpreter, and compiled for NVIDIA's sm_75 to sm_120 and AMD's gfx90a, gfx942 and
gfx1100; not yet run or measured on a GPU. So the first use on a device compares the kernels with torch there, and
where they do not run or do not agree the automatic choice goes on to "aten".

Importing this package does not import Triton.
"""
