"""On the path of a Python process: it ends, as by a fault in a kernel, when the model is about to compute a token. If
it is the one that deletes a certain file, its device fails in each step, as after an illegal memory access."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

POISON = int(os.environ.get("BATCHLOOM_TEST_POISON", "-1"))
FAULT = Path(os.environ.get("BATCHLOOM_TEST_FAULT", "/nowhere"))
try:
    FAULT.unlink()
    HAS_FAULT = True
except OSError:
    HAS_FAULT = False


def look(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    if type(module).__name__ in ("Embedding", "TiedEmbedding"):
        if (inputs[0] == POISON).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if HAS_FAULT:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


register_module_forward_pre_hook(look)
