"""Replay buffer: a ring of rows x environments, one tensor per field, each observation stored once.

Time runs down the rows. Each environment is a column with its own head. ::

            column 0   column 1
      row 0 |  o a r f | o a r f      o  observation acted on     r  reward, raw
      row 1 |  o a r f | o a r f      a  action                   f  flags (packed bits)
    head -> |  o . . . | o . . f      a filler row: the final observation of the episode that ended in row 1
      row 3 |  (old)   | o . . .  <- head       (old) rows to be overwritten next
            +----------+---------
    blank   |  0                 one cell of zeros, for frame stacks

The successor of row t is the observation of row t + 1, also where an episode ended: with next-step autoreset the
simulator returns the final observation there, in a filler row; with same-step autoreset the ring inserts that row. So
no final observation is lost, however often episodes end, and one gather reads all successors. Filler rows are masked
when drawn. Of a frame stack only the newest frame is stored (``pql.data.frames``).

Readers use a copy of the :class:`Cursor` made at the tick boundary. They never draw the ``horizon + 1`` oldest rows
(plus one per older stacked frame), which the collector may overwrite. Row ``head`` already holds its observation,
which readers use as a successor.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pql.contract.stacks import from_frames, kept_shape, newest_frame, order_of
from pql.data.flags import ENDS, NEXT_FIRST, OLDER_FINAL_OK, Packer, tables
from pql.data.frames import Stacker, as_stored, deepest, fitted, put
from pql.data.normalize import clip
from pql.data.sizes import ReplayLayout, action_store, storage_dtype
from pql.data.store import Store
from pql.types import Acted, Batch, Obs, ObsBatch, Rows, Step, fill

Triple = tuple[Tensor, Tensor, Tensor]
Stacks = dict[str, Tensor]
"""Cells of frame stacks, [B, S], by ``ObsSpec.fill``."""


class Cursor:
    """Rows written per column at a tick boundary; each worker pulls its copy like weights.

    ``lost`` counts the windows dropped because the simulator did not return their final observation. ``env_steps``,
    0-dim, are those of the run at the boundary, for a share of demonstrations that depends on them.
    """

    env_steps: Tensor | None = None

    def __init__(self, num_envs: int, device: torch.device):
        self.head = torch.zeros(num_envs, dtype=torch.int64, device=device)  # [N] rows ever written
        self.lost = torch.zeros((), dtype=torch.int64, device=device)

    def tensors(self) -> list[Tensor]:
        """Return the tensors published at a tick boundary, [N] each."""
        return [self.head]


class Window(NamedTuple):
    """n-step windows [B] without observations."""

    cell: Tensor  # int64, first cell
    last: Tensor  # int64, last row
    reward: Tensor  # float32, n-step sum
    discount: Tensor  # float32
    mask: Tensor  # bool, valid
    lost: Tensor  # bool, invalid because there is no final observation
    followed: Tensor  # bool, ``successor`` holds the next observation (else it is not used as a target)
    successor: Tensor  # int64, cell of the next observation


class Replay(Store):
    """A ring of ``rows`` x ``num_envs`` transitions on one device.

    Index words, here and in all readers of a ring::

        column  an environment
        row     number of rows written before it in its column; it only grows
        place   row % rows, where the ring holds it
        cell    place * N + column, the index into the stored tensors
        head    the row that is written next; its observation is there already
        tail    head - reach, the oldest row that may be drawn

    Args:
        obs_only: store observations only (for a policy learner on another device).
        reward_clip: clip rewards (stored raw) to +- this on reading; None: no clipping.
        ragged: columns may differ in length, so rows are drawn uniformly over all of them.
    """

    def __init__(
        self,
        layout: ReplayLayout,
        device: torch.device,
        *,
        obs_only: bool = False,
        reward_clip: float | None = None,
        ragged: bool = False,
    ):
        obs, rows, num_envs = layout.obs, layout.rows, layout.num_envs
        self.rows, self.num_envs, self.horizon, self.device = rows, num_envs, layout.horizon, device
        self.obs_only, self.reward_clip, self.ragged = obs_only, reward_clip, ragged
        self.fillers = layout.fillers
        cells = rows * num_envs
        self.obs = {
            k: torch.zeros(cells + (s.stack > 1), *kept_shape(s), dtype=storage_dtype(s, layout.dtype), device=device)
            for k, s in obs.items()
        }
        self.flags = torch.zeros(cells, dtype=torch.uint8, device=device)
        self.extra: dict[str, Tensor] = {}
        if not obs_only:
            self.action = action_store(layout.action_size, cells, device)
            self.reward = torch.zeros(cells, device=device)
            self.extra = {name: torch.zeros(cells, device=device) for name in layout.extra}
        self.live = Cursor(num_envs, device)  # the collector's positions
        self.columns = torch.arange(num_envs, device=device)
        self._rules, self._pack = tables(device), Packer(layout.fillers, device)
        self._constants: dict[tuple[int, float], Triple] = {}
        self.specs, self.stacks = obs, {k: s.stack for k, s in obs.items()}
        self._orders = {k: order_of(s, device) for k, s in obs.items()}
        depth = deepest(obs.values())
        self.guard = layout.horizon + depth  # rows that the collector may overwrite
        fills = {s.fill for s in obs.values() if s.stack > 1}
        self._stacker = Stacker(depth, rows, num_envs, cells, self._rules["same episode"], fills) if fills else None

    @property
    def reach(self) -> int:
        """Return the number of rows below the head that may be drawn."""
        return self.rows - self.guard

    # -- writing --------------------------------------------------------------------------------------------------

    def begin(self, obs: Obs, columns: Tensor | None = None) -> None:
        """Write the first observation [n, ...] of ``columns`` (default: all)."""
        columns = self.columns if columns is None else columns
        self._write_obs(self.cell(self.live.head[columns], columns), obs)

    def positions(self) -> list[Tensor]:
        """Return the write positions, [N] each."""
        return self.live.tensors()

    def restart(self, obs: Obs) -> None:
        """Begin a new episode at ``obs`` [N, ...] in all columns, as after a reset; no window crosses into it.

        The observation at the head remains, in a filler row, as the last row's successor.
        """
        self._fill_row(self.cell(self.live.head, self.columns))
        self.live.head += 1
        self.begin(obs)

    def insert(
        self, acted: Tensor | Acted, step: Step, columns: Tensor | None = None, arrived: Tensor | None = None
    ) -> None:
        """Append one row to ``columns`` (default: all), and a filler row where an episode ended and ``step.obs`` begins
        the next one.

        Args:
            acted: executed action, [n, A] or [n] int64, with the ``extra`` values if any.
            step: its results, [n, ...] each.
            columns: [n] int64, distinct.
            arrived: [n] bool; False: the env has not answered, so no row is added. None: all have.
        """
        columns = self.columns if columns is None else columns
        head = self.live.head.index_select(0, columns)  # [n]
        after = head + 1
        here, flags, follow = self.cell(head, columns), *self._pack(step)  # [n] each

        if self.fillers:
            # Written everywhere: where no episode ended, the next row overwrites it.
            filler = self.cell(after, columns)
            self._fill_row(filler)
            self._write_obs(filler, step.final_obs)
            after = after + (follow if arrived is None else follow * arrived)

        self.flags.index_copy_(0, here, flags)
        if not self.obs_only:
            action, extra = acted if isinstance(acted, Acted) else Acted(acted, {})
            self.action.index_copy_(0, here, action)
            for name, store in self.extra.items():
                store.index_copy_(0, here, extra[name])
            self.reward.index_copy_(0, here, step.reward)

        # Without an answer the row remains at the head: unread, and rewritten later.
        self.live.head.index_copy_(0, columns, after if arrived is None else torch.where(arrived, after, head))
        self._write_obs(self.cell(after, columns), step.obs)

    def _fill_row(self, cell: Tensor) -> None:
        """Make filler rows of ``cell`` [n]: they end an episode, and no actor has evaluated their observations."""
        self.flags.index_fill_(0, cell, NEXT_FIRST)
        for store in self.extra.values():
            store.index_fill_(0, cell, torch.nan)
        for store in () if self.obs_only else (self.action, self.reward):  # the same bits in every run
            store.index_fill_(0, cell, 0)

    def cell(self, row: Tensor, columns: Tensor) -> Tensor:
        """Return the cells of ``row`` of ``columns`` (both [..., n])."""
        return torch.add(columns, row % self.rows, alpha=self.num_envs)

    def _write_obs(self, index: Tensor, obs: Obs) -> None:
        for name, store in self.obs.items():
            frames = fitted(newest_frame(obs[name], self.specs[name]), store.shape[1:])
            put(store, index, frames.to(store.dtype))

    # -- sampling -------------------------------------------------------------------------------------------------

    def draw(self, cursor: Cursor, batch: int, gen: Generator) -> Triple:
        """Draw rows uniformly per column. Returns row, column and the column's head, [B] int64 each."""
        if self.ragged:
            return self._draw_evenly(cursor, batch, gen)
        column = torch.randint(self.num_envs, (batch,), generator=gen, device=self.device)
        # Integers, because the 24 bits of a float32 uniform are too few for large rings.
        shift = 62 - self.rows.bit_length()  # bits times row count must fit int64
        bits = torch.randint(1 << shift, (batch,), generator=gen, device=self.device)
        head = cursor.head.index_select(0, column)
        length = head.clamp(1, self.reach)
        age = (bits * length) >> shift  # in [0, length), without an integer division
        return head - 1 - age, column, head  # an empty column gives row -1, which is masked

    def _draw_evenly(self, cursor: Cursor, batch: int, gen: Generator) -> Triple:
        """Draw rows uniformly over all columns."""
        length = cursor.head.clamp(max=self.reach)
        ends = length.cumsum(0)  # [N]
        # The remainder favours some rows by less than rows / 2^62.
        number = torch.randint(1 << 62, (batch,), generator=gen, device=self.device) % ends[-1].clamp(min=1)
        column = torch.searchsorted(ends, number, right=True).clamp(max=self.num_envs - 1)
        age = number - (ends - length).index_select(0, column)
        head = cursor.head.index_select(0, column)
        return head - 1 - age, column, head

    def sample_obs(self, cursor: Cursor, batch: int, gen: Generator) -> ObsBatch:
        """Draw observations [B, ...] for a policy update."""
        row, column, head = self.draw(cursor, batch, gen)
        cell = self.cell(row, column)
        mask = self.rule("valid", self.flags.index_select(0, cell).int()) & (head > 0)
        obs = self._gather(cell, self._stack(row, column))
        return ObsBatch(obs, mask.float(), torch.ones_like(mask, dtype=torch.float32))

    def sample(self, cursor: Cursor, batch: int, n: int, gamma: float, gen: Generator) -> Batch:
        """Draw B = ``batch`` n-step windows. Shapes are static; invalid windows have ``mask == 0``."""
        row, column, head = self.draw(cursor, batch, gen)
        return self.windows(cursor, row, column, head, n, gamma)

    def windows(self, cursor: Cursor, row: Tensor, column: Tensor, head: Tensor, n: int, gamma: float) -> Batch:
        """Return the n-step windows that begin at ``row`` of ``column`` (both [B])."""
        window = self.targets(cursor, row, column, head, n, gamma)
        cursor.lost += window.lost.sum()
        stacks = None
        if self._stacker is not None:
            stacks = self._stack(torch.cat((row, window.last + 1)), column.repeat(2))
        both = self._gather(torch.cat((window.cell, window.successor)), stacks)
        size = row.shape[0]
        obs, next_obs = {k: v[:size] for k, v in both.items()}, {k: v[size:] for k, v in both.items()}
        action, mask = self.action.index_select(0, window.cell), window.mask.float()
        weight, followed = torch.ones_like(mask), mask * window.followed
        return Batch(obs, action, window.reward, window.discount, next_obs, mask, weight, window.cell, followed)

    def observations(self, row: Tensor, column: Tensor) -> Obs:
        """Return the observations at ``row`` of ``column`` (both [B])."""
        return self._gather(self.cell(row, column), self._stack(row, column))

    def targets(self, cursor: Cursor, row: Tensor, column: Tensor, head: Tensor, n: int, gamma: float) -> Window:
        """Return the windows that begin at ``row`` of ``column`` (both [B]).

        A window ends at the first of: n steps, termination, truncation, the row before a filler row or a restart,
        the head. Its target is ``sum_i gamma^i r_i + gamma^m (1 - terminated) V(s_{t+m})``, with each r_i clipped.
        """
        place = row % self.rows  # [B]
        cell = torch.add(column, place, alpha=self.num_envs)  # [B]
        flags = self.flags.index_select(0, cell).int()  # [B]
        usable = self.rule("valid", flags) & (head > 0)  # [B]

        reward = clip(self.reward.index_select(0, cell), self.reward_clip)  # [B]
        last, end = row, flags  # [B], the window's last row and its flags
        power = self.constants(n, gamma)[2][:1]  # [1]
        if n > 1:
            reward, more, power = self._extend(reward, flags, place, column, head - 1 - row, self.constants(n, gamma))
            last, place = row + more, self._wrap(place + more)  # [B]
            end = self.flags.index_select(0, torch.add(column, place, alpha=self.num_envs)).int()  # [B]

        lost = usable & self.rule("final lost", end)  # [B]
        mask, followed = usable & ~lost & self.rule("announced", end), self.rule("same episode", end)  # [B]
        successor = torch.add(column, self._wrap(place + 1), alpha=self.num_envs)  # [B]
        return Window(cell, last, reward, power * self.rule("alive", end), mask, lost, followed, successor)

    def _extend(
        self, reward: Tensor, flags: Tensor, place: Tensor, column: Tensor, newer: Tensor, constants: Triple
    ) -> Triple:
        """Add steps 2..n of a window, of which ``newer`` [B] rows are written.

        Returns the sum of rewards, the steps after the first and gamma^m, [B] each.
        """
        steps, powers, table = constants  # [n-1, 1], [n-1, 1], [n]
        inside = steps <= newer  # [n-1, B]; rows at or above the head are incomplete
        places = self._wrap(place + torch.minimum(steps, newer))  # [n-1, B]
        cell = torch.add(column, places, alpha=self.num_envs).view(-1)  # [(n-1) B]
        later = self.flags.index_select(0, cell).int()  # [(n-1) B]

        goes_on = self.rule("goes on", torch.cat((flags, later[: -flags.shape[0]]))).view_as(places)  # [n-1, B]
        follows = goes_on & inside & self.rule("valid", later).view_as(places)  # [n-1, B]; step i follows step i - 1
        for i in range(1, steps.shape[0]):
            follows[i] &= follows[i - 1]
        more = follows.sum(0)  # [B]

        rewards = clip(self.reward.index_select(0, cell), self.reward_clip).view_as(places)  # [n-1, B]
        reward = reward + (rewards * powers).mul_(follows).sum(0)  # [B]
        return reward, more, table.index_select(0, more)

    def _wrap(self, row: Tensor) -> Tensor:
        """Return ``row`` modulo the ring's rows, for rows below twice that."""
        return torch.where(row >= self.rows, row - self.rows, row)

    def rule(self, name: str, flags: Tensor) -> Tensor:
        """Look up a predicate of ``flags`` ([B] int32) in a table: one kernel instead of several bit tests."""
        return self._rules[name].index_select(0, flags)

    def constants(self, n: int, gamma: float) -> Triple:
        """Return cached offsets 1..n-1 [n-1, 1], their gamma^i [n-1, 1], and gamma^m [n] for m = 1..n."""
        if (n, gamma) not in self._constants:
            powers = torch.tensor([gamma**i for i in range(1, n + 1)], dtype=torch.float64).float().to(self.device)
            steps = torch.arange(1, n, device=self.device).unsqueeze(1)
            self._constants[n, gamma] = (steps, powers[:-1].unsqueeze(1), powers)
        return self._constants[n, gamma]

    def _stack(self, row: Tensor, column: Tensor) -> Stacks | None:
        """Return the cells of each row's frame stack; None without stacking."""
        return None if self._stacker is None else self._stacker.cells(self.flags, row, column)

    def _gather(self, cell: Tensor, stack: Stacks | None) -> Obs:
        """Gather observations [B, ...] at ``cell`` [B], and those of stacked groups at ``stack`` [B, S]."""
        out: Obs = {}
        for k, store in self.obs.items():
            spec, order = self.specs[k], self._orders[k]
            index = cell if stack is None or spec.stack == 1 else stack[spec.fill][:, -spec.stack :]
            rows = store.index_select(0, index.reshape(-1)).view(*index.shape, *store.shape[1:])
            if order is not None:
                rows = rows.flatten(1).index_select(1, order)
            elif spec.stack > 1:
                rows = from_frames(rows, spec)
            # Networks never see half-precision storage; uint8 frames stay uint8.
            out[k] = rows.float() if rows.is_floating_point() else rows
        return out

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def used(self) -> int:
        """Return the number of rows in use. Synchronises with the device."""
        # Two beyond the longest column: the head's observation, and a row written before its answer.
        return min(int(self.live.head.max()) + 2, self.rows)

    def _by_row(self) -> dict[str, Tensor]:
        """Return the stored fields of all rows, [rows * N, ...] each."""
        cells = self.rows * self.num_envs
        out = {**{f"obs.{k}": v[:cells] for k, v in self.obs.items()}, "flags": self.flags}
        if not self.obs_only:
            out |= {"action": self.action, "reward": self.reward}
        return out | {f"extra.{k}": v for k, v in self.extra.items()}

    def state_dict(self) -> Rows:
        """Return views of the rows in use, and the positions. Synchronises with the device."""
        cells = self.used() * self.num_envs
        return Rows({k: v[:cells] for k, v in self._by_row().items()} | {"head": self.live.head})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy ``state_dict``'s tensors, [rows * N, ...] each, in place (captured graphs keep their addresses).

        Raises:
            ConfigError: more rows than the ring has, or fewer than the positions require.
        """
        n = self.num_envs
        fill("head", self.live.head, state["head"], n)
        least = min(int(state["head"].max()), self.rows) * n
        for name, store in self._by_row().items():
            # Release 0.1 saved final observations behind the rows.
            saved = state[name][: self.rows * n] if name.startswith("obs.") else state[name]
            fill(name, store, as_stored(saved, store, self.specs.get(name.removeprefix("obs."))), least)
        if bool((self.flags & OLDER_FINAL_OK).any()):
            self.flags.copy_(converted(self.flags))


def converted(flags: Tensor) -> Tensor:
    """Convert flags [n] of release 0.2, which kept final observations apart from the rows, and a bit for their loss.

    Windows that end in a truncation of that time count as lost, unless the next row has the final observation.
    """
    lost = (flags & ENDS > 0) & (flags & OLDER_FINAL_OK == 0)
    return torch.where(lost, flags | NEXT_FIRST, flags) & ~OLDER_FINAL_OK
