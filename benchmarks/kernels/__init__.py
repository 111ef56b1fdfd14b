"""Attention on a GPU, measured and tuned."""
