"""What a process needs in its environment for Triton's interpreter, made quick, to run its kernels on the CPU."""

import os
from pathlib import Path

_PATH = [str(Path(__file__).with_name("interpreter")), *filter(None, [os.environ.get("PYTHONPATH")])]

INTERPRETING = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(_PATH)}
