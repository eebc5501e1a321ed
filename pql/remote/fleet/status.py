"""What a fleet's actors do, in lines for the user, and whether it makes sense to go on. It knows nothing of Ray."""

from collections import Counter
from collections.abc import Callable, Mapping

from pql.errors import ConfigError, PqlError, RunError
from pql.remote.fleet.host import Look

TRIES = 5  # consecutive failures of one actor that end a fleet in which no actor has stepped yet
QUIET = 60.0  # seconds between status lines if nothing has changed


class FleetStatus:
    """State of a fleet of ``count`` actors with ``num_envs`` environments each.

    Args:
        tell: called with each message for the user.
    Attributes:
        error: error that ends the fleet, before any actor has stepped, or None.
    """

    def __init__(self, count: int, num_envs: int, tell: Callable[[str], None]):
        self.count, self.num_envs, self.tell = count, num_envs, tell
        self.looks: dict[int, Look] = {}
        self.error: PqlError | None = None
        self.steps = 0
        self._lost, self._processes = Counter[int](), dict[int, tuple[str, int]]()
        self._reported, self._reported_at, self._reported_steps = "", 0.0, 0

    def see(self, looks: Mapping[int, Look | None], now: float) -> None:
        """Take the new states of some actors; None: no answer, because it is starting, lost or waiting for room.
        ``now``: seconds of any monotonic clock."""
        for number, look in looks.items():
            if look is None:
                self.looks.pop(number, None)
            else:
                self._saw(number, look)
                self.looks[number] = look
        self._report(now)

    def _saw(self, number: int, look: Look) -> None:
        process, last = (look.node, look.process), self._processes.get(number)
        before = self.looks.get(number) if process == last else None
        if process != last:
            self._lost[number] += last is not None
            self.tell(f"actor {number} {'was lost, and ' * (last is not None)}is on {look.node}")
            self._processes[number] = process
        elif before is not None and look.failures > before.failures:
            self.tell(f"actor {number} on {look.node} failed: {look.said}")
        self.steps += max(0, look.steps - (0 if before is None else before.steps))
        failures = look.failures + self._lost[number]
        if self.steps or self.error is not None:  # no actor has ever stepped: probably the same error for all
            return
        if look.setting is not None:
            self.error = ConfigError(*look.setting)
        elif failures >= TRIES:
            why = look.said.rpartition("; next attempt")[0] or "its process ended"
            self.error = RunError(f"actor {number} on {look.node} failed {TRIES} times in a row: {why}")

    def _report(self, now: float) -> None:
        """Report the state when it has changed, and every ``QUIET`` seconds."""
        words = self._words()
        if words == self._reported and now - self._reported_at < QUIET:
            return
        rate = (self.steps - self._reported_steps) * self.num_envs / max(now - self._reported_at, 1.0)
        self._reported, self._reported_at, self._reported_steps = words, now, self.steps
        self.tell(words + f"; {rate:,.0f} env steps/s" * (rate >= 1))

    def _words(self) -> str:
        acting = [look for look in self.looks.values() if look.connected]
        alone = [look.said.partition(";")[0] for look in self.looks.values() if look.said and not look.connected]
        nodes, starting, lost = len({look.node for look in acting}), self.count - len(acting) - len(alone), self._lost
        parts = [f"{len(acting)} of {self.count} acting" + f" on {nodes} node{'s' * (nodes > 1)}" * (nodes > 0)]
        parts += [f"{len(alone)} without a learner ({said})" for said in alone[:1]]
        parts += [f"{starting} starting, or waiting for room"] * (starting > 0)
        parts += [f"{lost.total()} restarts so far"] * (lost.total() > 0)
        return ", ".join(parts)
