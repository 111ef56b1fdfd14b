"""Two workloads on the same rows: their prompts as one batch, and what differs in the answers."""
