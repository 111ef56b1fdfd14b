"""What is to be answered: a workload's definition, read from TOML and checked."""
