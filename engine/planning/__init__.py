"""The global plan: the prefix tree of a batch, its prefix groups, the blocks that groups share, partitions."""
