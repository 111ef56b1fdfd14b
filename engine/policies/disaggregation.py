"""Which process computes prompts, and which one decodes (batching notes, "Prefill-Decode Disaggregation")."""

from typing import Literal

Disaggregation = Literal["none", "processes", "distributed"]
"""
"none"
    one process does both.
"processes"
    prompts are computed in a process of their own on this host, which the engine starts and ends; their KV comes
    through shared memory.
"distributed"
    prompts are computed by rank 1 of the caller's torch.distributed processes, which runs
    `engine.prefill_worker.serve_prefills`, on this host or another; their KV comes through the process group.
"""
