"""Sequences of rows from a replay ring, with the recurrent state before their first row (R2D2).

A sequence begins at every row whose number is a multiple of ``period``; the recurrent state before the action is stored
only for these rows. Sequences cross episode ends. ::

    row         80        120                             200        n = 5
                |---------|-------------------------------|-----|
                 burn-in   trained on: losses and targets  ahead: steps of the last rows' n-step targets
    state       s         .    .    .    first  .    .            zeroed where an episode begins

The priorities, one per sequence, are an array [ring rows / period, environments] and the leaves of a sum tree.

Source: Kapturowski et al. 2019 (Recurrent Experience Replay in Distributed Reinforcement Learning). Does not depend on
networks or losses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from pql.data.priority import PriorityRule, Ranked, valued_when_acted
from pql.data.replay import Cursor, Replay
from pql.data.store import Store
from pql.types import Acted, Obs, Rows, Step, fill

Target = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sequence(NamedTuple):
    """B sequences of S rows, L of which are trained on; ``reward`` to ``followed`` begin at row ``burn_in``."""

    obs: Obs  # [S, B, ...]
    first: Tensor  # [S, B] bool; the next row begins an episode
    carry: Tensor  # [B, C] the policy's recurrent state before row 0
    action: Tensor  # [S, B] int64 or [S, B, A] float32
    reward: Tensor  # [L, B] n-step sum
    discount: Tensor  # [L, B]
    successor: Tensor  # [L, B] int64; row to bootstrap from, in ``obs`` from row ``burn_in`` on
    mask: Tensor  # [L, B] float32; 0: a filler row, or one without a valid target
    followed: Tensor  # [L, B] float32; 0: without a successor, or ``mask`` is 0
    weight: Tensor  # [B] importance weight
    index: Tensor  # type: ignore[assignment]  # [B] int64, for the priorities


class States(Store):
    """Recurrent states before the actions of a ring's aligned rows, stored next to the ring. Sequences cross ticks, and
    after a restart the next aligned row stores a zero state.

    Args:
        ring: its rows are a whole number of periods. Each row must be inserted here before it is inserted there.
        size: C.
    """

    def __init__(self, ring: Replay, size: int, period: int):
        assert ring.rows % period == 0, (ring.rows, period)
        self.ring, self.period, self.device = ring, period, ring.device
        self.slots, self.ragged = ring.rows // period, ring.ragged  # P
        # One scratch slot for states that are not kept: every row writes, so that nothing branches.
        self.carry = torch.zeros((self.slots + 1) * ring.num_envs, size, device=self.device)

    def begin(self, obs: Obs) -> None:
        """Forget the states of captured steps: filler rows, which have none, would not overwrite them."""
        self.carry.zero_()

    def insert(self, acted: Acted, step: Step, columns: Tensor | None = None, arrived: Tensor | None = None) -> None:
        """Store ``acted.extra["carry"]`` [n, C] if the row is aligned and exists.

        Args:
            arrived: [n] bool; False: the env has not answered, so there is no row. None: all have.
        """
        ring = self.ring
        columns = ring.columns if columns is None else columns
        row = ring.live.head[columns]
        kept = row % self.period == 0
        kept = kept if arrived is None else kept & arrived
        slot = torch.where(kept, row // self.period % self.slots, self.slots)
        self.carry.index_copy_(0, slot * ring.num_envs + columns, acted.extra["carry"])

    def at(self, row: Tensor, column: Tensor) -> Tensor:
        """Return the state before aligned ``row`` of ``column`` (both [B]): [B, C]."""
        return self.carry.index_select(0, row // self.period % self.slots * self.ring.num_envs + column)

    def used(self) -> int:
        """Return the number of leading slots in use, N per period of rows. Synchronises with the device."""
        return -(-self.ring.used() // self.period) * self.ring.num_envs

    def state_dict(self) -> Rows:
        """Return the rows in use (views). Synchronises with the device."""
        return Rows(carry=self.carry[: self.used()])

    def load_state_dict(self, state: Any) -> None:
        fill("carry", self.carry[: self.slots * self.ring.num_envs], state["carry"])


class Span(NamedTuple):
    """Rows of a sequence: burn-in, trained on (L), and steps of the n-step targets."""

    burn_in: int
    length: int
    n: int


class Sequences:
    """Selection and reading of a ring's sequences.

    Args:
        stored: begin with the stored state; False: with zeros.

    Attributes:
        size: S, rows that must be sealed: burn_in + length + n.
    """

    def __init__(self, states: States, span: Span, gamma: float, stored: bool = True):
        ring, (burn_in, length, n) = states.ring, span
        self.ring, self.states, self.burn_in, self.length, self.n, self.gamma = ring, states, burn_in, length, n, gamma
        self.size, self.stored, self.count = burn_in + length + n, stored, states.slots * ring.num_envs
        device = ring.device
        self._steps = torch.arange(self.size, device=device).unsqueeze(1)  # [S, 1]
        self.trained = self._steps[:length]  # [L, 1]
        self._first_places = torch.arange(states.slots, device=device).unsqueeze(1) * states.period  # [P, 1]

    def starts(self, cursor: Cursor) -> tuple[Tensor, Tensor]:
        """Return the first row of the newest sequence in each slot, and whether it may be read; [P * N] both.

        A sequence may be read if all its rows are sealed and none is in the guard band, which the collector may be
        overwriting.
        """
        ring, head = self.ring, cursor.head
        row = head - 1 - (head - 1 - self._first_places) % ring.rows  # [P, N] the newest in this slot below the head
        usable = (row >= 0) & (row >= head - ring.reach) & (row + self.size <= head)
        return row.flatten(), usable.flatten()

    def open(self, cursor: Cursor, reward_scale: Tensor) -> None:
        """Do nothing at the beginning of a tick: no sequence has a priority. ``reward_scale`` is a scalar."""

    def sample(self, cursor: Cursor, batch: int, gen: Generator) -> Sequence:
        """Draw ``batch`` sequences uniformly among those that may be read; if there are none, masks are 0."""
        ring, period = self.ring, self.states.period
        newest = (cursor.head - self.size) // period  # [N], in periods; negative: there is none
        oldest = ((cursor.head - ring.reach).clamp(min=0) + period - 1) // period
        count = (newest - oldest + 1).clamp(min=0)
        ends = count.cumsum(0)
        # The remainder favours some sequences by less than their number / 2^62.
        number = torch.randint(1 << 62, (batch,), generator=gen, device=ring.device) % ends[-1].clamp(min=1)
        column = torch.searchsorted(ends, number, right=True).clamp(max=ring.num_envs - 1)
        start = (number - (ends - count - oldest).index_select(0, column)) * period
        out = self.read(cursor, start, column)
        there = ends[-1] > 0
        return out._replace(mask=out.mask * there, followed=out.followed * there)

    def column(self, index: Tensor) -> Tensor:
        """Return the columns of drawn indices, [B] both."""
        return index % self.ring.num_envs

    def read(self, cursor: Cursor, start: Tensor, column: Tensor) -> Sequence:
        """Return the sequences at rows ``start`` of ``column`` (both [B]); raw observations and rewards."""
        ring, burn, trained = self.ring, self.burn_in, self.length
        heads = cursor.head.index_select(0, column).expand(self.size, -1)  # [S, B]
        rows = torch.minimum(start + self._steps, heads - 1)  # [S, B]; if none may be read yet, some written row
        columns = column.expand_as(rows)  # [S, B]
        cells = ring.cell(rows, columns).flatten()
        flags = ring.flags.index_select(0, cells).int()  # [S B]

        part = slice(burn, burn + trained)
        row, col, head = (v[part].flatten() for v in (rows, columns, heads))  # [L B]
        window = ring.targets(cursor, row, col, head, self.n, self.gamma)  # [L B]
        cursor.lost += window.lost.sum()
        last = window.last.view(trained, -1) - rows[burn]  # [L, B], from burn_in on

        carry = self.states.at(start, column)  # [B, C]
        obs = ring.observations(rows.flatten(), columns.flatten())  # [S B, ...]
        return Sequence(
            {k: v.unflatten(0, rows.shape) for k, v in obs.items()},
            ~ring.rule("same episode", flags).view_as(rows),
            carry if self.stored else torch.zeros_like(carry),
            ring.action.index_select(0, cells).unflatten(0, rows.shape),
            window.reward.view_as(last),
            window.discount.view_as(last),
            last + 1,
            window.mask.view_as(last).float(),
            (window.mask & window.followed).view_as(last).float(),
            torch.ones_like(carry[:, 0]),
            start,
        )


class RankedSequences(Ranked):
    """Prioritised sampling of sequences, in proportion to priority ** alpha, from an array [P, N].

    At the start of a tick, sequences enter whose last row is sealed, and those leave whose first row the collector may
    overwrite.

    Args:
        eta: see :func:`mixed`.
        target: (rewards, discounts, successor values) -> targets, in units of the values. A new sequence's priority is
            computed from TD errors under the values stored by its actor, if any; otherwise, and if None, it is the
            largest priority so far.

    Attributes:
        entered: [P * N] int64; first row of the sequence of each leaf; -1 if there is none.
    """

    def __init__(self, sequences: Sequences, rule: PriorityRule, eta: float = 0.9, target: Target | None = None):
        device, states = sequences.ring.device, sequences.states
        super().__init__(sequences.count, device, rule)
        self.sequences, self.eta, self.target = sequences, eta, target
        self.entered = torch.full((sequences.count,), -1, dtype=torch.int64, device=device)
        self._all = torch.arange(sequences.count, device=device)
        self._newest = torch.arange(-(-sequences.ring.horizon // states.period), device=device).unsqueeze(1)  # [M, 1]

    def open(self, cursor: Cursor, reward_scale: Tensor) -> None:
        """Begin a tick: insert completed sequences and remove those that may be overwritten.

        Args:
            reward_scale: 0-dim factor by which learners multiply rewards.
        """
        start, usable = self.sequences.starts(cursor)
        old, new = self.tree.levels[0][: self.sequences.count], self.largest.repeat(self.sequences.count)
        if self.target is not None:
            new.index_copy_(0, *self._when_acted(cursor, reward_scale, self.target))
        leaf = torch.where(start == self.entered, old, new)
        self.tree.set(self._all, torch.where(usable, leaf, 0.0))
        self.entered.copy_(torch.where(usable, start, -1))
        self.count_tick()

    def _when_acted(self, cursor: Cursor, reward_scale: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """Return slots and leaves [M N] of the newest sequences in each column, as many as a tick may complete."""
        seq, ring, states = self.sequences, self.sequences.ring, self.sequences.states
        number = (cursor.head - seq.size) // states.period - self._newest  # [M, N]; negative: there is none
        rows = (number * states.period + seq.burn_in).clamp(min=0) + seq.trained.unsqueeze(2)  # [L, M, N]
        column, head = (v.expand_as(rows).flatten() for v in (ring.columns, cursor.head))
        window = ring.targets(cursor, torch.minimum(rows.flatten(), head - 1), column, head, seq.n, seq.gamma)
        q, next_value = valued_when_acted(ring, window)
        error = (target(window.reward * reward_scale, window.discount, next_value) - q).view(seq.length, -1)
        known = window.mask.view_as(error) & ~error.isnan()
        leaf = self.power(mixed(error.nan_to_num(), known.float(), self.eta))
        place = number % states.slots * ring.num_envs + ring.columns
        return place.flatten(), torch.where(known.any(0), leaf, self.largest)

    def sample(self, cursor: Cursor, batch: int, gen: Generator) -> Sequence:
        """Draw ``batch`` sequences; if there are none, weights and masks are 0."""
        index, leaf, weight = self.draw(batch, gen)
        start = self.entered.index_select(0, index).clamp(min=0)
        out = self.sequences.read(cursor, start, self.sequences.column(index))
        return out._replace(mask=out.mask * (leaf > 0), weight=weight, index=index)

    def used(self) -> int:
        return self.sequences.states.used()

    def state_dict(self) -> dict[str, Any]:
        return Rows({**super().state_dict(), "entered": self.entered[: self.used()]})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        fill("entered", self.entered, state["entered"])
        self.entered[len(state["entered"]) :] = -1


def mixed(error: Tensor, mask: Tensor, eta: float) -> Tensor:
    """Return a sequence's priority: eta max |e| + (1 - eta) mean |e| over the valid rows.

    Args:
        error, mask: [L, B].
    Returns:
        [B]; 0 if no row is valid.
    """
    size = error.abs() * mask
    return eta * size.amax(0) + (1 - eta) * size.sum(0) / mask.sum(0).clamp(min=1)
