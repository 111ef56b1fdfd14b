"""Encoders: every token of a text attends to all of it, so nothing is shared, cached or decoded."""
