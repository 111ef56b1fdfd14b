"""Forecasts the use of `keep_prefixes` for a later night over the same documents."""

from pathlib import Path

from engine.config import EngineConfig
from engine.keeping.read_rate import measure_read_rate
from engine.planning.plan import Plan
from tasks.forecast.forecast import KeptPrefixes
from tasks.forecast.hardware import Hardware
from tasks.storage.artifact import runs_folder


def forecast_kept(rows: Plan, config: EngineConfig, hardware: Hardware, database: str | Path) -> KeptPrefixes | None:
    """Compare computing the shared prefixes of a plan with reading their KV from the database's disk. None if the rows
    share nothing, the engine cannot keep KV, or the disk cannot be measured.

    Args:
        rows, hardware: the plan, and the device whose rates give the time to compute.
        database: KV is kept beside it.
    """
    if config.sharing in ("lru", "none") or config.disaggregation != "none" or hardware.shape.kept_windows:
        return None
    shared = [len(group.prefix) for group in rows.groups() if len(group.prefix) >= config.block_size]
    num_tokens = sum(shared) - rows.num_common_block_tokens(config.block_size)
    if num_tokens <= 0:
        return None
    try:
        bytes_per_second = measure_read_rate(runs_folder(database))
    except OSError:
        return None
    num_bytes = num_tokens * hardware.shape.kv_bytes_per_token
    num_flops = 2 * hardware.shape.num_layer_weights * num_tokens
    return KeptPrefixes(
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        compute_seconds=num_flops / hardware.device.flops_per_second(hardware.dtype),
        read_seconds=num_bytes / bytes_per_second,
        budget_bytes=config.keep_prefixes_bytes,
    )
