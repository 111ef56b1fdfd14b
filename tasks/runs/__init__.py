"""A run of one workload: its folder, record, progress, lock, recovery, and its copy elsewhere."""
