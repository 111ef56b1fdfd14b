"""How good answers are: samples, comparisons of two prompts, evaluation with gold rows, calibration."""
