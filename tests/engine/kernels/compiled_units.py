"""The C++ kernels compiled for fewer units than this CPU has, once for all processes of the tests."""

import re
from pathlib import Path

import pytest

from engine.kernels.cpu.native_build import load_library
from engine.model.loading.checkpoint import cache_folder

VECTORS = "-O1 -DNO_TILES"
PLAIN = "-O1 -DNO_TILES -DNO_VECTORS"


def compiled(flags: str, *sources: str) -> Path:
    """The folder of these sources compiled with these further flags; the product's own where there are none."""
    folder = cache_folder() / re.sub(r"\W", "", flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXXFLAGS", flags)
        for source in sources:
            load_library(folder, source)
    return folder
