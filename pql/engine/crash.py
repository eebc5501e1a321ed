"""Crashes in native code, such as an abort or a segmentation fault in a simulator: stacks, and a last line.

faulthandler prints the stacks of all threads, but no Python code of this process runs after it. The last line, with the
worker that crashed and what to do, is therefore printed by a second process (this file as a script), which reads
what faulthandler writes into a pipe.
"""

import contextlib
import faulthandler
import glob
import os
import subprocess
import sys
import threading
from collections.abc import Iterable

FACT = b"\x01"  # begins a line about this process; the others are faulthandler's
_pipe: int | None = None  # of this process, as faulthandler itself is


def report_crashes(speaker: str | None) -> None:
    """Report crashes of this process on standard error, unless faulthandler is enabled already.

    Args:
        speaker: prefix of the last line; None: stacks alone, without a second process.
    """
    global _pipe
    if faulthandler.is_enabled():
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # standard error is not a file
        faulthandler.enable()
        if speaker is None:
            return
        read, write = os.pipe()
        with os.fdopen(read, "rb") as source:  # no Ctrl-C: it must outlive this process
            subprocess.Popen([sys.executable or "", "-ES", __file__, speaker], stdin=source, start_new_session=True)
        faulthandler.enable(write)
        _pipe = write


def name_thread(name: str) -> None:
    """Name the calling thread in the last line of a crash."""
    _state(f"thread {threading.get_ident():x} {name}")


def name_run(folder: object, command: str) -> None:
    """Name the run directory, and the command that continues the run, for the last line of a crash."""
    _state(f"run {os.path.abspath(str(folder))}")
    _state(f"command {command}")


def _state(fact: str) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe, FACT + fact.encode(errors="replace").replace(b"\n", b" ") + b"\n")


def last_line(lines: Iterable[bytes], speaker: str) -> str | None:
    """Print what faulthandler writes until the process ends. Return the last line; None if it has not crashed."""
    threads, run, command, cause, crashed = dict[str, str](), "", "", "", ""
    for line in lines:
        if line.startswith(FACT):
            kind, _, rest = line[1:].decode(errors="replace").rstrip("\n").partition(" ")
            if kind == "run":
                run = rest
            elif kind == "command":
                command = rest
            else:
                ident, _, name = rest.partition(" ")
                threads[ident] = name
            continue
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        text = line.decode(errors="replace").strip()
        if text.startswith("Fatal Python error: "):
            cause = text.partition(": ")[2]
        elif text.startswith("Current thread 0x"):
            crashed = threads.get(text.split()[2].removeprefix("0x").lstrip("0"), "a thread of a library")
    if not cause:
        return None
    saved = run and glob.glob(os.path.join(glob.escape(run), "checkpoints", "tick-*"))
    advice = f"; continue with: {command}" if saved else "; nothing had been saved" if run else ""
    return f"{speaker}: {crashed or 'a thread without Python code'} crashed: {cause}; its stack is above{advice}"


if __name__ == "__main__":
    if text := last_line(sys.stdin.buffer, sys.argv[1]):
        print(text, file=sys.stderr)
