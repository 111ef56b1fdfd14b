"""What an engine knows of the folder in which it keeps prefixes: how fast it is read, and whether it still works."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch

from engine.execution.step_record import StepRecord
from engine.keeping.prefix_store import PrefixStore
from engine.keeping.read_rate import measure_read_rate
from engine.kv.kv_cache import KVCache

LOGGER = logging.getLogger("batchloom.engine")

FEWEST_PROMPT_TOKENS = 64
"""Fewest prompt tokens of a step that is used to measure the time of a prompt token."""
SECONDS_PER_FILE = 0.001
"""Time to open a file and to find it in the index."""


class PrefixKeeper:
    """The store of an engine's prefixes and the rates by which a prefix is worth keeping, for all runs of the engine.
    Once reading or writing the store fails, it is not read or written any more, with a warning in the log.

    Attributes:
        cache: the engine's KV memory.
        reader, writer: threads for its files.
    """

    def __init__(self, store: PrefixStore, cache: KVCache) -> None:
        self.store, self.cache = store, cache
        self.reader = ThreadPoolExecutor(1, "kept-prefixes-read")
        self.writer = ThreadPoolExecutor(1, "kept-prefixes-write")
        self._bytes_per_second = measure_read_rate(store.folder)
        self._seconds, self._num_tokens = 0.0, 0
        self._failed: set[str] = set()

    def measure(self, record: StepRecord) -> None:
        """Measures the time of a token by a step."""
        num_prompt_tokens = record.num_prefix_tokens + record.num_suffix_tokens
        if num_prompt_tokens >= (FEWEST_PROMPT_TOKENS if self._num_tokens else 1):
            self._seconds += record.duration_ms / 1e3
            self._num_tokens += record.num_tokens

    def is_worth(self, num_blocks: int) -> bool:
        """Whether reading blocks takes less time than computing them."""
        num_bytes, num_tokens = num_blocks * self.cache.block_bytes, num_blocks * self.cache.block_size
        read_seconds = num_bytes / self._bytes_per_second + SECONDS_PER_FILE
        is_faster = not self._num_tokens or num_tokens * self._seconds_per_token > read_seconds  # before the first step
        return "kept" not in self._failed and num_blocks > 0 and is_faster

    def saved_seconds(self, num_tokens: int) -> float:
        """How much longer computing tokens takes than reading them."""
        token_bytes = self.cache.block_bytes / self.cache.block_size
        return max(0.0, num_tokens * (self._seconds_per_token - token_bytes / self._bytes_per_second))

    def find(self, keys: Sequence[bytes]) -> list[tuple[str, int]]:
        """See `PrefixStore.find`; nothing once reading has failed."""
        return self.attempt("read", self.store.find, keys) or []

    def read(self, name: str) -> torch.Tensor | None:
        """See `PrefixStore.read`; measures the rate."""
        started = perf_counter()
        found = self.store.read(name)
        if found is not None:  # the newest measurement counts half
            rate = found.nbytes / (perf_counter() - started)
            self._bytes_per_second = 2 / (1 / rate + 1 / self._bytes_per_second)
        return found

    def attempt(self, what: str, call: Callable[..., Any], *given: Any) -> Any:
        """The result of a call of the store; None if it, or an earlier call to do the same, has failed.

        Args:
            what: "read" or "kept".
        """
        if what in self._failed:
            return None
        try:
            return call(*given)
        except OSError as error:
            LOGGER.warning("no more prefixes are %s: %s: %s", what, self.store.folder, error)
            self._failed.add(what)
            return None

    @property
    def _seconds_per_token(self) -> float:
        return self._seconds / self._num_tokens if self._num_tokens else 0.0
