"""Finds checkpoints on disk or on a hub, identifies them by a digest, and reads them."""
