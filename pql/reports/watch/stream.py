"""A policy in a browser, live: frames of an episode as JPEG images in one answer that does not end."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from html import escape
from typing import Any

from pql.contract.optional import WebViewable, supports
from pql.engine import deadlines
from pql.reports.watch.loopback import LoopbackHandler, LoopbackServer
from pql.run.play import Stage, cadence, check_numbers, check_video_packages

PORT = 8422
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/style.css"></head>
<body><h1>{title}</h1><img src="/frames" alt="live frames of the policy"></body></html>
"""
STYLE = b"body { margin: 16px; font-family: system-ui, sans-serif; } img { max-width: 100%; height: auto; }"
FRAMES = "multipart/x-mixed-replace; boundary=frame"
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


class Handler(LoopbackHandler):
    """A page with one image, and the image."""

    def reply(self, path: str, asked: dict[str, str]) -> None:
        if path == "/":
            self.send(200, PAGE.format(title=escape(self.server.title)).encode(), "text/html")
        elif path == "/style.css":
            self.send(200, STYLE, "text/css")
        elif path != "/frames":
            self.send(404, b"not found", "text/plain")
        elif self.command == "HEAD":
            self.head(200, FRAMES, 0)
        else:
            self.frames()

    def frames(self) -> None:
        self.close_connection = True
        self.head(200, FRAMES)
        number, data = self.server.frames.after(0)
        while data:
            try:
                self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\n")
                self.wfile.write(f"Content-Length: {len(data)}\r\n\r\n".encode() + data + b"\r\n")
            except OSError:  # the browser has left
                return
            number, data = self.server.frames.after(number)


class Server(LoopbackServer):
    """Serves the newest frame of a policy."""

    def __init__(self, title: str, port: int):
        self.title, self.frames = title, Frames()
        super().__init__(Handler, port)


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
    with Server(f"pql: {stage.env.spec.name}", port) as server, server.running():
        yield server.address, lambda: server.frames.put(encode(stage.picture(None, None)))


def encoder() -> Any:
    """Return a function from an image, uint8 [H, W, 3], to a JPEG file's bytes."""
    check_video_packages("--browser", True, ("PIL",))
    from PIL import Image

    def encode(image: Any) -> bytes:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()

    return encode
