"""When requests may start: at any step, or only when the batch before them is finished."""

import math

from engine.config import Batching


def admission_window_tokens(batching: Batching, *, is_idle: bool, max_num_batched_tokens: int) -> float:
    """Prompt tokens that may start together now, as far as memory and `max_running_requests` allow; 0 for none.

    "continuous"
        any number at any step: a request that finishes makes room at once.
    "static"
        any number, once the whole batch before is finished. A batch is as many as memory or the cap allows.
    "dynamic"
        as "static", but a batch is limited by a window, too. A server's window is a time in which requests arrive;
        offline all of them have arrived, so the window is the prompt tokens of one step.

    Args:
        is_idle: whether no request runs.
    """
    if batching == "continuous":
        return math.inf
    if not is_idle:
        return 0
    return math.inf if batching == "static" else max_num_batched_tokens
