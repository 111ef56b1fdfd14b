"""How good answers are: samples, comparisons of two prompts or models, evaluation with gold rows, calibration."""
