"""Attention on a GPU, measured and tuned; every kernel, compiled for every architecture."""
