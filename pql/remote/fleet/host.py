"""What a fleet runs on a machine of the cluster: one actor, the very one of ``pql actor``, that others can look at."""

import threading
from typing import TYPE_CHECKING

from pql.engine.watchdog import Watchdog
from pql.errors import ConfigError
from pql.remote.actor.command import Setup, make_actor
from pql.remote.fleet.supervisor import FAILED, OVER, REFUSED, STOPPED, Ending, Look

if TYPE_CHECKING:
    from pql.remote.actor.client import Actor


class Host:
    """One actor. ``run`` takes a thread for as long as it lives; the other methods are for other threads."""

    def __init__(self, setup: Setup):
        self.setup, self._leave, self._said = setup, threading.Event(), ""
        self.actor: Actor | None = None

    def run(self) -> Ending:
        """Act until the learner, or ``leave``, ends it.

        Errors are told, not raised: where they would be read, a simulator's own types may not be known.
        """
        try:
            self.actor = make_actor(self.setup, self._tell, self._leave)
            with Watchdog():  # a simulator that hangs ends this process, and another is placed
                why = self.actor.run()
            self.actor.sim.close()
        except ConfigError as error:
            return Ending(REFUSED, str(error), (error.setting, str(error.value), error.allowed))
        except Exception as error:
            return Ending(FAILED, f"{type(error).__name__}: {error}".splitlines()[0])
        return Ending(STOPPED, "") if why is None else Ending(OVER, why)

    def look(self, node: str) -> Look:
        actor = self.actor
        return Look(node) if actor is None else Look(node, actor.steps, actor.connected, self._said)

    def leave(self) -> None:
        """At the learner's next order."""
        self._leave.set()

    def _tell(self, line: str) -> None:
        from pql.remote.actor.client import say

        self._said = line
        say(line)  # into this process's log, which Ray keeps
