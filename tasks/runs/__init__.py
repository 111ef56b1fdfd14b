"""A run of one workload: its folder, record, progress and lock, and its copy elsewhere."""
