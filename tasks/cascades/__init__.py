"""Cascades: a small model scores every row, and those that it is unsure of go to a large one."""
