"""vLLM behind the benchmark's protocol: prefix caching and chunked prefill on, KV blocks of 32 tokens."""

import os
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work, serve
from benchmarks.peers.w8a8_checkpoint import write_w8a8

BLOCK_SIZE = 32
"""vLLM's smallest block size for the CPU; with its default of 128 the end of most prefixes is not cached."""

LEAST_MEMORY_SHARE, SPARE_BYTES = 0.3, 4 * 2**30
"""vLLM checks the share of the device's memory at start; num_gpu_blocks_override sets the KV memory. The spare bytes
are for what vLLM takes besides weights and KV."""


class VllmEngine:
    """vLLM with its engine in this process, as for batch use, so that nothing is sent between processes."""

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
            "dtype": "bfloat16" if settings.dtype == "int8" else settings.dtype,
            # Only grammars need a tokenizer, and some measured checkpoints have none.
            "skip_tokenizer_init": not (Path(settings.model) / "tokenizer.json").is_file(),
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": settings.kv_tokens // BLOCK_SIZE,
            "max_model_len": settings.max_model_len,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_num_seqs": 256,
            "gpu_memory_utilization": _memory_share(settings),
            "seed": 0,
        }
        if settings.dtype == "int8":
            arguments["model"] = str(write_w8a8(Path(settings.model), Path(settings.scratch)))
        self._engine = LLM(**(arguments | settings.options))
        return Loaded(versions={_package(): version(_package()), "torch": torch.__version__})

    def run(self, work: Work) -> Answers:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1 if work.labels else work.num_output_tokens,
            ignore_eos=not work.schema,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(json=work.schema) if work.schema else None,
        )
        prompts = [{"prompt_token_ids": token_ids} for token_ids in work.token_ids]
        started = time.perf_counter()
        outputs = self._engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        # vLLM counts a preempted request's cached tokens once, so tokens that it computes again are missing here.
        num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        num_prompt = sum(map(len, work.token_ids))
        num_decoded = sum(len(ids) - 1 for ids in token_ids)
        return Answers(
            token_ids=token_ids,
            seconds=seconds,
            num_computed_tokens=num_prompt - num_cached + num_decoded,
            details={"num_cached_tokens": num_cached},
        )


def _memory_share(settings: LoadSettings) -> float:
    """The share of the device's memory that vLLM may take; 16-bit weights may be held in 32 bits."""
    weight_bytes = 2 * sum(file.stat().st_size for file in Path(settings.model).glob("*.safetensors"))
    if settings.device == "cpu":
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        _, total_bytes = torch.cuda.mem_get_info(settings.device)
    return max(LEAST_MEMORY_SHARE, min(0.9, (weight_bytes + settings.kv_bytes + SPARE_BYTES) / total_bytes))


def _package() -> str:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


if __name__ == "__main__":
    serve(VllmEngine())
