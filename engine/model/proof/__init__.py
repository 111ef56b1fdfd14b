"""Whether an architecture is computed as transformers does: a tiny model of its kind, run both ways."""
