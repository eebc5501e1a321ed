"""Process that runs one actor, as ``pql actor`` does, on a machine of the cluster and reports its state."""

import threading
from typing import TYPE_CHECKING

from pql.engine.watchdog import Watchdog
from pql.errors import ConfigError
from pql.remote.actor.command import ActorOptions, make_actor_client
from pql.remote.fleet.supervisor import FAILED, OVER, REFUSED, STOPPED, Ending, Look

if TYPE_CHECKING:
    from pql.remote.actor.client import ActorClient


class FleetHost:
    """Host of one actor. ``run`` occupies a thread until the actor ends; other threads call the other methods."""

    def __init__(self, setup: ActorOptions):
        self.setup, self._leave, self._said = setup, threading.Event(), ""
        self.actor: ActorClient | None = None

    def run(self) -> Ending:
        """Run the actor until the learner, or ``leave``, ends it. Errors are returned as text: a simulator's exception
        types may be unknown to the fleet's process."""
        try:
            self.actor = make_actor_client(self.setup, self._tell, self._leave)
            with Watchdog():  # a hung simulator ends this process, and the fleet starts another
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
        """Leave at the learner's next request."""
        self._leave.set()

    def _tell(self, line: str) -> None:
        from pql.remote.actor.client import say_actor

        self._said = line
        say_actor(line)  # into this process's log, which Ray keeps
