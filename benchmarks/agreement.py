"""How much int8 changes answers, by engine:  python -m benchmarks.agreement --model FOLDER [--out FILE]

Every installed engine that computes in int8 (llama.cpp: Q8_0) continues the same passages of Python's own reference
greedily. A float32 transformers model then tells for each answered token whether it would have chosen the same one; if
so for all tokens, the answer is the model's own greedy answer. Engines that can score labels answer yes-or-no questions
about the passages, as does the float32 model. For batchloom, the perplexity of texts in int8, bfloat16 and float32 is
measured, too, and how far the probabilities of their next tokens are from float32's; the texts are those that Python,
NumPy and torch ship, so that nothing is downloaded.
"""

import argparse
import inspect
import math
import sys
import tempfile
import typing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.measuring.comparison import LOAD_SECONDS
from benchmarks.measuring.engine_session import Session
from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.result_file import report
from benchmarks.peers.catalog import PEERS, available
from benchmarks.peers.process import PeerError
from benchmarks.peers.protocol import Answers, Work
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import BatchloomError
from engine.kernels import cdiv
from engine.scheduling.token_batch import ChunkGroup, Chunks, build_token_batch

KV_TOKENS = 4096
RUN_SECONDS = 900.0
FORMS = (
    "\n\nQuestion: {}\nAnswer:",
    "\n\n{} Answer yes or no:",
    "\n\nQ: {} (yes/no)\nA:",
    "\n---\n{}\nMy answer is",
    "\n\nInstruction: {} Reply with yes or no.\nReply:",
    "\n\nSomebody asked: {} The teacher said",
)
"""Ways to ask, in turn: the last tokens decide, and where they are the same, so are an engine's errors."""
QUESTIONS = (
    "Does the text above show an example of code?",
    "Is the text above about exceptions?",
    "Does the text above describe a statement of the language?",
    "Would a beginner understand the text above?",
    "Is the text above about classes?",
    "Does the text above mention a function?",
    "Is there a list in the text above?",
    "Is the text above about numbers?",
    "Does the text above give a warning?",
    "Is the text above easy to read?",
    "Does the text above use the word object?",
    "Is the text above about files?",
)
LABELS = (" yes", " no")


class ScoringEngine(Engine):
    """An engine that gives the probabilities of each token of a text."""

    def logprobs(self, window: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of all tokens after each token but the last, float32 ``[T - 1, vocab_size]``. Nothing else
        may run meanwhile."""
        block_size = self._cache.block_size
        blocks = np.arange(cdiv(len(window), block_size), dtype=np.int32)
        chunks = Chunks()
        chunks.add(np.asarray(window, dtype=np.int32), 0, 0, blocks, len(window))
        alone = ChunkGroup(prefix_block_ids=blocks[:0], prefix_length=0, num_chunks=1)
        hidden = self._runner.forward(build_token_batch(chunks, [alone], block_size))
        return self._model.logits(hidden)[:-1].log_softmax(dim=-1)


def texts() -> dict[str, str]:
    """Prose, source code and documentation, by name."""
    return {
        "Python's reference": "\n".join(topics.values()),
        "source of argparse": inspect.getsource(argparse),
        "source of typing": inspect.getsource(typing),
        "docstrings of numpy": _docstrings(np),
        "docstrings of torch": _docstrings(torch),
    }


def _docstrings(module: Any) -> str:
    members = (getattr(module, name) for name in sorted(dir(module)))
    return "\n".join(inspect.getdoc(member) or "" for member in members if callable(member))


def compare_texts(
    model: Path, dtypes: Sequence[str], windows: Mapping[str, Sequence[Sequence[int]]], num_threads: int
) -> dict[str, dict[str, dict[str, float]]]:
    """By number format and text: the perplexity of its windows, each from its second token on; the mean divergence
    (Kullback-Leibler) of a format's next tokens from float32's; and how many of float32's most likely tokens it has.

    Args:
        model: checkpoint folder.
        dtypes: number formats of the computation besides float32.
        windows: token ids, by text.
        num_threads: of the engine.
    """

    def load(dtype: str) -> ScoringEngine:
        config = EngineConfig(dtype=dtype, device="cpu", kv_memory_bytes=2**28, num_threads=num_threads)
        return ScoringEngine.load(model, config)

    engines = {dtype: load(dtype) for dtype in ("float32", *dtypes)}
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for text, of_text in windows.items():
        figures = defaultdict[str, list[dict[str, float]]](list)
        for window in of_text:
            exact = engines["float32"].logprobs(window)
            for dtype, engine in engines.items():
                logprobs = exact if dtype == "float32" else engine.logprobs(window)
                figures[dtype].append(
                    {
                        "loss": -float(logprobs[range(len(window) - 1), list(window[1:])].mean()),
                        "divergence": float((exact.exp() * (exact - logprobs)).sum(dim=-1).mean()),
                        "same_tokens": float((exact.argmax(dim=-1) == logprobs.argmax(dim=-1)).float().mean()),
                    }
                )
        for dtype, of_windows in figures.items():
            means = {name: mean(each[name] for each in of_windows) for name in of_windows[0]}
            found[dtype][text] = {"perplexity": math.exp(means.pop("loss")), **means}
    return found


def take_windows(token_ids: Sequence[int], num_windows: int, num_tokens: int) -> list[list[int]]:
    """Windows of a text, evenly spread over it."""
    step = max(1, (len(token_ids) - num_tokens) // num_windows)
    return [list(token_ids[i * step : i * step + num_tokens]) for i in range(num_windows)]


def compare(
    arguments: argparse.Namespace, model: Path, works: Mapping[str, Work], logs: Path
) -> dict[str, dict[str, Any]]:
    """By engine: how many of its answers, tokens and labels are those of float32, or why it failed.

    Args:
        arguments: of the command line.
        model: checkpoint folder.
        works: "answers", and "labels" for engines that can score them.
        logs: folder for what engines print.
    """
    peers = [peer for peer in PEERS if peer.name in arguments.engines and peer.has_int8]
    pythons, skipped = available(peers, {}, "cpu", "int8")
    session = Session(
        model=model, device="cpu", num_threads=arguments.threads, max_num_batched_tokens=2048, options={},
        pythons=pythons, logs=logs, run_seconds=RUN_SECONDS,
    )  # fmt: skip
    longest = max(len(prompt) + work.num_output_tokens for work in works.values() for prompt in work.token_ids)
    found: dict[str, dict[str, Any]] = {name: {"failure": f"skipped: {reason}"} for name, reason in skipped.items()}
    given: dict[str, dict[str, Answers]] = {}
    versions: dict[str, dict[str, str]] = {}
    for peer in peers:
        if peer.name in skipped:
            continue
        try:
            with session.start(peer.name, peer.module, peer.arguments) as engine:
                loaded, _, _ = engine.load(session.settings(peer.name, "int8", KV_TOKENS, longest), LOAD_SECONDS)
                versions[peer.name] = loaded.versions
                asked = {name: work for name, work in works.items() if peer.can_score or not work.labels}
                given[peer.name] = {name: engine.run(work, RUN_SECONDS)[0] for name, work in asked.items()}
        except PeerError as error:
            found[peer.name] = {"failure": str(error)}
        print(f"{peer.name:12} {found.get(peer.name, {}).get('failure', 'has answered')}", file=sys.stderr, flush=True)
    with session.start("referee", "benchmarks.peers.judge_engine") as referee:
        referee.load(session.settings("referee", "float32", KV_TOKENS, longest), LOAD_SECONDS)
        asked_labels = {"prompts": works["labels"].token_ids, "labels": [works["labels"].labels]}
        exact = referee.call("label_logprobs", asked_labels, RUN_SECONDS)["answer"]["label_logprobs"]
        for name, answers in given.items():
            asked_tokens = {"prompts": works["answers"].token_ids, "answers": answers["answers"].token_ids}
            gaps = referee.call("token_gaps", asked_tokens, RUN_SECONDS)["answer"]["gaps"]
            found[name] = {
                "versions": versions[name],
                "num_answers": len(gaps),
                "same_answers": sum(max(row) == 0 for row in gaps),
                "same_first_tokens": sum(row[0] == 0 for row in gaps),
                "num_tokens": sum(map(len, gaps)),
                "same_tokens": sum(gap == 0 for row in gaps for gap in row),
                "mean_gap": round(mean(gap for row in gaps for gap in row), 5),
            }
            if "labels" in answers:
                found[name] |= compare_labels(answers["labels"].label_logprobs, exact)
    return found


def compare_labels(found: Sequence[Sequence[float]], exact: Sequence[Sequence[float]]) -> dict[str, Any]:
    """From log-probabilities by prompt: how many prompts get the same label, and how far probabilities differ."""
    pairs = list(zip(found, exact, strict=True))
    return {
        "num_labels": len(pairs),
        "same_labels": sum(int(np.argmax(ours) == np.argmax(theirs)) for ours, theirs in pairs),
        "mean_probability_error": round(
            mean(float(np.abs(np.exp(ours) - np.exp(theirs)).max()) for ours, theirs in pairs), 5
        ),
    }


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures as `command_line` says (the process's own if None); returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS if peer.has_int8]
    parser.add_argument("--model", required=True, help="checkpoint folder, or GGUF file, which is converted once")
    parser.add_argument("--engines", nargs="+", choices=names, default=names, metavar="ENGINE", help=", ".join(names))
    parser.add_argument("--rows", type=int, default=64, help="passages that are continued and asked about")
    parser.add_argument("--row-tokens", type=int, default=200, help="of a passage")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--windows", type=int, default=16, help="of each text whose perplexity is measured")
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=describe_machine()["num_cores"])
    parser.add_argument("--out", type=Path, help="where the JSON goes, e.g. benchmarks/results/agreement.json")
    arguments = parser.parse_args(command_line)
    try:
        model = find_model(arguments.model).resolve()
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        token_ids = {name: tokenizer.encode(text, add_special_tokens=False).ids for name, text in texts().items()}
        passages = take_windows(token_ids["Python's reference"], arguments.rows, arguments.row_tokens)
        questions = [
            tokenizer.encode(form.format(question), add_special_tokens=False).ids
            for question, form in zip(QUESTIONS, cycle(FORMS), strict=False)
        ]
        works = {
            "answers": Work(token_ids=passages, num_output_tokens=arguments.tokens),
            "labels": Work(
                token_ids=[passage + question for passage in passages for question in questions],
                num_output_tokens=1,
                labels=[tokenizer.encode(label, add_special_tokens=False).ids[0] for label in LABELS],
            ),
        }
        windows = {
            name: take_windows(ids, arguments.windows, arguments.window_tokens) for name, ids in token_ids.items()
        }
        with tempfile.TemporaryDirectory(prefix="batchloom-bench-") as logs, torch.inference_mode():
            engines = compare(arguments, model, works, Path(logs))
            found = compare_texts(model, ("bfloat16", "int8"), windows, arguments.threads)
    except (BatchloomError, PeerError) as error:
        print(f"benchmarks.agreement: {error}", file=sys.stderr)
        return 1
    report(
        "agreement", command_line, arguments.out, machine=describe_machine(), model=model.name, engines=engines,
        texts=found,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
