"""Ray cluster that runs the actors of a fleet, and restarts those that it loses. No other file uses Ray."""

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from pql.engine import deadlines
from pql.errors import ConfigError, first_line
from pql.remote.actor.command import ActorOptions
from pql.remote.fleet.host import FleetHost, Look
from pql.remote.protocol import LOOPBACK

LOCAL = "local"
THREADS = 3  # of a Ray actor: for ``run``, ``look`` and ``leave``
FOR_EVER = {"max_restarts": -1, "max_task_retries": -1}  # on another machine, too


class RayCluster:
    """Ray cluster on which each actor is a Ray actor with ``cpus`` processors, spread over the machines.

    Ray starts an actor again whose process or machine it has lost, and calls its ``run`` again.

    Args:
        address: address of the cluster's head; ``auto``: the cluster of this machine; ``local``: a new cluster with
            only this machine, which ends with this process.
        tell: called with each message for the user.
    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or its machines cannot reach the learner's address.
    """

    def __init__(self, setup: ActorOptions, address: str, cpus: float, tell: Callable[[str], None]):
        try:
            import ray
        except ModuleNotFoundError as error:
            needed = f"packages that are installed: pip install 'pql-rl[cluster]' ({error})"
            raise ConfigError("command", "fleet", needed) from error
        self.ray, self.setup, self.tell = ray, setup, tell
        self._handles: dict[int, Any] = {}
        self._runs: dict[Any, int] = {}  # calls of ``run`` that have not ended -> the actor's number
        self._asked: dict[int, tuple[Any, float]] = {}  # call of ``look`` and its time
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == LOCAL:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            quiet["include_dashboard"] = False
        try:
            knock(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            hint = f"a Ray cluster (ray start --head), or {LOCAL}: {str(error).partition('. ')[0]}"
            raise ConfigError("--ray", address, hint) from error
        self._nodes = [node for node in ray.nodes() if node["Alive"]]
        self._check_reach()
        options = {"num_cpus": cpus, "max_concurrency": THREADS, "scheduling_strategy": "SPREAD"}
        self._host: Any = ray.remote(Located).options(**options, **FOR_EVER)

    def _check_reach(self) -> None:
        """Raise ``ConfigError`` for a loopback address on a cluster of several machines."""
        machines = {node["NodeManagerAddress"] for node in self._nodes}
        if len(machines) > 1 and self.setup.connect.startswith(LOOPBACK):
            self.close()
            raise ConfigError("--connect", self.setup.connect, f"an address that all {len(machines)} machines reach")

    def words(self) -> str:
        """Describe the cluster for the user."""
        count, processors = len(self._nodes), sum(node["Resources"].get("CPU", 0) for node in self._nodes)
        nodes = f"{count} node{'s' * (count > 1)}, {processors:g} processors"
        return f"a Ray cluster of {nodes}; this is node {short_name(self.ray)}"

    def start(self, count: int) -> None:
        """Request ``count`` actors, on any machines with room; return immediately."""
        for number in range(count):
            self._place(number)

    def _place(self, number: int) -> None:
        handle = self._handles[number] = self._host.remote(self.setup)
        self._runs[handle.run.remote()] = number
        self._asked[number] = handle.look.remote(), time.monotonic()

    def looks(self) -> dict[int, Look | None]:
        """Return the new states of actors; None for one that does not answer."""
        found: dict[int, Look | None] = {}
        for number in self._runs.values():
            asked, since = self._asked[number]
            try:
                found[number] = self.ray.get(asked, timeout=0)
            except self.ray.exceptions.GetTimeoutError:
                if time.monotonic() - since > deadlines.RAY:
                    found[number] = None
                continue
            except self.ray.exceptions.RayError:  # it was lost
                found[number] = None
            self._asked[number] = self._handles[number].look.remote(), time.monotonic()
        return found

    def endings(self) -> dict[int, str | None]:
        """Return why actors have ended since the last call: the learner's reason; None for one that has left."""
        found: dict[int, str | None] = {}
        ready = self.ray.wait([*self._runs], num_returns=len(self._runs), timeout=0)[0] if self._runs else ()
        for call in ready:
            number = self._runs.pop(call)
            try:
                found[number] = self.ray.get(call, timeout=deadlines.RAY)
            except self.ray.exceptions.RayError as error:  # its machine has no pql, for example: try another
                self.tell(f"actor {number} could not start: {first_line(error)}")
                self._place(number)
        return found

    @property
    def acting(self) -> int:
        """Number of actors that have not ended."""
        return len(self._runs)

    def leave(self) -> None:
        """Ask all actors to leave between two steps; return immediately."""
        for number in self._runs.values():
            self._handles[number].leave.remote()

    def close(self) -> None:
        """Disconnect from the cluster, which ends the fleet's remaining actors."""
        self.ray.shutdown()


class Located(FleetHost):
    """Host that knows its machine."""

    def __init__(self, setup: ActorOptions):
        import ray

        super().__init__(setup, f"{socket.gethostname()} (node {short_name(ray)})")


def knock(address: str) -> None:
    """Raise ``OSError`` if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=deadlines.KNOCK).close()


def short_name(ray: Any) -> str:
    """Return the first characters of Ray's id of this node."""
    return str(ray.get_runtime_context().get_node_id())[:8]
