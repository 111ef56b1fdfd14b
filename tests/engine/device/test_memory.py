"""Memory that was freed: on the host it goes back to the system when it is told to, on a GPU torch keeps it."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.device import free_memory
from engine.device.free_memory import free_memory_bytes

HOLES = """
import threading
from pathlib import Path
from engine.device.placement import give_back_freed_memory

def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

kept = []
def fill():
    blocks = [b"x" * 100_000 for _ in range(2000)]
    kept.extend(blocks[::10])

thread = threading.Thread(target=fill)
thread.start()
thread.join()
before = resident_bytes()
give_back_freed_memory()
print(before - resident_bytes(), all(block == b"x" * 100_000 for block in kept))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_holes_left_by_a_thread_are_given_back() -> None:
    """Of 200 MB, a tenth of the blocks stays in use; the page at each end of a hole may stay, too."""
    command = [sys.executable, "-c", HOLES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0, done.stderr
    given_back_bytes, is_kept = done.stdout.split()
    assert int(given_back_bytes) > 100e6
    assert is_kept == "True"


def test_what_a_dropped_model_leaves_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts it as used. Else the next model of a night would get shorter steps."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_memory_bytes(torch.device("cuda")) == 60


def test_files_that_a_container_has_cached_count_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else reading a large file would leave hardly any memory for KV."""
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    host = free_memory_bytes(torch.device("cpu"))
    assert host > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\ninactive_file 600\nactive_file 100\n")
    assert free_memory_bytes(torch.device("cpu")) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(torch.device("cpu")) > 1000
