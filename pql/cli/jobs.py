"""Runs in separate processes, one after the other, which share no state and end with their parent.

Used by ``pql train -m`` and ``pql sweep``; does not depend on what they compare.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pql.engine.world import end_with_parent
from pql.errors import ConfigError
from pql.run.resume import counts_when_typed
from pql.run.store import checkpoint, claim
from pql.run.store import run_dir as rundir

PROGRAM = (sys.executable, "-m", "pql")
INTERRUPTED = 130


def next_command(run_dir: Path, words: Sequence[str]) -> list[str] | None:
    """Arguments of the next ``pql`` call that finishes the run in ``run_dir``; None if it is finished.

    Files of an earlier sitting that ended before its first resume point are moved to ``.lost`` next to the run. A run
    that another process is working on is left unchanged: ``resume`` rejects it and names that process.
    """
    state = rundir.state(run_dir)
    if state == "finished":
        return None
    if state == "interrupted":
        if checkpoint.resume_points(run_dir / "checkpoints") or claim.holder(run_dir) is not None:
            return ["resume", str(run_dir), *filter(counts_when_typed, words)]
        lost = run_dir.parent / ".lost" / f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        lost.parent.mkdir(exist_ok=True)
        run_dir.rename(lost)
        with contextlib.suppress(OSError):  # no longer found as a run when folders are searched
            (lost / "metrics.jsonl").rename(lost / "metrics.jsonl.lost")
    return ["train", *words, f"run_dir={run_dir}"]


class Runner:
    """Runs ``pql`` commands, each in a new process, while it is entered.

    Ctrl-C and SIGTERM are forwarded to the running process, which saves and ends; the second one ends it at once. The
    process has its own process group, so that a terminal's Ctrl-C reaches it only through this class, and only once.

    Args:
        folder: of all runs; created if it does not exist. Only one runner works in it.
        setting: the user's name of ``folder``.
        program: what to run instead of ``pql``.

    Attributes:
        asked: Ctrl-C or SIGTERM was received, here or by a process: no more commands are started.
    """

    def __init__(self, folder: Path, setting: str, program: Sequence[str] = PROGRAM):
        self.folder, self.setting, self.program = folder, setting, list(program)
        self.asked = False
        self._signals = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Runner":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = claim.open_lock(self.folder / claim.LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(self.setting, self.folder, f"a folder that can be written ({error})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError(self.setting, self.folder, "a folder that no other command uses now") from error
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        assert self._lock is not None
        self._lock.close()

    def run(
        self,
        words: Sequence[str],
        log: Path | None = None,
        enough: Callable[[], bool] | None = None,
        every: float = 0.5,
    ) -> int:
        """Run one command to its end. Returns its exit status (negative: the signal that ended it).

        Args:
            log: file for its output; None: the console.
            enough: called every ``every`` seconds; once it returns True, the process is asked to save and end.
        """
        if self.asked:
            return INTERRUPTED
        assert self._lock is not None
        with contextlib.ExitStack() as opened:
            out = opened.enter_context(log.open("ab")) if log else None
            self._child = child = subprocess.Popen(
                [*self.program, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
                pass_fds=[self._lock.fileno()],  # the lock is held until the process has ended as well
                preexec_fn=end_with_parent,
            )
            if self.asked:  # the signal came while the process was being started
                child.send_signal(signal.SIGTERM)
            status = _wait(child, enough, every)
        self._child = None
        self.asked = self.asked or (status == INTERRUPTED and enough is None)
        return status

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._signals += 1
        if self._child is not None:
            self._child.send_signal(number if self._signals < 3 else signal.SIGKILL)


def how_ended(status: int) -> str:
    """Describe an exit status: ``status 1``, ``ended by SIGABRT``."""
    return f"status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"


def _wait(child: "subprocess.Popen[bytes]", enough: Callable[[], bool] | None, every: float) -> int:
    signalled = False
    while True:  # no deadline: a run has its own; signals reach it through ``Runner``
        try:
            return child.wait(every)
        except subprocess.TimeoutExpired:
            if not signalled and enough is not None and enough():
                child.send_signal(signal.SIGTERM)
                signalled = True
