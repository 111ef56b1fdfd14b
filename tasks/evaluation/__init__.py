"""Evaluation of answers against gold rows: metrics with intervals, thresholds, calibration."""
