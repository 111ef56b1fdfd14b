"""Families whose layers the CPU kernels compute beside Llama's: what their modules are called, and what they hold."""
