"""Requests of one mode, planned and answered in one call."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence

from engine.completion import Completion
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.execution.output import Decoder
from engine.planning.group import PrefixGroup
from engine.planning.planner import plan_prompts
from engine.request import Mode, Request


class BatchCalls(ABC):
    """The calls of an engine that plan and answer a list of requests; results are in input order. Each raises
    `RequestError` before any work where a request is impossible or of another mode, or two have the same request_id."""

    config: EngineConfig

    @abstractmethod
    def run_plan(
        self, requests: Sequence[Request], groups: Sequence[PrefixGroup], *, decode: Decoder | None = None
    ) -> Iterator[Completion]:
        """See `engine.engine.Engine.run_plan`."""

    @abstractmethod
    def why_impossible(self, request: Request, *, can_decode: bool = False) -> str | None:
        """Why a request cannot be answered even alone; None where it can."""

    def generate(self, requests: Iterable[Request], *, decode: Decoder | None = None) -> list[Completion]:
        """Answers requests of mode "generate"; `decode` is needed where one has stop strings."""
        return self._answer_all(requests, "generate", decode)

    def score(self, requests: Iterable[Request]) -> list[Completion]:
        """Answers requests of mode "score"."""
        return self._answer_all(requests, "score")

    def pool(self, requests: Iterable[Request], mode: Mode = "embed") -> list[Completion]:
        """Answers requests of mode "embed", or all of mode "classify". Raises `ModelError` if the checkpoint has no
        layer for the mode, or its pooling is not supported."""
        return self._answer_all(requests, mode)

    def _answer_all(self, requests: Iterable[Request], mode: Mode, decode: Decoder | None = None) -> list[Completion]:
        try:
            requests = list(requests)  # which may come from a generator
        except TypeError as error:
            raise RequestError(f"requests must be a list or another iterable of Requests, got {requests!r}") from error
        seen = set[str]()
        for request in requests:
            if not isinstance(request, Request):
                raise RequestError(f"requests must hold Requests, got {request!r}")
            if not isinstance(request.request_id, Hashable):
                raise RequestError(f"request {request.request_id!r}: a request_id must be hashable")
            if request.request_id in seen:
                raise RequestError(f"request {request.request_id!r}: the request_id is used twice in one call")
            seen.add(request.request_id)
            reason = self.why_impossible(request, can_decode=decode is not None)
            if request.mode != mode:
                reason = f"mode is {request.mode!r}, expected {mode!r} here"
            if reason is not None:
                raise RequestError(f"request {request.request_id!r}: {reason}")
        prompts = [request.token_ids for request in requests]
        plan, _ = plan_prompts(prompts, block_size=self.config.shared_block_size)
        answers = {answer.request_id: answer for answer in self.run_plan(requests, plan.groups(), decode=decode)}
        return [answers[request.request_id] for request in requests]
