"""What would make a run shorter, read off a forecast's numbers."""

from collections.abc import Sequence

from tasks.forecast.field_orders import FieldOrder
from tasks.forecast.forecast import Prediction, SharingPolicy

WORTH_SAYING = 0.05
"""A gain below this share of time, or of prompt text, is not worth a change."""


def advise(
    policies: Sequence[SharingPolicy],
    best_saving_ratio: float,
    orders: Sequence[FieldOrder],
    prediction: Prediction | None,
) -> tuple[str, ...]:
    """Sentences, the template first, then settings by how much they help.

    Args:
        policies: the last but one is the whole plan, the last one what is run of it; see `Forecast`.
        orders: best first.
    """
    said = []
    current = next((order for order in orders if order.is_current), None)
    if current is not None and orders[0].saving_ratio - current.saving_ratio >= WORTH_SAYING:
        said.append(
            f"Put the template's fields in the order {', '.join(orders[0].fields)}: about "
            f"{orders[0].saving_ratio:.0%} of the text is shared then, {current.saving_ratio:.0%} now."
        )
    if prediction is None:
        return tuple(said)
    for what_if in prediction.what_ifs:
        if what_if.time_ratio <= 1 - WORTH_SAYING:
            said.append(f"{what_if.option} would take {1 - what_if.time_ratio:.0%} less time.")
    planned, run = policies[-2].token_saving_ratio, policies[-1].token_saving_ratio
    if best_saving_ratio - planned >= WORTH_SAYING:
        said.append(
            f"{best_saving_ratio - planned:.0%} of the prompt tokens are shared, too, but within blocks or on deeper "
            f"levels than the plan uses: a smaller --block-size reaches more of them."
        )
    if planned - run >= WORTH_SAYING and not prediction.run.num_preempted_requests:
        said.append(
            f"{planned - run:.0%} of the prompt tokens are computed by several partitions each: raise "
            f"--partition-tokens."
        )
    idle_share = 1 - prediction.run.seconds / (prediction.num_engines * prediction.seconds)
    if idle_share >= WORTH_SAYING:
        said.append(
            f"The {prediction.num_engines} engines have nothing to do for {idle_share:.0%} of their time: lower "
            f"--partition-tokens, or use fewer."
        )
    if prediction.num_oversized_rows:
        said.append(f"{prediction.num_oversized_rows:,} rows need more KV memory than there is: raise --kv-memory.")
    if prediction.run.num_preempted_requests:
        said.append(
            f"{prediction.run.num_preempted_requests:,} requests lose their KV and are computed again: "
            f"raise --output-reserve or --kv-memory."
        )
    return tuple(said)
