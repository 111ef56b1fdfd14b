"""Nights of several workloads: their graph, their order, and what fits before a deadline."""
