"""When separate devices for prefill and decode gain more than the KV transfer costs (batching notes, "When
Disaggregation Makes Sense"): device seconds per request, by a roofline."""

from dataclasses import dataclass

import numpy as np

from benchmarks.papers.configurations import WHOLE, Settings, simulated_config
from benchmarks.papers.simulated import A100, Place
from benchmarks.papers.table import Cell, Plot, Table
from engine import Request
from engine.simulation.device import StepWork

PROMPT_TOKENS = (256, 1024, 4096)
ANSWER_TOKENS = (10, 50, 100, 500)
NUM_REQUESTS = 400
LINKS = {"NVLink": 600e9, "PCIe 4.0": 64e9, "100 Gbit/s": 12.5e9}
ALONE: Settings = {"sharing": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Device seconds of one request, on devices that do both phases, and on devices that do one of them.

    Attributes:
        chunked_s, whole_s: both phases on one device, prompts mixed with decode tokens or in steps of their own.
        prefill_s, decode_s: on separate devices; decode with as many requests as the device's memory holds.
        kv_bytes: transferred.
    """

    chunked_s: float
    whole_s: float
    prefill_s: float
    decode_s: float
    kv_bytes: int

    @property
    def apart_s(self) -> float:
        return self.prefill_s + self.decode_s

    def longest_transfer_s(self, together_s: float) -> float:
        """The longest KV transfer that still gains; 0 if even a free one does not."""
        return max(0.0, together_s - self.apart_s)


def disaggregation() -> Table:
    """Analytic, except for devices that do both phases, whose runs are simulated."""
    rows: list[list[Cell]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    for num_prompt in PROMPT_TOKENS:
        for num_answer in ANSWER_TOKENS:
            split = measure_split(A100, num_prompt, num_answer)
            transfers = [split.kv_bytes / rate * 1e3 for rate in LINKS.values()]
            allowed_ms = split.longest_transfer_s(split.whole_s) * 1e3
            paying = [name for name, ms in zip(LINKS, transfers, strict=True) if ms < allowed_ms]
            rows.append(
                [
                    num_prompt, num_answer, *(round(1e3 * s, 1) for s in (split.chunked_s, split.whole_s)),
                    *(round(1e3 * s, 1) for s in (split.prefill_s, split.decode_s, split.apart_s)),
                    " / ".join(f"{ms:.1f}" for ms in transfers),
                    round(split.longest_transfer_s(split.chunked_s) * 1e3, 1), round(allowed_ms, 1),
                    ", ".join(paying) or "none",
                ]
            )  # fmt: skip
            for name, seconds in (("", split.chunked_s), (", over whole", split.whole_s)):
                line = series.setdefault(f"prompts of {num_prompt}{name}", [])
                line.append((num_answer, seconds / split.apart_s))
    return Table(
        method=(
            f"{A100.text} (both on one device) and analytic from the same roofline (apart); no shared prefixes, device "
            "milliseconds a request"
        ),
        columns=(
            "prompt", "answer", "together, chunked", "together, whole", "prefill apart", "decode apart", "sum apart",
            f"handing over: {' / '.join(LINKS)}", "may cost, over chunked", "may cost, over whole",
            "links that pay over whole",
        ),
        rows=rows,
        plots=[
            Plot(
                slug="break-even",
                title="Device time together over apart, handing over for free",
                kind="lines",
                labels=["answer tokens", "above 1: apart is faster; dashed: over whole prompts"],
                series=series,
            )
        ],
    )  # fmt: skip


def measure_split(place: Place, num_prompt: int, num_answer: int) -> Split:
    """One prompt and answer length on one kind of device."""
    rng = np.random.default_rng(3)
    requests = [
        Request(
            request_id=str(number), token_ids=rng.integers(3, place.shape.vocab_size, num_prompt),
            max_new_tokens=num_answer, ignore_eos=True,
        )
        for number in range(NUM_REQUESTS)
    ]  # fmt: skip
    chunked = place.run(requests, simulated_config(ALONE))
    whole = place.run(requests, simulated_config({**ALONE, **WHOLE}))
    num_together = max(1, chunked.max_num_batched_tokens // num_prompt)
    prefill = place.roofline.cost(
        StepWork(
            num_rows=num_together * num_prompt,
            num_output_rows=num_together,
            num_attention_pairs=num_together * num_prompt * (num_prompt + 1) // 2,
            num_kv_tokens_read=num_together * num_prompt,
        )
    )
    kv_bytes = place.shape.kv_bytes_per_token
    num_decoding = max(1, place.kv_bytes // (kv_bytes * (num_prompt + num_answer)))
    num_seen = num_decoding * (num_prompt + num_answer // 2)
    decode = place.roofline.cost(
        StepWork(
            num_rows=num_decoding,
            num_output_rows=num_decoding,
            num_attention_pairs=num_seen,
            num_kv_tokens_read=num_seen,
        )
    )
    return Split(
        chunked_s=chunked.seconds / NUM_REQUESTS,
        whole_s=whole.seconds / NUM_REQUESTS,
        prefill_s=prefill.seconds / num_together,
        decode_s=(num_answer - 1) * decode.seconds / num_decoding,
        kv_bytes=kv_bytes * num_prompt,
    )
