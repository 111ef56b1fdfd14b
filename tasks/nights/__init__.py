"""A night of several workloads: their graph, in which order they run, what fits before a deadline."""
