"""Nights whose answers are drawn: each row draws by its own content, and always the same."""

from pathlib import Path
from typing import Any

from tests.flows.conftest import Nights

WORKLOAD = """
name = "names"
mode = "generate"
requests_sql = "select_documents.sql"
key = ["doc_id"]
[prompt]
template = "{body}"
[decoding]
max_new_tokens = 12
temperature = 1000.0
seed = 0
[output]
table = "names"
answer_column = "name"
"""


def test_rows_draw_by_their_content_alone(prefect_server: str, nights: Nights, tmp_path: Path) -> None:
    """At this temperature all tokens are equally likely, so that rows with the same draws would have one answer."""

    def draw(**options: Any) -> dict[str, str]:
        nights.run(str(path), full=True, **options)
        return dict(nights.sql("select doc_id, name from latest_names"))

    (tmp_path / "select_documents.sql").write_text("select doc_id, body from documents")
    path = tmp_path / "names.toml"
    path.write_text(WORKLOAD)
    first = draw()
    assert len(set(first.values())) == len(first) == 4
    nights.sql("insert into documents select 'same', title, body from documents where doc_id = 'd1'")
    nights.sql("insert into documents values ('d10', 'Barn', 'A barn.')")
    again = draw(partition_tokens=1)
    assert {doc_id: again[doc_id] for doc_id in first} == first, "neighbours and partitions do not matter"
    assert again["same"] == first["d1"]
    path.write_text(WORKLOAD.replace("seed = 0", "seed = 1"))
    other = draw()
    assert not {other[doc_id] for doc_id in first} & set(first.values())
