"""The model: its layers, and the attention backend underneath."""
