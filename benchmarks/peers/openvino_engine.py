"""OpenVINO GenAI behind the benchmark's protocol: its continuous batching pipeline with prefix caching."""

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work, serve

BLOCK_SIZE = 32
"""The pipeline's block size on a CPU."""

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "bf16"}
"""Of the arithmetic; beside int8 weights, products quantise their rows themselves."""


class OpenVinoEngine:
    """KV has the number format of the arithmetic; the default of 8 bits would be less exact.

    With int8, weights and KV have 8 bits.
    """

    def load(self, settings: LoadSettings) -> Loaded:
        """Options are properties of the CPU plugin."""
        weights = "int8" if settings.dtype == "int8" else "fp32"
        converted, convert_seconds = _converted(Path(settings.model), Path(settings.scratch), weights)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings.kv_tokens // BLOCK_SIZE
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
        precision = PRECISIONS[settings.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": "u8" if settings.dtype == "int8" else precision,
            "INFERENCE_NUM_THREADS": settings.num_threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(converted), scheduler, "CPU", properties | settings.options
        )
        names = ("openvino", "openvino-genai")
        return Loaded(versions={name: version(name) for name in names}, details={"convert_seconds": convert_seconds})

    def run(self, work: Work) -> Answers:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = 1 if work.labels else work.num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompts = [openvino.Tensor(np.array([token_ids], dtype=np.int64)) for token_ids in work.token_ids]
        started = time.perf_counter()
        results = self._pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - started
        token_ids = [list(result.m_generation_ids[0]) for result in results]
        # With prefix caching, release 2026.4.1 drops requests without an error if prompts of an earlier call come again
        # while its KV memory is full. The benchmark's rounds share no prompts, so this does not occur.
        num_dropped = token_ids.count([])
        if num_dropped:
            raise RuntimeError(f"dropped {num_dropped} of {len(token_ids)} requests: its scheduler found no KV block")
        return Answers(token_ids=token_ids, seconds=seconds)


def _converted(model: Path, scratch: Path, weights: str) -> tuple[Path, float]:
    """The checkpoint in OpenVINO's own form, weights in "fp32" or "int8", made once."""
    folder = scratch / f"{model.name}-openvino{'-int8' * (weights == 'int8')}"
    started = time.perf_counter()
    if not (folder / "openvino_model.xml").is_file():
        export = Path(sys.executable).with_name("optimum-cli")
        task = ["--task", "text-generation-with-past", "--weight-format", weights]
        command = [export, "export", "openvino", "--model", str(model), *task, str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder, time.perf_counter() - started


if __name__ == "__main__":
    serve(OpenVinoEngine())
