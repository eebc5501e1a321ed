"""Ray cluster that runs the actors of a fleet. No other file uses Ray."""

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from pql.engine import deadlines
from pql.errors import ConfigError
from pql.remote.actor.command import ActorOptions
from pql.remote.fleet.host import FleetHost
from pql.remote.fleet.supervisor import LOST, Ending, Look
from pql.remote.protocol import LOOPBACK

LOCAL = "local"
THREADS = 3  # of a Ray actor: for ``run``, ``look`` and ``leave``


@dataclass
class Placed:
    """A Ray actor and its pending calls."""

    handle: Any
    ending: Any  # call of ``run``
    news: Any  # call of ``where``, then of ``look``
    node: str | None = None  # set once its process runs
    look: Look | None = None


class RayCluster:
    """Ray cluster on which each actor is a Ray actor with ``cpus`` processors, spread over the machines.

    Ray's own restarts are off: they have no back-off, and do not distinguish finished actors from lost ones.

    Args:
        address: address of the cluster's head; ``auto``: the cluster of this machine; ``local``: a new cluster with
            only this machine, which ends with this process.
    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or its machines cannot reach the learner's address.
    """

    def __init__(self, setup: ActorOptions, address: str, cpus: float):
        try:
            import ray
        except ModuleNotFoundError as error:
            needed = f"packages that are installed: pip install 'pql-rl[cluster]' ({error})"
            raise ConfigError("command", "fleet", needed) from error
        self.ray, self.setup = ray, setup
        self._placed: dict[int, Placed] = {}
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
        options = {"num_cpus": cpus, "max_concurrency": THREADS, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._host: Any = ray.remote(Located).options(**options)

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

    def place(self, number: int) -> None:
        handle: Any = self._host.remote(self.setup)
        self._placed[number] = Placed(handle, handle.run.remote(), handle.where.remote())

    def look(self) -> dict[int, Look | Ending | None]:
        refs = [ref for placed in self._placed.values() for ref in (placed.ending, placed.news)]
        ready = set(self.ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        found: dict[int, Look | Ending | None] = {}
        for number, placed in list(self._placed.items()):
            if placed.ending in ready:
                found[number] = self._ending(placed)
                self.remove(number)
            else:
                if placed.news in ready:
                    self._read(placed)
                found[number] = placed.look
        return found

    def _ending(self, placed: Placed) -> Ending:
        try:
            return self.ray.get(placed.ending, timeout=deadlines.RAY)
        except self.ray.exceptions.RayError as error:
            return Ending(LOST, reason(error))

    def _read(self, placed: Placed) -> None:
        """Read the last look and request the next."""
        try:
            if placed.node is None:
                placed.node = self.ray.get(placed.news, timeout=deadlines.RAY)
                placed.look = Look(placed.node)
            else:
                placed.look = self.ray.get(placed.news, timeout=deadlines.RAY)
        except self.ray.exceptions.RayError:
            return  # the result of ``run`` holds the error
        placed.news = placed.handle.look.remote(placed.node)

    def stop(self, number: int) -> None:
        self._placed[number].handle.leave.remote()

    def remove(self, number: int) -> None:
        self.ray.kill(self._placed.pop(number).handle)

    def close(self) -> None:
        """Disconnect from the cluster, which ends the fleet's remaining actors."""
        self.ray.shutdown()


class Located(FleetHost):
    """Host that reports its machine."""

    def where(self) -> str:
        import ray

        return f"{socket.gethostname()} (node {short_name(ray)})"


def knock(address: str) -> None:
    """Raise ``OSError`` if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=deadlines.KNOCK).close()


def short_name(ray: Any) -> str:
    """Return the first characters of Ray's id of this node."""
    return str(ray.get_runtime_context().get_node_id())[:8]


def reason(error: Exception) -> str:
    """Return the line of Ray's error message that says why an actor ended."""
    if type(error).__name__ == "ActorUnavailableError":
        return "its process or its machine does not answer"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("The actor ")] or lines or [type(error).__name__]
    return causes[-1].partition(". ")[0]
