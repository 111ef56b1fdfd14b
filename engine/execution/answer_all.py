"""Requests of one mode, answered in one call."""

from collections.abc import Callable, Iterable, Sequence

from engine.errors import RequestError
from engine.planning.plan import PrefixGroup
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Completion, Mode, Request


def answer_all(
    requests: Sequence[Request],
    mode: Mode,
    why_impossible: Callable[[Request], str | None],
    run_plan: Callable[[Sequence[Request], Sequence[PrefixGroup]], Iterable[Completion]],
    block_size: int | None = None,
) -> list[Completion]:
    """Plans requests and answers them; results in input order.

    Args:
        requests: in any order; request_ids are unique.
        mode: of all of them.
        why_impossible: why a request cannot be answered even alone; None where it can.
        run_plan: of an engine.
        block_size: tokens in the KV blocks that its groups share; None: they share nothing.
    Raises:
        RequestError: a request is impossible; raised before any work starts.
    """
    seen = set[str]()
    for request in requests:
        if request.request_id in seen:
            raise RequestError(f"request {request.request_id!r}: the request_id is used twice in one call")
        seen.add(request.request_id)
        reason = why_impossible(request)
        if request.mode != mode:
            reason = f"mode is {request.mode!r}, expected {mode!r} here"
        if reason is not None:
            raise RequestError(f"request {request.request_id!r}: {reason}")
    groups = plan_prefix_groups([request.token_ids for request in requests], block_size=block_size)
    answers = {answer.request_id: answer for answer in run_plan(requests, groups)}
    return [answers[request.request_id] for request in requests]
