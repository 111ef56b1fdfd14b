"""A real browser without a window, and a page as it has it."""

import json
import os
import re
import signal
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
VOID_TAGS = frozenset(("meta", "br", "hr", "img", "link", "input"))


@dataclass
class Node:
    """An element of a page as the browser has it."""

    tag: str
    attributes: dict[str, str]
    children: list["Node | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str, kind: str | None = None) -> list["Node"]:
        return [node for node in self.walk() if node.tag == tag and (kind is None or kind in node.classes)]

    def by_id(self, name: str) -> "Node":
        (found,) = (node for node in self.walk() if node.attributes.get("id") == name)
        return found

    def cells(self) -> list[list[str]]:
        """The body of the first table in it."""
        body = self.all("tbody")[0]
        return [[cell.text for cell in row.children if isinstance(cell, Node)] for row in body.all("tr")]


class TreeBuilder(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("document", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID_TAGS:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


@dataclass
class Browser:
    """A real browser without a window; each call is a process and a profile of its own."""

    program: str
    folder: Path

    def run(self, page: Path, *options: str) -> tuple[str, list[str]]:
        """Its standard output, and what the page wrote to the console, errors of scripts and policies included."""
        profile = self.folder / f"profile-{len(list(self.folder.glob('profile-*')))}"
        command = [self.program, *OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            output, log = process.communicate(timeout=90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert process.returncode == 0, log
        return output, [line for line in log.splitlines() if "CONSOLE" in line]

    def open(self, page: Path) -> tuple[Node, list[str]]:
        """The page after its scripts have run, and its console."""
        output, console = self.run(page, "--dump-dom")
        builder = TreeBuilder()
        builder.feed(output)
        builder.close()
        return builder.root, console

    def label_boxes(self, page: Path, width: int) -> list[list[tuple[str, float, float, float, float]]]:
        """Of each picture its texts with their boxes (left, top, right, bottom), in a window of this many pixels."""
        boxes = """Array.from(document.querySelectorAll("svg"), (picture) =>
          Array.from(picture.querySelectorAll("text"), (text) => {
            const box = text.getBoundingClientRect();
            return [text.textContent, box.left, box.top, box.right, box.bottom];
          }))"""
        found: list[list[tuple[str, float, float, float, float]]] = self.evaluate(page, width, boxes)
        return found

    def evaluate(self, page: Path, width: int, expression: str, *options: str) -> Any:
        """The value of a JavaScript expression on the page, in a window of this many pixels."""
        script = f"<script>document.body.dataset.value = JSON.stringify({expression});</script>"
        copy = self.folder / "evaluated.html"
        text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
        copy.write_text(text.replace("</body>", f"{script}</body>"))
        output, console = self.run(copy, f"--window-size={width},900", "--dump-dom", *options)
        assert console == []
        builder = TreeBuilder()
        builder.feed(output)
        (body,) = builder.root.all("body")
        return json.loads(body.attributes["data-value"])

    def take_picture(self, page: Path, *options: str) -> bytes:
        picture = self.folder / "picture.png"
        self.run(page, "--window-size=800,600", f"--screenshot={picture}", *options)
        return picture.read_bytes()


def first_pixel(png: bytes) -> tuple[int, ...]:
    """Red, green and blue at the top left, where every filter of PNG leaves them as they are."""
    data, position = b"", 8
    while position < len(png):
        length = int.from_bytes(png[position : position + 4], "big")
        if png[position + 4 : position + 8] == b"IDAT":
            data += png[position + 8 : position + 8 + length]
        position += length + 12
    return tuple(zlib.decompress(data)[1:4])
