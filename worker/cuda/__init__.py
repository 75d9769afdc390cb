"""The CUDA backend of dense models: paged attention, fused row kernels and skinny products, decode under graphs.

Importing it needs no CUDA and no Triton: what needs either is imported where it is used.
"""
