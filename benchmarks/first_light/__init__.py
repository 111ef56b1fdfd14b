"""What the first minutes with a GPU are spent on, stage by stage: `python -m benchmarks.first_light`."""
