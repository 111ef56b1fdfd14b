"""Execution of steps: the loop, CUDA graphs, sampling, answers, and the metrics of each step."""
