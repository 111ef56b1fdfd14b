"""Whether a model outside the plain families is computed as transformers does, before a night begins."""

from pathlib import Path

from engine.encoding.families import is_encoder
from engine.engine import Engine
from engine.model.loading.stock_weights import read_config
from engine.model.proof.probe import prove


def prove_architecture(checkpoint: Path) -> None:
    """Refuse a decoder that is not computed as transformers does; a few seconds, once for each architecture.

    Raises:
        ModelError: with the reason.
    """
    if not is_encoder(checkpoint):
        prove(read_config(checkpoint), Engine)
