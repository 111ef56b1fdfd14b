"""What benchmarks share: the work, the machine, correctness, timing, result files."""
