"""How good answers are: samples before a night, two prompts beside each other, gold rows and calibration."""
