"""The engine: a model, its KV memory, and the loop that answers a whole plan."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from contextlib import closing
from functools import cache, partial
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Self

from engine.completion import Completion
from engine.config import EngineConfig
from engine.conflicts import check_model
from engine.device.placement import find_dtype, resolve_device, use_device, use_threads
from engine.errors import BusyError, ConfigError
from engine.execution.batch_calls import BatchCalls
from engine.execution.lookup import make_lookup
from engine.execution.output import Decoder, TokenSampler, complete
from engine.execution.overlapped_run import can_overlap, run_overlapped
from engine.execution.step_record import StepMetrics, StepRecord
from engine.execution.step_runner import CommittedSteps, StepRunner, run_steps
from engine.kv.broken_blocks import clear_broken_blocks
from engine.limits import why_impossible
from engine.model.adapters.adapter import Adapter
from engine.model.compiling import compile_if_long
from engine.model.loading.checkpoint import find_tokenizer_ends, is_quantized, resolve_checkpoint
from engine.model.model import Model
from engine.model.plain.plain_checkpoint import read_plain_config
from engine.planning.group import PrefixGroup
from engine.pooling.pooler import causal_pooler, why_too_many
from engine.request import Request
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.sharing import check_groups, schedule_groups
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    import transformers

    from engine.disaggregation.disaggregated_run import PromptProcess
    from engine.model.shard import Shard


class Engine(BatchCalls):
    """One model on one device. Between calls it holds the weights and the KV memory, and no state of a request.

    Made by `Engine.load`. One call at a time: a call of another thread raises `BusyError` while one is under way. A
    thread that begins a call ends its own unfinished ones, whose iterators then raise `BusyError`.

    Args:
        model: loaded; its layers may be replaced by native ones.
        checkpoint: the model's folder, for a second process and pooling layers; None where the model is an object.
    Attributes:
        max_model_len: longest prompt plus answer, in tokens.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None, checkpoint: Path | None = None) -> None:
        if config is None or isinstance(model, (str, Path)):
            raise ConfigError(f"a checkpoint's engine is made by {type(self).__name__}.load(model, config)")
        if config.max_num_batched_tokens == "auto" and model.device.type != "cpu":
            from engine.simulation.step_tokens import resolve_on_gpu  # imported only when needed

            config = resolve_on_gpu(config, model.settings, model.device, model.dtype, model.shard)
        self.config = config  # on a GPU with a number of tokens for each step
        self._model, limit = model, config.max_model_len
        self.max_model_len = model.max_positions if limit == "auto" else min(limit, model.max_positions)
        self._find_pooler = cache(partial(causal_pooler, checkpoint, model.device, model.hidden_size))
        self._overlaps_steps = model.device.type != "cpu" and can_overlap(config)
        self._runner = StepRunner(model, config, max_model_len=self.max_model_len)
        self._cache, self.num_kv_blocks = self._runner.cache, self._runner.cache.num_blocks
        self.vocab_size, self.eos_token_ids = model.vocab_size, model.eos_token_ids
        self._lock = Lock()
        self._latest_run: tuple[CommittedSteps, Thread] | None = None
        self._prompt_process: PromptProcess | None = None
        if config.disaggregation != "none":
            from engine.disaggregation import disaggregated_run  # imported only when needed

            assert checkpoint is not None, "Engine.load refuses a loaded model here"
            self._prompt_process = disaggregated_run.PromptProcess(str(checkpoint), config, self._runner)

    @classmethod
    def load(
        cls,
        model: "str | Path | transformers.PreTrainedModel",
        config: EngineConfig | None = None,
        *,
        adapter: Adapter | None = None,
        keeps_base: bool = False,
        shard: "Shard | None" = None,
    ) -> Self:
        """Loads a checkpoint and takes its KV memory.

        Args:
            model: checkpoint folder, GGUF file, hub id, or a loaded causal LM (which is switched to our attention).
            adapter: LoRA adapter that is added to the weights.
            keeps_base: whether `use_adapter` will be called; the base's weights are then kept in memory, too.
            shard: the rank whose share is computed here; None: the model is whole, or this rank starts the others.
        Raises:
            ConfigError: a setting is of `KeepingEngine`, or of a second process, which cannot load a model object.
            ModelError: not readable, or not an architecture that is computed exactly.
            CapacityError: the KV budget holds no block, or is larger than the free memory (`OutOfMemoryError`).
        """
        if not isinstance(config := EngineConfig() if config is None else config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, got {config!r}")
        if config.keep_prefixes_bytes and cls is Engine:
            raise ConfigError("keep_prefixes_bytes is a setting of KeepingEngine: load that, or set it to 0")
        is_loaded, is_adapted = not isinstance(model, (str, Path)), adapter is not None or keeps_base
        if config.disaggregation != "none" or config.tensor_parallel_size > 1:
            check_model(config, is_loaded=is_loaded, is_adapted=is_adapted)
        device = resolve_device(config.device)
        source = model if is_loaded else resolve_checkpoint(model)
        if config.tensor_parallel_size > 1 and shard is None:
            from engine.tensor_parallel.ranks import lead  # imported only when needed

            return lead(partial(cls.load, source, config), Path(source), config)
        device = use_device(device)
        use_threads(config.num_threads)
        if shard is None and (not isinstance(source, Path) or read_plain_config(source) is None):
            from engine.model.proof.probe import prove_source  # seconds to import

            prove_source(source, Engine)
        loaded: Model | None = None
        if shard is None and not is_adapted and isinstance(source, Path) and is_quantized(source):
            from engine.model.quantized.quantized_model import load_quantized  # imported only when needed

            loaded = load_quantized(source, config, device)
        if loaded is None:
            how: dict[str, Any] = {"dtype": find_dtype(config.dtype, device), "device": device}
            if shard is not None:
                from engine.model.sharded_model import ShardedModel

                loaded = ShardedModel.load_share(source, **how, shard=shard)
            elif is_adapted:
                from engine.model.adapters.adapted_model import AdaptedModel

                loaded = AdaptedModel.load_with(adapter, source, **how, keeps_base=keeps_base)
            else:
                loaded = Model.load(source, **how)
        if isinstance(source, Path):  # as in vLLM: config.json of some chat models has the base model's alone
            loaded.eos_token_ids |= {end for end in find_tokenizer_ends(source) if end < loaded.vocab_size}
        return cls(loaded, config, source if isinstance(source, Path) else None)

    def use_adapter(self, adapter: Adapter | None) -> None:
        """Exchanges the adapter, which is a call as any other; None: the base alone. Raises as
        `AdaptedModel.use_adapter`; `ConfigError` where the model was loaded without its base."""
        from engine.model.adapters.adapted_model import AdaptedModel  # imported only when needed

        with closing(self._begin(step for step in list[Any]())):  # a run without steps
            if not isinstance(self._model, AdaptedModel) or not self._model.keeps_base:
                raise ConfigError("adapters are exchanged in an engine that was loaded with keeps_base=True")
            self._model.use_adapter(adapter, self._runner.attention)
            if self._runner.graphs is not None:
                self._runner.graphs.forget()

    @property
    def adapter(self) -> Adapter | None:
        """The adapter in the weights; None: the base alone."""
        return self._model.adapter

    @property
    def is_usable(self) -> bool:
        """False once a rank of a sharded model has failed: the engine has to be loaded again."""
        return self._model.shard is None or not self._model.shard.is_closed

    def why_impossible(self, request: Request, *, can_decode: bool = False) -> str | None:
        """Why a request cannot be answered even alone; None where it can."""
        if request.dimensions is not None and (reason := why_too_many(request, self._find_pooler("embed"))):
            return reason
        return why_impossible(request, self._model, self._cache, self.max_model_len, can_decode=can_decode)

    def run_plan(
        self,
        requests: Sequences[Request],
        groups: Sequences[PrefixGroup],
        *,
        decode: Decoder | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        make_node: Callable[..., PrefixNode] = PrefixNode,
    ) -> Iterator[Completion]:
        """Answers a plan, group by group; each completion is yielded once it is ready, in any order.

        An impossible request yields a completion with an error before the others start. So does a request that
        preemption "kill" ends, at the step that ends it.

        Args:
            requests: modes may be mixed.
            groups: their members' request_indices point into `requests`; `RequestError` unless each request is in one.
            decode: needed where a request has stop strings.
            on_step: called after each step, once its completions are yielded. If it raises an exception, the run ends
                with it.
            make_node: makes the nodes of shared prefixes, as `PrefixNode` does; its subclasses may know their KV.
        """
        check_groups(requests, groups)
        for name, function, what in (("decode", decode, "token ids"), ("on_step", on_step, "step records")):
            if not (function is None or callable(function)):
                raise ConfigError(f"{name} must be a function of {what}, got {function!r}")
        poolers = {mode: self._find_pooler(mode) for mode in {r.mode for r in requests if r.is_pooled}}
        make_sampler = TokenSampler
        if any(request.is_constrained for request in requests):
            from engine.execution.constrained_sampler import ConstrainedSampler as make_sampler  # needs llguidance
        sampler = make_sampler(self._model, decode, poolers)
        impossible = dict[int, Completion]()
        for index, request in enumerate(requests):
            if reason := self.why_impossible(request, can_decode=decode is not None):
                impossible[index] = Completion.refuse(request.request_id, len(request.token_ids), reason)
        config, cache = self.config, self._cache
        scheduler = Scheduler(
            schedule_groups(requests, groups, impossible, config, make_node),
            pool=make_pool(config, cache.num_blocks, cache.layout.windows),
            config=config,
            swap=SwapSpace.of_run(config, cache, self._model.device) if config.preemption == "swap" else None,
            lookup=make_lookup(self._model, sampler) if config.prompt_lookup == "always" else None,
        )
        late: list[Sequence] = []
        with closing(self._begin(self._run(scheduler, sampler))) as steps:
            if not self._model.has_replaced_layers:
                compile_if_long(self._model, config.compile, sum(group.num_tokens for group in groups))
            yield from impossible.values()
            metrics = StepMetrics(scheduler)
            try:
                for step, answered in steps:
                    record = metrics.record(step, answered)
                    # A finished request may still have a row in flight: its answer comes one step later, when its cost
                    # is final.
                    final = [*late, *(sequence for sequence in answered if not sequence.has_late_row)]
                    late = [sequence for sequence in answered if sequence.has_late_row]
                    for sequence in final:
                        yield from complete(sequence, requests)
                    if on_step is not None:
                        on_step(record)
            except Exception:  # of `on_step` or of the next step
                for sequence in late:
                    yield from complete(sequence, requests)
                raise
        if scheduler.num_unfinished or late:
            raise BusyError("another call of the engine has begun, which ended this one")
        assert scheduler.pool.num_used == 0, "KV blocks are still held after the last request"

    def _begin(self, steps: CommittedSteps) -> CommittedSteps:
        """Steps that have the engine to themselves; `BusyError` where another thread's are unfinished."""
        with self._lock:
            if self._latest_run is not None:
                latest, thread = self._latest_run
                state, is_elsewhere = getgeneratorstate(latest), thread is not current_thread() and thread.is_alive()
                if state == GEN_RUNNING or (state != GEN_CLOSED and is_elsewhere):
                    raise BusyError(f"a call of thread {thread.name!r} is under way: finish it, or close its iterator")
                latest.close()
            self._latest_run = steps, current_thread()
        return steps

    def _run(self, scheduler: Scheduler, sampler: TokenSampler) -> CommittedSteps:
        use_device(self._model.device)  # this may not be the thread that loaded the model
        if self._prompt_process is not None:
            steps = self._prompt_process.run(scheduler, sampler)
        else:
            run = run_overlapped if self._overlaps_steps else run_steps
            steps = run(scheduler, self._runner.forward, sampler)
        try:
            yield from steps if self._model.shard is None else self._model.shard.watch(steps)
        except (Exception, GeneratorExit):
            clear_broken_blocks(self._cache, scheduler.pool.num_touched)
            raise
