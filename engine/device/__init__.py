"""The device computed on: which one, its number formats, its free memory, copies to and from it."""
