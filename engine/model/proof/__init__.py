"""Proves that the engine computes an architecture as transformers does, on a tiny model of its kind."""
