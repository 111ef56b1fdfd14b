"""Which prefixes of a run are read from disk instead of computed, and which are written for later runs.

A prefix is written when its last request is answered, if computing it takes longer than reading it, by the measured
seconds per token of this engine's steps and the measured read rate of the disk. A thread reads and checks files ahead
while groups are computed.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.step_record import StepRecord
from engine.keeping.prefix_keeper import PrefixKeeper
from engine.kv.block_pool import BlockPool
from engine.planning.group import CommonPrefix, Member, PrefixGroup
from engine.scheduling.prefix_node import PrefixNode

LOGGER = logging.getLogger("batchloom.engine")

MOST_READ_AHEAD = 16
"""Most files that are mapped and checked before their group starts."""
MOST_WRITES_IN_FLIGHT = 4
"""Most copies of prefixes in memory that wait to be written."""

OnStep = Callable[[StepRecord], None]


class KeptNode(PrefixNode):
    """A prefix node that is read from disk where it is kept there. `keys` are those of its full blocks; `num_loaded`
    leading tokens were read when it last allocated blocks."""

    __slots__ = ("_run", "keys", "num_loaded")

    def __init__(self, run: "KeptRun", **place: Any) -> None:
        super().__init__(**place)
        self._run = run
        self.keys = run.name_blocks(self)
        self.num_loaded = 0

    def announce(self) -> None:
        self._run.read_later(self)

    def acquire(self, pool: BlockPool) -> int:
        missing = [node for node in self.chain() if not node.holds_blocks]
        num_tokens = super().acquire(pool)
        for node in missing:
            assert isinstance(node, KeptNode)
            self._run.load(node)
        return num_tokens

    def release(self, pool: BlockPool) -> None:
        if self.holds_blocks and self.num_uncomputed == 0:
            self._run.save(self)
        super().release(pool)

    def charge(self) -> int:
        uncharged = [node for node in self.chain() if not node.is_charged]
        num_loaded = sum(node.num_loaded for node in uncharged if isinstance(node, KeptNode))
        return super().charge() - num_loaded


class KeptRun:
    """The prefixes of one run: loaded from the keeper's store into KV memory, and saved from there."""

    def __init__(self, keeper: PrefixKeeper, about: str) -> None:
        """`about` identifies the model, see `PrefixStore.name_blocks`."""
        self._keeper, self._cache = keeper, keeper.cache
        keys = self._cache.keys
        self._about = f"{about} {len(keys)} {tuple(keys[0].shape[1:])} {keys[0].dtype}"
        self._num_loaded: dict[str, int] = {}
        self._num_written = 0
        self._announced: dict[KeptNode, list[str]] = {}  # files of nodes that are not loaded yet
        self._mapped: dict[str, Future[torch.Tensor | None]] = {}
        self._writes: deque[Future[bool]] = deque()

    def extend(self, groups: Sequence[PrefixGroup]) -> list[PrefixGroup]:
        """The groups, where prompts with more on disk than their group's prefix get groups of their own."""
        return [extended for group in groups for extended in self._extend(group)]

    def read_later(self, node: KeptNode) -> None:
        """Reads what is on disk of a node ahead, after the nodes that this was called for before."""
        if names := [name for name, _ in self._keeper.find(node.keys)]:
            self._announced[node] = names
            self._read_ahead()

    def watch(self, on_step: OnStep | None) -> OnStep:
        """A callback that measures the steps' time per token, and calls `on_step`."""

        def watch_step(record: StepRecord) -> None:
            self._keeper.measure(record)
            if on_step is not None:
                on_step(record)

        return watch_step

    def name_blocks(self, node: PrefixNode) -> list[bytes]:
        """Keys of a node's full blocks."""
        tokens = np.concatenate([above.token_ids for above in node.chain()])
        return self._name(tokens)[node.start // self._cache.block_size :]

    def load(self, node: KeptNode) -> None:
        """Reads the leading blocks of a node from disk, as far as they are there, into the blocks it has allocated."""
        node.num_loaded, first = 0, 0
        if node.block_ids.ndim > 1:  # sliding windows: several block tables, which are not kept
            return
        for name, places in groupby(self._keeper.find(node.keys), key=itemgetter(0)):
            kept = [place for _, place in places]
            kv = self._keeper.attempt("read", self._take, name)
            if kv is None:
                break
            end = first + len(kept)
            self._cache.write_blocks(node.block_ids[first:end], kv[:, kept[0] : kept[0] + len(kept)])
            self._num_loaded[name] = self._num_loaded.get(name, 0) + len(kept) * self._cache.block_size
            first = end
        node.num_computed = node.num_loaded = first * self._cache.block_size
        for name in self._announced.pop(node, ()):  # files from an unusable one on
            if read_ahead := self._mapped.pop(name, None):
                read_ahead.cancel()
        self._read_ahead()

    def save(self, node: KeptNode) -> None:
        """Writes the blocks of a computed node that are not on disk, if reading them will be faster than computing."""
        first = len(self._keeper.find(node.keys))
        if node.block_ids.ndim == 1 and self._keeper.is_worth(len(node.keys) - first):
            while len(self._writes) >= MOST_WRITES_IN_FLIGHT:
                self._end_write()
            kv = self._cache.read_blocks(node.block_ids[first : len(node.keys)])
            self._writes.append(self._keeper.writer.submit(self._keeper.store.write, node.keys[first:], kv))

    def finish_writes(self) -> None:
        """Waits for all writes."""
        while self._writes:
            self._end_write()

    def end(self) -> None:
        """Adds to the index the seconds that reading has saved. Drops what the run has left: files read ahead, and
        prefixes that are not being written yet."""
        saved_seconds = {name: self._keeper.saved_seconds(count) for name, count in self._num_loaded.items()}
        self._keeper.attempt("kept", self._keeper.store.book, saved_seconds)
        if self._num_loaded or self._num_written:
            LOGGER.info(
                "kept prefixes: %s tokens read from disk, %s files written",
                f"{sum(self._num_loaded.values()):,}",
                f"{self._num_written:,}",
            )
        unfinished: list[Future[Any]] = [*self._mapped.values(), *self._writes]
        for work in unfinished:
            work.cancel()

    def _extend(self, group: PrefixGroup) -> Iterator[PrefixGroup]:
        block_size, common = self._cache.block_size, group.common
        num_planned = max(len(group.prefix), 0 if common is None else common.num_tokens)
        if common is None or num_planned > common.num_tokens:
            common = CommonPrefix(num_tokens=num_planned, parent=common) if num_planned else None
        rest: list[Member] = []
        longer: dict[bytes, list[Member]] = {}
        num_kept: dict[bytes, int] = {}
        for member in group.members:
            prompt = np.concatenate([group.prefix, member.suffix[:-1]])
            keys = self._name(prompt[: num_planned + block_size])
            if len(keys) * block_size > num_planned and self._keeper.find(keys[-1:]):
                keys = self._name(prompt)
                found = len(self._keeper.find(keys))
                if found * block_size > num_planned:
                    longer.setdefault(keys[found - 1], []).append(member)
                    num_kept[keys[found - 1]] = found * block_size
                    continue
            rest.append(member)
        if rest:
            yield replace(group, members=tuple(rest), common=common if longer else group.common)
        for key, members in longer.items():
            start = num_kept[key] - len(group.prefix)
            yield PrefixGroup(
                prefix=np.concatenate([group.prefix, members[0].suffix[:start]]),
                members=tuple(replace(member, suffix=member.suffix[start:]) for member in members),
                common=common,
            )

    def _name(self, token_ids: npt.NDArray[np.int32]) -> list[bytes]:
        return self._keeper.store.name_blocks(token_ids, self._cache.block_size, self._about)

    def _read_ahead(self) -> None:
        for name in chain.from_iterable(self._announced.values()):
            if len(self._mapped) >= MOST_READ_AHEAD:
                return
            if name not in self._mapped and name not in self._num_loaded:
                self._mapped[name] = self._keeper.reader.submit(self._keeper.read, name)

    def _take(self, name: str) -> torch.Tensor | None:
        read_ahead = self._mapped.pop(name, None)
        found = self._keeper.read(name) if read_ahead is None or read_ahead.cancel() else read_ahead.result()
        self._read_ahead()
        return found

    def _end_write(self) -> None:
        self._num_written += bool(self._keeper.attempt("kept", self._writes.popleft().result))
