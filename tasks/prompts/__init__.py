"""Texts to token ids and back."""
