"""Decoder layers on a GPU: the kernels between matrix products, and products in fp8."""
