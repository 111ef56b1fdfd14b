"""Fits the costs of tiles to measured times of steps (the formulas of engine/kernels/triton/cost_model.py)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.kernels.least_squares import non_negative_least_squares
from engine.kernels.triton.tuned import Launch, TunedAttention
from engine.kernels.triton.work_list import TileField, WorkList

NUM_ROUNDS = 30
"""Rounds of the fit; each uses the bounds of the steps by the costs of the last round."""

TRUST = 0.2
"""Relative error of one step that weighs as much as a cost of twice the expected one, so that costs on which the steps
hardly depend stay near the expected ones."""


DeviceCosts = tuple[float, float, float]
"""`start_us`, `memory_kilotoken_us` and `l2_kilotoken_us` of `TunedAttention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step's tiles under one launch, and the time of one layer.

    Attributes:
        tiles: int64 ``[num_shapes, 3]``, of each shape: tiles, KV tokens that they read, partial results.
        longest: int64 ``[n, num_shapes, 3]``, the same of single tiles, of which one may be the longest.
        num_fresh, num_reread: KV tokens that all tiles read, from memory and from L2.
        num_slots: program slots of the device.
        us: measured, microseconds.
    """

    tiles: np.ndarray
    longest: np.ndarray
    num_fresh: int
    num_reread: int
    num_kv_heads: int
    num_slots: int
    us: float

    @classmethod
    def of(cls, work_list: WorkList, *, num_kv_heads: int, num_processors: int, us: float) -> "MeasuredStep":
        """What a work list took on a device of so many processors."""
        tiles = work_list.tiles[work_list.tiles[:, TileField.NUM_TOKENS] > 0].astype(np.int64)
        shape, is_partial = tiles[:, TileField.IS_WIDE], (tiles[:, TileField.PART] >= 0).astype(np.int64)
        num_read = tiles[:, TileField.KV_END] - tiles[:, TileField.KV_BEGIN]
        counts = np.zeros((len(tiles), len(work_list.launch.shapes), 3), dtype=np.int64)
        counts[np.arange(len(tiles)), shape] = np.stack([np.ones_like(num_read), num_read, is_partial], axis=1)
        kinds = shape * 2 + is_partial
        candidates = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        longest = [index[num_read[index].argmax()] for index in candidates]
        num_fresh = _distinct_tokens(tiles)
        return cls(
            tiles=counts.sum(0), longest=counts[longest], num_fresh=num_fresh,
            num_reread=max(int(num_read.sum()) - num_fresh, 0), num_kv_heads=num_kv_heads,
            num_slots=num_processors * work_list.launch.programs_per_processor, us=us,
        )  # fmt: skip

    def bounds(self, first: int, num_costs: int) -> np.ndarray:
        """``[n, num_costs]``: what each cost counts in each of the bounds, of which the highest is the step's time.

        Args:
            first: where the costs of this launch's shapes begin: a tile, a kilotoken, a partial result of each.
            num_costs: of all launches, behind a launch's start and a kilotoken from memory and from L2.
        """
        num_tiles = self.tiles[:, 0].sum()
        rounds = np.ceil(num_tiles * self.num_kv_heads / self.num_slots)
        found = np.zeros((2 + len(self.longest), num_costs))
        found[:, 0] = 1.0
        found[0, 1:3] = np.array([self.num_fresh, self.num_reread]) * self.num_kv_heads / 1000
        slots = np.array([rounds / num_tiles * self.tiles, *self.longest]) * (1.0, 1e-3, 1.0)
        found[1:, first : first + self.tiles.size] = slots.reshape(len(slots), -1)
        return found


def fit_costs(
    launches: Sequence[Launch], steps: Sequence[Sequence[MeasuredStep]], device: DeviceCosts
) -> tuple[list[Launch], DeviceCosts]:
    """The launches and the device with the costs that explain the steps of each launch best.

    A step's time is the highest of several bounds. Which one depends on the costs, so both are found in turn.

    Args:
        launches: with the costs that are expected.
        device: likewise.
    """
    shapes = [shape for launch in launches for shape in launch.shapes]
    costs = np.array([*device, *(cost for launch in launches for cost in _costs(launch))])
    firsts = len(device) + 3 * np.cumsum([0, *(len(launch.shapes) for launch in launches)])
    bounds = [step.bounds(first, len(costs)) for first, each in zip(firsts, steps, strict=False) for step in each]
    took = np.array([step.us for each in steps for step in each])
    best_error, best = np.inf, costs
    expected, expected_errors = TRUST * np.diag(1 / costs), np.full(len(costs), TRUST)
    for _ in range(NUM_ROUNDS):
        bounding = np.array([each[(each @ costs).argmax()] for each in bounds]) / took[:, None]
        costs = non_negative_least_squares(
            np.concatenate([bounding, expected]), np.concatenate([np.ones(len(took)), expected_errors])
        )
        errors = np.array([(each @ costs).max() for each in bounds]) / took - 1
        if (errors**2).mean() < best_error:
            best_error, best = float((errors**2).mean()), costs
    start_us, memory_us, l2_us, *others = best.round(5).tolist()
    priced = (
        replace(shape, tile_us=tile_us, kilotoken_us=kilotoken_us, partial_us=partial_us)
        for shape, (tile_us, kilotoken_us, partial_us) in zip(
            shapes, np.array(others).reshape(-1, 3).tolist(), strict=True
        )
    )
    fitted = [replace(launch, narrow=next(priced), wide=next(priced) if launch.wide else None) for launch in launches]
    return fitted, (start_us, memory_us, l2_us)


def cost_errors(tuned: TunedAttention, launch: Launch, steps: Sequence[MeasuredStep]) -> list[float]:
    """By step, predicted over measured time, minus 1."""
    device = [tuned.start_us, tuned.memory_kilotoken_us, tuned.l2_kilotoken_us]
    costs = np.array([*device, *_costs(launch)])
    return [round(float((step.bounds(len(device), len(costs)) @ costs).max()) / step.us - 1, 4) for step in steps]


def _costs(launch: Launch) -> list[float]:
    return [cost for each in launch.shapes for cost in (each.tile_us, each.kilotoken_us, each.partial_us)]


def _distinct_tokens(tiles: np.ndarray) -> int:
    """Number of KV tokens that at least one tile reads."""
    ends: dict[tuple[int, int], int] = {}
    for tile in tiles:
        prefix_len, begin, end = (int(tile[f]) for f in (TileField.PREFIX_LEN, TileField.KV_BEGIN, TileField.KV_END))
        for entry, first, last in (
            (tile[TileField.PREFIX_ENTRY], begin, min(end, prefix_len)),
            (tile[TileField.OWN_ENTRY], max(begin - prefix_len, 0), end - prefix_len),
        ):
            if first < last:
                key = int(entry), first
                ends[key] = max(ends.get(key, 0), last)
    return sum(last - first for (_, first), last in ends.items())
