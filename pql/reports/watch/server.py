"""The server of ``pql watch``: standard library, loopback only, read-only.

Run directories may be anybody's, so every text that comes from them is sent as JSON and inserted as text.
"""

import json
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from pql.engine import deadlines
from pql.errors import ConfigError, RunError
from pql.reports.watch.feed import Folder
from pql.reports.watch.loopback import LoopbackHandler, LoopbackServer

PORT = 8421
PAGES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
VIDEO_BYTES = 256 << 20


class Server(LoopbackServer):
    """Serves a folder of runs."""

    def __init__(self, folder: Path, port: int):
        self.folder, self.lock = Folder(folder), threading.Lock()
        super().__init__(Handler, port)


class Handler(LoopbackHandler):
    """The page, the runs and their videos."""

    def reply(self, path: str, asked: dict[str, str]) -> None:
        if path in PAGES:
            name, kind = PAGES[path]
            self.send(200, files("pql.reports.watch").joinpath(name).read_bytes(), kind)
        elif path == "/api/runs":
            self.json(self.runs())
        elif path == "/api/run":
            self.json(self.run(asked))
        elif path == "/video":
            self.video(asked.get("id", ""))
        else:
            self.send(404, b"not found", "text/plain")

    def runs(self) -> dict[str, Any]:
        with self.server.lock:
            folder = self.server.folder
            folder.update()
            return {"folder": folder.root.name, "runs": [{"id": k, **feed.head()} for k, feed in folder.feeds.items()]}

    def run(self, asked: dict[str, str]) -> dict[str, Any] | None:
        with self.server.lock:
            feed = self.server.folder.feeds.get(asked.get("id", ""))
            if feed is None:
                return None
            if asked.get("version") == (version := feed.version()):
                return {"version": version}
            return feed.body()

    def video(self, name: str) -> None:
        feed = self.server.folder.feeds.get(name)  # names of runs only: no path of a request is ever opened
        file = feed.video() if feed else None
        try:
            if file is None or file.stat().st_size > VIDEO_BYTES:
                raise FileNotFoundError
            self.send_part(file.read_bytes(), "video/mp4")
        except FileNotFoundError:
            self.send(404, b"not found", "text/plain")

    def json(self, data: dict[str, Any] | None) -> None:
        self.send(404 if data is None else 200, json.dumps(data, allow_nan=False).encode(), "application/json")


@contextmanager
def serving(folder: Path, port: int = PORT) -> Iterator[Server]:
    """Serve a folder of runs in a thread.

    Args:
        port: 0: any free one.
    Raises:
        ConfigError: no such folder, or the port is taken.
    """
    if not folder.is_dir():
        raise ConfigError("run", folder, "a run directory, or a folder of runs")
    with Server(folder, port) as server, server.running():
        yield server


def watch(folder: Path, port: int = PORT, show: bool = False) -> None:
    """Serve a folder of runs until Ctrl-C, which raises ``KeyboardInterrupt``. ``show``: open the page in a browser."""
    with serving(folder, port) as server:
        print(f"{server.address} shows the runs in {folder}; Ctrl-C ends it", flush=True)
        if show:
            webbrowser.open(server.address)
        while server.thread.is_alive():
            server.thread.join(deadlines.IDLE)
    raise RunError("the page's server has ended")
