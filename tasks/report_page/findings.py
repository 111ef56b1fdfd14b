"""The main numbers of a run, and findings about it with remedies."""

from tasks.report_page.facts import RunFacts, count_computed_prompt_tokens
from tasks.report_page.quantity import count, percent, seconds
from tasks.runs.run_record import NEEDS_FULL

LARGE_SHARE = 0.2
"""Share of the time, the steps or the tokens from which on a finding is mentioned."""

FULL_KV = 0.95

FEWEST_ROWS = 10
"""Fewest answered rows from which on a template is said to share little."""


def key_figures(facts: RunFacts) -> list[tuple[str, str, str]]:
    """The main numbers of a run: (name, value, reference value)."""
    run, totals = facts.run, facts.totals
    figures = [
        (
            "rows answered",
            count(run.num_ok),
            f"of {count(run.num_rows)}; {count(run.num_already_done)} done before",
        ),
        ("rows failed", count(run.num_errors), f"{count(run.num_unanswered)} left unanswered"),
    ]
    if not totals.num_steps:
        return figures
    rate_of = "planned with others" if run.is_shared else "prompt and output, of the infer stage"
    figures.append(("tokens per second", count(run.tokens_per_second), rate_of))
    if run.num_prompt_tokens:
        saved, best = run.num_cached_tokens / run.num_prompt_tokens, run.best_token_saving_ratio or 0.0
        scope = " for all rows anew" if saved > best + 1e-9 else ""
        limit = "planned with others" if run.is_shared else f"at best {percent(best)}{scope}"
        computed = count_computed_prompt_tokens(facts)
        if computed > run.num_prompt_tokens - run.num_cached_tokens:
            limit += f"; {percent(1 - computed / run.num_prompt_tokens)} with what was computed twice"
        figures.append(("prompt tokens saved", percent(saved), limit))
    steps = (
        f"{count(totals.num_tecd_steps)} of {count(totals.num_steps)} steps; all took {seconds(totals.elapsed_seconds)}"
    )
    if totals.num_engines > 1:
        steps += f" on the longest of {count(totals.num_engines)} engines"
    full = f"{percent(totals.tecd_utilisation)} without cool-down"
    figures.append(("time without cool-down (TECD)", seconds(totals.tecd_seconds), steps))
    figures.append(("batch utilisation", percent(totals.utilisation), full))
    if totals.num_kv_blocks_total:  # not of an encoder
        blocks = f"{count(totals.peak_kv_blocks)} of {count(totals.num_kv_blocks_total)} blocks"
        blocks += " of an engine" if totals.num_engines > 1 else ""
        figures.append(("KV memory, most", percent(totals.peak_kv_blocks / totals.num_kv_blocks_total), blocks))
    lost = f"in {count(totals.num_preempting_steps)} of {count(totals.num_steps)} steps"
    return [*figures, ("preempted", count(totals.num_preempted_requests), lost)]


def find_remarkable(facts: RunFacts) -> list[str]:
    """Findings as sentences, the most serious first; empty for a run without any."""
    return [*_find_outcome(facts), *_find_idle_time(facts), *_find_lost_sharing(facts)]


def _find_outcome(facts: RunFacts) -> list[str]:
    run, found = facts.run, []
    if run.error:
        ended = {"deadline": "ended by its deadline", "failed": "failed"}.get(run.status, f"was {run.status}")
        found.append(f"The run {ended}: {run.error}.")
    if run.num_unanswered:
        rest = NEEDS_FULL if facts.config.get("full") else ""
        found.append(f"{count(run.num_unanswered)} rows are left for the next run{rest}.")
    if run.num_errors:
        found.append(f"{count(run.num_errors)} rows could not be answered; the reasons are below.")
    if not (run.num_rows or run.num_already_done):
        found.append("There was nothing to do: the workload had no rows.")
    elif not run.num_rows:
        found.append(f"There was nothing new to do: {count(run.num_already_done)} rows had been done before.")
    return found


def _find_idle_time(facts: RunFacts) -> list[str]:
    totals, found = facts.totals, []
    if not totals.num_steps or not totals.step_seconds:
        return []
    cool_down = totals.partition_cool_down_seconds / totals.step_seconds
    if cool_down >= LARGE_SHARE:
        remedy = (
            "A larger night has the same cool-down, so it is a smaller part of it."
            if totals.num_partitions == 1
            else "Larger partitions (--partition-tokens) have fewer of them."
        )
        found.append(
            f"{percent(cool_down)} of the model's time was cool-down: only the last answers went on, and nothing was "
            f"left to fill the steps with. {remedy}"
        )
    is_memory_full = (totals.peak_kv_blocks or 0) >= FULL_KV * (totals.num_kv_blocks_total or 1)
    if totals.valley_seconds >= LARGE_SHARE * totals.step_seconds:
        remedy = " KV memory was full: more of it (--kv-memory) lets more requests run." if is_memory_full else ""
        found.append(
            f"{count(totals.num_valley_steps)} steps outside any cool-down were less than half full, "
            f"{seconds(totals.valley_seconds)} together.{remedy}"
        )
    if totals.num_preempted_requests:
        found.append(
            f"{count(totals.num_preempted_requests)} times a request lost its KV memory before it was answered. More "
            "memory (--kv-memory) or a larger reserve for answers (--output-reserve) makes that rarer."
        )
    loading = (facts.run.infer_seconds or 0.0) - totals.elapsed_seconds
    if loading >= LARGE_SHARE * (facts.run.infer_seconds or 1.0):
        found.append(
            f"{seconds(loading)} of the infer stage were no steps: loading the model, reading and writing parts."
        )
    num_engines = max(totals.num_engines, int(facts.prediction.get("num_engines", 0)))  # those without a step, too
    idle = num_engines * totals.elapsed_seconds - totals.step_seconds
    if idle >= LARGE_SHARE * num_engines * totals.elapsed_seconds:
        found.append(
            f"The {count(num_engines)} engines had nothing to do for {seconds(idle)} together while the longest "
            "went on. Smaller partitions (--partition-tokens) even that out."
        )
    return found


def _find_lost_sharing(facts: RunFacts) -> list[str]:
    run, best = facts.run, facts.run.best_token_saving_ratio
    if not run.num_prompt_tokens or best is None:
        return []
    saved = run.num_cached_tokens / run.num_prompt_tokens
    if best < LARGE_SHARE and run.num_ok >= FEWEST_ROWS:
        return [
            f"The prompts share few beginnings: at best {percent(best)} of their tokens could be saved. A template "
            "that begins with what many rows have in common shares more."
        ]
    if best - saved >= LARGE_SHARE / 2:
        return [f"{percent(saved)} of the prompt tokens were saved, {percent(best)} are possible."]
    return []
