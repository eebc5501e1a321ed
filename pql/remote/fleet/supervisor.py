"""Supervision of a fleet's actors: start, restart with back-off, and shutdown.

It contains only the decisions: the caller passes the time, and a ``Cluster`` starts processes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pql.engine import deadlines
from pql.errors import ConfigError, PqlError, RunError

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds until an actor that ended is restarted
STEADY = 60.0  # seconds of stepping after which the failure count is reset
TRIES = 5  # consecutive failures of one actor that end a fleet in which no actor has stepped yet
QUIET = 60.0  # seconds between status lines if nothing has changed

OVER, STOPPED, REFUSED, FAILED, LOST = "is done", "has left", "was refused", "failed", "was lost"


class Look(NamedTuple):
    """State of a placed actor at one moment."""

    node: str  # name of its machine, for messages
    steps: int = 0  # of each of its environments, since it was placed
    connected: bool = False
    said: str = ""  # its last line


class Ending(NamedTuple):
    """How an actor ended: the learner said that the run is ``OVER``, it was ``STOPPED``, a setting was ``REFUSED``, its
    simulator ``FAILED``, or its process or machine was ``LOST``."""

    kind: str
    why: str
    setting: tuple[str, Any, str] | None = None  # arguments of ``ConfigError``, if refused


class Cluster(Protocol):
    """Place where numbered actors run."""

    def place(self, number: int) -> None:
        """Request an actor on any machine with room; return immediately."""

    def look(self) -> dict[int, Look | Ending | None]:
        """Return the state of all placed actors; None while one is starting or waits for room. Endings appear once."""

    def stop(self, number: int) -> None:
        """Ask an actor to leave between two steps; return immediately."""

    def remove(self, number: int) -> None:
        """Kill an actor."""


@dataclass
class Post:
    """One of the fleet's actors, across restarts."""

    number: int
    due: float | None = 0.0  # time of its next start; None: it is placed, or will not be started again
    placed: bool = False
    look: Look | None = None
    stepping_since: float | None = None
    failures: int = 0  # consecutive


class FleetState(NamedTuple):
    """Counts of a fleet's status line."""

    acting: int
    nodes: int  # of the actors that act
    alone: int  # without a learner
    said: str  # message of one of these
    starting: int  # or waiting for room
    again: int  # waiting for a restart
    restarts: int  # so far


class Fleet:
    """Fleet of ``count`` actors with ``num_envs`` environments each.

    Args:
        tell: called with each message for the user.
        jitter: draws a number from a range, so that actors lost together do not reconnect at the same moment.
    Attributes:
        error: error that ended the fleet before any actor had stepped, or None.
    """

    def __init__(
        self,
        cluster: Cluster,
        count: int,
        num_envs: int,
        tell: Callable[[str], None],
        jitter: Callable[[float, float], float] = random.uniform,
    ):
        self.cluster, self.num_envs, self.tell, self.jitter = cluster, num_envs, tell, jitter
        self.posts = [Post(number) for number in range(count)]
        self.error: PqlError | None = None
        self.restarts = self.steps = 0
        self._leaving_until: float | None = None
        self._reported: tuple[Any, ...] = ()
        self._reported_at, self._reported_steps = 0.0, 0

    def turn(self, now: float) -> bool:
        """Check all actors and start, restart or remove them. Return True once none is left. ``now``: seconds of any
        monotonic clock."""
        looks = self.cluster.look()
        for number, found in looks.items():
            self.posts[number].placed = not isinstance(found, Ending)  # for all, before any is asked to leave
        for number, found in looks.items():
            post = self.posts[number]
            if isinstance(found, Ending):
                self._ended(post, found, now)
            elif found is not None:
                self._saw(post, found, now)
        if self._leaving_until is None:
            for post in self.posts:
                if post.due is not None and now >= post.due:
                    post.due, post.placed = None, True
                    self.restarts += post.failures > 0
                    self.cluster.place(post.number)
        elif now >= self._leaving_until:
            for post in self.posts:
                if post.placed:
                    post.placed = False
                    self.cluster.remove(post.number)
        self._report(now)
        return self._leaving_until is not None and not any(post.placed for post in self.posts)

    def drain(self, now: float) -> None:
        """Start no more actors and ask all to leave; after ``LEAVE`` seconds they are killed."""
        if self._leaving_until is not None:
            return
        self._leaving_until = now + deadlines.LEAVE
        for post in self.posts:
            post.due = None
            if post.placed:
                self.cluster.stop(post.number)

    # -- one actor ----------------------------------------------------------------------------------------------------

    def _saw(self, post: Post, look: Look, now: float) -> None:
        before = 0 if post.look is None else post.look.steps
        if post.look is None:
            self.tell(f"actor {post.number} is on {look.node}")
        if look.steps > before:
            self.steps += look.steps - before
            post.stepping_since = now if post.stepping_since is None else post.stepping_since
            if now - post.stepping_since >= STEADY:
                post.failures = 0
        post.look = look

    def _ended(self, post: Post, ending: Ending, now: float) -> None:
        node = "" if post.look is None else f" on {post.look.node}"
        post.look = post.stepping_since = None
        if self._leaving_until is not None:
            return
        if ending.kind == OVER:
            self.tell(f"actor {post.number}{node}: {ending.why}")
            self.drain(now)
            return
        post.failures += 1
        if self.steps == 0:  # no actor has ever stepped: probably the same error for all
            if ending.kind == REFUSED and ending.setting is not None:
                self.error = ConfigError(*ending.setting)
            elif post.failures == TRIES:
                self.error = RunError(f"actor {post.number}{node} failed {TRIES} times in a row: {ending.why}")
            if self.error is not None:
                self.drain(now)
                return
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(post.failures - 1, 10)) * self.jitter(0.5, 1.0)
        post.due = now + delay
        self.tell(f"actor {post.number}{node} {ending.kind}: {ending.why}; restart in {delay:.1f} s")

    # -- status lines -------------------------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        """Report the state when it has changed, and every ``QUIET`` seconds."""
        state = self._state()
        if state == self._reported and now - self._reported_at < QUIET:
            return
        rate = (self.steps - self._reported_steps) * self.num_envs / max(now - self._reported_at, 1.0)
        self._reported, self._reported_at, self._reported_steps = state, now, self.steps
        self.tell(self._words(state) + f"; {rate:,.0f} env steps/s" * (rate >= 1))

    def _state(self) -> FleetState:
        """Return the counts that a status line reports."""
        looks = [post.look for post in self.posts if post.look is not None]
        alone = [look for look in looks if look.said and not look.connected]
        acting = [look for look in looks if look.connected]
        starting = sum(post.placed for post in self.posts) - len(acting) - len(alone)
        again = sum(post.due is not None for post in self.posts)
        said = alone[0].said.partition(";")[0] if alone else ""
        nodes = len({look.node for look in acting})
        return FleetState(len(acting), nodes, len(alone), said, starting, again, self.restarts)

    def _words(self, state: FleetState) -> str:
        acting, nodes, alone, said, starting, again, restarts = state
        parts = [f"{acting} of {len(self.posts)} acting" + f" on {nodes} node{'s' * (nodes > 1)}" * (nodes > 0)]
        parts += [f"{alone} without a learner" + f" ({said})" * bool(said)] * (alone > 0)
        parts += [f"{starting} starting, or waiting for room"] * (starting > 0)
        parts += [f"{again} waiting for a restart"] * (again > 0)
        parts += [f"{restarts} restarts so far"] * (restarts > 0)
        return ", ".join(parts)
