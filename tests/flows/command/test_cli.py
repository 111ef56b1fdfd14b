"""`python -m flows.nightly` as a process: exit codes, one line for an error, Ctrl-C, SIGTERM, kill -9."""

import fcntl
import json
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any, Literal, get_args, get_origin

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import LogSort
from prefect.settings import PREFECT_API_URL, temporary_settings
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from engine import EngineConfig
from engine.errors import ConfigError
from engine.model.loading.checkpoint import read_json
from flows.advise import LOCK_TIMEOUT_SECONDS
from flows.cli import batchloom
from flows.command.commands import COMMANDS
from flows.command.prefect_server import ANSWER_SECONDS
from flows.command.run_flow import run_flow
from flows.nightly import nightly
from flows.nights.night import night
from flows.settings import EngineSettings, PlanSettings, WorkerSettings
from tasks.runs.infer_job import FailurePolicy
from tests.flows.distributed.worker_watch import wait_until
from tests.tiny_encoders import save_encoder

ROOT = Path(__file__).parents[3]
STOPPED = "nightly: stopped; what is answered is kept, and the next run does the rest"
OPTIONS = ("--dtype", "float32", "--kv-memory", "8MiB", "--max-num-batched-tokens", "128")


@dataclass
class Command:
    """One call of the command line. Its output goes to files, since a surviving child would keep a pipe open."""

    process: "subprocess.Popen[bytes]"
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)


Start = Callable[..., Command]


@pytest.fixture
def start(nights: Any, prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts the command line on the database, in a process group of its own.

    Its Prefect server is the session's, to save the time of starting one, or with ``own_server=True`` a temporary one,
    as on a machine without any.
    """
    commands = []

    def begin(*options: str, own_server: bool = False, **streams: Any) -> Command:
        arguments = [
            sys.executable,
            "-m",
            "flows.nightly",
            "--database",
            str(nights.path),
            "--model",
            str(nights.model),
        ]
        environment = os.environ | ({} if own_server else {"PREFECT_API_URL": prefect_server})
        folder = tmp_path_factory.mktemp("command")
        with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                [*arguments, *OPTIONS, *options],
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                **({"stdout": stdout, "stderr": stderr} | streams),
            )
        commands.append(Command(process, folder))
        return commands[-1]

    yield begin
    for command in commands:
        with suppress(ProcessLookupError):
            os.killpg(command.process.pid, signal.SIGKILL)
        command.wait()


def wait_for(condition: Callable[[], Any], command: Command, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert command.process.poll() is None, command.errors
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def many_documents(nights: Any, count: int) -> None:
    """One prefix group each, so that they become partitions of their own."""
    nights.sql(
        "insert into documents select 'm' || i, 'Tower ' || i, i || ' towers stand in the night. ' || repeat('So ', i)"
        " from range(?) as numbers (i)",
        [count],
    )
    nights.sql("insert into snippet_requests select doc_id, query_id from documents, queries where doc_id like 'm%'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--database", "{tmp}/none.duckdb"), "no database at {tmp}/none.duckdb: no such file"),
        (("--database", "{tmp}/text.duckdb"), "{tmp}/text.duckdb cannot be opened"),
        (("--model", "{tmp}/nothing"), "model '{tmp}/nothing': no such file or folder"),
        (("--model", "~no-such-user/nothing"), "model '~no-such-user/nothing': no such file or folder"),
        (("--adapter", "~no-such-user/nothing"), "~no-such-user/nothing': the folder holds no adapter_config.json"),
        (("--attach", "crm=~no-such-user/nothing"), "attach: crm: nothing is at "),
        (("--device", "cuda:99"), "device 'cuda:99': torch finds"),
        (("--model", "org/not-here", "--device", "cuda:99"), "device 'cuda:99': torch finds"),
        (("--kv-memory", "1KB"), "a KV budget of 1000 bytes holds no request"),
        (("--runner", "ray", "--kv-memory", "1KB"), "a KV budget of 1000 bytes holds no request"),
        (("--workload", "nonsense"), "no workload 'nonsense'"),
        (("--workload", "{tmp}/broken.toml"), "broken.toml cannot be read as TOML"),
        (("--workload", "{tmp}/"), "nightly: {tmp} cannot be read: Is a directory"),
        (("--max-model-len", "48"), "workload 'snippets': answers of up to 48 tokens leave no room for a prompt"),
        (("--max-num-batched-tokens", "0"), "--max-num-batched-tokens: Input should be greater than or equal to 1"),
        (("--workers", "0"), "--workers: Input should be greater than or equal to 1"),
        (("--kv-memory", "much"), "--kv-memory: 'much' is not what it takes: memory for KV, such as 512MiB or 4GB"),
        (("--exchange", "s3://me:secret@here/x"), "--exchange: may hold neither password nor query"),
        (
            ("--workload", "snippets", "ranking"),
            "ranking: belongs to no option (several values are given as --option A",
        ),
        (
            ("--workload", "snippets", "--workload", "snippets"),
            "workloads snippets and snippets write to the table 'snippets': each workload needs a table of its own",
        ),
        (("--budget", "9min"), "--budget needs a night file: batchloom nightly NIGHT.toml --budget VALUE"),
        (("--until=06:00",), "--until needs a night file: batchloom nightly NIGHT.toml --until VALUE"),
        (("--method", "best"), 'Invalid value "best" for --method. Choose from: "exact", "paper", "none".'),
    ],
)
@pytest.mark.usefixtures("prefect_server")
def test_a_mistake_is_one_line(
    nights: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "text.duckdb").write_text("this is no database, whatever its name says\n" * 100)
    (tmp_path / "broken.toml").write_text("name = ")
    before = sorted(path.name for path in tmp_path.iterdir())
    given = [option.format(tmp=tmp_path) for option in options]
    arguments = [*nights.inputs, *given]
    capfd.readouterr()
    assert run_flow(nightly, arguments) in (1, 2)
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1, errors
    assert message.format(tmp=tmp_path) in errors[0]
    assert errors[0].startswith("nightly: ")
    assert errors[0].count(f"{options[0]}: ") <= 1
    tables = nights.sql("select count(*) from snippets union all select count(*) from runs")
    assert tables == [(0,), (0,)]
    after = {path.name for path in tmp_path.iterdir()} - {f"{nights.path.name}.runs"}
    assert sorted(after) == before


@pytest.mark.parametrize(
    ("sizes", "block_size", "why"),
    [
        ({}, 36, "block_size must be a multiple of 8 of at most 256, got 36"),
        ({"head_dim": 264}, 32, "head_dim must be a multiple of 8 of at most 256, got 264"),
        ({"hidden_size": 36}, 32, "head_dim must be a multiple of 8 of at most 256, got 6"),
        ({"num_attention_heads": 34, "head_dim": 16}, 32, "34 query heads for 2 KV heads: must be 1 to 16 times as"),
    ],
)
def test_what_a_gpu_does_not_compute_is_refused_before_any_row_is_read(
    sizes: dict[str, int], block_size: int, why: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """Where it computes decoders; encoders have no KV."""
    values = read_json(tiny_llama / "config.json")
    values.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(values | sizes))
    config, machines = EngineConfig(attention="fused", block_size=block_size), WorkerSettings()
    with pytest.raises(ConfigError, match=f"model '{tmp_path}': attention on a GPU: {why}"):
        machines.check_host(config, tmp_path)
    machines.check_host(EngineConfig(device="cpu", block_size=block_size), tmp_path)
    encoder = save_encoder("bert", tmp_path / "encoder")
    machines.check_host(config, encoder)
    with pytest.raises(ConfigError, match=r"dtype 'int8' is for decoders, model '.*encoder' is an enc"):
        machines.check_host(EngineConfig(dtype="int8"), encoder)


@pytest.mark.parametrize(
    ("family", "sizes", "settings", "why"),
    [
        ("llama", {}, {"dtype": "int8", "block_size": 48}, "dtype 'int8': block_size 48 is not a multiple of 32"),
        ("qwen2", {}, {"deterministic": True}, "deterministic: head dim 24 is not a multiple of 16 up to 256"),
        ("llama", {"intermediate_size": 144}, {"dtype": "int8"}, "dtype 'int8': it .* says intermediate_size 144$"),
        ("llama", {"num_attention_heads": 4, "head_dim": 16}, {"dtype": "int8"}, None),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48}, {"deterministic": True}, None),
        (
            *("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}, {"deterministic": True}),
            "says num_attention_heads x head_dim 48, columns of queries, keys and values 80$",
        ),
        ("llama", {"vocab_size": 500}, {"dtype": "int8"}, None),
        ("llama", {"vocab_size": 500}, {"deterministic": True}, "config.json says vocab_size 500$"),
        ("mistral", {"sliding_window": 64}, {"dtype": "int8"}, "no sliding window, config.json says one of 64 pos"),
        ("mistral", {"sliding_window": 64}, {"deterministic": True}, "no sliding window, config.json says one of 64"),
        ("llama", {"mlp_bias": True}, {"dtype": "int8"}, "layers are not those of Llama, Mistral or Qwen$"),
        ("llama", {"model_type": "gpt_neox"}, {"deterministic": True}, "transformers' own, whose products depend"),
        ("llama", {"model_type": "granite"}, {"deterministic": True}, None),
    ],
)
def test_what_a_cpu_does_not_compute_is_refused_before_any_row_is_read(
    family: str,
    sizes: dict[str, Any],
    settings: dict[str, Any],
    why: str | None,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    values = read_json(tiny_checkpoint(family) / "config.json") | sizes
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, machines = EngineConfig(device="cpu", **settings), WorkerSettings()
    if why is None:
        machines.check_host(config, tmp_path)
        return
    with pytest.raises(ConfigError, match=f"model '{tmp_path}': .*{why}"):
        machines.check_host(config, tmp_path)


def save_wrong_model(kind: str, right: Path, folder: Path) -> None:
    if kind == "encoder":
        save_encoder("bert", folder)
        return
    left_out = {"unspoken": "chat_template*", "silent": "*token*"}.get(kind, "")
    shutil.copytree(right, folder, ignore=shutil.ignore_patterns(left_out))
    sizes = {
        "smaller": {"vocab_size": 500},
        "spiral": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0}},
        "text": {"hidden_size": "96"},
        "foreign": {"vocab_size": 480},
        "untaught": {"vocab_size": 499},
    }.get(kind, {})
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | sizes))
    if kind == "garbled":
        (folder / "tokenizer.json").write_text("{")
    if kind in ("foreign", "untaught"):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][: sizes["vocab_size"]]
        save_file(tensors, file, metadata={"format": "pt"})
    if kind == "untaught":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<turn>"])
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<turn>")
        tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("encoder", "is an encoder; it can be used for mode 'embed'"),
        ("unspoken", "has no chat template: set chat = false in the [prompt] of 'snippets'"),
        ("silent", "the folder holds no tokenizer"),
        ("garbled", "its tokenizer cannot be read from tokenizer.json, "),
        (
            "smaller",
            "config.json says vocab_size 500, hidden_size 96; the weight model.embed_tokens.weight has the shape",
        ),
        ("spiral", "config.json: rope_type 'spiral' is not one of default, dynamic, linear, llama3, longrope, "),
        ("text", "config.json: hidden_size must be a positive whole number, got '96'"),
        ("foreign", "config.json says vocab_size 480, its tokenizer has ids up to 498"),
        ("untaught", "config.json says vocab_size 499, and each prompt has the token '<turn>' with id 499"),
    ],
)
@pytest.mark.usefixtures("prefect_server")
def test_a_model_that_cannot_answer_is_named_before_a_row_is_read(
    nights: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, message: str
) -> None:
    save_wrong_model(model, nights.model, tmp_path / model)
    capfd.readouterr()
    assert run_flow(nightly, [*nights.inputs, "--model", str(tmp_path / model)]) == 1
    shown = capfd.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert message in shown.err
    assert not list(nights.runs.glob("*-*")), "no run was begun"


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    ("columns", "query", "message"),
    [
        ("doc_id text, label integer", "select doc_id, body from documents", "table 'topics' is not batchloom's"),
        ("doc_id text", "select doc_id, text from documents", "no column 'text'; there are"),
    ],
)
def test_all_workloads_are_checked_before_the_first_is_answered(
    nights: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], columns: str, query: str, message: str
) -> None:
    nights.sql(f"create table {'topics' if 'label' in columns else 'others'} ({columns})")
    (tmp_path / "rows.sql").write_text(query)
    (tmp_path / "topics.toml").write_text(
        'name = "topics"\nmode = "score"\nrequests_sql = "rows.sql"\nkey = ["doc_id"]\nlabels = ["a", "b"]\n'
        '[prompt]\ntemplate = "{body}"\n[output]\ntable = "topics"\n'
    )
    workloads = ["--workload", "snippets", "--workload", str(tmp_path / "topics.toml")]
    capfd.readouterr()
    for sample in ([], ["--sample", "2"]):
        assert run_flow(nightly, [*nights.inputs, *OPTIONS, *workloads, *sample]) == 1
        shown = capfd.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert message in shown.err
    assert not list(nights.runs.glob("*-*")), "no run was begun"


@pytest.mark.usefixtures("prefect_server")
def test_a_wrong_model_and_a_wrong_workload_are_named_together(
    nights: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.toml").write_text("name = ")
    workloads = [str(tmp_path / "broken.toml"), "snipets"]
    where = [*nights.inputs, "--model", str(tmp_path / "none")]
    for command, arguments in (
        ("nightly", [*where, "--workload", workloads[0], "--workload", workloads[1]]),
        ("explain", [*where, "--workload", workloads[0], "--workload", workloads[1]]),
        ("compare", [*workloads, *where]),
    ):
        assert batchloom([command, *arguments]) == 1
        (line,) = capfd.readouterr().err.splitlines()
        model, broken, unknown = line.split("; ", 2)
        assert model == f"{command}: model '{tmp_path / 'none'}': no such file or folder"
        assert broken.startswith(f"{workloads[0]} cannot be read as TOML: ")
        assert unknown.startswith("no workload 'snipets': ")


@pytest.mark.usefixtures("prefect_server")
def test_labels_of_all_workloads_are_checked_before_the_first_is_answered(
    nights: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.sql").write_text("select doc_id, body from documents")
    (tmp_path / "topics.toml").write_text(
        'name = "topics"\nmode = "score"\nrequests_sql = "rows.sql"\nkey = ["doc_id"]\nlabels = ["Yes", "yes"]\n'
        '[prompt]\ntemplate = "{body}"\n[output]\ntable = "topics"\n'
    )
    shutil.copytree(nights.model, tmp_path / "model")
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "Lowercase"}}))
    workloads = ["--workload", "snippets", "--workload", str(tmp_path / "topics.toml")]
    capfd.readouterr()
    assert run_flow(nightly, [*nights.inputs, "--model", str(tmp_path / "model"), *OPTIONS, *workloads]) == 1
    shown = capfd.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "nightly: workload 'topics': labels 'Yes' and 'yes' are the same tokens [" in shown.err
    assert not list(nights.runs.glob("*-*")), "no run was begun"


def test_help_shows_ten_options_first_and_all_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_flow(nightly, ["--help"]) == 0
    shown = capsys.readouterr().out
    assert max(part.count("\n") for part in re.split(r"^│ .? +--", shown, flags=re.MULTILINE)[1:]) <= 5, "lines of one"
    first = set(re.findall(r"^│ .? +(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"}
    assert first == {
        *("--database", "--model", "--workload", "--full", "--publish", "--sample"),
        *("--device", "--dtype", "--kv-memory", "--workers"),
    }
    assert run_flow(nightly, ["--help-all"]) == 0
    text = capsys.readouterr().out
    assert "all the same unless sharing is group or none" in " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    for model in (EngineSettings, PlanSettings, FailurePolicy, WorkerSettings):
        for name, field in model.__pydantic_fields__.items():
            assert f"--{name.replace('_', '-')}" in text
            for choice in get_args(field.annotation) if get_origin(field.annotation) is Literal else ():
                assert choice in text


@pytest.mark.usefixtures("prefect_server")
def test_summaries_as_json(nights: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_flow(nightly, [*nights.inputs, *OPTIONS, "--workload", "ranking", "--json"]) == 0
    printed = capfd.readouterr()
    (found,) = json.loads(printed.out)
    assert (found["workload"], found["status"], found["num_ok"], found["num_errors"]) == ("ranking", "completed", 6, 0)
    assert "ranking: completed: 6 rows answered" in printed.err
    file = nights.path.with_name("night.toml")
    tables = f'[models.tiny]\npath = "{nights.model}"\ndtype = "float32"\n[[workload]]\nfile = "ranking"\n'
    file.write_text(f'database = "{nights.path}"\n{tables}')
    assert run_flow(night, [str(file), "--json"]) == 0
    (again,) = json.loads(capfd.readouterr().out)
    assert (again["workload"], again["num_rows"], again["num_already_done"]) == ("ranking", 0, 6)


@pytest.mark.usefixtures("prefect_server")
def test_too_many_threads_are_a_line(nights: Any, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--workload", "ranking", "--dtype", "float32", "--kv-memory", "8MiB", "--max-num-batched-tokens", "64"]
    assert run_flow(nightly, [*nights.inputs, *options, "--num-threads", "9999"]) == 0
    shown = capfd.readouterr()
    assert not shown.err
    assert re.search(r"^num_threads is 9999, this process may use (\d+) cores: \1 threads$", shown.out, re.MULTILINE)
    assert nights.sql("select config->>'$.engine.max_num_batched_tokens' from runs") == [("64",)]


@pytest.mark.parametrize("seconds", [0.1, 0.4])
def test_ctrl_c_before_a_night_begins_prints_nothing(seconds: float, tmp_path: Path) -> None:
    program = "import sys; from flows.cli import batchloom; print(flush=True); sys.exit(batchloom(['nightly', '--x']))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("call", ["batchloom()", "run_flow(nightly)"])
def test_ctrl_c_while_the_process_exits_prints_no_traceback(call: str, nights: Any, prefect_server: str) -> None:
    program = (
        "import signal, sys, threading, time; from flows.cli import batchloom\n"
        "from flows.command.run_flow import run_flow; from flows.nightly import nightly\n"
        f"code = {call}; threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('over', flush=True); sys.exit(code)"
    )
    name = ["nightly"] if call == "batchloom()" else []
    command = [sys.executable, "-c", program, *name, "--database", "none.duckdb", "--model", str(nights.model)]
    environment = os.environ | {"PREFECT_API_URL": prefect_server}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "over\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "nightly: no database at none.duckdb: no such file\n"


def test_help_shows_arguments_and_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night = tmp_path / "night.toml"
    night.write_text("")
    for arguments, usage in (
        (["nightly", str(night)], "Usage: batchloom nightly NIGHT.toml [OPTIONS]\n\nAnswer the rows"),
        (["compare"], "Usage: batchloom compare OLD.toml NEW.toml --database PATH --model STR [OPTIONS]\n\nAnswer"),
    ):
        assert batchloom([*arguments, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(usage)
        assert "--file" not in shown
    assert batchloom(["nightly", "--help-all"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "path of a TOML file [default: snippets, ranking]" in shown
    assert ". [" not in shown, "help texts end without a full stop, wherever they come from"
    assert "0: torch decides [default: 0]" in shown
    assert not re.findall(r"default: (?:False|None|\(\)|\])", shown)
    assert "╭─ When the run tries again, and when it gives up ──" in shown


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_whose_reader_has_read_enough_ends_quietly(option: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for buffering in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", option],
            cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": buffering}, stdout=writer, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
    os.close(writer)


def test_the_command_is_also_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "flows.cli", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"batchloom {version('batchloom')}\n"


@pytest.mark.parametrize(("text", "size"), [("4Gi", 4 << 30), ("4GiB", 4 << 30), ("4G", 4e9), ("1.5 mb", 1.5e6)])
def test_sizes_have_units(text: str, size: float) -> None:
    config = EngineSettings(kv_memory=text, keep_prefixes=text).to_config()
    assert (config.kv_memory_bytes, config.keep_prefixes_bytes) == (size, size)


def test_what_is_missing_is_named(nights: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night = tmp_path / "night.toml"
    night.write_text("")
    for arguments, message in (
        (["nightly"], "nightly: --database is missing"),
        (["nightly", *nights.inputs[:2]], "nightly: --model is missing\n"),
        (["nightly", *nights.inputs[:2], "--modle", "x"], "nightly: --model is missing; --modle is no option\n"),
        (["nightly", "--full", "night.toml"], "nightly: a night file comes before the options: batchloom nightly"),
        (["nightly", "--full", "--workload", "mine.toml"], "nightly: --database is missing"),
        (["nightly", "--database"], "nightly: Parameter --database requires an argument."),
        (
            ["compare", "old.toml", *nights.inputs],
            "compare: two workloads are needed: batchloom compare OLD.toml NEW.toml",
        ),
        (
            ["nightly", str(night), "--device", "cpu"],
            "nightly: --device does not go with a night file, whose tables hold",
        ),
        (
            ["nightly", *nights.inputs, "--workers", "two"],
            'nightly: Invalid value for --workers: unable to convert "two" into a whole number or auto.',
        ),
        (
            ["nightly", *nights.inputs, "--sample", "few"],
            'nightly: Invalid value for --sample: unable to convert "few" into a whole number.\n',
        ),
        (
            ["report", *nights.inputs[:2], "--lock-timeout-seconds", "long"],
            'report: Invalid value for --lock-timeout-seconds: unable to convert "long" into a number.\n',
        ),
        (["check"], "check: NIGHT.toml is missing"),
        (["check", str(night), "more"], "check: more: belongs to no option"),
        (["advise", *nights.inputs], "advise: WORKLOAD is missing"),
        (["report"], "report: --database is missing"),
        (["report", *nights.inputs[:2], "--lock-timeout-seconds", "x"], "report: Invalid value for --lock-timeout"),
        (["demo", "--bogus"], "demo: Unknown option: --bogus."),
    ):
        assert batchloom(arguments) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
        assert shown.err.startswith(message)


def test_a_name_that_is_not_utf_8_is_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert batchloom(["nightly", "--database", os.fsdecode(b"caf\xe9.duckdb"), "--model", "x"]) == 2
    line = "batchloom: names must be UTF-8, got 'nightly --database caf\\udce9.duckdb --model x'\n"
    assert capsys.readouterr().err == line


def test_one_command_has_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert batchloom(["--version"]) == 0
    assert capsys.readouterr().out == f"batchloom {version('batchloom')}\n"
    assert batchloom([]) == 0
    listed = capsys.readouterr().out
    assert batchloom(["weekly"]) == 2
    known = "nightly, check, explain, advise, report, evaluate, compare, calibrate, demo"
    assert capsys.readouterr().err == f"batchloom: no command 'weekly'; there are {known}\n"
    for name in COMMANDS:
        assert f"  {name} " in listed
        assert batchloom([name, "--help"]) == 0
        assert ("NIGHT.toml" if name == "check" else "--database") in capsys.readouterr().out
    program = "import sys; from flows.cli import batchloom; batchloom(['--help']); assert 'prefect' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert script == {"batchloom": "flows.cli:batchloom"}


@pytest.mark.usefixtures("prefect_server")
def test_a_locked_database_is_named_with_who_holds_it(
    nights: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LOCK_TIMEOUT_SECONDS == 5
    monkeypatch.setattr("flows.advise.LOCK_TIMEOUT_SECONDS", 2.5)
    hold = (
        f"import duckdb, time; held = duckdb.connect({str(nights.path)!r}); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        capfd.readouterr()
        assert run_flow(nightly, [*nights.inputs, "--lock-timeout-seconds", "0.5"]) == 1
        shown = capfd.readouterr()
        assert batchloom(["advise", "snippets", *nights.inputs]) == 1
        waiting, failed = capfd.readouterr().err.splitlines()
        assert waiting.endswith("; waiting up to 2.5 s")
        assert failed.endswith("; waited 2.5 s")
        holder.kill()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert f"is locked by process {holder.pid}" in shown.err


def test_a_home_that_cannot_be_written_is_named_before_a_server_is_started(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", "/proc/none")
    command = start(own_server=True)
    assert command.wait() == 1
    *prefects_own, last = command.errors.splitlines()
    assert not [line for line in prefects_own if "Traceback" in line]
    assert last == (
        "nightly: Prefect's server keeps its database in /proc/none, which cannot be written; "
        "name another folder in PREFECT_HOME"
    )


@pytest.fixture
def run_at(nights: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Runs the command line in this process, with the server at this URL as the configured one."""

    def run(url: str) -> int:
        monkeypatch.setattr("flows.command.prefect_server.CONFIGURED_URL", url)
        with temporary_settings({PREFECT_API_URL: url}):
            return run_flow(nightly, nights.inputs)

    return run


def test_a_server_that_does_not_answer_is_named_within_seconds(
    run_at: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its port is held by a process that never reads what it is sent."""
    assert ANSWER_SECONDS <= 15
    monkeypatch.setattr("flows.command.prefect_server.ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        assert run_at(url) == 1
    line = f"nightly: no Prefect server at {url}: timed out; start it, or unset PREFECT_API_URL\n"
    assert capfd.readouterr().err == line
    assert run_at("http://127.0.0.1:abc/api") == 1
    line = "nightly: no Prefect server at http://127.0.0.1:abc/api: Invalid port: 'abc'; start it, or unset PREFECT"
    assert capfd.readouterr().err == f"{line}_API_URL\n"


def test_a_server_of_another_version_is_named_without_the_password_of_its_url(
    run_at: Callable[[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'"2.20.0"')

        def log_message(self, *_: object) -> None:
            """Write nothing to standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever).start()
        assert run_at(f"http://night:secret@127.0.0.1:{server.server_port}/api") == 1
        server.shutdown()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"nightly: no Prefect server at http://127.0.0.1:{server.server_port}/api: Found incompatible versions: "
    )


@pytest.mark.slow
def test_a_whole_night_and_one_with_nothing_new(
    nights: Any, start: Start, prefect_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that cannot be written does not matter to a Prefect database elsewhere."""
    shutil.copyfile(prefect_database, tmp_path / "prefect.db")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PREFECT_HOME", "/proc/none")
        elsewhere.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
        command = start(own_server=True)
    assert command.wait() == 0, command.errors
    prefects_own = ("/proc/none", "GLOBAL_SETTINGS_CONTEXT")
    lines = command.errors.splitlines()
    assert [line for line in lines if not any(part in line for part in prefects_own)] == []
    assert "snippets: 12 rows to answer: 12 new" in command.output
    assert "snippets: completed: 12 rows answered, 0 failed" in command.output
    assert "ranking: completed: 6 rows answered" in command.output
    cpu_seconds = _children_cpu_seconds()
    command = start(own_server=True)
    assert (command.wait(), command.errors) == (0, "")
    assert command.output.splitlines() == [
        "snippets: nothing new to do; 12 rows were done before",
        "ranking: nothing new to do; 6 rows were done before",
    ]
    assert _children_cpu_seconds() - cpu_seconds < 20, "other programs on the machine do not count"


def _children_cpu_seconds() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_night_with_nothing_new_is_short_and_does_not_import_what_computes(
    nights: Any, answered: Any, prefect_server: str
) -> None:
    answered()
    check = (
        "import sys, time; from pathlib import Path; from flows.nightly import nightly; started = time.process_time();"
        f"summaries = nightly(Path({str(nights.path)!r}), {str(nights.model)!r}, engine={{'dtype': 'float32'}});"
        "assert time.process_time() - started < started, 'it takes longer than the imports before it';"
        "assert [summary.num_rows for summary in summaries] == [0, 0];"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, env=environment, check=True, timeout=60)


def test_a_night_whose_log_nobody_reads_goes_on(nights: Any, prefect_server: str) -> None:
    """As under a deployment whose worker died: standard output and error are pipes without a reader."""
    night = (
        "from pathlib import Path; from flows.nightly import nightly;"
        f"nightly(Path({str(nights.path)!r}), {str(nights.model)!r}, engine={{'dtype': 'float32'}})"
    )
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    subprocess.run([sys.executable, "-c", night], cwd=ROOT, env=environment, stdout=writer, stderr=writer, timeout=120)
    os.close(writer)
    assert nights.sql("select workload, status from runs order by started_at") == [
        ("snippets", "completed"),
        ("ranking", "completed"),
    ]


def test_only_json_that_cannot_be_written_fails_a_command(prefect_server: str) -> None:
    """The log of a night that is done is no reason to fail, on a full disk as in a closed pipe. One process imports,
    and each command is a fork of it."""
    script = (
        "import logging, os, sys; from prefect import flow\n"
        "from flows.command.run_flow import prepare_console, run_flow\n"
        "@flow(name='nightly', persist_result=False)\n"
        "def quick():\n"
        "    for number in range(2): logging.getLogger('batchloom').info('line %d', number)\n"
        "    return []\n"
        "for options in ([], ['--json']):\n"
        "    if os.fork() == 0:\n"
        "        prepare_console()\n"
        "        sys.exit(run_flow(quick, options))\n"
        "    print('exit code', os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr)"
    )
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    environment.pop("PYTHONUNBUFFERED", None)  # else output is written at once
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=True,
        )  # fmt: skip
    shown = [shown for shown in done.stderr.splitlines() if not shown.startswith("line ")]
    assert shown == ["exit code 0", "nightly: [Errno 28] No space left on device", "exit code 1"]


def test_each_flow_shows_its_messages() -> None:
    """On Prefect's console, as in a worker, which imports the flow's file. Each is imported in a fork of its own."""
    flows = [f"flows.{name}" for name in ("nightly", "explain", "nights.night")]
    flows += [f"flows.quality.{name}" for name in ("evaluate", "compare", "calibrate")]
    script = (
        "import logging, os, sys; from importlib import import_module; import flows.workload_run\n"
        "for flow in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        import_module(flow); logging.getLogger('batchloom').info('a line of %s', flow); os._exit(0)\n"
        "    os.wait()"
    )
    command = [sys.executable, "-c", script, *flows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    shown = [line.partition(" | ")[2] for line in done.stderr.splitlines()]
    assert shown == [f"INFO    | batchloom - a line of {flow}" for flow in flows]


def test_a_command_shows_no_log_of_prefects_own_services() -> None:
    """Such as each event, a page long, that a server which is gone does not take any more. A user's own handlers do."""
    script = (
        "import logging, sys; from flows.command.run_flow import plain_log; import prefect.events.worker\n"
        "of_a_user = logging.StreamHandler(sys.stdout)\n"
        "logging.root.addHandler(of_a_user); logging.getLogger('prefect._internal').addHandler(of_a_user)\n"
        "with plain_log(sys.stdout):\n"
        "    logging.getLogger('prefect._internal.concurrency').error('failed to process item')\n"
        "    logging.getLogger('batchloom').warning('snippets: a line')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_LOGGING_LEVEL"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "failed to process item",
        "snippets: a line",
    ]  # the first for the user's handler
    assert done.stderr == ""


@pytest.mark.slow
def test_a_night_whose_server_ends_has_its_answers_and_one_line(
    nights: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    command = start("--workload", "snippets", own_server=True)
    wait_for(lambda: "rows to answer" in command.output, command)
    for server in find_temporary_servers(command.process.pid):
        os.kill(int(server.name), signal.SIGKILL)
    message = "nightly: the Prefect server does not answer any more: "
    wait_for(lambda: message in command.errors, command)
    assert command.wait(20) == 1, "its last events are not sent again and again"
    assert "Traceback" not in command.errors
    assert nights.sql("select count(*) from snippets where status = 'ok'") == [(12,)]


def test_a_full_disk_of_the_temporary_server_is_named_without_tracebacks(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))  # whose database is not there yet
    limit = (1 << 16, 1 << 16)
    command = start(own_server=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert command.wait() == 1
    lines = command.errors.splitlines()
    assert not [line for line in lines if "Traceback" in line or line.startswith("  ")]
    assert [line for line in lines if re.search(r"uvicorn.error - .*OperationalError: \(sqlite3", line)]
    (last,) = [line for line in lines if line.startswith("nightly: ")]
    place = re.escape(str(tmp_path / "prefect"))
    assert re.search(
        rf"Prefect's temporary server has not started: .*; its database is in {place}; .* bytes free", last
    )


def test_a_temporary_server_starts_after_one_that_may_migrate_the_same_database(
    nights: Any, start: Start, prefect_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a profile that names no server, too: only Prefect's own first profile allows Prefect to start one."""
    monkeypatch.setenv("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "false")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    shutil.copyfile(prefect_database, tmp_path / "prefect.db")
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    command = start("--workload", "snippets", own_server=True)

    def is_waiting() -> bool:
        waiting = [line.split()[5] for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line]
        return any(server.name in waiting for server in find_temporary_servers(command.process.pid))

    wait_for(is_waiting, command)
    assert nights.sql("select count(*) from snippets") == [(0,)]
    os.close(other)
    assert (command.wait(), command.errors) == (0, "")
    assert nights.sql("select count(*) from snippets where status = 'ok'") == [(12,)]


def test_an_error_that_the_temporary_server_repeats_is_one_line() -> None:
    """On a full disk, Prefect cannot register any of its blocks, and says so of each."""
    script = (
        "import logging, sys; from flows.command.temporary_server import make_record\n"
        "logging.setLogRecordFactory(make_record); logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "for block, fault in (('Slack', 'disk is full'), ('Secret', 'disk is full'), ('Secret', 'file is locked')):\n"
        "    try:\n"
        "        raise OSError(fault)\n"
        "    except OSError:\n"
        "        logging.getLogger('prefect.server').exception('Failed to register %s\\n', block)\n"
        "logging.error('Exiting'); logging.error('Exiting')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = ["Failed to register Slack OSError: disk is full", "Failed to register Secret OSError: file is locked"]
    assert done.stdout.splitlines() == [*lines, "Exiting", "Exiting"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "exit_code"), [("ctrl-c", 130), ("sigterm", 143), ("hang-up", 129), ("kill", -signal.SIGKILL)]
)
def test_an_interrupted_night_keeps_what_is_finished(nights: Any, start: Start, how: str, exit_code: int) -> None:
    many_documents(nights, 30)
    ((num_requests,),) = nights.sql("select count(*) from snippet_requests")
    has_server, streams = how in ("ctrl-c", "kill"), {}
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may have been started by nohup
    if how == "hang-up":
        controller, streams["stderr"] = pty.openpty()
    command = start("--workload", "snippets", "--partition-tokens", "1", own_server=has_server, **streams)
    signal.signal(signal.SIGHUP, usual)
    wait_for(lambda: len(list(nights.runs.glob("*/parts/part-*.parquet"))) >= 2, command)
    command.process.send_signal(signal.SIGSTOP)  # else it might end while its processes are looked for
    servers = find_temporary_servers(command.process.pid)
    for end in (controller, *streams.values()) if how == "hang-up" else ():
        os.close(end)
    if how == "ctrl-c":  # as a terminal sends it: to every process of the job, its Prefect server included
        os.killpg(command.process.pid, signal.SIGINT)
    else:
        command.process.send_signal({"sigterm": signal.SIGTERM, "hang-up": signal.SIGHUP}.get(how, signal.SIGKILL))
    command.process.send_signal(signal.SIGCONT)
    for _ in range(3 if how == "ctrl-c" else 0):  # as somebody in a hurry
        time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait(15) == exit_code
    assert len(servers) == has_server
    wait_until(lambda: not any(server.exists() for server in servers), 5)
    if how == "kill":
        assert nights.sql("select count(*) from snippets") == [(0,)]
    else:
        assert command.errors.splitlines() == ([] if how == "hang-up" else [STOPPED])
        assert "snippets: interrupted: " in command.output
        ((status, num_ok, num_unanswered),) = nights.sql("select status, num_ok, num_unanswered from runs")
        assert (status, num_ok + num_unanswered) == ("interrupted", num_requests)
        assert nights.sql("select count(*) from snippets where status = 'ok'") == [(num_ok,)]

    nights.run("snippets")
    first, second = nights.sql("select status, num_rows, num_ok, num_already_done from runs order by started_at")
    assert first[:2] == ("interrupted", num_requests)
    assert 6 <= first[2] < num_requests
    assert second == ("completed", num_requests - first[2], num_requests - first[2], first[2])
    num_answers = "select count(*), count(distinct (doc_id, query_id)) from snippets where status = 'ok'"
    assert nights.sql(num_answers) == [(num_requests, num_requests)]
    assert not list(nights.runs.glob("*/parts"))


def test_a_terminal_shows_a_bar_and_the_configured_server_the_log(start: Start) -> None:
    controller, terminal = pty.openpty()
    command = start("--workload", "snippets", stderr=terminal)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # which is how reading ends when the other side is closed
        while block := os.read(controller, 4096):
            shown += block
    os.close(controller)
    assert command.wait() == 0
    lines = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode().replace("\r", "\n").splitlines()
    shown_at_last = r"snippets .* 12/12 prompts [1-9][\d,]* tokens [1-9][\d,]*/s .*left"
    assert any(re.search(shown_at_last, line) for line in lines), lines
    with get_client(sync_client=True) as client:
        logged = {log.message for log in client.read_logs(sort=LogSort.TIMESTAMP_DESC)}
    log = command.output.splitlines()
    assert log[-1].startswith("report: ")
    assert set(log) <= logged


def find_temporary_servers(process_id: int) -> list[Path]:
    """Folders under /proc of the Prefect servers that a process has started."""
    children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    folders = [Path("/proc", child) for child in children]
    return [folder for folder in folders if b"temporary_server.py" in (folder / "cmdline").read_bytes()]
