"""Reproducible measurements. Each checks its own answers first; results are JSON with hardware, versions and commit."""
