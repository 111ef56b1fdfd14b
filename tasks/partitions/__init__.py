"""Pieces of a plan: what is answered, what was tried, the engine that answers it."""
