"""Every policy at once: what an engine may be configured to, with steps and blocks so small that all limits are met.

Where three policies have to meet for prompts and decode tokens to share steps, as they do by default, that is likelier.
"""

from collections.abc import Sequence
from typing import get_args

from hypothesis import strategies as st

from engine import EngineConfig
from engine.config import Batching, Order, Packing, Preemption, Sharing

BLOCK_SIZE = 4


@st.composite
def engine_configs(draw: st.DrawFn, sharings: Sequence[Sharing] = get_args(Sharing)) -> EngineConfig:
    packing = draw(st.just("ragged") | st.sampled_from(get_args(Packing)))
    return EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=draw(st.integers(1, 20)),
        output_reserve=draw(st.sampled_from([0.0, 0.5, 1.0])),
        order=draw(st.sampled_from(get_args(Order))),
        sharing=draw(st.sampled_from(sharings)),
        max_running_requests=draw(st.sampled_from(["memory", 1, 3])),
        batching=draw(st.just("continuous") | st.sampled_from(get_args(Batching))),
        prefill="whole" if packing != "ragged" else draw(st.sampled_from(["chunked", "chunked", "whole"])),
        packing=packing,
        preemption=draw(st.sampled_from(get_args(Preemption))),
    )
