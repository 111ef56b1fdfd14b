"""The papers' tables, small: what workloads save, what layouts compute, who is refused, and the page they end on."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.kernels.relay_model import equation_10
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.papers import __main__ as papers
from benchmarks.papers import disaggregation, notes, prepacking, relay, throughput
from benchmarks.papers.case_workload import CASE_1, CASE_2
from benchmarks.papers.configurations import simulated_config
from benchmarks.papers.lab import Lab, Trial
from benchmarks.papers.simulated import A100
from benchmarks.random_model import SHAPES, write_checkpoint
from engine.planning.planner import plan_prompts

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"


def test_case_workloads_save_what_the_paper_reports() -> None:
    """The share of tokens that explicit prefixes save (6.2.2, 6.2.3), within what sampled lengths change."""
    for case, reported in ((CASE_1, 0.549), (CASE_2, 0.38)):
        requests = case.requests()
        _, saved = plan_prompts([request.token_ids for request in requests])
        assert len({request.request_id for request in requests}) == case.num_requests
        assert saved.token_saving_ratio == pytest.approx(reported, abs=0.025)


def test_a_simulated_run_saves_what_its_plan_saves() -> None:
    """All documents fit, so nothing is recomputed; a cache finds less, and nothing without sharing is saved."""
    requests = replace(CASE_1, num_requests=60).requests()
    best = plan_prompts([request.token_ids for request in requests])[1].best_token_saving_ratio
    ratios = {
        sharing: A100.run(requests, simulated_config({"sharing": sharing})).token_saving_ratio
        for sharing in ("path", "lru", "none")
    }
    assert ratios["none"] == 0
    assert 0 < ratios["lru"] < ratios["path"] == pytest.approx(best)


def test_layouts_of_prompts() -> None:
    lengths = [10, 40, 30, 20]

    def layout(packing: str) -> tuple[int, int]:
        found = prepacking.Layout.of(packing, lengths, batch_size=2)
        return found.num_rows, found.most_rows

    assert layout("padded") == (2 * 40 + 2 * 30, 80)
    assert layout("length-ordered") == (2 * 20 + 2 * 40, 80)
    assert layout("prepacked") == (100, 40)
    assert layout("ragged") == (100, 50)


def test_equation_10_is_the_ratio_of_elements_moved() -> None:
    """Eq. 8 over Eq. 9, with the embedding dimension cancelled."""
    b, s, c = 8, 1024, 128
    assert equation_10(b, s, c) == pytest.approx((2 * b + b * (s + c)) / (2 * b + s + 2 * b + b * c + 3 * b))


def test_a_shared_prefix_and_copies_of_it_hold_the_same() -> None:
    """Every request's table leads to the same values in either form, in blocks of its own where they are copies."""
    torch.manual_seed(1)
    step = relay.Step.make(3, 64, torch.float32)
    num_prefix, num_own = 64 // relay.BLOCK_SIZE, relay.OWN_TOKENS // relay.BLOCK_SIZE
    tables = step.copied.suffix_block_table.reshape(3, num_prefix + num_own)
    assert len(set(tables[:, :num_prefix].flatten().tolist())) == 3 * num_prefix
    for cache in (step.k_cache, step.v_cache):
        for table in tables:
            assert torch.equal(
                cache[table[:num_prefix].astype("int64")], cache[step.shared.prefix_block_ids.astype("int64")]
            )
    assert (tables[:, num_prefix:].flatten() == step.shared.suffix_block_table).all()


def test_configurations_that_answer_otherwise_get_no_figures(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    lab = Lab(tmp_path / "model", name="tiny", dtype="float32", num_threads=1)
    case = CASE_1.scaled(0.02, 3)
    trials = {
        f"seed {seed}": Trial(
            settings={}, kv_tokens=512, requests=case.requests(is_shuffled=False, vocab_size=512, seed=seed)
        )
        for seed in (1, 2)
    }
    with pytest.raises(WrongAnswerError, match=r"seed 2, request \d: .*, expected "):
        lab.measure(trials, num_repeats=1)


def test_tables_are_run_kept_and_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line with its own model of random weights, tables of both kinds, the page, and pictures."""
    monkeypatch.setattr(papers, "RANDOM_SHAPE", SHAPES["tiny"])
    monkeypatch.setattr(notes, "CASE", replace(notes.CASE, num_requests=100))
    monkeypatch.setattr(notes, "MEASURED_QUESTIONS", notes.QUESTIONS)  # a second process takes seconds to start
    monkeypatch.setattr(notes, "NUM_REPEATS", 1)
    monkeypatch.setattr(throughput, "NUM_REQUESTS", 6)
    monkeypatch.setattr(throughput, "NUM_REPEATS", 1)
    monkeypatch.setattr(prepacking, "BATCH_SIZES", (2,))
    monkeypatch.setattr(prepacking, "NUM_PROMPTS", 4)
    monkeypatch.setattr(prepacking, "NUM_REPEATS", 1)
    monkeypatch.setattr(disaggregation, "PROMPT_TOKENS", (256,))
    monkeypatch.setattr(disaggregation, "NUM_REQUESTS", 8)
    monkeypatch.setattr(relay, "PREFIX_TOKENS", (64,))
    monkeypatch.setattr(relay, "BATCH_SIZES", (2, 3))
    monkeypatch.setattr(relay, "NUM_REPEATS", 1)
    out, document = tmp_path / "results" / "papers.json", tmp_path / "papers.md"
    document.write_text(re.sub(r"(: generated -->).*?(<!-- [\w-]+: end)", r"\1\2", PAGE.read_text(), flags=re.DOTALL))
    options = ["--out", str(out), "--document", str(document), "--dtype", "float32", "--threads", "1"]
    names = ["notes-simulated", "disaggregation", "prepacking", "relay", "throughput-measured", "notes-measured"]
    assert papers.main([*options, "--only", *names[:2]]) == 0
    assert papers.main([*options, "--only", *names[2:]]) == 0
    found = json.loads(out.read_text())["tables"]
    assert list(found) == names
    for entry in found.values():
        table = entry["table"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert table["method"].startswith("measured" if "--threads" in entry["command"] else "simulated")
    for name in ("notes-simulated", "notes-measured"):
        rows = {
            tuple(row[:2]): dict(zip(found[name]["table"]["columns"], row, strict=True))
            for row in found[name]["table"]["rows"]
        }
        assert rows["preemption", "recompute"]["preempted"] > 0
        assert rows["preemption", "kill"]["error rows"] == rows["preemption", "kill"]["preempted"] > 0
        assert sum(row["error rows"] for row in rows.values()) == rows["preemption", "kill"]["error rows"]
        assert rows["batching", "static"]["steps"] > rows["batching", "continuous"]["steps"]

    assert papers.main([*options, "--render"]) == 0
    page = document.read_text()
    assert '| prefill | chunked | `prefill="chunked"` |' in page
    pictures = re.findall(r"!\[[^\]]+\]\(([\w./]+)\)", page)
    assert len(pictures) == 4 + 1 + 2 + 1 + 1 + 4
    for picture in pictures:
        ElementTree.parse(tmp_path / picture)


def test_the_page_has_a_place_for_every_table() -> None:
    page = PAGE.read_text()
    for name in (*papers.SIMULATED, *papers.MEASURED):
        assert page.count(f"<!-- {name}: generated -->") == page.count(f"<!-- {name}: end -->") == 1
