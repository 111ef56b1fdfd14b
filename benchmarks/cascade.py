"""Checks a cascade's certificate on rows outside its sample:
    python -m benchmarks.cascade [--model FOLDER] [--rows N] [--target SHARE] [--out FILE]

SmolLM2 (the demo's model, or --model) scores every row; a larger model of random weights with the same tokenizer
answers the rows of which SmolLM2 is unsure. Both answer the sample, from which the threshold is chosen. Then the larger
model answers all rows in a workload of its own, and the rows outside the sample are counted in which the cascade's
answer differs from it. Models compute in float32, so an answer does not depend on the workload that asks.

The answers of a random model are unrelated to SmolLM2's, so the certificate may send all rows to it. The second part
therefore simulates the larger model's labels: each is SmolLM2's label with the probability that SmolLM2 gives it, drawn
by a hash of the row. They replace the sample's answers in the database, and the night is run again.

If more rows differ than the certificate allows, no figures are given.
"""

import argparse
import atexit
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.result_file import report
from benchmarks.measuring.wrong_answer import WrongAnswerError, refuse_wrong_answers
from benchmarks.random_model import SHAPES, write_checkpoint
from engine.model.loading.checkpoint import TOKENIZER_FILES
from engine.model.loading.stock_weights import read_config
from flows.command.failure import end_quietly
from flows.command.prefect_server import temporary_server
from flows.nights.night import night

PARTS = (
    ("The old", "A new", "My small", "That large", "No other", "Our first", "Every last", "This quiet"),
    ("harbour", "teacher", "invoice", "garden", "engine", "letter", "winter", "market", "doctor", "bridge"),
    ("was", "will be", "has never been", "may be", "is not", "is said to be"),
    ("ready.", "on fire.", "very kind.", "too late.", "lost.", "paid for.", "welcome.", "broken.", "free.", "loud."),
)
WORKLOAD = """
name = "{name}"
mode = "score"
requests_sql = "texts.sql"
key = ["text_id"]
labels = [" good", " bad"]
[prompt]
chat = false
template = "{{body}} This is"
[output]
table = "{name}"
"""
NIGHT = """
database = "night.duckdb"
[models.small]
path = "{small}"
dtype = "float32"
kv_memory = "256MiB"
[models.large]
path = "{large}"
dtype = "float32"
kv_memory = "256MiB"
[[workload]]
"""
CASCADED = 'file = "mood.toml"\nmodel = "small"\ncascade = {{ to = "large", target_agreement = {target} }}\n'
ALONE = 'file = "alone.toml"\nmodel = "large"\n'

SIMULATE = """
create table simulated as
select
    text_id,
    if(
        hash(text_id) / 18446744073709551615.0 < exp(list_max(label_logprobs)),
        label,
        if(label = ' good', ' bad', ' good')
    ) as label
from mood
where model = $small
"""
PUT_SIMULATED = """
update mood
set label = simulated.label
from simulated
where simulated.text_id = mood.text_id and mood.model <> $small
"""
CERTIFICATE = """
select threshold, num_rows, num_sampled, num_sent, num_allowed, sample_agreement, reason
from certificates
order by created_at desc
limit 1
"""
OUTSIDE = """
with sampled as (
    select unnest(sample).request_key[1] as text_id
    from certificates
    where created_at = (select max(created_at) from certificates)
)

select count(*), count(*) filter (first.label <> other.label), count(*) filter (first.model = $small)
from latest_mood as first
inner join {other} as other using (text_id)
where text_id not in (select text_id from sampled) and ({is_compared})
"""


def write_files(folder: Path, small: Path, num_rows: int, target: float) -> dict[str, Path]:
    """The database, a larger model and the night files, by name.

    Args:
        folder: for the files.
        small: checkpoint folder; the larger model gets the same tokenizer.
        num_rows: number of texts.
        target: agreement that the certificate has to prove.
    """
    large = folder / "large"
    write_checkpoint(large, SHAPES["medium"] | {"vocab_size": int(read_config(small).vocab_size)})
    for name in TOKENIZER_FILES:
        if (small / name).is_file():
            shutil.copyfile(small / name, large / name)
    texts = [" ".join(parts) for parts in product(*PARTS)]
    chosen = texts[:: max(1, len(texts) // num_rows)][:num_rows]
    with duckdb.connect(str(folder / "night.duckdb")) as connection:
        connection.execute("create table texts (text_id text, body text)")
        connection.executemany("insert into texts values (?, ?)", [[f"{n}", text] for n, text in enumerate(chosen)])
    (folder / "texts.sql").write_text("select text_id, body from texts")
    files = {}
    for name, table in {"mood": CASCADED.format(target=target), "alone": ALONE}.items():
        (folder / f"{name}.toml").write_text(WORKLOAD.format(name=name))
        files[name] = folder / f"night-{name}.toml"
        files[name].write_text(NIGHT.format(small=small, large=large) + table)
    return files


def check_certificate(database: Path, small: Path, other: str, is_compared: str = "true") -> dict[str, Any]:
    """The newest certificate, and how many rows outside its sample differ; `WrongAnswerError` if too many do.

    Args:
        database: of the night.
        small: the small model, as the tables name it.
        other: table with the large model's label of each row.
        is_compared: SQL condition on the rows that are compared.
    """
    with duckdb.connect(str(database)) as connection:
        result = connection.execute(CERTIFICATE)
        names = [column[0] for column in result.description or ()]
        found = dict(zip(names, result.fetchall()[0], strict=True))
        query = OUTSIDE.format(other=other, is_compared=is_compared)
        num_compared, num_differing, num_spared = connection.execute(query, {"small": str(small)}).fetchall()[0]
    if num_differing > found["num_allowed"]:
        raise WrongAnswerError(f"{num_differing} rows outside the sample differ, {found['num_allowed']} are allowed")
    return found | {"num_compared": num_compared, "num_differing": num_differing, "num_spared": num_spared}


def measure(small: Path, num_rows: int, target: float) -> dict[str, Any]:
    """Both parts; raises `WrongAnswerError` if a certificate's bound does not hold.

    Args:
        small: checkpoint folder.
        num_rows: number of texts.
        target: agreement that the certificate has to prove.
    """
    with tempfile.TemporaryDirectory(prefix="batchloom-cascade-") as name:
        database, files = Path(name) / "night.duckdb", write_files(Path(name), small, num_rows, target)
        night(file=files["mood"])
        night(file=files["alone"])
        answered = check_certificate(database, small, "latest_alone")
        with duckdb.connect(str(database)) as connection:
            connection.execute("create or replace temp table sampled as select unnest(sample).request_key[1] as text_id"
                               " from certificates")  # fmt: skip
            connection.execute(SIMULATE, {"small": str(small)})
            connection.execute(PUT_SIMULATED, {"small": str(small)})
            connection.execute("delete from mood where model <> $small and text_id not in (from sampled)",
                               {"small": str(small)})  # fmt: skip
        night(file=files["mood"])
        # Rows that went to the large model agree by definition, so only the small model's rows are compared.
        simulated = check_certificate(database, small, "simulated", "first.model = $small")
    return {"answered": answered, "simulated": simulated}


@refuse_wrong_answers
def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="small model, a checkpoint folder or GGUF file; the demo's if not given")
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--target", type=float, default=0.75, help="agreement that the certificate has to prove")
    parser.add_argument("--out", type=Path, help="file for the JSON result")
    arguments = parser.parse_args(command_line)
    small, machine = find_model(arguments.model), describe_machine()
    with temporary_server():
        run = measure(small, arguments.rows, arguments.target)
    report("cascade", command_line, arguments.out, machine=machine, model=f"{small.name}, float32", run=run)
    return 0


if __name__ == "__main__":
    atexit.register(end_quietly)
    sys.exit(main())
