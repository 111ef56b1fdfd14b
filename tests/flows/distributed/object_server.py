"""A small object store on loopback: put, get, list, delete, and nothing else; neither folders nor renames.

It speaks what fsspec calls ``jupyter://``, and asks for a token, which fsspec finds in the environment.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

TOKEN = "f00d5ec2e7"
VERSIONS = count()


class ObjectServer(ThreadingHTTPServer):
    """Objects by their path.

    Attributes:
        num_refusals: so many of the next requests are answered with 503.
        is_write_only: whether nothing may be read or listed.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ObjectHandler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.num_refusals = 0
        self.is_write_only = False

    @property
    def environment(self) -> dict[str, str]:
        """How fsspec's users learn of it."""
        return {"FSSPEC_JUPYTER_URL": f"http://127.0.0.1:{self.server_port}", "FSSPEC_JUPYTER_TOK": TOKEN}


class ObjectHandler(BaseHTTPRequestHandler):
    server: ObjectServer

    def do_GET(self) -> None:
        path, objects = self._path(), dict(self.server.objects)
        inside = {name[len(path) + 1 :].partition("/")[0] for name in objects if name.startswith(f"{path}/")}
        if path in objects:
            self._answer(200, objects[path])
        elif inside:
            children = [f"{path}/{name}" for name in sorted(inside)]
            folder = {"type": "directory", "path": "", "content": None}
            listed = [{**objects.get(child, folder), "path": child, "content": None} for child in children]
            self._answer(200, {"type": "directory", "path": path, "content": listed})
        else:
            self._answer(404, {})

    def do_PUT(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stored = {name: given[name] for name in ("type", "size", "content", "format")}
        self.server.objects[self._path()] = {**stored, "path": self._path(), "version": next(VERSIONS)}
        self._answer(201, {})

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._path(), None)
        self._answer(204, {})

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing on standard error."""

    def _path(self) -> str:
        return self.path.removeprefix("/api/contents/").rstrip("/")

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        is_refused = self.server.is_write_only and self.command == "GET"
        if is_refused or self.headers["Authorization"] != f"token {TOKEN}":
            status, value = 403, {}
        elif self.server.num_refusals:
            self.server.num_refusals -= 1
            status, value = 503, {}
        body = b"" if status == 204 else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve_objects() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
