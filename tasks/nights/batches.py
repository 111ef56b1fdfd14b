"""Which workloads of a night are planned together."""

from collections.abc import Sequence

from tasks.workloads.workload import Workload


def list_batches(workloads: Sequence[Workload], *, is_joint: bool) -> list[list[Workload]]:
    """Workloads of one model that do not read each other's answers, in batches that are planned together.

    A batch has one adapter. Pooled workloads, which share nothing, are batches of their own, and so are all if not
    `is_joint`, as with an exchange, which carries the work of one workload.
    """
    batches: list[list[Workload]] = []
    for adapter in dict.fromkeys(workload.adapter for workload in workloads):
        alike = [workload for workload in workloads if workload.adapter == adapter]
        joint = [workload for workload in alike if is_joint and not workload.kind.is_pooled]
        batches += [joint] if joint else []
        batches += [[workload] for workload in alike if workload not in joint]
    return batches
