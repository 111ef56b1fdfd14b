"""One model over several devices: the first rank schedules and samples, each computes a share of every layer."""
