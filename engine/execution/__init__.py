"""Steps as they run: the loop, CUDA graphs, sampling, answers, and what is measured of each step."""
