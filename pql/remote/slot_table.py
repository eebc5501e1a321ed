"""Assignment of remote environments to slots; shared by the server's thread and the collector's thread.

A slot is the index of an environment on the learner's side: a column of the replay buffer. Its states::

    EMPTY --admitted--> FLYING --the actor's answer--> READY --taken--> DUE --an action--> FLYING ...
      ^                    |                             |               |
      +---- actor gone ----+-----------------------------+ (once taken) -+

This file imports neither gRPC nor torch.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pql.engine import interrupt
from pql.engine.watchdog import touch
from pql.remote.protocol import BYE, RESET, ActorRows, Layout, pack, pack_json

EMPTY, FLYING, READY, DUE = range(4)
NOBODY = -1


class FullError(Exception):
    """Fewer slots are free than the actor has environments."""


class TooManyError(Exception):
    """The actor has more environments than there are slots, free or not."""


class RemoteActor:
    """One connected actor with K environments, on the learner's side. ``post``: sends a message to the actor; may be
    called from any thread."""

    def __init__(self, run_id: int, layout: Layout, post: Callable[[bytes], object]):
        self.run_id, self.layout, self.post = run_id, layout, post
        self.number = NOBODY  # in order of admission
        self.seq = 0  # of the last request
        self.slots = np.zeros(0, dtype=np.int64)  # [K], ascending
        self.rows: ActorRows | None = None  # the newest answer
        self.action = np.zeros(layout.action_shape, layout.action_type)
        self.missing = 0  # rows of ``action`` still to be filled before it is sent
        self.reset_due = False  # drop its next answer and reset it
        self.stepped = False  # it has answered a step
        self.gone = False

    def order_reset(self, seed: int) -> None:
        """Send RESET."""
        self.seq += 1
        self.post(pack(RESET, self.run_id, self.seq, seed.to_bytes(8, "little")))

    def order_step(self) -> None:
        """Send ACT with ``action``."""
        self.seq += 1
        self.post(self.layout.pack_action(self.run_id, self.seq, self.action))

    def order_end(self, why: str) -> None:
        """Send BYE."""
        self.post(pack_json(BYE, self.run_id, self.seq + 1, {"reason": why}))


class Answer(NamedTuple):
    """Some rows of an actor's answer, and their slots."""

    rows: ActorRows
    places: np.ndarray  # [k] indices into ``rows``
    slots: np.ndarray  # [k] slots


class SlotTable:
    """Table of ``size`` slots in ``groups`` equal groups.

    Args:
        wait: seconds for which answers wait for the rest of their group; None: until all connected actors answered.
        patience: seconds after which :meth:`take` returns empty-handed.
    Attributes:
        empty_since: time at which the last actor left, or the table was created (``time.monotonic``).
    """

    def __init__(self, size: int, groups: int = 1, wait: float | None = None, patience: float = 0.5):
        self.size, self.wait, self.patience = size, wait, patience
        self.status = np.zeros(size, dtype=np.uint8)
        self.owner = np.full(size, NOBODY)  # [N] number of each slot's actor
        self.place = np.zeros(size, dtype=np.int64)  # [N] row of each slot among those of its actor
        self.actors: dict[int, RemoteActor] = {}  # by number; one that left stays until its last answer is taken
        self.changed = threading.Condition()
        self.seed: int | None = None  # None before the first reset
        self.admitted = 0  # actors so far
        self.empty_since = time.monotonic()
        self.closed = False
        self.divide(groups)

    def divide(self, groups: int) -> None:
        """Divide the slots into ``groups`` equal groups."""
        each = self.size // groups
        self.parts = [slice(g * each, (g + 1) * each) for g in range(groups)]

    # -- the server's thread ------------------------------------------------------------------------------------------

    def admit(self, actor: RemoteActor) -> None:
        """Assign a slot to each environment of ``actor``, all in one group if they fit. Raises ``FullError``: too few
        slots are free; ``TooManyError``: there are too few slots in all."""
        if actor.layout.count > self.size:
            raise TooManyError(f"at most {self.size}, its number of slots")
        with self.changed:
            if self.closed:
                raise FullError("the run is ending")
            free, count = np.flatnonzero(self.status == EMPTY), actor.layout.count
            if len(free) < count:
                raise FullError(f"{count} environments, but {len(free)} of {self.size} slots are free")
            roomy = max((free[(free >= p.start) & (free < p.stop)] for p in self.parts), key=len)
            actor.slots = (roomy if len(roomy) >= count else free)[:count]
            actor.number = self.admitted
            self.admitted += 1
            self.owner[actor.slots], self.place[actor.slots] = actor.number, np.arange(count)
            self.status[actor.slots] = DUE
            self.actors[actor.number] = actor
            if self.seed is not None:
                self._reset(actor)
            self.changed.notify_all()

    def answered(self, actor: RemoteActor, rows: ActorRows) -> None:
        """Store the answer of ``actor`` to its last request; after :meth:`end` it is dropped."""
        with self.changed:
            if self.closed:
                return
            if actor.reset_due:
                self._reset(actor)
                return
            actor.rows = rows
            self.status[actor.slots] = READY
            self.changed.notify_all()

    def leave(self, actor: RemoteActor) -> None:
        """Free the slots of ``actor``; a slot with an answer not taken yet is freed once it is taken."""
        with self.changed:
            if actor.gone or actor.number not in self.actors:
                return
            actor.gone = True
            self._free(actor, actor.slots[self.status[actor.slots] != READY])
            if self.live == 0:
                self.empty_since = time.monotonic()
            self.changed.notify_all()

    @property
    def live(self) -> int:
        """Number of connected actors."""
        return sum(not actor.gone for actor in self.actors.values())

    def _free(self, actor: RemoteActor, slots: np.ndarray) -> None:
        self.status[slots], self.owner[slots] = EMPTY, NOBODY
        if not (self.owner == actor.number).any():
            del self.actors[actor.number]

    def _reset(self, actor: RemoteActor) -> None:
        """Request first observations, with a seed derived from the run's and the actor's number."""
        assert self.seed is not None
        drawn = np.random.SeedSequence([self.seed, actor.number]).generate_state(1, np.uint32)[0]
        self.status[actor.slots], actor.missing, actor.reset_due = FLYING, 0, False
        actor.order_reset(int(drawn) >> 1)

    # -- the collector's thread ---------------------------------------------------------------------------------------

    def reset(self, seed: int | None) -> None:
        """Reset all actors, present and future. Answers to earlier requests are dropped."""
        with self.changed:
            self.seed = (self.seed or 0) + 1 if seed is None else seed
            for actor in list(self.actors.values()):
                if actor.gone:
                    self._free(actor, actor.slots)
                elif actor.missing == 0 and (self.status[actor.slots] == FLYING).any():
                    actor.reset_due = True
                else:
                    self._reset(actor)

    def act(self, slots: np.ndarray, action: np.ndarray) -> None:
        """Store actions [k, ...] for ``slots`` [k] in state DUE; send an actor its actions once all are there. Actions
        for an actor that has left are dropped."""
        with self.changed:
            due = self.status[slots] == DUE
            if not due.all():
                slots, action = slots[due], action[due]
            owners = self.owner[slots]
            for number in distinct(owners):
                actor, mine = self.actors[number], owners == number
                own = slots[mine]
                if actor.missing == 0:
                    actor.missing = len(actor.slots)
                actor.action[self.place[own]] = action[mine]
                actor.missing -= len(own)
                self.status[own] = FLYING
                if actor.missing == 0:
                    actor.order_step()

    def take(self, group: int) -> list[Answer]:
        """Take the answers of one group; wait for a bounded time. Returns once all pending answers have arrived, or
        ``wait`` seconds after the call if there are some. Returns an empty list if another group is ready or due, or if
        nothing has arrived for ``patience`` seconds."""
        part, start = self.parts[group], time.monotonic()
        with self.changed:
            while not self.closed:
                status = self.status[part]
                ready, flying = bool((status == READY).any()), bool((status == FLYING).any())
                limit, waited = self.wait if ready else self.patience, time.monotonic() - start
                over = (limit is not None and waited >= limit) or (ready and interrupt.asked())
                if over or (ready and not flying) or (not ready and (self.status >= READY).any()):
                    return self._collect(part)
                touch()  # the server limits each answer
                self.changed.wait(self.patience if limit is None else limit - waited)
            return []

    def take_all(self, timeout: float) -> list[Answer]:
        """Take the answers of all connected actors, regardless of groups; an empty list after ``timeout`` seconds, and
        after :meth:`end`."""
        start = time.monotonic()
        with self.changed:
            while not self.closed and ((self.status == FLYING).any() or not (self.status == READY).any()):
                left = timeout - (time.monotonic() - start)
                if left <= 0:
                    return []
                self.changed.wait(left)
            return [] if self.closed else self._collect(slice(0, self.size))

    def _collect(self, part: slice) -> list[Answer]:
        out = []
        ready = part.start + np.flatnonzero(self.status[part] == READY)
        for number in distinct(self.owner[ready]):
            actor, slots = self.actors[number], ready[self.owner[ready] == number]
            assert actor.rows is not None
            out.append(Answer(actor.rows, self.place[slots], slots))
            self.status[slots] = DUE
            if actor.gone:
                self._free(actor, slots)
        return out

    def end(self, why: str) -> None:
        """Send BYE to every actor and admit no more."""
        with self.changed:
            self.closed = True
            for actor in self.actors.values():
                if not actor.gone:
                    actor.order_end(why)
            self.changed.notify_all()

    def measures(self) -> dict[str, float]:
        """Metrics: actors and environments connected now, actors admitted so far."""
        with self.changed:
            envs = int((self.status != EMPTY).sum())
            return {"remote/actors": self.live, "remote/envs": envs, "remote/admitted": self.admitted}


def distinct(numbers: np.ndarray) -> list[int]:
    """Return the distinct numbers in order of appearance; for few numbers this is faster than ``np.unique``."""
    return list(dict.fromkeys(numbers.tolist()))
