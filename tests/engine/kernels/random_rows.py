"""Rows of logits with settings of draws, for the tests of every implementation."""

import numpy as np
import torch

from engine.kernels.draw import draw_tokens


def make_rows(seed: int, num_rows: int, vocab_size: int, *, has_ties: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every spread, some of them -inf, with settings of every kind."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_rows, vocab_size)) * rng.choice([0.0, 0.5, 3.0, 30.0], size=(num_rows, 1))
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[np.arange(num_rows), rng.integers(0, vocab_size, num_rows)] = 1.0  # of each row, one can be drawn
    if has_ties:
        logits = np.round(logits * 2) / 2
    settings = np.stack(
        [
            rng.choice([0.01, 0.3, 0.7, 1.0, 2.0], num_rows),
            rng.choice([1, 2, 5, max(vocab_size // 2, 1), vocab_size, vocab_size], num_rows).clip(1, vocab_size),
            rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0], num_rows),
            rng.random(num_rows),
        ],
        axis=1,
    )
    return torch.from_numpy(logits).float(), torch.from_numpy(settings)


def make_hard_rows(seed: int, vocab_size: int, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are equal, nearly flat, sorted or mostly masked, or whose large logits lie `stride` apart; each with
    every setting that leaves one token, some, nearly all or all."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=vocab_size) * 3
    ids = np.arange(vocab_size)
    kinds = [
        np.zeros(vocab_size),
        np.where(rng.random(vocab_size) < 0.5, 0.0, -0.0),
        np.where(rng.random(vocab_size) < 0.3, 2.0, -1.0),
        np.where(ids == vocab_size - 1, -5.0, -np.inf),
        np.where(ids % 911 == 7, normal, -np.inf),
        np.where(rng.random(vocab_size) < 0.02, normal, -1e30),
        np.where(ids % stride == 5, 20 + normal / 9, normal),
        np.sort(normal),
        np.sort(normal)[::-1],
        normal / 300,
        normal - 1e4,
    ]
    kept = [(top_k, 1.0) for top_k in (1, 50, stride + 1, vocab_size - 1, vocab_size)]
    kept += [(vocab_size, top_p) for top_p in (1e-6, 0.9, 1 - 1e-9)] + [(50, 0.9), (vocab_size // 2, 0.99)]
    logits = np.repeat(np.stack(kinds), len(kept), axis=0)
    temperature, uniform = rng.choice([0.3, 0.7, 1.0, 2.0], len(logits)), rng.random(len(logits))
    settings = np.column_stack([temperature, np.tile(kept, (len(kinds), 1)), uniform])
    return torch.from_numpy(logits).float(), torch.from_numpy(settings)


def is_a_close_call(logits: torch.Tensor, settings: torch.Tensor, drawn: int) -> bool:
    """Whether a hair's breadth in the random number or in top-p makes the plain draw the other token."""
    for moved in (-1e-5, 1e-5):
        for column in (2, 3):
            near = settings.clone()
            near[column] = (near[column] + moved).clip(1e-9, 1.0 if column == 2 else 1 - 1e-9)
            if draw_tokens(logits[None], near[None]).item() == drawn:
                return True
    return False
