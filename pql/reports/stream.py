"""A policy in a browser, live: frames of an episode as JPEG images in one answer that does not end.

Only requests that name the loopback address are answered, which pages of other sites cannot make.
"""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pql.contract.optional import WebViewable, supports
from pql.engine import deadlines
from pql.errors import ConfigError
from pql.run.play import Stage, cadence, check_numbers, check_video_packages

PORT = 8422
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="data:,"></head>
<body><h1>{title}</h1><img src="/frames" width="100%" alt="live frames of the policy"></body></html>
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
QUALITY = 80  # of JPEG


class Frames:
    """The newest frame, for any number of readers."""

    def __init__(self) -> None:
        self._changed, self._number, self._data = threading.Condition(), 0, b""

    def put(self, data: bytes) -> None:
        with self._changed:
            self._number, self._data = self._number + 1, data
            self._changed.notify_all()

    def after(self, number: int) -> tuple[int, bytes]:
        """Wait for a frame newer than ``number``; return its number and data, (number, b"") if none comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._number > number, deadlines.FRAME):
                return number, b""
            return self._number, self._data


class Handler(BaseHTTPRequestHandler):
    """Answers GET: a page with one image, and the image."""

    server: "Server"
    timeout = deadlines.BROWSER

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self.answer(403, "text/plain", b"unknown host")
        elif self.path == "/":
            self.answer(200, "text/html; charset=utf-8", PAGE.format(title=escape(self.server.title)).encode())
        elif self.path == "/frames":
            self.answer(200, "multipart/x-mixed-replace; boundary=frame")
            self.send_frames()
        else:
            self.answer(404, "text/plain", b"not found")

    def answer(self, status: int, kind: str, body: bytes = b"") -> None:
        """Send status, headers and a body, at whose end the connection is closed."""
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_frames(self) -> None:
        number, data = self.server.frames.after(0)
        while data:
            try:
                self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\n")
                self.wfile.write(f"Content-Length: {len(data)}\r\n\r\n".encode() + data + b"\r\n")
            except OSError:  # the browser has left
                return
            number, data = self.server.frames.after(number)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Server(ThreadingHTTPServer):
    """Serves the newest frame of a policy. ``port``: of 127.0.0.1; 0 takes any free one. Raises ``ConfigError``: the
    port is taken."""

    daemon_threads = True

    def __init__(self, title: str, port: int):
        self.title, self.frames = title, Frames()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError("port", port, f"a free port, or 0 for any ({error.strerror})") from error
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about browsers that leave in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Answer requests in a thread; yield the address."""
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="pql-http", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{self.server_port}/"
        finally:
            self.shutdown()
            thread.join(timeout=deadlines.WORKER)


def stream(
    path: str, port: int = PORT, episodes: int = 1_000_000, seed: int = 0, device: str = "cpu", trust: bool = False
) -> None:
    """Show the greedy policy of a run, checkpoint or export in a browser, at simulated speed, until Ctrl-C.

    A simulator with a page of its own (``WebViewable``) serves that; of others, the page shows the frames.

    Args:
        port: 0: any free one.
        episodes: the stream ends after this many.
    Raises:
        ConfigError: as :func:`pql.record_video`; the port is taken.
    """
    check_numbers(episodes, None, None, None, seed)
    with Stage(path, seed, device, trust) as stage, page(stage, port) as (address, show):
        print(f"{address} shows the policy; Ctrl-C ends it", flush=True)
        every, fps = cadence(stage.env.spec.info.get("dt"))
        begun, shown = time.perf_counter(), 0
        for t in stage.run(episodes, None):
            if t % every == 0:
                show()
                shown += 1
                time.sleep(max(0.0, begun + shown / fps - time.perf_counter()))


@contextmanager
def page(stage: Stage, port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve a page; yield its address and a function that shows the simulation's current state on it."""
    viewer = stage.env.web_viewer(port) if supports(stage.env, WebViewable) else None
    if viewer is not None:
        with closing(viewer):
            yield viewer.address, viewer.show
        return
    encode = encoder()
    with Server(f"pql: {stage.env.spec.name}", port) as server, server.running() as address:
        yield address, lambda: server.frames.put(encode(stage.picture(None, None)))


def encoder() -> Any:
    """Return a function from an image, uint8 [H, W, 3], to a JPEG file's bytes."""
    check_video_packages("--browser", True, ("PIL",))
    from PIL import Image

    def encode(image: Any) -> bytes:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()

    return encode
