"""Benchmarks. Each checks its answers before it measures; results are JSON with hardware, versions and commit."""
