"""A workload is data: which rows, which prompt, how to answer, where to. Read from TOML, checked once, then frozen."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import WorkloadError
from engine.request import Mode
from tasks.workloads.workload_file import Decoding, Prompt, parse_workload_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where answers go.

    Attributes:
        table: created when it is not there.
        answer_column: of a generated answer; empty in mode "score", whose columns are score, label and rank.
        rank_within: score only: the key column within which rows are ranked by score; empty for no rank.
    """

    table: str
    answer_column: str = ""
    rank_within: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One nightly job over a table.

    Attributes:
        name: unique among the workloads of a database; part of run ids.
        source: the shipped name or the TOML file's absolute path; `load_workload(source)` gives it again.
        mode: "generate" decodes text, "score" gives label probabilities.
        requests_sql: text of the query that selects the rows.
        key: columns that identify a row.
        priority: column of the query with a whole number; rows with a larger one are answered earlier, and a null is 0.
            Empty where all rows are alike.
        labels: score only: what the model chooses from; the score is the probability of the first.
    """

    name: str
    source: str
    mode: Mode
    requests_sql: str
    key: tuple[str, ...]
    prompt: Prompt
    decoding: Decoding
    labels: tuple[str, ...]
    output: Output
    priority: str = ""

    @property
    def digest(self) -> str:
        """sha256 over all that decides an answer apart from the row and the model: prompt, decoding, labels."""
        parts = [self.mode, asdict(self.prompt), asdict(self.decoding), self.labels]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens of an answer; 1 in mode "score", where a prompt's last row gives the score."""
        return self.decoding.max_new_tokens if self.mode == "generate" else 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Key columns, then the template's fields that are not among them."""
        return tuple(dict.fromkeys(self.key + self.prompt.fields))


def load_workload(name_or_path: str | Path) -> Workload:
    """Read a shipped workload by name, or any TOML file by path (whatever ends in ``.toml`` or holds a ``/``).

    Raises:
        WorkloadError: no such workload, an unknown or missing key, a wrong type, a value out of range, a field that is
            no plain name, a column name that batchloom itself uses, or a requests_sql file that is not there.
    """
    shipped = Path(__file__).parents[2] / "workloads"
    is_path = isinstance(name_or_path, Path) or name_or_path.endswith(".toml") or "/" in name_or_path
    path = Path(name_or_path) if is_path else shipped / f"{name_or_path}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in shipped.glob("*.toml")))
        raise WorkloadError(f"no workload {str(name_or_path)!r}: no file {path}; shipped workloads: {known}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    file = parse_workload_file(text, path)
    source = str(path.absolute()) if is_path else str(name_or_path)
    return Workload(**(dict(file) | {"source": source, "output": Output(**dict(file.output))}))
