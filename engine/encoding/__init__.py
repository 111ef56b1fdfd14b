"""Encoders: every token of a text attends to the whole text, so no KV is shared or kept, and nothing is decoded."""
