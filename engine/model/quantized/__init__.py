"""Models whose weights stay as files quantize them, on the CPU."""
