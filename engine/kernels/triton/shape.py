"""The attention shapes that the Triton kernels support; checked without torch and Triton, before any work."""

LARGEST_GROUP = 16
"""Query heads per KV head: they must fit the rows of the narrowest tile."""


def check_shape(*, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Raises `ValueError` if the kernels do not support a model's heads or a KV block's size. See `TritonAttention`."""
    if num_q_heads % num_kv_heads or not 1 <= num_q_heads // num_kv_heads <= LARGEST_GROUP:
        raise ValueError(
            f"{num_q_heads} query heads for {num_kv_heads} KV heads: must be 1 to {LARGEST_GROUP} times as many"
        )
    for name, size in (("head_dim", head_dim), ("block_size", block_size)):
        if size % 8 or not 8 <= size <= 256:
            raise ValueError(f"{name} must be a multiple of 8 of at most 256, got {size}")
