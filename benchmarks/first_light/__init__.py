"""The measurements for the first minutes with a GPU, stage by stage: `python -m benchmarks.first_light`."""
