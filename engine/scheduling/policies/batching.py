"""When requests may start: at any step, or only when the batch before them is finished."""

import math

from engine.config import Batching


def admission_window_tokens(batching: Batching, *, is_idle: bool, max_num_batched_tokens: int) -> float:
    """Prompt tokens that may start together now, memory and the cap on requests permitting; 0 where none may start.

    "continuous"
        any number at any step: whoever finishes makes room at once.
    "static"
        any number, once the whole batch before is finished. As many as memory or the cap allows make a batch.
    "dynamic"
        as "static", but a window closes the batch, too, whichever comes first. A server's window is a time in which
        requests arrive; offline all of them have arrived, so the window is the prompt tokens of one step.

    Args:
        is_idle: nothing runs.
        max_num_batched_tokens: most tokens in a step.
    """
    if batching == "continuous":
        return math.inf
    if not is_idle:
        return 0
    return math.inf if batching == "static" else max_num_batched_tokens
