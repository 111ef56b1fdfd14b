"""Compiles the C++ kernels of cpp/ once per machine, loads them, and passes tensors to them."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

import torch

from engine.kernels.cpu.layer_structures import SIGNATURES

LOGGER = logging.getLogger("batchloom.engine")

_SOURCES = Path(__file__).with_name("cpp")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
_FLAGS_OF_SOURCE = {"int8": ("-ffp-contract=off",)}
"""Int8 results are the same bits on every instruction set: the compiler must not fuse a * b + c."""
_X86_FLAGS = ("-mprefer-vector-width=512",)

_announce = cache(LOGGER.info)  # logs the same message once, although a night may compile several sources


class NativeBuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here."""


def find_compiler() -> list[str]:
    """The C++ compiler's command: ``$CXX``, which may have arguments, g++ by default; empty where it is not there."""
    name, *arguments = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    path = shutil.which(name)
    return [path, *arguments] if path else []


@cache
def load_library(folder: Path, source: str) -> ctypes.CDLL:
    """The functions of a source file, "native", "int8" or "quantized"; compiled unless `folder` has them already.
    Raises `NativeBuildError` if there is no compiler, it fails, or its result cannot be stored or loaded."""
    compiler = find_compiler()
    if not compiler:
        raise NativeBuildError(
            f"there is no C++ compiler ({os.environ.get('CXX') or 'g++'!r} is not on the path); on Debian and Ubuntu "
            "`apt install g++` installs one"
        )
    try:
        try:
            library = ctypes.CDLL(str(path := _compiled(compiler, folder, source)))
        except OSError:  # a damaged file
            path.unlink(missing_ok=True)
            library = ctypes.CDLL(str(_compiled(compiler, folder, source)))
    except OSError as error:
        raise NativeBuildError(f"the compiled kernels cannot be loaded: {error}") from error
    for name in filter(partial(hasattr, library), SIGNATURES):
        getattr(library, name).argtypes, getattr(library, name).restype = SIGNATURES[name], None
    return library


def _compiled(compiler: list[str], folder: Path, source: str) -> Path:
    """The shared library for this source, compiler and processor. It is on the disk before it has its name: half of one
    would end each process that loads it."""
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    flags = [*_FLAGS, *_FLAGS_OF_SOURCE.get(source, ()), *(_X86_FLAGS if platform.machine() == "x86_64" else ())]
    # Not $CXXFLAGS: package managers set it, for processors that may lack units which this one has.
    flags += shlex.split(os.environ.get("BATCHLOOM_CXXFLAGS", ""))
    version = run([*compiler, "--version"]).stdout
    identity = hashlib.sha256("\0".join([*compiler, version, *flags, _processor()]).encode())
    for file in sorted(_SOURCES.glob("**/*.*")):
        identity.update(file.read_bytes())
    path = folder / f"{source}-{identity.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    _announce("compiling the C++ kernels for this processor: a few seconds, once")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            built = run([*compiler, *flags, str(_SOURCES / f"{source}.cpp"), "-o", str(made)])
            if built.returncode != 0:
                why = " ".join(built.stderr.split())[:500] or f"its exit status is {built.returncode}"
                raise NativeBuildError(f"{compiler[0]} cannot compile {source}.cpp: {why}")
            with made.open("rb") as library:
                os.fsync(library.fileno())
            made.replace(path)
    except OSError as error:
        raise NativeBuildError(f"the kernels cannot be kept in {folder}: {error}") from error
    return path


def _processor() -> str:
    """The processor's features, on which -march=native depends: different machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def address(tensor: torch.Tensor | None) -> int | None:
    """A tensor as an argument: the address of its memory; None, a null pointer, where there is none."""
    return None if tensor is None else tensor.data_ptr()
