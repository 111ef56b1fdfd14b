"""Shared by the benchmarks: workloads, machine description, correctness, timing, result files."""
