"""The CUDA backend: paged attention, recurrences in chunks, fused row kernels, skinny products, decode under graphs.

Importing it needs no CUDA and no Triton: what needs either is imported where it is used.
"""
