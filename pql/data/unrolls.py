"""Unrolls: rollouts of environments that answer at different times. Each fills at its own pace, across ticks.

An unroll is ``horizon`` consecutive rows of one environment, independent of the others, so late answers do not change
what is learned. It is stored in a *place*, a column of a :class:`~pql.data.rollout.Rollout`. An environment fills one
place and then takes another. Full unrolls are numbered, and the learner reads the oldest N in a tick::

    environment   0   1   2   ...           number        ...   7   8   9   10  11  12 < completed
    its place     3   0   6                 its place           5   1   4   2   9   7
    next row      2  17   9                               read  >^^^^^^^^^ taken

A place is reused once FULL * N more unrolls have been completed, and by then it has been read: a tick makes
``horizon * N`` rows (an excess, fewer than N, is subtracted from the next tick), and a learner reads N unrolls, or all
if there are fewer. At most 2 N unrolls, partial ones included, are unread at the start of a tick and 3 N at its end.

Source: Espeholt et al. 2020 (SEED RL), section 3. Does not depend on networks, losses or transports.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import EnvSpec
from pql.data.frames import put
from pql.data.normalize import Normalizer
from pql.data.rollout import PolicyOutput, Rollout, Segment, View, needs_room
from pql.data.store import Store
from pql.types import Memory, Obs, Rows, Step

FULL = 3
"""Full places per environment."""


class Unrolls(Store):
    """Storage for environments that may answer late.

    Arguments are those of ``Rollout``.

    Attributes:
        place: [N] int64; the place that each environment writes to.
        completed: 0-dim int64; number of full unrolls so far.
        order: [FULL N + N] int64; the place of unroll i is at ``i % (FULL N)``. Later entries are scratch.
    """

    ragged = True

    def __init__(
        self, spec: EnvSpec, norm: Normalizer, horizon: int, params_size: int, device: torch.device, carry_size: int = 0
    ):
        n = spec.num_envs
        self.num_envs, self.horizon, self.device, self.size = n, horizon, device, FULL * n
        self.blank = n + self.size  # a place that is never written; its rows are masked
        self.rollout = Rollout(replace(spec, num_envs=self.blank + 1), norm, horizon, params_size, device, carry_size)
        self.columns = torch.arange(n, device=device)
        self.place = self.columns.clone()
        # True if an environment's newest row ended an episode
        self.ended = torch.zeros(n, dtype=torch.bool, device=device)
        self.completed = torch.zeros((), dtype=torch.int64, device=device)
        self.order = torch.arange(n, self.blank + n, device=device).clamp_(max=self.blank)

    def begin(self, obs: Obs) -> None:
        for k, store in self.rollout.obs.items():
            put(store, self.place, obs[k])

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """Begin a tick. Unrolls continue; reads after the tick use the current statistics."""
        self.rollout.take_statistics()

    def restart(self, obs: Obs) -> None:
        """Begin unannounced new episodes; partial unrolls are dropped."""
        for tensor, value in ((self.rollout.row, 0), (self.rollout.count, 0), (self.rollout.fresh, True)):
            tensor.index_fill_(0, self.place, value)
        self.ended.zero_()
        self.begin(obs)

    def insert(
        self, acted: PolicyOutput, step: Step, columns: Tensor | None = None, arrived: Tensor | None = None
    ) -> None:
        """Append one row for each environment of ``columns`` ([n]; default: all) that has ``arrived`` ([n] bool).

        Rows whose action the policy did not choose (in a warm-up) are dropped. A filler row that begins an episode
        without a preceding end comes from a new actor: the partial unroll of the previous actor is dropped.
        """
        columns = self.columns if columns is None else columns
        rollout, place = self.rollout, self.place[columns]
        row, count = rollout.row[place], rollout.count[place]
        came = torch.ones_like(step.valid) if arrived is None else arrived
        replaced = step.first & ~step.valid & ~self.ended[columns]
        kept = came & ~replaced & (acted.version >= 0)
        full = kept & (row == self.horizon - 1)
        begins = full | (came & ~kept)  # a new unroll begins, with the current observation
        rollout.insert(acted, step, place)  # rows not kept are overwritten later
        assert acted.carry is not None
        before = torch.where((row == 0).unsqueeze(1), acted.carry, rollout.carry[place])
        rollout.carry.index_copy_(0, place, before)
        now = self._shelve(place, full, columns)
        cut = came & needs_room(step)
        for tensor, new in (
            (rollout.row, torch.where(begins, 0, row + came)),
            (rollout.count, torch.where(begins, 0, count + cut)),
            (rollout.fresh, torch.where(begins, step.first, rollout.fresh[now])),
        ):
            tensor.index_copy_(0, now, new)
        cell = torch.where(begins, 0, row + 1) * rollout.num_envs + now
        for k, store in rollout.obs.items():
            put(store, cell, step.obs[k])
        over = (step.terminated | step.truncated) & step.valid
        self.ended.index_copy_(0, columns, torch.where(came, over, self.ended[columns]))

    def _shelve(self, place: Tensor, full: Tensor, columns: Tensor) -> Tensor:
        """Number the unrolls that are ``full``. Returns the places that ``columns`` write to from now on, [n]."""
        number = self.completed + full.cumsum(0) - 1
        # Unrolls that are not full write to scratch entries: nothing here may branch.
        slot = torch.where(full, number % self.size, self.size + columns)
        now = torch.where(full, self.order[slot], place)
        self.order.index_copy_(0, slot, place)
        self.place.index_copy_(0, columns, now)
        self.completed += full.sum()
        return now

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a reader pulls."""
        return [self.completed, self.order, *self.rollout.norm.frozen()]

    def positions(self) -> list[Tensor]:
        return [self.place, self.ended, self.completed, self.order, self.rollout.row, self.rollout.count]

    def state_dict(self) -> Rows:
        names = ("place", "ended", "completed", "order")
        own = {k: getattr(self, k) for k in names}
        inside = {"row": self.rollout.row, "count": self.rollout.count, **self.rollout.storage()}
        return Rows({**own, **inside, **{f"norm/{i}": t for i, t in enumerate(self.rollout.norm.frozen())}})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for k, t in self.state_dict().items():
            self.rollout.restore(t, state[k])


class Reader:
    """A learner's read position in the unrolls; each unroll is read once, oldest first.

    Attributes:
        taken: 0-dim int64; number of unrolls read so far.
    """

    def __init__(self, unrolls: Unrolls):
        self.unrolls, self.view = unrolls, View(unrolls.rollout.norm, unrolls.device)
        self.completed, self.order = torch.zeros_like(unrolls.completed), unrolls.order.clone()
        self.taken = torch.zeros_like(unrolls.completed)

    def tensors(self) -> list[Tensor]:
        """Return the private copies of ``Unrolls.tensors``."""
        return [self.completed, self.order, *self.view.norm.frozen()]

    @torch.no_grad()
    def segment(self) -> Segment:
        """Return N unrolls as columns. If fewer are available, the remaining columns have ``mask`` 0."""
        unrolls = self.unrolls
        number = self.taken + unrolls.columns
        there = number < self.completed
        place = torch.where(there, self.order[number % unrolls.size], unrolls.blank)
        self.taken += there.sum()
        return unrolls.rollout.segment(self.view, place)

    def state_dict(self) -> dict[str, Tensor]:
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.taken.copy_(state["taken"])
