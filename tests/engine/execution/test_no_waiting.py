"""Launching a step never asks what is in a tensor: on a GPU the host would wait for the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import find_packed_sequence_indices

from engine import Engine, EngineConfig, Request
from engine.execution.output import TokenSampler

WAITING = ("item", "tolist", "numpy", "cpu", "nonzero", "masked_select")
CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__array__")
ASKS = {getattr(torch.Tensor, name) for name in (*WAITING, *CONVERSIONS)}


class Watch(TorchFunctionMode):
    """Counts calls of torch; one that has to wait for the device is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_by_mask = func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) is torch.bool
        assert func not in ASKS, f"{func.__name__} waits for the device"
        assert not is_by_mask, "an index of booleans waits for the device"
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_a_watch_sees_what_waits() -> None:
    values = torch.ones(3)
    asks: list[Callable[[torch.Tensor], Any]] = [
        lambda tensor: bool(tensor[0]),
        lambda tensor: float(tensor[0]),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor[tensor > 0],
    ]
    for ask in asks:
        with torch.inference_mode(), pytest.raises(AssertionError, match="waits for the device"), Watch():
            ask(values)
    with Watch(), pytest.raises(AssertionError, match="waits"):
        find_packed_sequence_indices(torch.arange(4).unsqueeze(0))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_launch_waits_for_nothing(
    tiny_checkpoint: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        dtype="float32", device="cpu", attention="torch", kv_memory_bytes=1 << 22, max_num_batched_tokens=40
    )
    engine = Engine.load(tiny_checkpoint(family), config)
    engine._overlaps_steps = True
    watch = Watch()

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with watch:
                return call(*args)

        return run

    monkeypatch.setattr(engine._runner, "forward", watched(engine._runner.forward))
    monkeypatch.setattr(TokenSampler, "sample", watched(TokenSampler.sample))
    prompts = [[3, 4, 5] * 12 + [7 + i] for i in range(4)]
    drawn = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
    assert len(engine.generate([Request(request_id=str(i), token_ids=p, **drawn) for i, p in enumerate(prompts)])) == 4
    labels = ((5,), (6, 7), (6, 8, 9))
    assert len(engine.score([Request(request_id="s", token_ids=prompts[0], mode="score", labels=labels)])) == 1
    assert watch.num_calls > 1000
