"""The page's server: standard library, loopback only, read-only.

Run directories may be anybody's, so every text that comes from them is sent as JSON and inserted as text. Only requests
addressed to this server by a loopback name are answered, which other sites in the same browser cannot make.
"""

import json
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pql.errors import ConfigError
from pql.reports.watch.feed import Folder, newest

PORT = 8421
FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
VIDEO_BYTES = 256 << 20
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Serves a folder of runs."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int):
        self.folder, self.lock = Folder(folder), threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError("port", port, f"a free port, or 0 for any ({error.strerror})") from error
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds a connection may be silent

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self.send(403, b"unknown host", "text/plain")
            return
        url = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path in FILES:
            name, kind = FILES[url.path]
            self.send(200, files("pql.reports.watch").joinpath(name).read_bytes(), kind)
        elif url.path == "/api/runs":
            self.json(self.runs())
        elif url.path == "/api/run":
            self.json(self.run(asked))
        elif url.path == "/video":
            self.video(asked.get("id", ""))
        else:
            self.send(404, b"not found", "text/plain")

    def do_HEAD(self) -> None:
        self.do_GET()

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
            if asked.get("version") == str(feed.offset):
                return {"version": feed.offset}
            return feed.body()

    def video(self, name: str) -> None:
        feed = self.server.folder.feeds.get(name)  # names of runs only: no path of a request is ever opened
        file = newest(feed.path / "videos", ".mp4") if feed else None
        if file is None or file.stat().st_size > VIDEO_BYTES:
            self.send(404, b"not found", "text/plain")
        else:
            self.send(200, file.read_bytes(), "video/mp4")

    def json(self, data: dict[str, Any] | None) -> None:
        self.send(404 if data is None else 200, json.dumps(data, allow_nan=False).encode(), "application/json")

    def send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header(
            "Content-Type", f"{kind}; charset=utf-8" if kind.startswith(("text/", "application/")) else kind
        )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "pql"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


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
    with Server(folder, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="pql-watch", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=2.0)


def watch(folder: Path, port: int = PORT, show: bool = False) -> None:
    """Serve a folder of runs until Ctrl-C.

    Args:
        show: open the page in a browser.
    """
    with serving(folder, port) as server:
        print(f"{server.address} shows the runs in {folder}; Ctrl-C ends it", flush=True)
        if show:
            webbrowser.open(server.address)
        threading.Event().wait()
