"""Attention on a GPU: Triton kernels, their tuned sizes, and the work they are given."""
