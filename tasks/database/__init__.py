"""DuckDB connections, batchloom's own tables and views, and the demo's database."""
