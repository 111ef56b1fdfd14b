"""How a flow is run as a command: its options, a Prefect server, errors and exit code."""
