"""KV memory: the cache itself and the pools that say which of its blocks are free."""
