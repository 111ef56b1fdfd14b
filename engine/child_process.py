"""A child process that has a socket to its parent, and ends when the parent ends, for whatever reason."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from engine.cores import BINDING_VARIABLES, on_usable_cores


def start_child(
    module: str,
    arguments: Sequence[str] = (),
    *,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Run a module in a new interpreter with our search path; returns our end of the socket, and the process.

    The child must call `end_with_parent` first. It does not receive Ctrl-C: the parent handles interrupts.

    Args:
        module: its first argument is the file descriptor of its end of the socket.
        pass_fds: further file descriptors that stay open in the child.
        environment: variables that are added to this process's.
    """
    ours, theirs = socket.socketpair()
    # Bound by OpenMP, the threads of all children would share the same cores.
    inherited = {name: value for name, value in os.environ.items() if name not in BINDING_VARIABLES}
    with theirs, on_usable_cores():
        process = subprocess.Popen(
            # -P: a user's folder `tasks` or `sql` in the working directory must not stand in for ours.
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=(theirs.fileno(), *pass_fds),
            stdin=subprocess.DEVNULL,
            env={**inherited, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **(environment or {})},
            start_new_session=True,
        )
    return ours, process


def end_with_parent(socket_fd: int, clean_up: Callable[[], None] = lambda: None) -> None:
    """Ends this process, after `clean_up`, as soon as the other end of its socket is closed, even in the middle of its
    work. Other threads may read from the socket meanwhile."""

    def watch() -> None:
        poll = select.poll()
        poll.register(socket_fd, select.POLLRDHUP)
        poll.poll()
        clean_up()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
