"""KV of shared prefixes on disk, for later runs over the same documents."""
