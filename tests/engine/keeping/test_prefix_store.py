"""Kept prefixes as files: found by their tokens, private, checked, within their budget."""

import json
import logging
import shutil
import sqlite3
import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.keeping.prefix_store import HALF_LIFE_SECONDS, HEADER_BYTES, PrefixStore
from engine.keeping.read_rate import measure_read_rate

BLOCK_SIZE = 4
TOKENS = np.arange(20, dtype=np.int32)


def name_of(keys: Sequence[bytes]) -> str:
    return f"{keys[0].hex()}-{keys[-1].hex()}"


def make_kv(num_blocks: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2 * 3, num_blocks, BLOCK_SIZE, 2, 8, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_was_written_is_found_by_its_tokens(tmp_path: Path, dtype: torch.dtype) -> None:
    store, kv = PrefixStore(tmp_path / "kept", 1 << 30), make_kv(5, dtype=dtype)
    keys = store.name_blocks(TOKENS, BLOCK_SIZE, "model")
    assert len(keys) == 5
    assert store.write(keys[:2], kv[:, :2])
    assert store.write(keys[2:], kv[:, 2:])
    later = PrefixStore(tmp_path / "kept", 1 << 30)
    longer = np.concatenate([TOKENS[:14], np.full(10, 99, np.int32)])
    found = later.find(later.name_blocks(longer, BLOCK_SIZE, "model"))
    assert found == [
        (name_of(keys[:2]), 0),
        (name_of(keys[:2]), 1),
        (name_of(keys[2:]), 0),
    ]
    first, second = later.read(name_of(keys[:2])), later.read(name_of(keys[2:]))
    assert first is not None
    assert second is not None
    assert torch.equal(torch.cat([first, second], dim=1), kv)
    for other in (TOKENS[1:], np.roll(TOKENS, 1)):
        assert later.find(later.name_blocks(other, BLOCK_SIZE, "model")) == []
    assert later.find(later.name_blocks(TOKENS, BLOCK_SIZE, "another model")) == []
    assert later.find([]) == []


def test_the_folder_is_its_users_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o755)
    store = PrefixStore(tmp_path / "kept", 1 << 30)
    store.write(store.name_blocks(TOKENS, BLOCK_SIZE, "model"), make_kv(5))
    assert measure_read_rate(store.folder) > 0
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    files = list(store.folder.iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "header", "gone", "foreign", "other"])
def test_a_file_that_is_not_right_is_ignored_with_a_line(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(tmp_path / "kept", 1 << 30)
    keys = store.name_blocks(TOKENS, BLOCK_SIZE, "model")
    store.write(keys, make_kv(5))
    name = name_of(keys)
    path = store.folder / f"{name}.kv"
    content = bytearray(path.read_bytes())
    match damage:
        case "byte":
            content[-7] ^= 1
        case "cut":
            del content[-100:]
        case "empty":
            content.clear()
        case "header":
            header = json.loads(content[:HEADER_BYTES])
            content[:HEADER_BYTES] = json.dumps(header | {"dtype": "torch.int8"}).encode().ljust(HEADER_BYTES)
        case "foreign" | "other":
            other = PrefixStore(tmp_path / "other", 1 << 30) if damage == "foreign" else store
            others = other.name_blocks(TOKENS if damage == "foreign" else TOKENS + 1, BLOCK_SIZE, "model")
            assert others != keys, "keys are keyed by the folder's secret"
            other.write(others, make_kv(5, seed=1))
            content = bytearray((other.folder / f"{name_of(others)}.kv").read_bytes())
    path.write_bytes(content)
    if damage == "gone":
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert store.read(name) is None
    assert [name in record.getMessage() for record in caplog.records] == [True]
    assert store.find(keys) == []
    assert store.write(keys, make_kv(5)), "it is kept anew"
    assert torch.equal(torch.as_tensor(store.read(name)), make_kv(5))


def test_a_copied_folder_of_another_database_is_not_found(tmp_path: Path) -> None:
    """Files alone, without their index and its secret."""
    one, two = PrefixStore(tmp_path / "one", 1 << 30), PrefixStore(tmp_path / "two", 1 << 30)
    keys = one.name_blocks(TOKENS, BLOCK_SIZE, "model")
    one.write(keys, make_kv(5))
    shutil.copy(one.folder / f"{name_of(keys)}.kv", two.folder)
    assert two.find(two.name_blocks(TOKENS, BLOCK_SIZE, "model")) == []
    assert two.find(keys) == []


def test_a_name_that_was_found_has_the_same_blocks_when_it_is_read(tmp_path: Path) -> None:
    """Another process may replace the file in between. A file whose blocks are all in a longer one is deleted."""
    one, other, kv = PrefixStore(tmp_path / "kept", 1 << 30), PrefixStore(tmp_path / "kept", 1 << 30), make_kv(5)
    keys = one.name_blocks(TOKENS, BLOCK_SIZE, "model")
    one.write(keys[2:], kv[:, 2:])
    ((name, _), *_) = one.find(keys[2:])
    other.write(keys[1:], kv[:, 1:])
    read = one.read(name)
    assert read is None or torch.equal(read, kv[:, 2:])
    assert {name for name, _ in one.find(keys[1:])} == {path.stem for path in one.folder.glob("*.kv")}
    assert torch.equal(torch.as_tensor(one.read(one.find(keys[1:])[0][0])), kv[:, 1:])


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 9), st.floats(0, 3 * HALF_LIFE_SECONDS)), max_size=8),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_what_saves_least_a_byte_makes_room(
    tmp_path_factory: pytest.TempPathFactory, kept: list[tuple[int, float, float]], num_new: int, num_budget: int
) -> None:
    folder = tmp_path_factory.mktemp("kept") / "prefixes"
    block_bytes = make_kv(1).nbytes
    budget = num_budget * (HEADER_BYTES + block_bytes)
    store = PrefixStore(folder, 1 << 30)
    values = {}
    for number, (num_blocks, saved, age) in enumerate(kept):
        keys = store.name_blocks(TOKENS[: num_blocks * BLOCK_SIZE] + 100 * number, BLOCK_SIZE, "model")
        store.write(keys, make_kv(num_blocks))
        store._index.execute(
            "update files set saved_seconds = ?, used_at = used_at - ? where name = ?", [saved, age + 1, name_of(keys)]
        )
        values[name_of(keys)] = (
            saved * 0.5 ** ((age + 1) / HALF_LIFE_SECONDS) / (HEADER_BYTES + num_blocks * block_bytes)
        )
    later = PrefixStore(folder, budget)
    keys = later.name_blocks(TOKENS[: num_new * BLOCK_SIZE] + 1, BLOCK_SIZE, "model")
    is_written = later.write(keys, make_kv(num_new))
    left = {path.stem for path in folder.glob("*.kv")}
    assert sum(path.stat().st_size for path in folder.glob("*.kv")) <= budget
    assert is_written == (HEADER_BYTES + num_new * block_bytes <= budget) == (name_of(keys) in left)
    evicted = values.keys() - left
    assert all(values[one] <= values[other] + 1e-9 for one in evicted for other in left & values.keys())
    assert not later.write(later.name_blocks(TOKENS + 7, BLOCK_SIZE, "model"), torch.zeros(budget)), (
        "what this run has written is not evicted by it"
    )


def test_what_was_found_is_not_evicted(tmp_path: Path) -> None:
    """It is going to be read, which is booked only when the run has ended."""
    first, num_file_bytes = PrefixStore(tmp_path / "kept", 1 << 30), HEADER_BYTES + make_kv(2).nbytes
    one, two, three, four = (first.name_blocks(TOKENS[:8] + i, BLOCK_SIZE, "model") for i in range(4))
    for keys in (one, two):
        first.write(keys, make_kv(2))
    later = PrefixStore(tmp_path / "kept", 2 * num_file_bytes)
    assert later.find(one)
    assert later.write(three, make_kv(2))
    assert not later.write(four, make_kv(2))
    assert [bool(later.find(keys)) for keys in (one, two, three, four)] == [True, False, True, False]


def test_an_index_that_cannot_be_used_is_an_os_error(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path / "kept", 1 << 30)
    keys = store.name_blocks(TOKENS, BLOCK_SIZE, "model")
    store._index.execute("pragma busy_timeout = 0")
    with closing(sqlite3.connect(store.folder / "index.sqlite", isolation_level=None)) as other:
        other.execute("begin exclusive")
        with pytest.raises(OSError, match=r"its index: database is locked$"):
            store.find(keys)
        with pytest.raises(OSError, match=r"its index: database is locked$"):
            store.book({name_of(keys): 1.0})
    assert store.find(keys) == []
    (store.folder / "index.sqlite").write_bytes(b"damaged" * 1000)
    with pytest.raises(OSError, match="its index: file is not a database; delete the folder, which"):
        PrefixStore(tmp_path / "kept", 1 << 30)
