"""HTTP on the loopback address: only requests that name it are answered, which pages of other sites cannot make."""

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pql.engine import deadlines
from pql.errors import ConfigError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


EMPTY: Mapping[str, str] = {}


class LoopbackServer(ThreadingHTTPServer):
    """A server on 127.0.0.1. ``port``: 0 takes any free one. Raises ``ConfigError``: the port is taken."""

    daemon_threads = True

    def __init__(self, handler: type["LoopbackHandler"], port: int):
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as error:
            raise ConfigError("port", port, f"a free port, or 0 for any ({error.strerror})") from error
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about browsers that leave in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answer requests in ``thread``."""
        self.thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="pql-http", daemon=True)
        self.thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.thread.join(timeout=deadlines.WORKER)


class LoopbackHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; a subclass implements :meth:`reply`."""

    server: Any
    protocol_version = "HTTP/1.1"
    timeout = deadlines.BROWSER

    def reply(self, path: str, asked: dict[str, str]) -> None:
        """Answer a request for ``path`` with the query ``asked``."""
        raise NotImplementedError

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self.send(403, b"unknown host", "text/plain")
            return
        url = urlsplit(self.path)
        self.reply(url.path, {key: values[0] for key, values in parse_qs(url.query).items()})

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_part(self, body: bytes, kind: str) -> None:
        """Send the part of an answer that the request asks for (``Range: bytes=A-B``), or all of it."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2] or len(body) - 1)) if asked else (0, len(body) - 1)
        if not asked or not first <= last < len(body):
            self.send(200, body, kind)
            return
        part = body[first : last + 1]
        self.head(206, kind, len(part), {"Content-Range": f"bytes {first}-{last}/{len(body)}"})
        if self.command != "HEAD":
            self.wfile.write(part)

    def head(self, status: int, kind: str, size: int | None = None, more: Mapping[str, str] = EMPTY) -> None:
        """Send status and headers."""
        self.send_response(status)
        for name, value in {**HEADERS, **more, "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        text = kind.startswith(("text/", "application/"))
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if text else kind)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.end_headers()

    def send(self, status: int, body: bytes, kind: str) -> None:
        """Send a complete answer."""
        self.head(status, kind, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "pql"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
