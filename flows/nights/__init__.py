"""Night files: read, checked, run."""
