"""Gives an engine the adapter of another workload."""

from engine.encoding.encoder_engine import EncoderEngine
from engine.engine import Engine
from engine.model.adapters.adapter import Adapter
from tasks.partitions.out_of_memory import is_out_of_memory


def exchange_adapter(engine: Engine | EncoderEngine, adapter: Adapter | None) -> bool:
    """Give an engine another adapter; False if it must be loaded anew: it is an encoder, or memory ran out. Raises
    `ModelError` if the adapter cannot be read, or belongs to another model."""
    try:
        if isinstance(engine, Engine):
            engine.use_adapter(adapter)
            return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return False
