"""RelayAttention's model of memory traffic."""


def equation_10(num_requests: int, prefix_tokens: int, own_tokens: int) -> float:
    """The speed-up over plain attention, by elements moved, for decode with one query head per KV head."""
    return (prefix_tokens + own_tokens + 2) / (prefix_tokens / num_requests + own_tokens + 7)
