"""One model on several devices: each rank computes a share of every layer; the first also schedules and samples."""
