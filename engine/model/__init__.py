"""The model: its checkpoint, its layers, and the attention backend underneath."""
