"""KV of shared beginnings on disk, for later runs over the same documents."""
