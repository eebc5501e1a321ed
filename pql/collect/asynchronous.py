"""Asynchronous collection from remote environments that may be late, lost or newly joined.

Columns of the ring advance independently. A tick ends when its number of transitions has been recorded, whichever
environments made them. While an environment is late, its action and its actor's memory are kept and nothing is written,
so lateness leaves no trace in its rows. One environment makes at most ``spread`` times its share of a tick's steps, as
allowed by the replay's guard band. If that does not suffice, the tick ends short: the learners skip the next tick, and
the collector collects the missing transitions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from pql.contract.optional import AsyncEnv
from pql.engine import interrupt
from pql.types import column

if TYPE_CHECKING:
    from pql.collect.actors import Actor
    from pql.collect.collector import Collector
    from pql.collect.env_slice import EnvSlice


class Ragged:
    """Steps a collector's env slices in turn, with the environments that have answered.

    Attributes:
        due: [N] bool, on the host; the last answer has been recorded and no action has been sent since.
        transitions: number recorded so far, over all environments, warm-up included.
        target: number requested by the ticks so far.
    """

    def __init__(self, collector: "Collector"):
        self.collector, self.lanes, self.env = collector, collector.lanes, cast(AsyncEnv, collector.env)
        self.due = np.zeros(collector.env.spec.num_envs, dtype=bool)
        self.transitions, self.target, self._turn = 0, 0, 0

    def start(self) -> Tensor:
        """Return the environments present after a reset, [N] bool, on the CPU."""
        present = self.env.present()
        self.due[:] = present.numpy()
        return present

    def behind_target(self) -> bool:
        """Return True if the last tick ended short."""
        return self.transitions < self.target

    def step(self, steps: int, choose: Callable[["EnvSlice"], None], going: Callable[[], bool] | None = None) -> bool:
        """Run a tick: ``steps`` transitions per possible environment, or the missing ones of a short tick.

        Args:
            going: if given (the warm-up), collect until the target without a limit per environment, and stop when it
                returns False or on Ctrl-C.

        Returns:
            False if it was stopped early.
        """
        spec = self.env.spec
        if not self.behind_target():
            self.target += steps * spec.num_envs
        if going is None:
            self._until(steps * spec.spread, choose)
            return True
        while self.behind_target() and going() and not interrupt.asked():
            self._until(self.target, choose, going)
        return not self.behind_target()

    def _until(self, room: int, choose: Callable[["EnvSlice"], None], going: Callable[[], bool] = lambda: True) -> None:
        """Collect until the target, or until no more answers arrive; at most ``room`` rows per environment."""
        left, idle = np.full(self.due.shape, room), 0
        while self.behind_target() and idle <= len(self.lanes) and going():
            self._send(self.lanes[self._turn], left > 0, choose)
            self._turn = (self._turn + 1) % len(self.lanes)
            ids = self._receive(self.lanes[self._turn])
            left[ids] -= 1
            idle = 0 if len(ids) else idle + 1

    def _send(self, lane: "EnvSlice", may: np.ndarray, choose: Callable[["EnvSlice"], None]) -> None:
        """Act for the environments of ``lane`` that are due and allowed by ``may`` [N] bool."""
        assert lane.ids is not None
        assert lane.mask is not None
        asked = self.due[lane.columns] & may[lane.columns]
        if not asked.any():
            return
        lane.mask.copy_(torch.from_numpy(asked))
        choose(lane)
        rows = torch.from_numpy(np.flatnonzero(asked))
        action = lane.actor.action
        self.env.send(action if asked.all() else action[rows.to(action.device)], lane.ids[rows])
        self.due[lane.columns] &= ~asked

    def _receive(self, lane: "EnvSlice") -> np.ndarray:
        """Record the answers that have arrived for ``lane``. Return their environments' ids."""
        assert lane.mask is not None
        group = self.lanes.index(lane)
        ids, step = self.env.answers(group)
        arrived = ids.numpy()
        if not len(arrived):
            return arrived
        self.due[arrived] = True
        self.transitions += len(arrived)
        self.collector.steps = self.transitions / len(self.due)
        came = np.zeros(self.due.shape, dtype=bool)
        came[arrived] = True
        lane.mask.copy_(torch.from_numpy(came[lane.columns]))
        lane.record(step)
        return arrived

    def counters(self) -> dict[str, int]:
        return {"transitions": self.transitions, "target": self.target}

    def load_counters(self, counters: Mapping[str, float]) -> None:
        self.transitions, self.target = int(counters["transitions"]), int(counters["target"])


@contextmanager
def masked_update(actor: "Actor", mask: Tensor | None) -> Iterator[None]:
    """Restrict changes of ``actor``'s state inside the context to the environments of ``mask`` ([n] bool; None: all).

    Scalars count steps; they grow by the share of the masked environments.
    """
    if mask is None:
        yield
        return
    tensors = [actor.action, *(t for t in actor.state_dict().values() if isinstance(t, Tensor))]
    before = [t.clone() for t in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        if tensor.dim() == 0:
            tensor.copy_(old + (tensor - old) * mask.sum() // mask.numel())
        else:
            tensor.copy_(torch.where(column(mask, tensor), tensor, old))
