"""Checkpoints on disk or on a hub: found, named by a digest, read."""
