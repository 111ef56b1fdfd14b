"""Writes tables and plots of the end-to-end results into docs/end_to_end.md:  python -m benchmarks.render

Reads benchmarks/results/end_to_end/*/*.json and flow_run*.json, replaces the text between the document's two markers,
and writes an SVG file for each end-to-end result into the folder charts/ beside it. Nothing is measured.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.charts import FOLDER, bar_chart, save_chart
from benchmarks.measuring.generated_part import replace_generated

ROOT = Path(__file__).parents[1]
GIB = 2**30


def render_comparison(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """A result of benchmarks.end_to_end as lines of Markdown."""
    engines = list(found["engines"])
    yield from _heading(name, found)
    settings = found["settings"]
    turns = ", each engine all its rounds in one go" if "--in-turn" in found["command"] else ""
    yield (
        f"{settings['threads']} threads, KV memory for {settings['kv_tokens']:,} tokens in every engine, at most "
        f"{settings['max_num_batched_tokens']:,} tokens a step, lengths of the paper times {settings['scale']}, "
        f"{settings['repeats']} rounds{turns}. Requests per second, median; in brackets how many times as fast "
        "batchloom is."
    )
    yield ""
    yield f"| workload | rows | {' | '.join(engines)} |"
    yield "|---" * (len(engines) + 2) + "|"
    for workload in found["workloads"]:
        cells = [_cell(workload, engine) for engine in engines]
        yield f"| {workload['name']}: {workload['shape']} | {workload['order']} | {' | '.join(cells)} |"
    yield ""
    yield f"![Requests per second by workload and engine]({FOLDER}/{name}.svg)"
    yield ""
    yield "batchloom itself; the ceiling is the rate of the model's own matrix products in the same run:"
    yield ""
    columns = ("workload", "rows", "seconds", "spread", "output tok/s", "total tok/s", "tokens computed")
    columns += ("of the ceiling", "peak memory, limit")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for workload in found["workloads"]:
        row = workload["engines"].get("batchloom", {"failure": "not measured"})
        if "failure" in row:
            continue
        share = row["share_of_ceiling"]
        yield (
            f"| {workload['name']} | {workload['order']} | {row['median_seconds']:.2f} | {row['spread']:.0%} "
            f"| {row['output_tokens_per_second']:,.0f} | {row['total_tokens_per_second']:,.0f} "
            f"| {row['num_computed_tokens']:,} of {workload['num_prompt_tokens'] + workload['num_output_tokens']:,} "
            f"| {'not measured' if share is None else f'{share:.0%}'} "
            f"| {row['peak_host_bytes'] / GIB:.2f} GiB, {workload['memory_limit_bytes'] / GIB:.2f} GiB |"
        )
    yield ""
    ceilings = found["ceilings"]
    yield (
        f"Ceilings of this run: {ceilings['matrix_flops_per_second'] / 1e12:.2f} TFLOP/s, "
        f"{ceilings['copy_bytes_per_second'] / 1e9:.1f} GB/s."
    )
    yield ""
    yield "| engine | versions | loading, s | float32 answers |"
    yield "|---|---|---|---|"
    for engine, verdict in found["correctness"].items():
        load = found["engines"].get(engine, {})
        versions = ", ".join(f"{package} {version}" for package, version in load.get("versions", {}).items())
        answers = f"{verdict['num_greedy']} of {verdict['num_answers']} greedy"
        if verdict["num_near_ties"]:
            answers += f", {verdict['num_near_ties']} after near ties"
        if not verdict["is_right"]:
            answers = f"wrong or failed, so no speed: {verdict['failure'] or verdict['first_wrong']}"
        yield f"| {engine} | {versions} | {load.get('load_seconds', '')} | {answers} |"
    for what, reason in found["skipped"].items():
        yield f"| {what} | | | skipped: {reason} |"
    yield ""


def render_flow_run(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """A result of benchmarks.flow_run as lines of Markdown."""
    run = found["run"]
    yield from _heading(name, found)
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in run["stage_seconds"].items())
    yield (
        f"A whole nightly run over {run['num_rows']:,} rows ({run['num_prompt_tokens']:,} prompt tokens, "
        f"{run['num_output_tokens']:,} new ones): {run['seconds']:.0f} s, of which {stages}. The model's steps take "
        f"{run['model_seconds']:.0f} s; everything around them is {run['overhead_share']:.1%}. Peak "
        f"memory {run['peak_host_bytes'] / GIB:.2f} GiB; budget, weights and 1 GiB are "
        f"{run['memory_limit_bytes'] / GIB:.2f} GiB."
    )
    yield ""


def _heading(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    machine = found["machine"]
    yield f"## {name}"
    yield ""
    yield f"`{found['command']}`"
    yield ""
    device = found.get("ceilings", {}).get("device", "CPU")
    place = f"{machine['num_cores']} cores of {machine['cpu']}" if device == "CPU" else device
    others = machine["load_average_before"]
    yield f"{found['model']}; {place}; commit {machine['commit']}. Load of others before: {others}."
    yield ""


def _cell(workload: Mapping[str, Any], engine: str) -> str:
    row = workload["engines"].get(engine)
    if row is None or "ended before it was asked" in row.get("failure", ""):
        return "not measured"
    if "failure" in row:
        return "failed"
    ratio = workload["batchloom_over"].get(engine)
    return f"{row['requests_per_second']:.2f}" + (f" ({ratio['median']:.2f}x)" if ratio else "")


def render_plot(found: Mapping[str, Any]) -> str:
    """The comparison as SVG."""
    groups = {
        f"{workload['name']}, {workload['order']}": {
            engine: row["requests_per_second"] for engine, row in workload["engines"].items() if "failure" not in row
        }
        for workload in found["workloads"]
    }
    return bar_chart("End to end", {name: bars for name, bars in groups.items() if bars}, "requests per second")


def render(results: Path, document: Path) -> None:
    """Replace the generated part of the document.

    Raises:
        ValueError: the document lacks the markers.
    """
    lines = [""]
    for file in sorted(results.glob("end_to_end/*/*.json")):
        found = json.loads(file.read_text())
        lines += render_comparison(file.stem, found)
        save_chart(render_plot(found), document, f"{file.stem}.svg")
    for file in sorted(results.glob("flow_run*.json")):
        lines += render_flow_run(file.stem, json.loads(file.read_text()))
    document.write_text(replace_generated(document.read_text(), "end-to-end", lines))


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "end_to_end.md")
    arguments = parser.parse_args(command_line)
    render(arguments.results, arguments.document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
