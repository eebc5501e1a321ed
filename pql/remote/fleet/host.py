"""Process that runs one actor, as ``pql actor`` does, on a machine of the cluster, and reports its state."""

import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pql.engine.watchdog import Watchdog
from pql.errors import ConfigError, first_line
from pql.remote.actor.command import ActorOptions, make_actor_client

if TYPE_CHECKING:
    from pql.remote.actor.client import ActorClient

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds until an actor that failed is made again
STEADY = 60.0  # seconds after which earlier failures no longer count


class Look(NamedTuple):
    """State of an actor at one moment."""

    node: str  # name of its machine, for messages
    process: int
    steps: int = 0  # of each of its environments, in this process
    connected: bool = False
    said: str = ""  # its last line
    failures: int = 0  # consecutive
    setting: tuple[str, Any, str] | None = None  # arguments of the ``ConfigError`` of the last one, if it was one


class FleetHost:
    """Host of one actor. ``run`` occupies a thread until the actor ends; other threads call the other methods."""

    def __init__(self, setup: ActorOptions, node: str = ""):
        self.setup, self.node, self._leave = setup, node, threading.Event()
        self.actor: ActorClient | None = None
        self._said, self._failures, self._steps = "", 0, 0
        self._setting: tuple[str, Any, str] | None = None

    def run(self) -> str | None:
        """Run the actor until the learner ends it, and return its reason; None after :meth:`leave`. One that fails is
        made again, after a growing delay."""
        while not self._leave.is_set():
            start = time.monotonic()
            try:
                return self._act()
            except Exception as error:
                wrong = (error.setting, str(error.value), error.allowed) if isinstance(error, ConfigError) else None
                self._failures = 1 if time.monotonic() - start > STEADY else self._failures + 1
                self._setting = wrong
                delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)
                self._tell(f"{error if wrong else first_line(error)}; next attempt in {delay:.1f} s")
                self._leave.wait(delay)
        return None

    def _act(self) -> str | None:
        self.actor = make_actor_client(self.setup, self._tell, self._leave)
        try:
            with Watchdog():  # a hung simulator ends this process, and Ray starts another
                return self.actor.run()
        finally:
            self._steps += self.actor.steps
            actor, self.actor = self.actor, None
            actor.sim.close()

    def look(self) -> Look:
        actor, steps = self.actor, self._steps
        connected = actor is not None and actor.connected
        steps += 0 if actor is None else actor.steps
        return Look(self.node, os.getpid(), steps, connected, self._said, self._failures, self._setting)

    def leave(self) -> None:
        """Leave at the learner's next request."""
        self._leave.set()

    def _tell(self, line: str) -> None:
        from pql.remote.actor.client import say_actor

        self._said = line
        say_actor(line)  # into this process's log, which Ray keeps
