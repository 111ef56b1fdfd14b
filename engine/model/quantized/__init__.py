"""Models on the CPU whose weights stay quantized as in their files."""
