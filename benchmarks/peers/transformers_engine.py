"""transformers behind the benchmark's protocol: padded ``generate``, or its continuous batching (first argument)."""

import sys
import time
from dataclasses import fields

import torch
import transformers

from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work, serve
from benchmarks.peers.stock_model import load_stock_model

BLOCK_SIZE = 32
PAD = 0


class TransformersEngine:
    """A stock model with torch's scaled dot product attention."""

    def load(self, settings: LoadSettings) -> Loaded:
        self._settings = settings
        self._model = load_stock_model(settings, getattr(torch, settings.dtype))
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=PAD)
        return Loaded(versions={"transformers": transformers.__version__, "torch": torch.__version__})

    def _generation(self, work: Work) -> transformers.GenerationConfig:
        num_tokens = 1 if work.labels else work.num_output_tokens
        return transformers.GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )


class PaddedEngine(TransformersEngine):
    """Batches in the order given, as many rows as the KV memory holds at their padded length."""

    @torch.inference_mode()
    def run(self, work: Work) -> Answers:
        generation = self._generation(work)
        num_new = generation.max_new_tokens
        answers: list[list[int]] = []
        num_computed = 0
        started = time.perf_counter()
        while len(answers) < len(work.token_ids):
            batch = _next_batch(work.token_ids[len(answers) :], num_new, self._settings.kv_tokens)
            longest = max(map(len, batch))
            ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in batch], device=self._model.device)
            lengths = torch.tensor(list(map(len, batch)), device=ids.device)
            mask = (torch.arange(longest, device=ids.device) >= longest - lengths[:, None]).long()
            out = self._model.generate(input_ids=ids, attention_mask=mask, generation_config=generation)
            answers += out[:, longest:].tolist()
            num_computed += len(batch) * (longest + num_new - 1)
        return Answers(token_ids=answers, seconds=time.perf_counter() - started, num_computed_tokens=num_computed)


class ContinuousEngine(TransformersEngine):
    """`generate_batch`, its blocks shared between equal prefixes."""

    @classmethod
    def around(cls, model: transformers.PreTrainedModel, settings: LoadSettings) -> "ContinuousEngine":
        """Wraps a model that this process has loaded."""
        made = cls()
        made._settings, made._model = settings, model
        return made

    def run(self, work: Work) -> Answers:
        settings = self._settings
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=settings.kv_tokens // BLOCK_SIZE,
            max_batch_tokens=settings.max_num_batched_tokens,
            allow_block_sharing=True,
            **{_block_size_name(): BLOCK_SIZE},
            **settings.options,
        )
        started = time.perf_counter()
        found = self._model.generate_batch(
            work.token_ids,
            generation_config=self._generation(work),
            continuous_batching_config=batching,
            progress_bar=False,
        )
        seconds = time.perf_counter() - started
        # Requests are named req_0, req_1, ... in the order given; answers come in any order.
        answers = [found[f"req_{index}"].generated_tokens for index in range(len(work.token_ids))]
        return Answers(token_ids=[list(map(int, answer)) for answer in answers], seconds=seconds)


def _block_size_name() -> str:
    """transformers 5.17 calls it block_size, later releases page_size."""
    names = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
    return "page_size" if "page_size" in names else "block_size"


def _next_batch(rows: list[list[int]], num_new: int, kv_tokens: int) -> list[list[int]]:
    longest = 0
    for count, row in enumerate(rows):
        longest = max(longest, len(row))
        if count and (count + 1) * (longest + num_new) > kv_tokens:
            return rows[:count]
    return rows


if __name__ == "__main__":
    serve({"padded": PaddedEngine, "continuous": ContinuousEngine}[sys.argv[1]]())
