"""Unrolls: rollouts of environments that answer when they can. Each fills one at its own pace, across ticks.

An unroll is ``horizon`` consecutive rows of one environment, whatever the others did meanwhile; so what is learned of
an environment that is late is what would have been learned had it been on time. It lies in a *place*, a column of a
:class:`~pql.data.rollout.Rollout`. An environment writes into one until that is full and then takes another. Full ones
have numbers, and the learner reads the oldest, N in a tick::

    environment   0   1   2   ...           number        ...   7   8   9   10  11  12 < completed
    its place     3   0   6                 its place           5   1   4   2   9   7
    next row      2  17   9                               read  >^^^^^^^^^ taken

A place is free again once FULL * N more unrolls have been completed, and by then it has been read: a tick makes
``horizon * N`` rows (what it makes beyond, fewer than N, the next one lacks), and a learner reads N unrolls or all that
there are. So when a tick begins at most 2 N unrolls of rows are unread, parts included, and when it ends at most 3 N.

Source: Espeholt et al. 2020 (SEED RL), section 3. This file knows nothing of networks, losses or wires.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pql.contract.env import EnvSpec
from pql.data.frames import put
from pql.data.normalize import Normalizer
from pql.data.rollout import PolicyOutput, Rollout, Segment, View
from pql.types import Memory, Obs, Step

FULL = 3
"""Full places per environment."""


class Unrolls:
    """Storage for environments that may answer late, each at its own pace (a store, as the replay is).

    Arguments are those of ``Rollout``.

    Attributes:
        place: [N] int64; where each environment writes.
        completed: 0-dim int64; full unrolls so far.
        order: [FULL N + N] int64; the place of number i at ``i % (FULL N)``. What lies beyond nobody reads.
    """

    ragged = True

    def __init__(
        self,
        spec: EnvSpec,
        norm: Normalizer,
        horizon: int,
        params_size: int,
        device: torch.device,
        carry_size: int = 0,
    ):
        n = spec.num_envs
        self.num_envs, self.horizon, self.device, self.size = n, horizon, device, FULL * n
        self.blank = n + self.size  # a place that nobody writes, whose rows do not count
        self.rollout = Rollout(replace(spec, num_envs=self.blank + 1), norm, horizon, params_size, device, carry_size)
        self.columns = torch.arange(n, device=device)
        self.place = self.columns.clone()
        self.ended = torch.zeros(n, dtype=torch.bool, device=device)  # each one's newest row ended an episode
        self.completed = torch.zeros((), dtype=torch.int64, device=device)
        self.order = torch.arange(n, self.blank + n, device=device).clamp_(max=self.blank)

    def begin(self, obs: Obs) -> None:
        for k, store in self.rollout.obs.items():
            put(store, self.place, obs[k])

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """A tick begins. Unrolls go on; what is read after it is read with the statistics in use now."""
        self.rollout.take_statistics()

    def restart(self, obs: Obs) -> None:
        """New episodes that nothing announced: what is not full is dropped."""
        for tensor, value in ((self.rollout.row, 0), (self.rollout.count, 0), (self.rollout.fresh, True)):
            tensor.index_fill_(0, self.place, value)
        self.ended.zero_()
        self.begin(obs)

    def insert(
        self, acted: PolicyOutput, step: Step, columns: Tensor | None = None, arrived: Tensor | None = None
    ) -> None:
        """Append one row for each environment of ``columns`` ([n]; default: all) that has ``arrived`` ([n] bool).

        No row is kept of an action that the policy did not choose (a warm-up's). A filler that begins an episode though
        nothing had ended is that of another actor: what the one before it had not filled is dropped.
        """
        columns = self.columns if columns is None else columns
        rollout, place = self.rollout, self.place[columns]
        row, count = rollout.row[place], rollout.count[place]
        came = torch.ones_like(step.valid) if arrived is None else arrived
        replaced = step.first & ~step.valid & ~self.ended[columns]
        kept = came & ~replaced & (acted.version >= 0)
        full = kept & (row == self.horizon - 1)
        begins = full | (came & ~kept)  # an unroll, with what is seen now
        rollout.insert(acted, step, place)  # where nothing is kept, in vain: it is written again
        assert acted.carry is not None
        before = torch.where((row == 0).unsqueeze(1), acted.carry, rollout.carry[place])
        rollout.carry.index_copy_(0, place, before)
        now = self._shelve(place, full, columns)
        cut = came & step.truncated & step.valid
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
        """Number the unrolls of those that are ``full``. Returns where ``columns`` write from now on, [n]."""
        number = self.completed + full.cumsum(0) - 1
        # One that is not full writes, too, where nobody reads: nothing here may branch.
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

    def state_dict(self) -> dict[str, Tensor]:
        names = ("place", "ended", "completed", "order")
        own = {k: getattr(self, k) for k in names}
        inside = {"row": self.rollout.row, "count": self.rollout.count, **self.rollout.storage()}
        return {**own, **inside, **{f"norm/{i}": t for i, t in enumerate(self.rollout.norm.frozen())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for k, t in self.state_dict().items():
            t.copy_(state[k])


class Reader:
    """How far a learner has read, and what it may: it reads every unroll once, the oldest first.

    Attributes:
        taken: 0-dim int64; unrolls read so far.
    """

    def __init__(self, unrolls: Unrolls):
        self.unrolls, self.view = unrolls, View(unrolls.rollout.norm, unrolls.device)
        self.completed, self.order = torch.zeros_like(unrolls.completed), unrolls.order.clone()
        self.taken = torch.zeros_like(unrolls.completed)

    def tensors(self) -> list[Tensor]:
        """Private copies of ``Unrolls.tensors``."""
        return [self.completed, self.order, *self.view.norm.frozen()]

    @torch.no_grad()
    def segment(self) -> Segment:
        """N unrolls as columns. Where there are not as many, the remaining ones do not count (``mask`` is 0)."""
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
