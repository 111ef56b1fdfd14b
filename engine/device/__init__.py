"""The device: which one is used, its number formats, its free memory, copies to and from it."""
