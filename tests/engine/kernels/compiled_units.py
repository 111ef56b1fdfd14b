"""The C++ kernels compiled for fewer units than this CPU has, once for all processes of the tests."""

import fcntl
import os
import re
from pathlib import Path

import pytest

from engine.kernels.cpu.native_build import load_library
from engine.model.loading.checkpoint import cache_folder

VECTORS = "-O1 -DNO_TILES"
PLAIN = "-O1 -DNO_TILES -DNO_VECTORS"


def _joined(flags: str) -> str:
    """The flags that the environment has, as those of sanitizers, and further ones."""
    return f"{os.environ.get('BATCHLOOM_CXXFLAGS', '')} {flags}".strip()


def compiled(flags: str, *sources: str) -> Path:
    """The folder of these sources compiled with these further flags; the product's own where there are none."""
    folder = cache_folder() / re.sub(r"\W", "", flags)
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("BATCHLOOM_CXXFLAGS", _joined(flags))
        for source in sources:
            load_library(folder, source)
    return folder


def compute_only_float32(patch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from now on compute as on a CPU that does not multiply bfloat16."""
    folder = compiled(PLAIN, "native", "quantized")
    patch.setenv("BATCHLOOM_CXXFLAGS", _joined(PLAIN))
    patch.setenv("BATCHLOOM_CACHE", str(folder))
