"""Slots, and the actors whose environments sit in them. Two threads meet here: the server's and the collector's.

A slot is a number that an environment has for the learner: a column of the replay. Its state goes round::

    EMPTY --admitted--> FLYING --the actor's answer--> READY --taken--> DUE --an action--> FLYING ...
      ^                    |                             |               |
      +---- actor gone ----+-----------------------------+ (once taken) -+

This file knows nothing of gRPC, torch or replays.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pql.remote.protocol import BYE, RESET, Layout, Rows, pack, pack_json

EMPTY, FLYING, READY, DUE = range(4)
NOBODY = -1


class FullError(Exception):
    """There are fewer free slots than an actor has environments."""


class TooManyError(Exception):
    """An actor has more environments than there are slots, free or not."""


class RemoteActor:
    """One connected actor, as the learner's side sees it.

    Args:
        post: sends a message to it, from any thread.
    """

    def __init__(self, run_id: int, layout: Layout, post: Callable[[bytes], object]):
        self.run_id, self.layout, self.post = run_id, layout, post
        self.number = NOBODY  # of its admission
        self.seq = 0  # of the last order
        self.slots = np.zeros(0, dtype=np.int64)  # [K], ascending
        self.rows: Rows | None = None  # the newest answer
        self.action = np.zeros(layout.action_shape, layout.action_type)
        self.missing = 0  # rows of ``action`` still to come before it can be told
        self.reset_due = False  # its next answer is of no use any more
        self.stepped = False  # it has answered a step
        self.gone = False

    def order_reset(self, seed: int) -> None:
        self.seq += 1
        self.post(pack(RESET, self.run_id, self.seq, seed.to_bytes(8, "little")))

    def order_step(self) -> None:
        self.seq += 1
        self.post(self.layout.pack_action(self.run_id, self.seq, self.action))

    def order_end(self, why: str) -> None:
        self.post(pack_json(BYE, self.run_id, self.seq + 1, {"reason": why}))


class Taken(NamedTuple):
    """Some of an actor's rows, and whose they are."""

    rows: Rows
    places: np.ndarray  # [k] rows of the actor's
    slots: np.ndarray  # [k] slots of the hall


class SlotTable:
    """``size`` slots in ``groups`` equal parts.

    Args:
        wait: seconds for which answers wait for the rest of their group; None: until all who are there have come.
        patience: seconds after which :meth:`take` returns with nothing.

    Attributes:
        empty_since: when the last actor left, or the hall was opened (``time.monotonic``).
    """

    def __init__(self, size: int, groups: int = 1, wait: float | None = None, patience: float = 0.5):
        self.size, self.wait, self.patience = size, wait, patience
        self.status = np.zeros(size, dtype=np.uint8)
        self.owner = np.full(size, NOBODY)  # [N] number of each slot's actor
        self.place = np.zeros(size, dtype=np.int64)  # [N] row of each slot among its actor's
        self.peers: dict[int, RemoteActor] = {}  # by number; those who left stay until their last answer is taken
        self.changed = threading.Condition()
        self.seed: int | None = None  # None: nobody has asked for observations yet
        self.admitted = 0  # actors so far
        self.empty_since = time.monotonic()
        self.closed = False
        self.divide(groups)

    def divide(self, groups: int) -> None:
        """Make ``groups`` equal parts of it."""
        each = self.size // groups
        self.parts = [slice(g * each, (g + 1) * each) for g in range(groups)]

    # -- the server's thread ------------------------------------------------------------------------------------------

    def admit(self, peer: RemoteActor) -> None:
        """Give ``peer`` a slot for each environment, all in one group where they fit.

        Raises:
            FullError: there are not as many free ones.
            TooManyError: nor will there ever be.
        """
        if peer.layout.count > self.size:
            raise TooManyError(f"at most {self.size}, its number of slots")
        with self.changed:
            if self.closed:
                raise FullError("the run is ending")
            free, count = np.flatnonzero(self.status == EMPTY), peer.layout.count
            if len(free) < count:
                raise FullError(f"{count} environments, but {len(free)} of {self.size} slots are free")
            roomy = max((free[(free >= p.start) & (free < p.stop)] for p in self.parts), key=len)
            peer.slots = (roomy if len(roomy) >= count else free)[:count]
            peer.number = self.admitted
            self.admitted += 1
            self.owner[peer.slots], self.place[peer.slots] = peer.number, np.arange(count)
            self.status[peer.slots] = DUE
            self.peers[peer.number] = peer
            if self.seed is not None:
                self._reset(peer)
            self.changed.notify_all()

    def answered(self, peer: RemoteActor, rows: Rows) -> None:
        """What came of the peer's last order."""
        with self.changed:
            if peer.reset_due:
                self._reset(peer)
                return
            peer.rows = rows
            self.status[peer.slots] = READY
            self.changed.notify_all()

    def leave(self, peer: RemoteActor) -> None:
        """Free the peer's slots: those of answers that nobody has taken yet, once they are."""
        with self.changed:
            if peer.gone or peer.number not in self.peers:
                return
            peer.gone = True
            self._free(peer, peer.slots[self.status[peer.slots] != READY])
            if self.live == 0:
                self.empty_since = time.monotonic()
            self.changed.notify_all()

    @property
    def live(self) -> int:
        """Actors that are connected."""
        return sum(not peer.gone for peer in self.peers.values())

    def _free(self, peer: RemoteActor, slots: np.ndarray) -> None:
        self.status[slots], self.owner[slots] = EMPTY, NOBODY
        if not (self.owner == peer.number).any():
            del self.peers[peer.number]

    def _reset(self, peer: RemoteActor) -> None:
        """Ask for first observations, with a seed of its own."""
        assert self.seed is not None
        drawn = np.random.SeedSequence([self.seed, peer.number]).generate_state(1, np.uint32)[0]
        self.status[peer.slots], peer.missing, peer.reset_due = FLYING, 0, False
        peer.order_reset(int(drawn) >> 1)

    # -- the collector's thread ---------------------------------------------------------------------------------------

    def reset(self, seed: int | None) -> None:
        """Have every actor start anew, and those that come later. What is on its way from before is dropped."""
        with self.changed:
            self.seed = (self.seed or 0) + 1 if seed is None else seed
            for peer in list(self.peers.values()):
                if peer.gone:
                    self._free(peer, peer.slots)
                elif peer.missing == 0 and (self.status[peer.slots] == FLYING).any():
                    peer.reset_due = True
                else:
                    self._reset(peer)

    def act(self, slots: np.ndarray, action: np.ndarray) -> None:
        """Actions [k, ...] for ``slots`` that are due. An actor hears of its own once they are complete.

        An actor that has left meanwhile does not: its environments' actions were taken in vain.
        """
        with self.changed:
            due = self.status[slots] == DUE
            if not due.all():
                slots, action = slots[due], action[due]
            owners = self.owner[slots]
            for number in distinct(owners):
                peer, mine = self.peers[number], owners == number
                own = slots[mine]
                if peer.missing == 0:
                    peer.missing = len(peer.slots)
                peer.action[self.place[own]] = action[mine]
                peer.missing -= len(own)
                self.status[own] = FLYING
                if peer.missing == 0:
                    peer.order_step()

    def take(self, group: int) -> list[Taken]:
        """Answers of one group. Waits for a bounded time.

        It returns what is there when all who are expected have answered, or ``wait`` seconds after the call. It returns
        nothing when another group is ready or due, or when nothing has come for ``patience`` seconds.
        """
        part, start = self.parts[group], time.monotonic()
        with self.changed:
            while not self.closed:
                status = self.status[part]
                ready, flying = bool((status == READY).any()), bool((status == FLYING).any())
                limit, waited = self.wait if ready else self.patience, time.monotonic() - start
                over = limit is not None and waited >= limit
                if over or (ready and not flying) or (not ready and (self.status >= READY).any()):
                    return self._collect(part)
                self.changed.wait(None if limit is None else limit - waited)
            return []

    def take_all(self, timeout: float) -> list[Taken]:
        """Answers of everybody who is there, whatever the groups; nothing where they do not come within ``timeout``."""
        start = time.monotonic()
        with self.changed:
            while not self.closed and ((self.status == FLYING).any() or not (self.status == READY).any()):
                left = timeout - (time.monotonic() - start)
                if left <= 0:
                    return []
                self.changed.wait(left)
            return self._collect(slice(0, self.size))

    def _collect(self, part: slice) -> list[Taken]:
        out = []
        ready = part.start + np.flatnonzero(self.status[part] == READY)
        for number in distinct(self.owner[ready]):
            peer, slots = self.peers[number], ready[self.owner[ready] == number]
            assert peer.rows is not None
            out.append(Taken(peer.rows, self.place[slots], slots))
            self.status[slots] = DUE
            if peer.gone:
                self._free(peer, slots)
        return out

    def end(self, why: str) -> None:
        """Tell every actor that it is over, and let nobody in any more."""
        with self.changed:
            self.closed = True
            for peer in self.peers.values():
                if not peer.gone:
                    peer.order_end(why)
            self.changed.notify_all()

    def measures(self) -> dict[str, float]:
        """For the log: actors and their environments now, and actors admitted so far."""
        with self.changed:
            return {
                "remote/actors": self.live,
                "remote/envs": int((self.status != EMPTY).sum()),
                "remote/admitted": self.admitted,
            }


def distinct(numbers: np.ndarray) -> list[int]:
    """Each of them once. They are few, and NumPy's way would sort."""
    return list(dict.fromkeys(numbers.tolist()))
