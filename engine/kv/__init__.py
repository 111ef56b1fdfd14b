"""KV memory: the cache itself, and the pools of its free blocks."""
