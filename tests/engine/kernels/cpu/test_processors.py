"""The C++ kernels compile for processors that this machine is not; what they compute is tested by unit."""

import os
import platform
import subprocess

import pytest

from engine.kernels.cpu import native_build


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64 processors")
@pytest.mark.parametrize("source", ["native", "int8", "quantized"])
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "cascadelake"])
def test_the_kernels_compile(processor: str, source: str) -> None:
    compiler = native_build.find_compiler()
    assert compiler
    file = native_build._SOURCES / f"{source}.cpp"
    # An instruction that the processor lacks is an error only when code is generated.
    flags = ["-O0", "-c", "-o", os.devnull, f"-march={processor}", "-fopenmp", "-std=c++17"]
    done = subprocess.run([*compiler, *flags, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
