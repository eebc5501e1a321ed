"""A copy of a run's console lines in RUN/console.log.

It must never stop or slow a run: a separate thread writes, lines that it cannot write are lost, and the file's size is
bounded.
This file does not import torch.
"""

import contextlib
import os
import stat
import threading
from collections import deque
from pathlib import Path
from typing import Any

from pql.engine import deadlines

CONSOLE_LOG = "console.log"  # in a run directory
LIMIT = 1 << 20  # bytes, after which the file is renamed to console.log.1 and a new one begins
WAITING = 1000  # texts that wait for a slow disk; older ones are lost


class ConsoleLog:
    """Appends texts to a file, from a thread that lives while there are any.

    Args:
        path: the file. It is opened for every batch of texts, so a run directory that is created again gets a new one.
        limit: size in bytes after which the file is renamed, with the suffix ``.1``: at most two such files remain.
    """

    def __init__(self, path: Path, limit: int = LIMIT):
        self.path, self.limit = path, limit
        self._texts: deque[str] = deque(maxlen=WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def print(self, text: str, **style: Any) -> None:
        """Append a line, or several, without waiting; ``style`` is ignored."""
        with self._lock:
            self._texts.append(f"{text}\n")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="pql-console-log", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads: the next text tries again
                    self._thread = None

    def flush(self) -> None:
        """Wait until all texts are written, for at most ``deadlines.CONSOLE`` seconds."""
        with self._lock:  # while another thread is in print, its new thread may not have been started yet
            thread = self._thread
        if thread is not None:
            thread.join(timeout=deadlines.CONSOLE)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._texts:
                    self._thread = None
                    return
                text = "".join(self._texts)
                self._texts.clear()
            with contextlib.suppress(OSError, ValueError):
                self._append(text.encode(errors="replace"))

    def _append(self, data: bytes) -> None:
        """Append to a regular file; links are not followed, and a pipe is not waited for."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_size + len(data) > self.limit:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(self.path, flags, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                file.write(data)
