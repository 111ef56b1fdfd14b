"""Starts the engines of a benchmark, each in its own process, with the same model, threads and limits."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.measuring.model_folder import read_model_shape
from benchmarks.peers.catalog import PEERS_FOLDER, is_gpu
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.protocol import LoadSettings
from engine.kernels import cdiv

BLOCK_TOKENS = 128
"""KV memory is a multiple of every engine's block size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What all engines of a benchmark have in common.

    Attributes:
        options: further settings, by engine.
        logs: folder for the output of engines.
        run_seconds: longest that one run of one workload may take.
    """

    model: Path
    device: str
    num_threads: int
    max_num_batched_tokens: int
    options: Mapping[str, dict[str, Any]]
    pythons: Mapping[str, Path]
    logs: Path
    run_seconds: float

    @property
    def num_unmeasured(self) -> int:
        """Warm-up runs: on a GPU two, since batchloom captures a CUDA graph when a size occurs again."""
        return 2 if is_gpu(self.device) else 1

    def start(self, name: str, module: str, arguments: Sequence[str] = ()) -> PeerProcess:
        python = self.pythons.get(name, Path(sys.executable))
        log = self.logs / f"{name}.log"
        return PeerProcess(name, python, module, arguments, log=log, threads=self.num_threads)

    def settings(self, name: str, dtype: str, kv_tokens: int, longest_request: int) -> LoadSettings:
        files = [self.model / "config.json", *sorted(self.model.glob("*.safetensors"))]
        known = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        scratch = PEERS_FOLDER / "converted" / sha256(repr(known).encode()).hexdigest()[:16]
        scratch.mkdir(parents=True, exist_ok=True)
        return LoadSettings(
            model=str(self.model),
            dtype=dtype,
            device=self.device,
            kv_tokens=kv_tokens,
            kv_bytes=kv_tokens * read_model_shape(self.model, dtype).kv_bytes_per_token,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=cdiv(longest_request + 1, BLOCK_TOKENS) * BLOCK_TOKENS,
            num_threads=self.num_threads,
            scratch=str(scratch),
            options=self.options.get(name, {}),
        )
