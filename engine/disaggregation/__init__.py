"""Prompts computed by another process than the one that decodes."""
