"""The Triton backend of a name."""

from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError

if TYPE_CHECKING:  # Triton is not installed everywhere that the CPU path runs
    from engine.kernels.triton.triton_attention import TritonAttention


def make_triton_attention(name: str, **arguments: Any) -> "TritonAttention":
    """Makes "paged", "relay" or "fused".

    Args:
        name: of the backend.
        arguments: as `TritonAttention` has them.
    Raises:
        ConfigError: Triton is not installed, or the shape or device is not covered.
    """
    try:
        from engine.kernels.triton.fused import FusedAttention, PagedAttention
        from engine.kernels.triton.relay import RelayAttention
    except ImportError as error:
        raise ConfigError(f"attention {name!r} needs Triton: {error}") from error
    backends: dict[str, type[TritonAttention]] = {
        "paged": PagedAttention,
        "relay": RelayAttention,
        "fused": FusedAttention,
    }
    try:
        return backends[name](**arguments)
    except ValueError as error:
        raise ConfigError(f"attention {name!r}: {error}") from error
