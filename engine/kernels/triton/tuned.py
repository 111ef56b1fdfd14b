"""Tuned configurations per architecture (`configs/*.json`), read at start, written by `benchmarks.kernels.tune`.

A file has one entry per element size and head dim. An entry has the costs of memory and of a launch, and the launches
to choose from in each step. A launch is one compiled kernel: its tile shapes, its compiler options, and the costs of a
tile (cost_model.py). An entry's `origin` says whether costs were measured, and where, or estimated from data sheets.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

CONFIG_FOLDER = Path(__file__).parent / "configs"

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """One tile shape of a launch, and the slot times of its tiles.

    Attributes:
        rows: packed query rows (tokens times query heads per KV head), a power of two of at least 16.
        tokens: KV tokens per loop iteration, a power of two of at least 16.
        tile_us: fixed time of a tile: start, query, block table, store.
        kilotoken_us: time per 1,000 KV tokens, without waiting for memory.
        partial_us: further time of a tile with a partial result: store, counter, merge.
    """

    __pydantic_config__ = _STRICT

    rows: int
    tokens: int
    tile_us: float
    kilotoken_us: float
    partial_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One way to compile the attention kernel.

    Attributes:
        narrow: the shape for few query rows, where memory is the bottleneck.
        wide: the shape for many, where arithmetic is the bottleneck; None: only narrow tiles, which take fewer
            registers and allow more programs per processor.
        programs_per_processor: programs that a processor runs at the same time: its program slots.
        options: further compiler options of the architecture (waves_per_eu, matrix_instr_nonkdim, ...).
    """

    __pydantic_config__ = _STRICT

    name: str
    narrow: TileShape
    wide: TileShape | None
    num_warps: int
    num_stages: int
    programs_per_processor: int
    options: Mapping[str, int]

    @property
    def shapes(self) -> tuple[TileShape, ...]:
        return (self.narrow,) if self.wide is None else (self.narrow, self.wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedAttention:
    """The tuned configuration of one attention shape on one architecture.

    Attributes:
        num_processors: of the device; in the files, of that on which costs were measured.
        min_split_tokens: fewest KV tokens of a split.
        start_us: fixed time of a launch.
        memory_kilotoken_us: time in which the whole device reads 1,000 KV tokens of one KV head from memory.
        l2_kilotoken_us: the same for tokens that another program has just read.
    """

    __pydantic_config__ = _STRICT

    architecture: str
    origin: str
    num_processors: int
    min_split_tokens: int
    start_us: float
    memory_kilotoken_us: float
    l2_kilotoken_us: float
    launches: tuple[Launch, ...]

    def for_8_bit_kv(self) -> "TunedAttention":
        """The configuration for KV in 8 bits. Its conversion takes registers, so launches get fewer stages or shorter
        loop iterations, without which registers would spill."""

        def for_conversion(found: Launch) -> Launch:
            narrow, wide = found.narrow, found.wide
            if wide is None or found.name == "grouped":
                narrow = replace(narrow, tokens=min(narrow.tokens, 32))
                wide = wide and replace(wide, tokens=min(wide.tokens, 32))
            return replace(found, num_stages=2 if wide else found.num_stages, narrow=narrow, wide=wide)

        return replace(
            self,
            memory_kilotoken_us=self.memory_kilotoken_us / 2,
            l2_kilotoken_us=self.l2_kilotoken_us / 2,
            launches=tuple(for_conversion(found) for found in self.launches),
        )


def load_tuned(architecture: str, *, element_bits: int, head_dim: int) -> TunedAttention:
    """Reads the entry for an element size and the smallest head dim that is at least head_dim. Raises `ValueError` if
    no entry fits, or the file has an unknown key or lacks one.

    Args:
        architecture: "sm_90", "gfx942", ...; "default" is used if it has no file.
    """
    path = CONFIG_FOLDER / f"{architecture}.json"
    document = json.loads((path if path.exists() else CONFIG_FOLDER / "default.json").read_text())
    entries = [
        entry
        for entry in document.pop("entries")
        if entry["element_bits"] == element_bits and entry["head_dim"] >= head_dim
    ]
    if not entries:
        raise ValueError(f"{path.name}: no entry for {element_bits}-bit elements and head dim {head_dim}")
    entry = min(entries, key=lambda found: int(found["head_dim"]))
    of_entry = {name: value for name, value in entry.items() if name not in ("element_bits", "head_dim")}
    try:
        return TypeAdapter(TunedAttention).validate_python(document | of_entry)
    except ValidationError as error:
        raise ValueError(f"{path.name}: {error}") from error
