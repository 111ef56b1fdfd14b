"""Texts on disk: what comes back is what was put, whatever the order, and equal texts lie there once."""

import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.storage.spill_file
from engine.errors import ArtifactError
from tasks.storage.spill_file import SpillFile
from tests.full_disk import files_of_at_most

TEXTS = ["", "a", "ß" * 40, "\0", "long " * 500]


def stored_bytes(folder: Path) -> int:
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(link.stat().st_size for link in links if link.is_symlink() and str(folder) in os.readlink(link))


@given(
    batches=st.lists(st.lists(st.sampled_from([None, *TEXTS]), max_size=12), max_size=5),
    order=st.randoms(use_true_random=False),
    most_known=st.sampled_from([0, 2, 1000]),
)
def test_any_rows_come_back_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[str | None]], order: random.Random, most_known: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, SpillFile(tmp_path_factory.getbasetemp()) as store:
        patch.setattr(tasks.storage.spill_file, "KNOWN_TEXTS", most_known)
        rows = []
        for batch in batches:
            # A slice: the arrays of a reader may begin anywhere in their buffers.
            texts = pa.array(["before", *batch], pa.large_string()).slice(1)
            places, sizes = store.put_once(texts, [str(text) for text in batch]), pc.binary_length(texts)
            rows += list(zip(batch, places.to_pylist(), sizes.to_pylist(), strict=True))
        order.shuffle(rows)
        found = store.get(
            pa.array([row[1] for row in rows], pa.int64()), pa.array([row[2] for row in rows], pa.int64())
        )
        assert found.view(pa.large_string()).to_pylist() == [row[0] for row in rows]
        found.validate(full=True)


def test_a_text_that_many_rows_have_lies_there_once(tmp_path: Path) -> None:
    with SpillFile(tmp_path) as store:
        for start in range(0, 70, 10):
            texts = pa.array([TEXTS[4], *(f"own {row:03}" for row in range(start, start + 9))], pa.large_string())
            places = store.put_once(texts, texts.to_pylist())
        assert store.get(places, pc.binary_length(texts)).view(pa.large_string()).equals(texts)
        assert stored_bytes(tmp_path) == len(TEXTS[4]) + 7 * 9 * len("own 000")
        assert not list(tmp_path.iterdir()), "nobody else can open it"
    assert stored_bytes(tmp_path) == 0


def test_a_value_comes_whole_where_the_system_reads_it_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does beyond 2 GiB."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, place: read(file, [buffers[0][:3]], place))
    texts = pa.array(["first", "0123456789", ""], pa.large_string())
    with SpillFile(tmp_path) as store:
        places = store.put(texts)
        assert store.get(places, pc.binary_length(texts)).view(pa.large_string()).equals(texts)


def test_a_file_that_was_cut_is_told(tmp_path: Path) -> None:
    with SpillFile(tmp_path) as store:
        places = store.put(pa.array(["0123456789"], pa.large_string()))
        with pytest.raises(ArtifactError, match=f"{tmp_path}: a temporary file there has no byte 10: it was cut"):
            store.get(places, pa.array([11], pa.int64()))


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no room for temporary files there"):
        SpillFile(tmp_path / "absent")


def test_a_full_disk_is_told_by_the_write_that_found_it_full(tmp_path: Path) -> None:
    """The text is smaller than what files buffer."""
    message = "no room for temporary files there"
    with SpillFile(tmp_path) as store, files_of_at_most(1000), pytest.raises(ArtifactError, match=message):
        store.put_once(pa.array(["a" * 2000], pa.large_string()), ["a"])
