"""A run without a model: the real scheduler, and a roofline for the time of each step."""
