"""``pql watch``: TensorBoard on the runs below a folder, while they train.

Rows of metrics.jsonl become event files in a temporary folder, whichever logger the runs have. Run directories may be
anybody's: of these only metrics.jsonl is read, nothing is written or executed, and links are not followed.
"""

import json
import os
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pql.engine import deadlines
from pql.errors import ConfigError

PORT = 8421
HOSTS = ("127.0.0.1", "localhost")
RUNS = 200
DEPTH = 4  # folders between the folder that is shown and a run
CHUNK = 8 << 20  # bytes of metrics.jsonl read at a time
WHOLE = 4 << 20  # bytes of metrics.jsonl, beyond which only every second, third, ... row is shown
KEYS, KEY = 200, 100  # metrics of a row, characters of a name
LARGEST = 1e18  # a step has 64 bits, a value 32


class Feed:
    """Copies the rows of one run directory into an event file below ``out``."""

    def __init__(self, path: Path, out: Path):
        self.path, self.out = path, out
        self._writer: Any = None
        self._offset, self._seen, self._every = 0, 0, 1
        self._rest = b""

    def update(self) -> None:
        """Copy the rows appended since the last call; all of them again if the file was replaced by a shorter one."""
        try:
            data = self._read()
        except OSError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-CHUNK:]
        for line in lines:
            if "steps/env" in (row := numbers(line)):
                self._add(row)
        if self._writer:
            self._writer.flush()

    def _read(self) -> bytes:
        file = self.path / "metrics.jsonl"
        if file.is_symlink() or not file.is_file():  # opening a pipe would wait
            return b""
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if self._offset == 0:
                self._every = 1 + size // WHOLE
            if size < self._offset:
                self._offset, self._rest = 0, b""
                self._add({"steps/env": 0.0}, again=True)
            stream.seek(self._offset)
            data = stream.read(CHUNK)
        self._offset += len(data)
        return data

    def _add(self, row: dict[str, float], again: bool = False) -> None:
        """Write a row; ``again``: a mark instead, with which TensorBoard forgets all rows so far."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._seen += 1
        if self._seen % self._every and "eval/return_mean" not in row and not again:
            return
        self._writer = self._writer or EventFileWriter(str(self.out))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        what: dict[str, Any] = {"summary": Summary(value=values)}
        if again:
            what = {"session_log": SessionLog(status=SessionLog.START)}
        self._writer.add_event(Event(wall_time=row.get("time/seconds", 0.0), step=int(row["steps/env"]), **what))

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def numbers(line: bytes) -> dict[str, float]:
    """Return the finite numbers of a line of metrics.jsonl; {} for a line that is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(row, dict):
        return {}
    items = [(k, v) for k, v in row.items() if isinstance(v, int | float) and len(k) <= KEY and k.isprintable()]
    return {k: float(v) for k, v in items[:KEYS] if abs(v) < LARGEST}


class Feeds:
    """All runs below ``root``, or one run, copied below ``out`` by their path relative to ``root``."""

    def __init__(self, root: Path, out: Path):
        self.root, self.out = root.resolve(), out
        self.feeds: dict[Path, Feed] = {}

    def update(self) -> None:
        """Find new runs and copy the new rows of all."""
        for path in self._paths():
            if path not in self.feeds and len(self.feeds) < RUNS:
                self.feeds[path] = Feed(path, self.out / path.relative_to(self.root.parent))
        for feed in self.feeds.values():
            feed.update()

    def _paths(self) -> Iterator[Path]:
        for folder, below, files in os.walk(self.root):
            depth = len(Path(folder).relative_to(self.root).parts)
            found = "metrics.jsonl" in files
            below[:] = () if found or depth == DEPTH else sorted(name for name in below if name[0] != ".")
            if found:
                yield Path(folder)

    def close(self) -> None:
        for feed in self.feeds.values():
            feed.close()


@contextmanager
def serving(folder: Path, port: int = PORT) -> Iterator[tuple[str, Feeds]]:
    """Serve the runs of a folder: the page's address, and what copies their rows when it is updated.

    Args:
        port: of the loopback address; 0: any free one.
    Raises:
        ConfigError: no such folder, the port is taken, or TensorBoard is not installed.
    """
    if not folder.is_dir():
        raise ConfigError("run", folder, "a run directory, or a folder of runs")
    try:
        from tensorboard import program
    except ModuleNotFoundError as error:
        what = f"the package {error.name!r}, which is not installed: pip install 'pql-rl[tensorboard]'"
        raise ConfigError("command", "watch", what) from error

    class Server(program.WerkzeugServer):
        def __init__(self, app: Any, flags: Any):
            super().__init__(for_this_machine(app), flags)

    with tempfile.TemporaryDirectory(prefix="pql-watch-") as out:
        feeds = Feeds(folder, Path(out))
        feeds.update()
        board: Any = program.TensorBoard(server_class=Server)
        words = {"logdir": out, "host": HOSTS[0], "port": port, "load_fast": "false", "reload_interval": 3}
        board.configure(argv=["pql watch", *(f"--{name}={value}" for name, value in words.items())])
        try:
            address = board.launch()
        except program.TensorBoardServerException as error:
            raise ConfigError("port", port, f"a free port, or 0 for any ({error.msg})") from error
        try:
            yield address, feeds
        finally:
            feeds.close()


def for_this_machine(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that answers only requests to this machine's names: a site elsewhere cannot redirect
    its own name here."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("HTTP_HOST", "").partition(":")[0] in HOSTS:
            return app(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"unknown host"]

    return answer


def watch(folder: Path, port: int = PORT, show: bool = False) -> None:
    """Serve a folder of runs until Ctrl-C, which raises ``KeyboardInterrupt``. ``show``: open the page in a browser."""
    with serving(folder, port) as (address, feeds):
        print(f"{address} shows the runs in {folder}; Ctrl-C ends it", flush=True)
        if show:
            webbrowser.open(address)
        while True:
            time.sleep(deadlines.IDLE)
            feeds.update()
