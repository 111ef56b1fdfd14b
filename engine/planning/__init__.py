"""The global plan: the prefix tree of a batch, its groups, the blocks that groups share, partitions."""
