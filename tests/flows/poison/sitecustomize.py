"""On the path of a Python process: it ends, as by a fault in a kernel, when the model is about to compute a token."""

import os
import signal
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

POISON = int(os.environ["BATCHLOOM_TEST_POISON"])


def look(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    if type(module).__name__ in ("Embedding", "TiedEmbedding") and (inputs[0] == POISON).any():
        os.kill(os.getpid(), signal.SIGKILL)


register_module_forward_pre_hook(look)
