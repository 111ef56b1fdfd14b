"""RelayAttention's model of traffic."""


def equation_10(num_requests: int, prefix_tokens: int, own_tokens: int) -> float:
    """The speed-up over plain attention by elements moved: one query head a KV head, decode only."""
    return (prefix_tokens + own_tokens + 2) / (prefix_tokens / num_requests + own_tokens + 7)
