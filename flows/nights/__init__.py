"""Nights that a file describes: read, checked, run."""
