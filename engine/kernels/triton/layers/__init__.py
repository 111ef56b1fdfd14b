"""What a GPU computes of a decoder layer besides attention: kernels between the products, and products in FP8."""
