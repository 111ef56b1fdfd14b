"""Attention and whole layers on the CPU: C++ kernels, and torch where there is no compiler."""
