"""Collecting from environments that answer when they can: remote actors, some of which are late, gone, or new.

Columns of the ring advance alone. A tick ends when its transitions are there, whoever made them. An environment that is
late keeps its action and what its actor remembers; it has written nothing, so nobody can tell it from one that was
never late. One environment makes at most ``spread`` times its share of a tick's steps, as far as the replay's guard
band reaches; if that is not enough the tick ends short: the learners sit the next one out, and the collector makes up
for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pql.engine import interrupt
from pql.types import column

if TYPE_CHECKING:
    from pql.collect.actors import Actor
    from pql.collect.collector import Collector
    from pql.collect.env_slice import EnvSlice


class Ragged:
    """A collector's lanes by turns, whoever has answered.

    Attributes:
        due: [N] bool, on the host; the last answer has been recorded, and no action was sent since.
        transitions: recorded so far, all environments together, warm-up included.
        target: that ticks have asked for so far.
    """

    def __init__(self, whole: "Collector"):
        self.whole, self.lanes, self.env = whole, whole.lanes, whole.env
        self.due = np.zeros(whole.env.spec.num_envs, dtype=bool)
        self.transitions, self.target, self._turn = 0, 0, 0

    def start(self) -> Tensor:
        """Return the environments present after a reset, [N] bool, on the CPU."""
        present = self.env.present()  # type: ignore[attr-defined]
        self.due[:] = present.numpy()
        return present

    def behind_target(self) -> bool:
        """The last tick ended short."""
        return self.transitions < self.target

    def step(self, steps: int, choose: Callable[["EnvSlice"], None], going: Callable[[], bool] | None = None) -> bool:
        """A tick: ``steps`` transitions for each environment there could be, or the rest of a short one.

        Args:
            going: until they are all there, with no limit for a single environment (the warm-up), or this is False, or
                Ctrl-C came.
        Returns:
            False: it was ended.
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
        """Until the target, or until nothing comes any more; at most ``room`` rows of each environment."""
        left, idle = np.full(self.due.shape, room), 0
        while self.behind_target() and idle <= len(self.lanes) and going():
            self._send(self.lanes[self._turn], left > 0, choose)
            self._turn = (self._turn + 1) % len(self.lanes)
            ids = self._receive(self.lanes[self._turn])
            left[ids] -= 1
            idle = 0 if len(ids) else idle + 1

    def _send(self, lane: "EnvSlice", may: np.ndarray, choose: Callable[["EnvSlice"], None]) -> None:
        """Act for those environments of ``lane`` that are due and may."""
        assert lane.ids is not None
        assert lane.mask is not None
        asked = self.due[lane.columns] & may[lane.columns]
        if not asked.any():
            return
        lane.mask.copy_(torch.from_numpy(asked))
        choose(lane)
        rows = torch.from_numpy(np.flatnonzero(asked))
        action = lane.actor.action
        self.env.send(action if asked.all() else action[rows.to(action.device)], lane.ids[rows])  # type: ignore[attr-defined]
        self.due[lane.columns] &= ~asked

    def _receive(self, lane: "EnvSlice") -> np.ndarray:
        """Record what has come for ``lane``. Returns whose answers those are."""
        assert lane.mask is not None
        group = self.lanes.index(lane)
        ids, step = self.env.answers(group)  # type: ignore[attr-defined]
        arrived = ids.numpy()
        if not len(arrived):
            return arrived
        self.due[arrived] = True
        self.transitions += len(arrived)
        self.whole.steps = self.transitions / len(self.due)
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
    """Inside, what changes of ``actor`` changes for the environments of ``mask`` ([n] bool; None: all) alone.

    Numbers without an axis of environments count their steps: they grow by as much as these environments' share.
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
