"""Prioritised replay on the device: a sum tree over a ring's cells, with insertion, removal and sampling of rows.

The tree has 128 children per node, so three levels hold two million leaves, and a level costs one gather and one sum
over children. A parent is always recomputed from its children instead of updated by a difference: rounding errors do
not accumulate, and duplicate indices are harmless. ::

    level 2            [  3.0                                       |  .  ]      one block of children
    level 1            [ 1.5            | 1.5       | 0.0 ...       ]
    level 0, leaves    [ .5  1.0  0 ... | .5  1 ... | 0 ...         ]      leaf i: priority of cell i (row * N + column)

The V-learner owns all of it. Sums are float64: with float32, a million leaves would round away.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from pql.data.replay import Cursor, Replay, Window
from pql.types import Batch, Rows, fill

FANOUT = 128
FLOOR = 1e-6  # added to |priority|, so that every row can be drawn again (Schaul et al. 2016, section 3.3)
CHUNK = 1 << 16  # rows inserted at a time before the first tick


class SumTree:
    """Nonnegative numbers at indices 0 .. size - 1, sampled in proportion to their value.

    Attributes:
        levels: from the leaves up; each level's length is a multiple of the fan-out. The last level is one node.
    """

    def __init__(self, size: int, device: torch.device, fanout: int = FANOUT):
        self.fanout, self.levels = fanout, list[Tensor]()
        while True:
            nodes = -(-size // fanout)
            self.levels.append(torch.zeros(nodes * fanout, dtype=torch.float64, device=device))
            if nodes == 1:
                break
            size = nodes
        self._place = torch.arange(fanout, device=device)

    @property
    def total(self) -> Tensor:
        """Return the sum of all leaves, 0-dim."""
        return self.levels[-1].sum()

    def set(self, index: Tensor, value: Tensor) -> None:
        """Overwrite leaves; for a duplicate index the largest value is kept.

        Args:
            index: [M] int64.
            value: [M] float64, nonnegative.
        """
        self.levels[0].index_fill_(0, index, 0.0)
        self.levels[0].scatter_reduce_(0, index, value, "amax")
        for children, parents in zip(self.levels, self.levels[1:], strict=False):
            blocks, index = children.view(-1, self.fanout), index // self.fanout
            if index.numel() < blocks.shape[0]:
                parents.index_copy_(0, index, blocks.index_select(0, index).sum(1))  # duplicates write the same sum
            else:
                parents[: blocks.shape[0]] = blocks.sum(1)

    def find(self, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Find for each of ``mass`` [B] in [0, total) the leaf i with sum(leaves < i) <= mass < sum(leaves <= i).

        Despite rounding, a leaf of zero is never returned unless all are zero.

        Returns:
            index [B] int64, value of that leaf [B].
        """
        node, value = torch.zeros_like(mass, dtype=torch.int64), mass
        for level in reversed(self.levels):
            children = level.view(-1, self.fanout).index_select(0, node)  # [B, F]
            sums, filled = children.cumsum(1), children > 0
            beyond = torch.where(filled & (sums > mass.unsqueeze(1)), self._place, self.fanout).amin(1)
            last = torch.where(filled, self._place, 0).amax(1)
            child = torch.minimum(beyond, last).unsqueeze(1)
            value = children.gather(1, child).squeeze(1)
            mass = mass - (sums.gather(1, child).squeeze(1) - value)
            node = node * self.fanout + child.squeeze(1)
        return node, value

    def state_dict(self, used: int) -> Rows:
        """Return the first ``used`` leaves and their ancestors (views); all other leaves must be 0."""
        out = Rows()
        for i, level in enumerate(self.levels):
            out[f"level{i}"] = level[:used]
            used = -(-used // self.fanout)
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for i, level in enumerate(self.levels):
            fill(f"level{i}", level, state[f"level{i}"])
            level[len(state[f"level{i}"]) :] = 0


def valued_when_acted(replay: Replay, window: Window) -> tuple[Tensor, Tensor]:
    """Return Q(s, a) and max_a Q(s', a) of windows, [B] each, as the actor stored them; NaN if unknown, and 0 for a
    successor whose value is not used."""
    q, value = (replay.extra[k] for k in ("q", "value"))
    next_value = value.index_select(0, window.successor)
    return q.index_select(0, window.cell), torch.where(window.discount > 0, next_value, 0.0)


@dataclass(frozen=True)
class PriorityRule:
    """Settings of prioritised sampling (Schaul et al. 2016).

    Attributes:
        alpha, beta: exponents; beta rises linearly to 1 within ``beta_steps`` env steps (None: it is constant).
        steps_per_tick: env steps per tick, all environments together.
        clip: priorities are clipped to this; None: no clipping.
    """

    alpha: float
    beta: float
    beta_steps: int | None
    steps_per_tick: int
    clip: float | None = None


class Ranked:
    """Items, by number, sampled in proportion to priority ** alpha (Schaul et al. 2016, proportional variant).

    Args:
        size: number of items.
    """

    def __init__(self, size: int, device: torch.device, rule: PriorityRule):
        beta, steps = rule.beta, rule.beta_steps
        self.size, self.alpha, self.clip, self.first_beta = size, rule.alpha, rule.clip, beta
        self.beta_per_tick = 0.0 if steps is None else (1 - beta) * rule.steps_per_tick / steps
        self.tree = SumTree(size, device)
        self.ticks = torch.zeros((), dtype=torch.int64, device=device)
        self.beta = torch.tensor(beta, dtype=torch.float64, device=device)
        self.largest = self.power(torch.ones((), device=device))  # leaf of an item whose priority is unknown

    def power(self, priority: Tensor) -> Tensor:
        """Return (|priority|, clipped) ** alpha, float64, for priorities [B]."""
        size = priority.abs().double()
        return ((size if self.clip is None else size.clamp(max=self.clip)) + FLOOR) ** self.alpha

    def count_tick(self) -> None:
        """Advance the schedule of beta by a tick."""
        self.beta.copy_((self.first_beta + self.beta_per_tick * self.ticks.double()).clamp(max=1))
        self.ticks += 1

    def draw(self, batch: int, gen: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one item from each of ``batch`` equal parts of the total: index [B], leaf [B], weight [B].

        The weight is (probability / smallest in the batch) ** -beta, at most 1. Weight and leaf are 0 if the tree is
        empty.
        """
        device = self.beta.device
        place = torch.arange(batch, device=device)
        u = torch.rand(batch, generator=gen, device=device, dtype=torch.float64)
        index, leaf = self.tree.find((place + u) / batch * self.tree.total)
        weight = torch.where(leaf > 0, (leaf.amin() / leaf) ** self.beta, 0.0).float()
        return index, leaf, weight

    def update(self, index: Tensor, priority: Tensor, mask: Tensor) -> None:
        """Set the priorities [B] of drawn items; an item whose ``mask`` is 0 is never drawn again."""
        leaf = torch.where(mask > 0, self.power(priority), 0.0)
        self.largest.copy_(torch.maximum(self.largest, leaf.amax()))
        self.tree.set(index, leaf)

    def used(self) -> int:
        """Return a number of leading leaves that includes all nonzero ones. Synchronises with the device."""
        return self.size

    def state_dict(self) -> dict[str, Any]:
        """Return leaves and schedule. Synchronises with the device."""
        tree = self.tree.state_dict(self.used())
        return {"ticks": self.ticks, "beta": self.beta, "largest": self.largest, "tree": tree}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("ticks", "beta", "largest"):
            getattr(self, name).copy_(state[name])
        self.tree.load_state_dict(state["tree"])


def least_rows(horizon: int, n: int, guard: int) -> int:
    """Return the fewest ring rows with which single rows can be drawn by priority.

    At a tick's start rows ``head - n - horizon`` to ``head - n - 1`` enter the tree, and rows that the tick may
    overwrite, up to ``head - (rows - guard) - 1``, leave it. In a smaller ring a row would do both at once.
    """
    return guard + horizon + n


class Prioritized(Ranked):
    """Prioritised sampling of a ring's rows.

    A row enters at the start of a tick once its n-step window is complete, ``n`` steps after it was written; it leaves
    before the collector may overwrite it. Filler rows and invalid windows never enter.

    Args:
        n, gamma: steps and discount of the windows.
        from_actor: a new row's priority is its TD error under the values stored by its actor (Horgan et al. 2018), if
            there are any. Otherwise, and if False, it is the largest priority so far.
    Raises:
        ValueError: the ring has fewer rows than :func:`least_rows`.
    """

    def __init__(self, replay: Replay, n: int, gamma: float, rule: PriorityRule, from_actor: bool = False):
        device, least = replay.device, least_rows(replay.horizon, n, replay.guard)
        if replay.rows < least:
            raise ValueError(f"a ring of {replay.rows} rows is too small for priorities: expected at least {least}")
        super().__init__(replay.rows * replay.num_envs, device, rule)
        self.replay, self.n, self.gamma, self.from_actor = replay, n, gamma, from_actor
        self.entered = torch.zeros(replay.num_envs, dtype=torch.int64, device=device)  # [N] rows processed for entry
        self._steps = torch.arange(replay.horizon, device=device).unsqueeze(1)  # [horizon, 1]

    # -- membership of the tree ----------------------------------------------------------------------------------------

    def begin(self, cursor: Cursor) -> None:
        """Before the first tick: insert the existing rows, with unknown priorities.

        Not to be captured: it reads the ring's length on the host.

        Args:
            cursor: the V-learner's; it is moved to the ring's current head.
        """
        replay = self.replay
        for mine, live in zip(cursor.tensors(), replay.live.tensors(), strict=True):
            mine.copy_(live)
        self.entered.copy_((cursor.head - replay.reach).clamp(min=0))
        done = (cursor.head - self.n).clamp(min=0)
        chunk = max(1, CHUNK // replay.num_envs)
        for start in range(0, int((done - self.entered).max()), chunk):
            steps = torch.arange(start, start + chunk, device=replay.device).unsqueeze(1)
            self.tree.set(*self._entries(cursor, steps, None))
        self.entered.copy_(torch.maximum(self.entered, done))

    def open(self, cursor: Cursor, reward_scale: Tensor) -> None:
        """Begin a tick: remove rows that the collector may overwrite from now on, insert completed ones.

        Args:
            reward_scale: scalar by which learners multiply rewards.
        """
        replay = self.replay
        leaving = replay.cell(cursor.head - replay.reach - 1 - self._steps, replay.columns).flatten()
        cell, leaf = self._entries(cursor, self._steps, reward_scale)
        self.tree.set(torch.cat((leaving, cell)), torch.cat((torch.zeros_like(leaf), leaf)))
        self.entered.add_((cursor.head - self.n - self.entered).clamp(0, replay.horizon))
        self.count_tick()

    def _entries(self, cursor: Cursor, steps: Tensor, reward_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cells and leaves, [K N] each, of the rows ``steps`` [K, 1] after those that have entered.

        The leaf of an invalid window is zero. An incomplete row is replaced by the row at the head, which is not yet
        written: its leaf is and remains zero.

        Args:
            reward_scale: None: all priorities are unknown, whatever the actor stored.
        """
        replay, head = self.replay, cursor.head
        row = self.entered + steps  # [K, N]
        complete = (row < head - self.n).flatten()  # [K N]
        column, heads = (v.expand_as(row).flatten() for v in (replay.columns, head))  # [K N]
        row = torch.where(complete, row.flatten(), heads)  # [K N]

        window = replay.targets(cursor, torch.minimum(row, heads - 1), column, heads, self.n, self.gamma)
        cursor.lost += (window.lost & complete).sum()

        leaf = self.largest.expand_as(row)  # [K N]
        if self.from_actor and reward_scale is not None:
            q, next_value = valued_when_acted(replay, window)
            error = window.reward * reward_scale + window.discount * next_value - q  # NaN if a value is unknown
            leaf = torch.where(error.isnan(), leaf, self.power(error))
        return replay.cell(row, column), torch.where(window.mask & complete, leaf, 0.0)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def sample(self, cursor: Cursor, batch: int, gen: Generator) -> Batch:
        """Draw ``batch`` windows, all valid. An empty tree gives rows of weight 0."""
        replay = self.replay
        cell, leaf, weight = self.draw(batch, gen)
        column = cell % replay.num_envs
        head = cursor.head.index_select(0, column)
        row = head - 1 - (head - 1 - cell // replay.num_envs) % replay.rows  # the newest row in this cell
        out = replay.windows(cursor, row, column, head, self.n, self.gamma)
        drawn = leaf > 0
        return out._replace(mask=out.mask * drawn, followed=out.followed * drawn, weight=weight)

    def used(self) -> int:
        return self.replay.used() * self.replay.num_envs

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "entered": self.entered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.entered.copy_(state["entered"])
