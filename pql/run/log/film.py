"""Videos beside the training: now and then an episode of the current policy, recorded by a process of its own.

The process is ``pql play`` on a copy of the policy, with low priority: a simulator that draws slowly, crashes or hangs
does not touch the run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pql.engine import deadlines

PATTERN = "steps-*.mp4"


class Filmer:
    """Records one video at a time below ``RUN/videos``, and keeps the newest.

    Args:
        run_dir: the run directory.
        device: device of the policy and its environment.
        kept: number of videos that are kept.
        warn: receives warnings.

    Attributes:
        policy: path at which :meth:`start` expects the policy checkpoint.
        busy: a recording has been announced or is running.
    """

    def __init__(self, run_dir: Path, device: str, kept: int, warn: Callable[[str], None]):
        self.folder, self.device, self.kept, self.warn = run_dir / "videos", device, kept, warn
        self.policy = self.folder / ".policy"
        self.busy = False
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close; a pipe would block on many warnings)
        self._file, self._steps, self._due = self.folder / "", 0, 0.0

    def start(self, steps: int) -> None:
        """Begin to record the policy of ``steps`` env steps. Any thread; ``busy`` was set before."""
        self._file, self._steps = self.folder / f"steps-{steps:012d}.mp4", steps
        self._due = time.monotonic() + deadlines.VIDEO
        command = [sys.executable, "-m", "pql", "play", str(self.policy), f"out={self._file}", f"device={self.device}"]
        low = ["nice", "-n", "10"] if shutil.which("nice") else []
        apart: Any = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "start_new_session": True}
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self._said}
        self._said.truncate(0)
        try:
            # Trusted, as the run's own settings: they may name code.
            self._process = subprocess.Popen([*low, *command, "--trust"], **quiet, **apart)
        except OSError:
            self.busy = False
            raise

    def finished(self) -> tuple[Path, int] | None:
        """Return (file, env steps) of a video once, when it is complete; None otherwise. Never waits."""
        process = self._process
        if process is None or (process.poll() is None and time.monotonic() < self._due):
            return None
        self._process = None
        intime = process.poll() is not None
        end_process(process)
        self.busy = False
        shutil.rmtree(self.policy, ignore_errors=True)  # never recorded again under another number of steps
        if process.returncode != 0:
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()
            how = f"exit status {process.returncode}" if intime else f"not recorded within {deadlines.VIDEO:g} s"
            last = (said.splitlines() if intime and said else [how])[-1]
            self.warn(f"no video of {self._steps:,} env steps: {last}")
            return None
        for old in sorted(self.folder.glob(PATTERN))[: -self.kept]:
            old.unlink(missing_ok=True)
        return self._file, self._steps

    def wait(self, stop: Callable[[], bool], seconds: float) -> None:
        """Wait for the current recording, until ``stop()`` or for ``seconds``."""
        end = time.monotonic() + seconds
        while self.busy and not stop() and time.monotonic() < end:
            if self._process is not None and self._process.poll() is not None:
                return
            time.sleep(deadlines.LOOK / 5)

    def close(self) -> None:
        """End the recording and remove what is unfinished."""
        if self._process is not None:
            end_process(self._process)
        self._said.close()
        for left in (self.folder.glob(".writing-*.mp4"), (p for p in [self.policy] if p.exists())):
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Kill ``process`` if it still runs; one that cannot even be killed is left behind."""
    if process.poll() is None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(deadlines.KILLED)
