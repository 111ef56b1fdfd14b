"""The Prefect server of a command: the configured one, else a temporary one of the process."""

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from httpx import HTTPError, InvalidURL
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_HOME,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)

from engine.errors import ConfigError
from flows.command.failure import describe_lost_server

SERVER_SETTINGS = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false"}
"""No usage statistics and no automations, unless the environment sets them."""

CONFIGURED_URL = PREFECT_API_URL.value()  # of a server that somebody else has started; None where there is none

STARTUP_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 90, 15, 5


@contextmanager
def reachable_server() -> Iterator[None]:
    """A Prefect server: the configured one, else a temporary one. Raises `ConfigError` if it does not answer or has
    another major version, or if Prefect's folder cannot be written."""
    with temporary_server():
        if not PREFECT_API_URL.value() and not _can_keep_a_database():
            place = f"{PREFECT_HOME.value()}, which cannot be written"
            raise ConfigError(f"Prefect's server keeps its database in {place}; name another folder in PREFECT_HOME")
        url = PREFECT_API_URL.value() or "this machine"
        own = os.environ.get(PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.name, STARTUP_SECONDS)
        limits = {"timeout": ANSWER_SECONDS if url == CONFIGURED_URL else float(own)}
        try:
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(limits, sync_client=True) as client:
                client.hello()
                client.raise_for_api_version_mismatch()
        except (RuntimeError, HTTPError, InvalidURL) as error:
            what = f"no Prefect server at {url}" if CONFIGURED_URL else "Prefect's temporary server has not started"
            advice = "; start it, or unset PREFECT_API_URL" if CONFIGURED_URL else ""
            raise ConfigError(describe_lost_server(error, what) + advice) from error
        yield


@contextmanager
def temporary_server() -> Iterator[None]:
    """If no server is configured, start one on loopback that ends with this process; do not wait for it.

    None is started if its folder cannot be written: `reachable_server` raises then. Prefect's own ephemeral server is
    imported into this process first, and goes on if this process is killed.
    """
    if PREFECT_API_URL.value() or not _can_keep_a_database():
        yield
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        script = Path(__file__).with_name("temporary_server.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(os.getpid()), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=SERVER_SETTINGS
            | os.environ
            | get_current_settings().to_environment_variables(exclude_unset=True)
            | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
            start_new_session=True,  # else Ctrl-C would end it before the run has reported its state
        )
    atexit.register(_stop, process)
    from prefect.events.clients import PrefectEventsClient  # imported while the server starts
    from prefect.events.worker import EventsWorker

    # No heartbeats: a temporary server does not use them, and their thread delays the end of a run by up to a second.
    with temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        # A server that is gone does not come back: ten attempts for each event delay the end of a run by a minute.
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=0)
        try:
            yield
        finally:
            EventsWorker.set_client_override(None)


def _can_keep_a_database() -> bool:
    """Whether the folder of the server's database can be written, if that is Prefect's own folder."""
    home = PREFECT_HOME.value()
    is_elsewhere = str(home) not in str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value())
    return is_elsewhere or os.access(home, os.W_OK)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    process.kill()
    process.wait()
