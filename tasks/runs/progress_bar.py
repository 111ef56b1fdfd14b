"""The progress of a plan as a bar on a terminal."""

import math
from collections.abc import Iterable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tasks.runs.progress import Look, PlannedWork


def draw_bar(looks: Iterable[Look], title: str, work: PlannedWork, console: Console) -> None:
    """Draw a bar and move it with each look, the last of which is made when the run has ended.

    Args:
        looks: what was done at each look; drawn as they come.
        title: what the bar stands for.
        work: all that is planned.
        console: the terminal.
    """
    columns = (  # within 80 characters for a million prompts
        TextColumn("{task.description}"),
        BarColumn(bar_width=7),
        TextColumn("{task.fields[rows]}/{task.fields[num_rows]} prompts"),
        TextColumn("{task.fields[tokens]:,} tokens {task.fields[rate]:,.0f}/s"),
        TextColumn("{task.fields[left]} left"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=1.0, rows=0, num_rows=work.num_rows, tokens=0, rate=0.0, left="-:--:--")
        for seconds, counts, left in looks:
            is_done = counts.num_rows >= work.num_rows
            bar.update(
                task,
                description=f"{title} ({counts.num_failed:,} failed)" if counts.num_failed else title,
                completed=1.0 if is_done else counts.num_tokens / max(1.0, work.count_tokens(counts)),
                rows=counts.num_rows,
                tokens=counts.num_tokens,
                rate=counts.num_tokens / seconds,
                left="-:--:--" if math.isnan(left) else timedelta(seconds=round(left)),
            )
