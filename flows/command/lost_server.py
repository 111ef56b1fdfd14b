"""What happened to Prefect's server when a command cannot reach it."""

from prefect.settings import PREFECT_HOME

from flows.command.prefect_server import CONFIGURED_URL
from tasks.database.messages import describe_free_space


def describe_lost_server(error: Exception, what: str = "the Prefect server does not answer any more") -> str:
    """What happened to the server and why; of a temporary one, where its database is, whose disk may be full."""
    reason = " ".join(str(error).split()).partition(" For more information check:")[0].rstrip("- ")
    line = f"{what}: {reason}"
    home = PREFECT_HOME.value()
    return line if CONFIGURED_URL else f"{line}; its database is in {home}{describe_free_space(home / 'prefect.db')}"
