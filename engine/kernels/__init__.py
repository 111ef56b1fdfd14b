"""Attention kernels: Triton, and their torch twins. They know tensors and block tables, no requests or schedules."""
