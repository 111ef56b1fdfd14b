"""Files of a run: Arrow artifacts, spilled rows, external sorting."""
