"""Child process of ``ProcessVec``: starts it, sends requests, and detects that it crashed or hangs."""

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pql
from pql.engine import deadlines
from pql.engine.watchdog import clock, touch
from pql.errors import ConfigError, RunError
from pql.remote.process import far


class ChildProcess:
    """Child process: starts it, sends requests, detects its end.

    Args:
        python: path of the interpreter, its name on PATH, or a script that starts it.
        threads: ``OMP_NUM_THREADS`` of the child, unless the variable is set; None: all cores.
    Raises:
        ConfigError: ``python`` cannot be run.
    """

    def __init__(self, python: str, threads: int | None = None):
        found = shutil.which(os.path.expanduser(python))
        if found is None:
            raise ConfigError("task.process.python", python, "a Python interpreter: a program that can be run")
        self.python = found
        self.memory, self.crash = _anonymous("pql-memory"), _anonymous("pql-crash")
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        inherited = {"requests": requests, "answers": answers, "memory": self.memory, "crash": self.crash}
        setup = {**inherited, "parent": os.getpid(), "package": str(Path(pql.__file__).parent)}
        environment = {**os.environ} if threads is None else {"OMP_NUM_THREADS": str(threads), **os.environ}
        files = [self.requests, self.answers, self.memory, self.crash]
        try:
            command, kept = [found, "-u", far.__file__, json.dumps(setup)], list(inherited.values())
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=kept, start_new_session=True, env=environment
            )
        except OSError as error:
            _close_files(files)
            raise ConfigError("task.process.python", python, f"a Python interpreter ({error.strerror})") from error
        finally:
            _close_files([requests, answers])
        self._end = weakref.finalize(self, _finish, self.process, files)
        os.set_blocking(self.requests, False)
        self._poll, self._room = select.poll(), select.poll()
        self._poll.register(self.answers, select.POLLIN)
        self._room.register(self.requests, select.POLLOUT)
        self._limit = 0.0, ""  # seconds of the current wait, and the setting with that limit

    def __str__(self) -> str:
        return f"the simulator's process {self.process.pid} ({self.python})"

    def ask(self, do: str, seconds: float, blob: bytes = b"", **request: Any) -> tuple[Any, bytes]:
        """Send a message and wait for the answer. Raises ``ConfigError``: the simulator rejected a setting; the process
        continues; ``RunError``: an exception in the child, or an error of :meth:`wait`; the process has ended."""
        self._check_open()
        self._limit = seconds, "start_seconds"
        with suppress(BrokenPipeError):  # it has ended; its last output is still to be read
            self._send(far.message(far.CALL, {"do": do, **request}, blob))
        kind = self.wait(seconds, "start_seconds")
        while kind in (far.STEP, far.PLAIN):  # answer to a step whose result was never read
            kind = self.wait(seconds, "start_seconds")
        return self._answer(kind)

    def wake(self) -> None:
        """Request a step."""
        self._check_open()
        try:
            os.write(self.requests, far.STEP)
        except BrokenPipeError:
            return  # as above

    def wait(self, seconds: float, setting: str = "step_seconds") -> bytes:
        """Wait for an answer and return its kind.

        Args:
            seconds: time limit; exceeding it counts as a hang.
            setting: the setting with that limit, for messages.
        Raises:
            RunError: a crash, or no answer within ``seconds``; the process is then gone.
        """
        self._limit = seconds, setting
        self._await(self._poll)
        return os.read(self.answers, 1)

    def _await(self, poll: "select.poll") -> None:
        """Wait until the child has written something (``_poll``), or has read (``_room``), within the current limit."""
        if not poll.poll(1000 * min(self._limit[0], deadlines.IDLE)):
            touch()
            self._look_after(poll)

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._await(self._room)  # a child that hangs reads nothing, and the pipe is soon full
            view = view[os.write(self.requests, view) :]

    def stepped(self, seconds: float, setting: str = "step_seconds") -> bool:
        """Wait for the requested step; return True if an episode ended or began. Raises as :meth:`ask`."""
        kind = self.wait(seconds, setting)
        if kind not in (far.STEP, far.PLAIN):
            self._answer(kind)
        return kind != far.PLAIN

    def _look_after(self, poll: "select.poll") -> None:
        """Check if the child is slow, hung or dead. An open pipe proves nothing, as forks keep it open."""
        seconds, setting = self._limit
        deadline = clock() + seconds - deadlines.IDLE
        while not poll.poll(0):
            if self.process.poll() is not None and not poll.poll(0):  # it may have answered, then ended
                raise self._died()
            left = deadline - clock()
            if left <= 0:
                raise self._hung(seconds, setting)
            poll.poll(1000 * min(left, deadlines.IDLE))
            touch()  # this wait has its own time limit

    def _answer(self, kind: bytes) -> tuple[Any, bytes]:
        """Read the rest of an answer of this kind."""
        if not kind:
            raise self._died()
        facts, blob = far.read_message(self._read)
        if kind == far.ANSWER:
            return facts, blob
        if "config" in facts:
            raise ConfigError(*facts["config"])
        self.kill()
        lines = [f"{self} failed", *facts["traceback"].rstrip().splitlines()]
        if lines[-1] != facts["cause"]:  # the message has several lines; its last one names the cause
            lines.append(facts["cause"])
        raise RunError("\n".join(lines))

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            self._await(self._poll)  # it may be stopped in the middle of a message
            part = os.read(self.answers, min(count, 1 << 20))
            if not part:
                raise self._died()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _died(self) -> RunError:
        """Return the error for a child that closed its pipe: its stacks and exit status."""
        try:
            status = self.process.wait(deadlines.SIMULATOR)
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            how = "stopped answering"
        left = self._stacks()
        self.kill()
        return RunError(f"{left}\n{self} {how}" if left else f"{self} {how}; its output above may have the reason")

    def _hung(self, seconds: float, setting: str) -> RunError:
        """Collect the stacks of a child that does not answer, kill it and return the error."""
        os.killpg(self.process.pid, signal.SIGUSR1)  # the group: a script may have started the interpreter
        stacks, before, deadline = "", "", time.monotonic() + deadlines.SIMULATOR
        while time.monotonic() < deadline and not (stacks and stacks == before):  # until the output is complete
            time.sleep(0.2)
            stacks, before = self._stacks(), stacks
        self.kill()
        how = f"{self} has not answered for {seconds:g} s (task.process.{setting})"
        return RunError(f"{stacks}\n{how}" if stacks else how)

    def _stacks(self) -> str:
        """Return the output of the child's fault handler."""
        return os.pread(self.crash, 1 << 16, 0).decode(errors="replace").rstrip()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RunError(f"{self} is closed")

    def kill(self) -> None:
        """Kill the process group. May be called repeatedly."""
        self._end()

    def close(self) -> None:
        """Let the simulator close, then end the process."""
        if self._end.alive:
            with suppress(RunError, ConfigError, subprocess.TimeoutExpired):  # it is killed in any case
                self.ask("close", deadlines.SIMULATOR)
                self.process.wait(deadlines.SIMULATOR)
        self.kill()


def _anonymous(name: str) -> int:
    """Open an unnamed file, in memory if possible, which vanishes with the last process that uses it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _finish(process: "subprocess.Popen[bytes]", files: list[int]) -> None:
    """Kill the process group and close the parent's files."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # inside a system call that hangs
        process.wait(deadlines.KILLED)
    _close_files(files)
