"""Disaggregation: one process computes prompts, another one decodes."""
