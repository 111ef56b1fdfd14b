"""Compiles the kernels of cpp/ for this machine, once, and loads them."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

LOGGER = logging.getLogger("batchloom.engine")

ELEMENT_TYPES = {torch.bfloat16: "bf16", torch.float32: "float32"}
"""Suffixes of the kernels that come once for each element type."""

_SOURCES = Path(__file__).with_name("cpp")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
_OWN_FLAGS = {"native": (), "int8": ("-ffp-contract=off",), "quantized": ()}
"""In int8 a sum is rounded where the source says so, on every unit."""
_WIDE_FLAGS = ("-mprefer-vector-width=512",)  # refused by compilers for other processors

_I64, _INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
KERNELS: dict[str, list[Any]] = {
    "attend": [
        *[_POINTER, _I64, *[_POINTER] * 3, *[_INT] * 4, _FLOAT, _FLOAT, _INT, _POINTER],
        *[*[_POINTER, _I64] * 2, *[_POINTER] * 4],
    ],
    "rms_norm": [*[_POINTER] * 3, *[_I64] * 2, _FLOAT],
    "rotate_and_store": [*[_POINTER] * 5, _FLOAT, *[_POINTER] * 3, _I64, *[_INT] * 4],
    "swiglu": [*[_POINTER] * 2, *[_I64] * 2],
    "project": [*[_POINTER] * 5, *[_I64] * 3, ctypes.c_bool],
    "largest_column": [*[_POINTER] * 5, *[_I64] * 3],
    "compute_layers": [*[_POINTER, _I64] * 2, *[_POINTER] * 5, _I64],
}
"""Argument types of the kernels that come once for each element type."""

_DRAW_TOKENS: list[Any] = [*[_POINTER] * 3, *[_I64] * 2]
_SIGNATURES: dict[str, dict[str, list[Any]]] = {
    "native": {
        **{f"{name}_{suffix}": types for name, types in KERNELS.items() for suffix in ELEMENT_TYPES.values()},
        "draw_tokens": _DRAW_TOKENS,
        "has_products": [],
    },
    "int8": {
        "attend_int8": [
            *[_POINTER, _I64, *[_POINTER] * 3, *[_INT] * 4, _FLOAT],
            *[*[_POINTER, _I64] * 2, *[_POINTER] * 3],
        ],
        "rotate_and_store_int8": KERNELS["rotate_and_store"],
        "quantize_int8": [*[_POINTER] * 3, *[_I64] * 2],
        "round_columns_int8": [*[_POINTER] * 5, *[_I64] * 2, _INT],
        "spread_columns_int8": [_POINTER, *[_I64] * 3],
        "project_int8": [*[_POINTER] * 4, *[_I64] * 3],
        "largest_column_int8": [*[_POINTER] * 5, *[_I64] * 3],
        "draw_tokens": _DRAW_TOKENS,
        "compute_layers_int8": KERNELS["compute_layers"],
    },
}
"""Argument types of the functions of each source file; of others, whoever loads them knows."""


class NativeBuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here."""


def find_compiler() -> str | None:
    """The C++ compiler's path: ``$CXX``, g++ by default; None where it is not there."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def load_library(folder: Path, source: str = "native") -> ctypes.CDLL:
    """The kernels of a source file, "native", "int8" or "quantized"; compiled where `folder` does not hold them yet.

    Raises:
        NativeBuildError: there is no compiler, it fails, or what it made cannot be kept or loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError(
            f"there is no C++ compiler ({os.environ.get('CXX', 'g++')!r} is not on the path); on Debian and Ubuntu "
            "`apt install g++` installs one"
        )
    try:
        library = ctypes.CDLL(str(_built(compiler, folder, source)))
    except OSError as error:
        raise NativeBuildError(f"the compiled kernels cannot be loaded: {error}") from error
    for name, types in _SIGNATURES.get(source, {}).items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_bool if name == "has_products" else None
    return library


def _built(compiler: str, folder: Path, source: str) -> Path:
    """The shared library for this source, compiler and processor; compiled where it is not in the cache."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags = [*_FLAGS, *_OWN_FLAGS[source], *(_WIDE_FLAGS if platform.machine() == "x86_64" else ())]
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    identity = hashlib.sha256("\0".join([compiler, version, *flags, _processor()]).encode())
    for file in sorted(_SOURCES.glob("**/*.*")):
        identity.update(file.read_bytes())
    path = folder / f"{source}-{identity.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    LOGGER.info("compiling the C++ kernels for this processor: a few seconds, once")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            built = subprocess.run(
                [compiler, *flags, str(_SOURCES / f"{source}.cpp"), "-o", str(made)],
                capture_output=True,
                text=True,
                check=False,
            )
            if built.returncode != 0:
                raise NativeBuildError(f"{compiler} cannot compile {source}.cpp: {built.stderr.strip()[:2000]}")
            made.replace(path)
    except OSError as error:
        raise NativeBuildError(f"the kernels cannot be kept in {folder}: {error}") from error
    return path


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
