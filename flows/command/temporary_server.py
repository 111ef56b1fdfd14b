"""The process of a temporary Prefect server: `temporary_server.py PARENT_PID FD` serves on an inherited socket.

It is started by path and imports nothing of this project, so it runs in any working directory.
"""

import ctypes
import gc
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent_pid, listener_fd = map(int, sys.argv[1:])
    # The kernel ends this process when its parent ends, even if the parent is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before its server began")

    gc.disable()  # garbage collection takes a fifth of the imports' time and finds nothing
    import uvicorn
    from prefect.server.api.server import create_app

    gc.freeze()
    gc.enable()
    config = uvicorn.Config(create_app, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=listener_fd)])
