"""The model: loading, layers, and the choice of an attention backend."""
