"""Checks before a night that a model outside the plain families gives the outputs that transformers gives."""

from pathlib import Path

from engine.encoding.families import is_encoder
from engine.engine import Engine
from engine.model.loading.stock_weights import read_config
from engine.model.proof.probe import prove


def prove_architecture(checkpoint: Path) -> None:
    """Compare a decoder's outputs with transformers' on a small model; takes seconds, once for each architecture.
    Raises `ModelError` if they differ, which says where."""
    if not is_encoder(checkpoint):
        prove(read_config(checkpoint), Engine)
