"""``pql train`` as a process of its own, forked from one that has imported the library already: starts at once."""

import ctypes
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from pql.cli.main import main
from pql.contract.registry import register
from pql.envs.toy import Counter


class Faulty(Counter):
    """Takes 1 ms for a step; step ``at`` ends the process or never ends, according to ``how``, unless ``mark`` exists,
    which is made then: the fault comes once."""

    def __init__(self, num_envs: int, device: object, at: int, how: str, mark: str):
        super().__init__(num_envs)
        self.at, self.how, self.mark, self.steps = at, how, Path(mark), 0

    def step(self, action):
        self.steps += 1
        time.sleep(0.001)
        if self.steps == self.at and not self.mark.exists():
            self.mark.touch()
            FAULTS[self.how]()
        return super().step(action)


def in_a_thread() -> None:
    """Abort in a thread of the simulator's own."""
    thread = threading.Thread(target=os.abort)
    thread.start()
    thread.join()


FAULTS: dict[str, Callable[[], object]] = {
    "abort": os.abort,
    "read": lambda: ctypes.string_at(0),
    "thread": in_a_thread,
    "hang": lambda: time.sleep(1000),
}


def faulty(num_envs: int, device: object, at: int, how: str, mark: str) -> Faulty:
    """Create a :class:`Faulty`; a class would have its settings checked as those of ``Counter``."""
    return Faulty(num_envs, device, at, how, mark)


register("crashing", faulty)


def obey_permissions() -> None:
    """Give up what lets root write where the permissions of a file or folder forbid it (Linux)."""
    if os.geteuid() == 0:
        libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits
        assert libc.capget(header, sets) == 0
        for i in range(3):
            sets[i] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.capset(header, sets) == 0


def _main(words: Sequence[str], log: Path, permitted: bool) -> None:
    if permitted:
        obey_permissions()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.exit(main([*words]))


def begin(words: Sequence[str], log: Path, permitted: bool = False) -> BaseProcess:
    """Start ``pql`` with ``words``; its output goes to ``log``. ``exitcode`` is negative after a signal.

    Args:
        permitted: it may write only where permissions allow it, also as root.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["real_runs"])
    process = context.Process(target=_main, args=(words, log, permitted))
    process.start()
    return process
