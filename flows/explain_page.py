"""A forecast as text for a terminal or for an artifact of its flow run."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from flows.text_page import TextPage, make_console, make_table, publish_page, show_duration, show_size
from tasks.forecast.forecast import Forecast, Prediction, Quantiles
from tasks.forecast.night_forecast import NightForecast

ARTIFACT_COLUMNS = 120


def print_forecasts(found: Sequence[Forecast] | NightForecast, *, is_json: bool) -> None:
    """Print forecasts, or that of a night file, on standard output, as JSON or as tables."""
    night = found if isinstance(found, NightForecast) else None
    forecasts = found.forecasts if isinstance(found, NightForecast) else found
    if is_json:
        print(json.dumps(asdict(night) if night else [asdict(each) for each in forecasts], indent=1), flush=True)
        return
    console = make_console()
    for forecast in forecasts:
        show_forecast(forecast, console)
    if night is not None:
        show_night_forecast(night, console)


def show_forecast(forecast: Forecast, console: Console) -> None:
    """Print the forecast of one workload."""
    console.rule(f"{forecast.workload}: {forecast.label}, no model was loaded", align="left", style="none")
    if forecast.shape is None:
        console.print(f"Nothing new to do; {forecast.num_already_done:,} rows were done before.\n")
        return
    console.print(_facts(_work_facts(forecast)))
    console.print(_policies(forecast))
    if forecast.field_orders:
        console.print(_orders(forecast))
    if forecast.prediction is not None and forecast.prediction.run.num_steps:  # else no row fits into the KV memory
        console.print(_facts(_run_facts(forecast.prediction)))
        console.print(_what_ifs(forecast.prediction))
    for sentence in forecast.advice or ("Nothing that was tried would help by 5% or more.",):
        console.print(f"- {sentence}")
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in forecast.seconds.items())
    console.print(f"\nExplained in {sum(forecast.seconds.values()):.1f} s: {stages}.\n")


def show_night_forecast(night: NightForecast, console: Console) -> None:
    """Print the batches of a night and their times."""
    console.rule(f"{night.title}: simulated, no model was loaded", align="left", style="none")
    table = make_table("", ("model", "workloads"), ("rows", "prompt tokens", "planned", "loading", "time"))
    for batch in night.batches:
        loading = "-" if batch.load_seconds is None else show_duration(batch.load_seconds)
        names = " + ".join(forecast.workload for forecast in batch.workloads)
        numbers = (
            sum(forecast.num_rows for forecast in batch.workloads),
            sum(forecast.num_prompt_tokens for forecast in batch.workloads),
            batch.num_planned_tokens,
        )
        table.add_row(batch.model, names, *(f"{number:,}" for number in numbers), loading, show_duration(batch.seconds))
    console.print(table)
    line = f"The night takes {show_duration(night.seconds)}"
    if any(batch.load_seconds is None for batch in night.batches):
        line += " beside the time in which models are loaded"
    if night.seconds_allowed is not None:
        fits = "fits before" if night.seconds <= night.seconds_allowed else "does not fit before"
        line += f", which {fits} its deadline, {show_duration(night.seconds_allowed)} after it begins"
    console.print(f"{line}.")
    for name, reason in night.unknown.items():
        console.print(f"- {name} is not simulated: {reason}.")
    console.print()


def publish_night_forecast(night: NightForecast) -> None:
    """Store the page as the artifact ``night-<title>`` of the calling flow run."""
    page = TextPage(ARTIFACT_COLUMNS)
    show_night_forecast(night, page.console)
    publish_page("night", night.title, page.text, f"Simulated: {night.title}")


def publish_forecast(forecast: Forecast) -> None:
    """Store the page as the artifact ``forecast-<workload>`` of the calling flow run."""
    page = TextPage(ARTIFACT_COLUMNS)
    show_forecast(forecast, page.console)
    description = f"Simulated: {forecast.workload}, {forecast.num_rows:,} rows"
    publish_page("forecast", forecast.workload, page.text, description)


def _work_facts(forecast: Forecast) -> list[tuple[str, str]]:
    shape = forecast.shape
    assert shape is not None
    return [
        ("rows to answer", f"{forecast.num_rows:,} ({forecast.num_already_done:,} done before)"),
        ("of these", f"{forecast.num_duplicates:,} duplicates, {forecast.num_error_rows:,} with an error"),
        ("prompt tokens", f"{forecast.num_prompt_tokens:,}"),
        (
            "groups",
            f"{shape.num_groups:,}, of which {shape.num_sharing_groups:,} share a prefix, "
            f"in {forecast.num_partitions:,} partitions",
        ),
        ("prefix tree", f"{shape.num_tree_nodes:,} shared beginnings; levels above a prompt: {_spread(shape.levels)}"),
        ("share degree", f"{_spread(shape.share_degree)} prompts"),
        ("prefix length", f"{_spread(shape.prefix_tokens)} tokens"),
    ]


def _run_facts(prediction: Prediction) -> list[tuple[str, str]]:
    device, run, kv = prediction.device, prediction.run, prediction.kv
    answer = prediction.answer
    source = f"the mean of {answer.num_earlier_answers:,} earlier ones" if answer.num_earlier_answers else "the most"
    shares = ", ".join(
        f"{name} {seconds / run.seconds:.0%}" for name, seconds in run.seconds_by_resource.items() if seconds
    )
    in_layers = [
        f"{num_bytes:,} bytes in layers that see {f'the last {window:,} tokens' if window else 'all tokens'}"
        for window, num_bytes in sorted(kv.bytes_per_token.items())
    ]
    num_engines = prediction.num_engines
    side_by_side = (
        f" on {num_engines} engines side by side ({show_duration(run.seconds)} of all)" if num_engines > 1 else ""
    )
    facts = [
        ("device", (f"{num_engines} x " if num_engines > 1 else "") + f"{device.name}: {device.title}"),
        (
            "assumed",
            f"{device.flops_per_second(prediction.dtype) / 1e12:,.3g} TFLOP/s in {prediction.dtype}, "
            f"{device.bytes_per_second / 1e9:,.4g} GB/s; {device.source}, "
            f"times {device.compute_efficiency:g} and {device.memory_efficiency:g}; "
            f"{device.host_s_per_layer * 1e3:g} ms of the host a layer and step",
        ),
        ("predicted time", f"{show_duration(prediction.seconds)}{side_by_side}, bound by {run.bound} ({shares})"),
        ("cool-down", f"{run.cool_down_seconds / run.seconds:.0%} of the time in steps with nothing left to start"),
        (
            "steps",
            f"{run.num_steps:,} for {run.num_prompt_tokens:,} prompt and {run.num_decode_tokens:,} decode tokens",
        ),
        ("running", f"at most {run.peak_running_requests:,} requests after a step"),
        (
            "KV memory",
            f"at most {show_size(kv.peak_bytes)} of {show_size(kv.budget_bytes)}"
            + (" on each" if num_engines > 1 else ""),
        ),
        ("KV of a token", ", ".join(in_layers)),
        ("weights", show_size(prediction.weight_bytes)),
        ("preemptions", f"{run.num_preempted_requests:,}"),
    ]
    if answer.num_tokens > 1 or answer.num_earlier_answers:
        facts.insert(2, ("answer length", f"{answer.num_tokens} tokens, {source}"))
    return facts


def _policies(forecast: Forecast) -> Table:
    table = make_table(
        "Prompt tokens that each way of sharing saves", ["sharing"], ("computed", "saved", "of the best")
    )
    best = forecast.best_saving_ratio
    for policy in forecast.policies:
        reached = f"{policy.token_saving_ratio / best:.1%}" if best else "-"
        saved = f"{policy.token_saving_ratio:.1%}"
        table.add_row(policy.name, f"{policy.num_processed_tokens:,}", saved, reached)
    num_best = round(forecast.num_prompt_tokens * (1 - best))
    table.add_row("the best any could reach", f"{num_best:,}", f"{best:.1%}", "100.0%" if best else "-")
    return table


def _orders(forecast: Forecast) -> Table:
    table = make_table("Orders of the template's fields, by text that whole fields share", ["order"], ("saved", ""))
    for order in forecast.field_orders:
        mark = "as it is" if order.is_current else ""
        table.add_row(", ".join(order.fields), f"{order.saving_ratio:.1%}", mark)
    return table


def _what_ifs(prediction: Prediction) -> Table:
    table = make_table("Settings tried on some partitions", ["option"], ("time", "partitions"))
    for what_if in prediction.what_ifs:
        table.add_row(what_if.option, f"{what_if.time_ratio - 1:+z.1%}", f"{what_if.num_partitions}")
    return table


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in facts:
        table.add_row(name, value)
    return table


def _spread(values: Quantiles) -> str:
    return f"{values.low:,} / {values.median:,} / {values.high:,} (10% / 50% / 90%), at most {values.largest:,}"
