"""The Prefect flows and the command line."""
