"""Names of columns and tables that batchloom writes itself."""

from sql import statement

RESERVED_COLUMNS = (
    *("row_id", "content_key", "error", "status", "finish_reason", "model", "run_id", "created_at"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "compute_ms", "prefix_group"),
    *("request_key", "is_sound", "row_priority", "question_states", "open_questions", "row_layout"),
)
"""Columns that batchloom writes itself; keys, prompt fields, priorities and answers may not use their names."""

RESERVED_TABLES = frozenset(
    (
        *("documents", "queries", "snippet_requests", "ranking_candidates", "runs", "steps"),
        *("run_summary", "failed_rows", "ranked_documents", "workload_layouts", "workload_row_layouts", "certificates"),
        *("evaluations", "evaluated_rows", "evaluation_metrics", "latest_evaluation_metrics", "evaluation_confusion"),
        *("evaluation_calibration", "calibrations"),
    )
)
"""Tables and views without answers; an output table may not use their names."""

VIEWED_QUERIES = {"snippets": "select_snippet_requests", "rankings": "select_ranking_requests"}
"""Output tables whose views, in ``schema.sql``, show the rows of one query."""


def check_query(table: str, requests_sql: str) -> None:
    """Raise `ValueError` if an output table has views of its own that do not show the rows of this query."""
    query = VIEWED_QUERIES.get(table.lower())
    if query and requests_sql != statement(f"requests/{query}"):
        raise ValueError(f"[output]: table may not be {table!r}, whose views show rows of {query}.sql: name another")
