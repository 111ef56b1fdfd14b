"""The engines that can be compared, and the Python interpreter of each on this machine."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PEERS_FOLDER = Path(__file__).parents[2] / ".peers"
"""One virtual environment per engine; made by `make bench-peers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine that can be measured.

    Attributes:
        module: run with ``python -m``; it serves the protocol.
        package: that its environment must have.
        environment: folder in PEERS_FOLDER; "" for batchloom's own environment.
        is_cpu_only: is skipped on a GPU.
        can_score: scores labels; other engines generate one token instead.
        has_int8: can compute with int8 weights and activations.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    package: str
    environment: str = ""
    is_cpu_only: bool = False
    can_score: bool = False
    has_int8: bool = False


PEERS = (
    Peer(name="batchloom", module="benchmarks.peers.batchloom_engine", package="torch", can_score=True, has_int8=True),
    Peer(
        name="batchloom-torch",
        module="benchmarks.peers.batchloom_engine",
        arguments=("torch",),
        package="torch",
        is_cpu_only=True,
        can_score=True,
    ),
    Peer(name="vllm", module="benchmarks.peers.vllm_engine", package="vllm", environment="vllm", has_int8=True),
    Peer(
        name="openvino",
        module="benchmarks.peers.openvino_engine",
        package="openvino_genai",
        environment="openvino",
        is_cpu_only=True,
        has_int8=True,
    ),
    Peer(
        name="llama.cpp",
        module="benchmarks.peers.llama_cpp_engine",
        package="llama_cpp",
        environment="llama.cpp",
        is_cpu_only=True,
        can_score=True,
        has_int8=True,
    ),
    Peer(
        name="transformers-continuous",
        module="benchmarks.peers.transformers_engine",
        arguments=("continuous",),
        package="transformers",
    ),
    Peer(
        name="transformers-padded",
        module="benchmarks.peers.transformers_engine",
        arguments=("padded",),
        package="transformers",
    ),
)


def is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def available(
    peers: Sequence[Peer], chosen: Mapping[str, Path], device: str, dtype: str
) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreters of engines that can be measured, and why the others are skipped, by name.

    Args:
        peers: the wanted engines.
        chosen: interpreters named by the user, by engine.
        device: of the measurement.
        dtype: of the measurement.
    """
    pythons, skipped = {}, {}
    for peer in peers:
        python = find_python(peer, chosen)
        if peer.is_cpu_only and is_gpu(device):
            skipped[peer.name] = "runs on the CPU only"
        elif dtype == "int8" and not peer.has_int8:
            skipped[peer.name] = "has no int8"
        elif python is None:
            skipped[peer.name] = "not installed (make bench-peers)"
        else:
            pythons[peer.name] = python
    return pythons, skipped


def find_python(peer: Peer, chosen: Mapping[str, Path]) -> Path | None:
    """The interpreter that has the engine's package; None if this machine has none.

    Args:
        chosen: interpreters named by the user, by engine.
    """
    if peer.name in chosen:
        return chosen[peer.name]
    own = PEERS_FOLDER / peer.environment / "bin" / "python"
    if peer.environment and own.exists():
        return own
    return Path(sys.executable) if importlib.util.find_spec(peer.package) else None
