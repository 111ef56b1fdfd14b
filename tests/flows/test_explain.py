"""The explain flow against the night that follows it: the same rows, groups, steps and tokens, before any model."""

import dataclasses
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from rich.console import Console

from engine.config import EngineConfig
from engine.errors import ArtifactError, CapacityError, ConfigError, DatabaseError, ModelError, WorkloadError
from flows.command.run_flow import run_flow
from flows.explain import explain
from flows.explain_page import show_forecast
from flows.settings import EngineSettings, PlanSettings
from tasks.forecast.advice import advise_keeping, try_settings
from tasks.forecast.forecast import Forecast
from tasks.layouts.estimate import PartTexts
from tasks.layouts.field_orders import compare_field_orders
from tasks.storage.artifact import runs_folder

pytestmark = pytest.mark.usefixtures("prefect_server")

# As the night of the fixture computes: tests/flows/conftest.py.
ENGINE = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128)


def run_explain(nights: Any, *workloads: str, device: str = "h200", **parameters: Any) -> list[Forecast]:
    return explain(
        database=nights.path,
        model=str(nights.model),
        workloads=workloads or ("snippets", "ranking"),
        device=device,
        engine=parameters.pop("engine", ENGINE),
        planning=PlanSettings(partition_tokens=parameters.pop("partition_tokens", 1500)),
        **parameters,
    )


def write_apart(folder: Path) -> str:
    """The file of a workload whose key has the query first, so that a document's rows lie apart in the table."""
    text = (Path(__file__).parents[2] / "workloads" / "snippets.toml").read_text()
    key, apart = 'key = ["doc_id", "query_id"]', 'key = ["query_id", "doc_id"]'
    assert key in text
    path = folder / "apart.toml"
    path.write_text(text.replace(key, apart).replace('"snippets"', '"apart"'))
    return str(path)


def test_a_forecast_foretells_the_night(nights: Any, add_bad_rows: Any) -> None:
    reasons = add_bad_rows(nights)
    nights.sql("insert into documents select 'd-twin', title, body from documents where doc_id = 'd1'")
    nights.sql("insert into snippet_requests values ('d-twin', 'q1')")
    snippets, ranking = run_explain(nights)
    assert not nights.sql("select * from runs")
    assert [forecast.label for forecast in (snippets, ranking)] == ["simulated", "simulated"]
    assert (snippets.num_rows, snippets.num_error_rows, snippets.num_duplicates) == (20, len(reasons), 1)
    assert (ranking.num_rows, ranking.num_error_rows, ranking.num_duplicates) == (6, 0, 0)

    cached = sorted((runs_folder(nights.path) / "cache").iterdir())
    nights.run()
    assert sorted((runs_folder(nights.path) / "cache").iterdir()) == cached, "the night made something again"
    for forecast in (snippets, ranking):
        ((num_prompt_tokens, best, num_partitions, peak_blocks, num_suffix_and_prefix),) = nights.sql(
            "select any_value(num_prompt_tokens), any_value(best_token_saving_ratio), count(distinct partition),"
            " max(num_kv_blocks_used), sum(num_suffix_tokens + num_prefix_tokens)"
            " from runs join steps using (run_id) where workload = $workload",
            {"workload": forecast.workload},
        )
        assert forecast.prediction is not None
        assert forecast.num_prompt_tokens == num_prompt_tokens
        assert forecast.best_saving_ratio == pytest.approx(best)
        assert forecast.num_partitions == num_partitions
        assert forecast.prediction.run.num_prompt_tokens == num_suffix_and_prefix
        # The night's answers may end early, which frees their memory early; what is set aside for them is the same.
        block_bytes = EngineConfig().block_size * 2 * 2 * 2 * 16 * 4
        if forecast.mode == "score":
            assert forecast.prediction.kv.peak_bytes == peak_blocks * block_bytes
        else:
            assert forecast.prediction.kv.peak_bytes >= peak_blocks * block_bytes
    ((num_steps,),) = nights.sql("select num_steps from runs where workload = 'ranking'")
    assert ranking.prediction is not None
    assert ranking.prediction.run.num_steps == num_steps


def test_time_on_this_machine_is_corrected_by_earlier_nights(nights: Any) -> None:
    """A night was a hundred times as slow as it was predicted; on another device that says nothing."""

    def predict(device: str) -> Any:
        return run_explain(nights, "snippets", device=device, full=True)[0].prediction

    before, elsewhere = predict("auto"), predict("h200")
    nights.run()
    with duckdb.connect(nights.path) as connection:
        connection.execute("update steps set duration_ms = 100")
        connection.execute(
            "update runs set config = json_merge_patch(config, prediction) from (select run_id,"
            " json_object('prediction', json_object('num_computed_tokens', num_tokens, 'step_seconds',"
            " num_steps / 1000)) as prediction"
            " from (select run_id, count(*) as num_steps,"
            " sum(num_decode_tokens + num_suffix_tokens + num_prefix_tokens) as num_tokens from steps group by run_id))"
            " as predicted where runs.run_id = predicted.run_id"
        )
    after = predict("auto")
    assert after.seconds > 50 * before.seconds  # both measured this machine
    assert "100.00 times its simulated time" in after.device.title
    assert "times its simulated time" not in before.device.title
    assert predict("h200").device == elsewhere.device


def test_policies_go_from_no_sharing_to_the_best(nights: Any) -> None:
    nights.sql("insert into documents select 'd-twin', title, body from documents where doc_id = 'd1'")
    nights.sql("insert into snippet_requests values ('d-twin', 'q1')")
    (forecast,) = run_explain(nights, "snippets", partition_tokens=10**6)
    ratios = {policy.name: policy.token_saving_ratio for policy in forecast.policies}
    # Table order puts a document's rows one after the other; with ample memory a cache finds all but blocks begun.
    cached = ratios.pop("LRU cache of blocks, order of the key")
    assert 0.3 < cached < forecast.best_saving_ratio
    ordered = [
        "none", "identical prompts once", "one level, paper", "one level, exact",
        "exact, with shared runs on paths",
    ]  # fmt: skip
    assert list(ratios) == [*ordered, "as run, in one partition"]
    assert ratios["none"] == 0 < ratios["identical prompts once"]
    found = [ratios[name] for name in ordered]
    assert found == sorted(found)
    assert ratios["as run, in one partition"] == pytest.approx(ratios["exact, with shared runs on paths"], abs=0.01)
    assert found[-1] < forecast.best_saving_ratio < 1
    assert forecast.shape is not None
    assert forecast.shape.num_sharing_groups == 4
    assert forecast.shape.share_degree.largest == 3
    by_fields = {order.fields: order for order in forecast.field_orders}
    assert by_fields["title", "body", "query_text"].is_current
    assert forecast.field_orders[0].fields == ("title", "body", "query_text")
    assert by_fields["query_text", "title", "body"].saving_ratio < by_fields["title", "body", "query_text"].saving_ratio


@pytest.mark.parametrize("settings", [{"sharing": "group"}, {"sharing": "lru"}, {"disaggregation": "processes"}])
def test_the_plan_is_that_of_the_night(nights: Any, settings: dict[str, str]) -> None:
    engine = ENGINE.model_copy(update=settings)
    (forecast,) = run_explain(nights, "ranking", engine=engine, partition_tokens=10**6)
    nights.run("ranking", engine=engine, partition_tokens=10**6)
    ((planned, num_computed),) = nights.sql(
        "select any_value(token_saving_ratio), sum(num_prefix_tokens + num_suffix_tokens)"
        " from runs join steps using (run_id)"
    )
    assert forecast.policies[-2].token_saving_ratio == planned
    assert forecast.policies[-2].name.startswith("exact, without" if "sharing" in settings else "exact, with shared")
    assert forecast.policies[-1].num_processed_tokens == num_computed


def test_rows_that_do_not_fit_are_not_saved(nights: Any, tmp_path: Path) -> None:
    """Also where rows are planned in another order than that of the table."""
    path, found = write_apart(tmp_path), []
    for kv_memory in ("40KiB", "136KiB"):
        engine = ENGINE.model_copy(update={"kv_memory": kv_memory})
        (forecast,) = run_explain(nights, path, engine=engine, partition_tokens=1)
        show_forecast(forecast, Console(file=io.StringIO()))
        assert forecast.prediction is not None
        num_oversized = forecast.prediction.num_oversized_rows
        assert f"{num_oversized} rows need more KV memory than there is: raise --kv-memory." in forecast.advice
        saved = [policy.token_saving_ratio for policy in forecast.policies]
        assert max(saved) < forecast.best_saving_ratio
        found.append((num_oversized, saved[1], saved[-1]))
    assert found[0] == (12, 0.0, 0.0)
    (run,) = nights.run(path, engine=engine, partition_tokens=1)
    assert 0 < run.num_errors == found[1][0] < 12
    assert found[1][2] == pytest.approx(run.num_cached_tokens / run.num_prompt_tokens)


def test_rows_of_several_prompts_are_counted_as_rows(nights: Any, tmp_path: Path) -> None:
    """Two questions about each of 20 texts: one is there twice, and one is too long for the KV memory."""
    (tmp_path / "asked.sql").write_text("select doc_id, body from documents")
    (tmp_path / "asked.toml").write_text(
        'name = "asked"\nmode = "decide"\nrequests_sql = "asked.sql"\nkey = ["doc_id"]\n'
        '[prompt]\ntemplate = "{body}"\n[output]\ntable = "asked"\n'
        '[questions]\nurgent = { type = "BOOLEAN", ask = "Is it urgent?" }\n'
        'friendly = { type = "BOOLEAN", ask = "Is it friendly?" }\n'
    )
    nights.sql("insert into documents select 'd-more' || i, 'House', 'House ' || i from range(14) as houses (i)")
    nights.sql("insert into documents select 'd-twin', title, body from documents where doc_id = 'd0'")
    nights.sql("insert into documents select 'd-long', title, repeat(body, 9) from documents where doc_id = 'd3'")
    engine = ENGINE.model_copy(update={"kv_memory": "256KiB"})
    (forecast,) = run_explain(nights, str(tmp_path / "asked.toml"), engine=engine)
    (run,) = nights.run(str(tmp_path / "asked.toml"), engine=engine)
    assert forecast.prediction is not None
    assert (forecast.num_rows, forecast.num_duplicates, forecast.prediction.num_oversized_rows) == (20, 1, 1)
    assert (run.num_rows, run.num_errors) == (20, 1)


def test_a_cache_of_blocks_forgets_what_a_plan_keeps(nights: Any, tmp_path: Path) -> None:
    path = write_apart(tmp_path)
    small = EngineSettings(dtype="float32", kv_memory="192KiB", max_num_batched_tokens=128, block_size=16)
    large = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128, block_size=16)
    cached, planned = {}, {}
    for name, engine in (("small", small), ("large", large)):
        (forecast,) = run_explain(nights, path, engine=engine, partition_tokens=10**6)
        ratios = {policy.name: policy.token_saving_ratio for policy in forecast.policies}
        cached[name] = ratios["LRU cache of blocks, order of the key"]
        planned[name] = ratios["as run, in one partition"]
    assert cached["small"] < 0.6 * cached["large"], "a document's blocks are gone before its next row comes"
    assert planned["small"] == pytest.approx(planned["large"], abs=0.01)


def test_earlier_answers_say_how_long_the_next_ones_are(nights: Any) -> None:
    first, _ = run_explain(nights)
    assert first.prediction is not None
    assert dataclasses.astuple(first.prediction.answer) == (48, 0)
    nights.run("snippets")
    nights.sql("update snippets set num_output_tokens = 7")
    (done,) = run_explain(nights, "snippets")
    assert (done.num_rows, done.num_already_done, done.prediction) == (0, 12, None)
    (again,) = run_explain(nights, "snippets", full=True)
    assert again.prediction is not None
    assert dataclasses.astuple(again.prediction.answer) == (7, 12)
    assert again.prediction.run.num_decode_tokens == 12 * 6 < first.prediction.run.num_decode_tokens


def test_a_template_in_a_poor_order_is_noticed(nights: Any, tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "workloads" / "snippets.toml"
    text = shipped.read_text()
    document, question = "Document: {title}\n\n{body}\n\n", "Question: {query_text}\n"
    assert document + question in text
    poor = tmp_path / "poor.toml"
    poor.write_text(text.replace(document + question, question + document).replace('"snippets"', '"poor"'))
    (forecast,) = run_explain(nights, str(poor))
    assert forecast.field_orders[0].fields == ("title", "body", "query_text")
    assert forecast.advice[0].startswith("Put the template's fields in the order title, body, query_text: about ")
    (better,) = run_explain(nights, "snippets")
    assert better.best_saving_ratio > forecast.best_saving_ratio
    # Whole fields are a lower bound of what prompts share, a close one where they begin differently.
    poor_order = next(order for order in forecast.field_orders if order.is_current)
    assert poor_order.saving_ratio < forecast.best_saving_ratio
    assert forecast.field_orders[0].saving_ratio == pytest.approx(better.best_saving_ratio, abs=0.05)


def test_orders_are_compared_as_by_hand() -> None:
    # Two documents of 100 bytes, each with three questions of 10 that all documents share.
    hashes = np.array([[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1]], np.uint64).T
    texts = PartTexts(head=0, hashes=hashes, num_bytes=np.tile([10, 100], (6, 1)))
    total, fixed = 6 * 117, 5 + 6 * 2
    found = compare_field_orders(["q", "d"], texts, 5, 2)
    assert [(order.fields, order.is_current) for order in found] == [(("d", "q"), False), (("q", "d"), True)]
    assert found[0].saving_ratio == pytest.approx(1 - (fixed + 2 * 100 + 6 * 10) / total)
    assert found[1].saving_ratio == pytest.approx(1 - (fixed + 3 * 10 + 6 * 100) / total)
    none = PartTexts(head=0, hashes=hashes[:0], num_bytes=texts.num_bytes[:0])
    assert compare_field_orders(["q", "d"], none, 5, 2) == []


def test_memory_decides_what_is_advised(nights: Any) -> None:
    small = EngineSettings(dtype="float32", kv_memory="128KiB", max_num_batched_tokens=128)
    (forecast,) = run_explain(nights, "snippets", engine=small, partition_tokens=10**6)
    assert forecast.prediction is not None
    assert forecast.prediction.run.bound == "KV capacity"
    assert forecast.prediction.what_ifs[0].option == "--kv-memory times 2"
    assert forecast.prediction.what_ifs[0].time_ratio < 0.95
    assert any(sentence.startswith("--kv-memory times 2 would take") for sentence in forecast.advice)
    (ample,) = run_explain(nights, "snippets", partition_tokens=10**6)
    assert ample.prediction is not None
    assert ample.prediction.run.seconds < forecast.prediction.run.seconds
    run, kv_bytes = forecast.prediction.run, forecast.prediction.kv.budget_bytes
    for most_kv_bytes, is_tried in ((2 * kv_bytes, True), (2 * kv_bytes - 1, False)):
        tried = try_settings(lambda *_: run, small.to_config(), kv_bytes, most_kv_bytes, run, [run.seconds])
        assert ("--kv-memory times 2" in {each.option for each in tried}) is is_tried


def test_a_larger_step_is_tried_than_the_device_chooses(nights: Any) -> None:
    """An H200 takes steps of 8,192 tokens unless it is told otherwise."""
    engine = EngineSettings(dtype="float32", kv_memory="8MiB")
    (forecast,) = run_explain(nights, "snippets", engine=engine, partition_tokens=10**6)
    assert forecast.prediction is not None
    assert [each.option for each in forecast.prediction.what_ifs] == ["--max-num-batched-tokens 32768"]


def test_what_an_earlier_workload_has_yet_to_answer_is_not_explained(nights: Any, tmp_path: Path) -> None:
    """The night would answer both; before it, only the first can be explained."""
    again = (Path(__file__).parents[2] / "workloads" / "snippets.toml").read_text()
    again = again.replace('"snippets"', '"again"').replace("select_snippet_requests.sql", "again.sql")
    (tmp_path / "again.toml").write_text(again)
    (tmp_path / "again.sql").write_text(
        "select doc_id, query_id, '' as title, snippet as body, snippet as query_text from latest_firsts"
    )
    (tmp_path / "first.toml").write_text(again.replace('"again"', '"firsts"').replace("again.sql", "first.sql"))
    (tmp_path / "first.sql").write_text(
        "select doc_id, query_id, title, body, query_text from snippet_requests join documents using (doc_id)"
        " join queries using (query_id)"
    )
    first, second = str(tmp_path / "first.toml"), str(tmp_path / "again.toml")
    line = "in the query of workload 'again': no table or view 'latest_firsts'"
    with pytest.raises(DatabaseError, match=f"{line}; if an earlier workload makes it, explain"):
        run_explain(nights, first, second)
    assert not (runs_folder(nights.path) / "cache").exists(), "no rows were read"
    with pytest.raises(DatabaseError, match=f"{line}$"):
        run_explain(nights, second, first)
    nights.run(first, second)
    assert [forecast.num_rows for forecast in run_explain(nights, first, second, full=True)] == [12, 12]


def test_several_engines_take_as_long_as_the_longest(nights: Any) -> None:
    (alone,) = run_explain(nights, "snippets", partition_tokens=1)
    (both,) = run_explain(nights, "snippets", partition_tokens=1, workers=2)
    assert alone.num_partitions >= 4
    assert alone.prediction is not None
    assert both.prediction is not None
    assert alone.prediction.seconds == alone.prediction.run.seconds
    assert both.prediction.run == alone.prediction.run, "each is a device of its own"
    share = both.prediction.seconds / alone.prediction.seconds
    assert 0.5 <= share < 0.8
    (idle,) = run_explain(nights, "snippets", partition_tokens=10**6, workers=2)
    assert idle.prediction is not None
    assert idle.prediction.seconds == idle.prediction.run.seconds, "one partition, one engine"
    assert any("The 2 engines have nothing to do for 50% of their time" in sentence for sentence in idle.advice)
    (halves,) = run_explain(nights, "snippets", device="cpu", workers=2)
    assert halves.prediction is not None
    assert halves.prediction.kv.budget_bytes == 4 << 20
    assert halves.prediction.device.title.endswith("divided by 2 engines")


def test_advice_names_what_is_lost_between_the_best_the_plan_and_the_run(nights: Any) -> None:
    fine = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128, block_size=16)
    (forecast,) = run_explain(nights, "snippets", engine=fine, partition_tokens=1)
    assert forecast.num_partitions >= 4
    planned, run = (policy.token_saving_ratio for policy in forecast.policies[-2:])
    assert planned - run > 0.05
    assert any(sentence.endswith("raise --partition-tokens.") for sentence in forecast.advice)
    whole = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128, deterministic=True)
    (forecast,) = run_explain(nights, "snippets", engine=whole, device="cpu", partition_tokens=10**6)
    assert forecast.num_partitions == 1
    assert not any("partitions" in sentence for sentence in forecast.advice), "prefixes are cut to whole blocks"
    coarse = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128, block_size=128)
    (forecast,) = run_explain(nights, "snippets", engine=coarse, partition_tokens=10**6)
    assert forecast.best_saving_ratio - forecast.policies[-2].token_saving_ratio > 0.05
    assert any("a smaller --block-size reaches more" in sentence for sentence in forecast.advice)
    apart = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128, sharing="group")
    (forecast,) = run_explain(nights, "snippets", engine=apart, partition_tokens=10**6)
    assert any("--sharing path reaches more" in sentence for sentence in forecast.advice)
    assert not any("--block-size" in sentence for sentence in forecast.advice)


def test_what_cannot_be_explained_is_refused(nights: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no device 'h900'; there are a100, h100"):
        run_explain(nights, device="h900")
    with pytest.raises(CapacityError, match="a KV budget of 1,000"):
        run_explain(nights, engine=EngineSettings(kv_memory="1TB"))
    with pytest.raises(WorkloadError, match="'snippets': answers of up to 48 tokens leave no room for a prompt"):
        run_explain(nights, "snippets", engine=EngineSettings(max_model_len=48))
    with pytest.raises(ConfigError, match="device 'a100' has no rate for dtype 'fp8'; there are bfloat16"):
        run_explain(nights, device="a100", engine=EngineSettings(dtype="fp8"))
    with pytest.raises(ConfigError, match="no device 'gpu'; there are a100, h100"):
        run_explain(nights, device="auto", engine=EngineSettings(device="gpu"))
    with pytest.raises(ConfigError, match="no device 'h900'"):  # before a model is fetched
        explain(nights.path, "org/not-here", device="h900")
    with pytest.raises(ConfigError, match="device 'cuda:99': torch finds"):
        explain(nights.path, "org/not-here", engine=EngineSettings(device="cuda:99"))
    assert not (runs_folder(nights.path) / "cache").exists(), "no rows were read"
    with pytest.raises(CapacityError, match="a KV budget of 24576 bytes holds no request: one block of 32 tokens"):
        run_explain(nights, engine=EngineSettings(dtype="float32", kv_memory="24KiB"))
    with pytest.raises(ConfigError, match="workloads snippets and snippets write to the table 'snippets': each"):
        run_explain(nights, "snippets", "snippets")
    (tmp_path / "broken").mkdir()
    for file in nights.model.iterdir():
        (tmp_path / "broken" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "broken" / "config.json").write_text('{"max_position_embeddings": 10}')
    nights.model = tmp_path / "broken"
    with pytest.raises(ModelError, match="num_attention_heads must be a positive whole number"):
        run_explain(nights)
    nights.path = tmp_path / "gone.duckdb"
    with pytest.raises(DatabaseError, match="no such file"):
        run_explain(nights)
    assert not runs_folder(nights.path).exists()


def test_a_folder_that_cannot_be_written_is_named_before_rows_are_read(nights: Any, tmp_path: Path) -> None:
    mount = ["mount", "--bind", str(tmp_path), str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
        place = re.escape(f"{nights.runs} cannot be written: Read-only file system")
        with pytest.raises(ArtifactError, match=f"^{place}; tokens and plans are kept there, so copy the database"):
            run_explain(nights)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_command_line_prints_a_page_or_json(nights: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*nights.inputs, "--workload", "snippets"]
    options += ["--device", "a100", "--dtype", "float32", "--kv-memory", "8MiB"]
    assert run_flow(explain, [*options, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["label"], found["num_rows"], found["prediction"]["device"]["name"]) == ("simulated", 12, "a100")
    assert run_flow(explain, options) == 0
    page = capsys.readouterr().out
    assert "simulated" in page
    assert "NVIDIA A100 data sheet" in page
    assert run_flow(explain, [*options, "--workers", "3"]) == 0
    page = capsys.readouterr().out
    assert "3 x a100" in page
    assert "on 3 engines side by side" in page
    assert run_flow(explain, [*options, "--workers", "none"]) == 2
    assert "--workers" in capsys.readouterr().err
    assert run_flow(explain, [*options, "--max-num-batched-tokens", "0"]) == 2
    assert "--max-num-batched-tokens" in capsys.readouterr().err
    assert run_flow(explain, [*options[:2], "--model", "/no/such"]) == 1
    assert capsys.readouterr().err == "explain: model '/no/such': no such file or folder\n"


def test_a_page_says_everything_once(nights: Any) -> None:
    (forecast,) = run_explain(nights, "snippets")
    console = Console(width=160, file=io.StringIO())
    show_forecast(forecast, console)
    page = console.file.getvalue()
    for expected in (
        "12 (0 done before)", "0 duplicates, 0 with an error", "share degree", "exact, with shared runs on paths",
        "the best any could reach", "title, body, query_text", "bound by", "KV memory", "48 tokens, the most",
    ):  # fmt: skip
        assert expected in page, expected


def test_a_device_of_the_table_has_formats_that_this_machine_lacks(nights: Any) -> None:
    (forecast,) = run_explain(nights, "snippets", device="h100", engine=EngineSettings(dtype="fp8"))
    assert forecast.prediction is not None
    assert forecast.prediction.dtype == "fp8"
    (wide,) = run_explain(nights, "snippets", device="h100", engine=EngineSettings(dtype="bfloat16"))
    assert wide.prediction is not None
    assert forecast.prediction.weight_bytes < wide.prediction.weight_bytes
    assert forecast.prediction.kv.bytes_per_token[0] < wide.prediction.kv.bytes_per_token[0]


def test_what_kept_prefixes_would_bring(nights: Any) -> None:
    keeping = ENGINE.model_copy(update={"keep_prefixes": "1MB"})
    (plain,) = run_explain(nights, "snippets")
    (forecast,) = run_explain(nights, "snippets", engine=keeping)
    for found in (plain.kept_prefixes, forecast.kept_prefixes):
        assert found is not None
        assert 0 < found.num_tokens < forecast.num_prompt_tokens
        assert found.num_bytes == found.num_tokens * 2 * 2 * 2 * 16 * 4
        assert min(found.compute_seconds, found.read_seconds) > 0
    assert not any("--keep-prefixes" in sentence for sentence in plain.advice), "a tiny model computes in no time"
    assert sum("--keep-prefixes keeps nothing of" in sentence for sentence in forecast.advice) == 1
    slow = dataclasses.replace(forecast.kept_prefixes, compute_seconds=60.0, read_seconds=2.0, num_bytes=4_000_000)
    (sentence,) = advise_keeping(slow)
    assert "keeps 25% of 0.00 GB" in sentence
    (sentence,) = advise_keeping(dataclasses.replace(slow, budget_bytes=0, num_bytes=2_500_000_000))
    assert sentence.startswith("--keep-prefixes 3GB would keep 2.50 GB of KV")
    (alone,) = run_explain(nights, "snippets", engine=ENGINE.model_copy(update={"sharing": "none"}))
    assert alone.kept_prefixes is None
