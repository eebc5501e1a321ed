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


def _main(words: Sequence[str], log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.exit(main([*words]))


def begin(words: Sequence[str], log: Path) -> BaseProcess:
    """Start ``pql`` with ``words``; its output goes to ``log``. ``exitcode`` is negative after a signal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["real_runs"])
    process = context.Process(target=_main, args=(words, log))
    process.start()
    return process
