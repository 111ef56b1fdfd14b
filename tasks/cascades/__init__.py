"""Cascades: a small model scores every row, and a large model answers the rows of which the small one is unsure."""
