"""The replay ring: one tensor per field, rows x environments, each observation stored once.

Time runs down the rows; every environment is a column with a head of its own (all equal for environments that
step together; apart for simulators that answer in groups). ::

            column 0   column 1
      row 0 |  o a r f | o a r f      o  observation acted on     r  reward, raw
      row 1 |  o a r f | o a r f      a  action                   f  flags (packed bits) + final counter
    head -> |  o . . . | o a r f
      row 3 |  (old)   | o . . .  <- head       (old) rows below the head are overwritten next
            +----------+---------
    finals  |  o o o             ring of K true final observations of truncated rows, one counter per column
    blank   |  0                 one cell of zeros, for stacks of frames

The successor of row t is row t + 1's observation; a row that was cut off finds its true successor in ``finals``.
Both live in one tensor, so a batch's next observations are one gather. Of a stack of frames only the newest is kept:
``pql.data.frames`` says where the others are found.

Writer and readers never meet: readers see a :class:`Cursor`, sealed at a tick's boundary, and draw only rows that
the collector cannot overwrite before the next one: the guard band of oldest rows is ``horizon + 1``, and one more for
each older frame that a stack reaches back to. The observation of row ``head`` itself is sealed too, so the newest
transition has its successor.

This file knows nothing of streams, threads or algorithms.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pql.contract.env import ObsSpec
from pql.data.flags import NEXT_FIRST, pack, tables
from pql.data.frames import Stacker, deepest, kept_shape, newest, put
from pql.data.normalize import clip
from pql.errors import ConfigError
from pql.types import Acted, Batch, Memory, Obs, ObsBatch, Rows, Step, fill


class Cursor:
    """What a reader may see: rows written per column, and truncations per column, as of a tick's boundary.

    Each worker owns one and pulls it like weights. ``lost`` counts windows that this reader had to drop because
    the true final observation was gone.
    """

    def __init__(self, num_envs: int, device: torch.device):
        self.head = torch.zeros(num_envs, dtype=torch.int64, device=device)  # [N] rows ever written
        self.finals = torch.zeros(num_envs, dtype=torch.int64, device=device)  # [N] final observations ever written
        self.lost = torch.zeros((), dtype=torch.int64, device=device)

    def tensors(self) -> list[Tensor]:
        """What a tick's boundary publishes."""
        return [self.head, self.finals]


class Window(NamedTuple):
    """n-step windows [B] before any observation is gathered."""

    cell: Tensor  # int64, where each begins
    last: Tensor  # int64, logical row that each ends with
    reward: Tensor  # float32, n-step sum
    discount: Tensor  # float32
    mask: Tensor  # bool; False: it must not be used
    lost: Tensor  # bool; it must not, because a true final observation is gone
    cut: Tensor  # bool; it ends with a final observation
    successor: Tensor  # int64, the cell of the observation that follows (final observations come after all rows)


class Replay:
    """A ring of ``rows`` x ``num_envs`` transitions on one device.

    Args:
        obs: observation groups to store.
        action_size: A; None: discrete actions, int64.
        rows: T, rows per column.
        horizon: rows the collector writes between two seals.
        max_episode_steps: time limit; sizes the store of final observations (None: no time limit).
        dtype: storage of floating observations (uint8 observations always stay uint8).
        obs_only: keep observations alone (for a policy learner on a device of its own).
        extra: names of float32 numbers that the actor gives beside each action.
        reward_clip: each reward (stored raw) is clipped to +- this when it is read; None: it is not.
        ragged: columns' lengths may differ for good, so rows are drawn evenly from all of them together.

    Attributes:
        guard: oldest rows of a full ring that are never drawn.
    """

    def __init__(
        self,
        obs: Mapping[str, ObsSpec],
        action_size: int | None,
        num_envs: int,
        rows: int,
        horizon: int,
        max_episode_steps: int | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        obs_only: bool = False,
        extra: Sequence[str] = (),
        reward_clip: float | None = None,
        ragged: bool = False,
    ):
        self.rows, self.num_envs, self.horizon, self.device = rows, num_envs, horizon, device
        self.obs_only, self.reward_clip, self.ragged = obs_only, reward_clip, ragged
        self.finals = 0 if obs_only else final_rows(rows, horizon, max_episode_steps)  # K
        cells, blank = rows * num_envs, (rows + self.finals) * num_envs
        self.obs = {
            k: torch.zeros(blank + (s.stack > 1), *kept_shape(s), dtype=storage_dtype(s, dtype), device=device)
            for k, s in obs.items()
        }
        self.flags = torch.zeros(cells, dtype=torch.uint8, device=device)
        self.extra: dict[str, Tensor] = {}
        if not obs_only:
            self.action = action_store(action_size, cells, device)
            self.reward = torch.zeros(cells, device=device)
            self.final = torch.zeros(cells, dtype=torch.int32, device=device)  # which final observation, if truncated
            self.extra = {name: torch.zeros(cells, device=device) for name in extra}
        self.live = Cursor(num_envs, device)  # the collector's own view, ahead of every sealed one
        self.columns = torch.arange(num_envs, device=device)
        self._rules = tables(device)
        self._constants: dict[tuple[int, float], tuple[Tensor, Tensor, Tensor]] = {}
        self.stacks = {k: s.stack for k, s in obs.items()}
        depth = deepest(obs.values())
        self.guard = horizon + depth
        self._stacker = Stacker(depth, rows, num_envs, blank, self._rules["same episode"]) if depth > 1 else None

    # -- the collector's side -------------------------------------------------------------------------------------

    def begin(self, obs: Obs, columns: Tensor | None = None) -> None:
        """Write the observation ([n, ...]) that ``columns`` (default: all) will act on first."""
        columns = self.columns if columns is None else columns
        self._write_obs(self.live.head[columns] % self.rows * self.num_envs + columns, obs)

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """A tick begins, which is nothing here: rows follow each other across ticks."""

    def positions(self) -> list[Tensor]:
        """Cells beyond these hold nothing."""
        return self.live.tensors()

    def restart(self, obs: Obs) -> None:
        """All columns go on from ``obs`` in a new episode that nothing announced: no window crosses into it."""
        last = (self.live.head - 1) % self.rows * self.num_envs + self.columns
        self.flags.index_copy_(0, last, self.flags.index_select(0, last) | NEXT_FIRST)
        self.begin(obs)

    def insert(
        self, acted: Tensor | Acted, step: Step, columns: Tensor | None = None, arrived: Tensor | None = None
    ) -> None:
        """Append one row to ``columns`` (default: all): the action taken there and what followed.

        Args:
            acted: the action, [n, A] or [n] int64, as acted; with the extra numbers where the ring keeps some.
            step: fields of shape [n, ...].
            columns: [n] int64, distinct.
            arrived: [n] bool; False: no answer has come yet, so there is no row. None: all have.
        """
        columns = self.columns if columns is None else columns
        head = self.live.head[columns]
        here = head % self.rows * self.num_envs + columns
        self.flags.index_copy_(0, here, pack(step))
        if not self.obs_only:
            action, extra = acted if isinstance(acted, Acted) else Acted(acted, {})
            self.action.index_copy_(0, here, action)
            for name, store in self.extra.items():
                store.index_copy_(0, here, extra[name])
            self.reward.index_copy_(0, here, step.reward)
            count = self.live.finals[columns]
            self.final.index_copy_(0, here, count.to(torch.int32))
            # Written whether or not this row was cut off: the slot counts only once the counter has passed it.
            self._write_obs((self.rows + count % self.finals) * self.num_envs + columns, step.final_obs)
            self.live.finals.index_copy_(0, columns, count + (step.truncated & step.valid))
        self._write_obs((head + 1) % self.rows * self.num_envs + columns, step.obs)
        # Where no answer has come, what was written lies at and above the head: unread, and to be written again.
        self.live.head.index_copy_(0, columns, head + (1 if arrived is None else arrived))

    def _write_obs(self, index: Tensor, obs: Obs) -> None:
        for name, store in self.obs.items():
            put(store, index, newest(obs[name], self.stacks[name]).to(store.dtype))

    # -- the learners' side ---------------------------------------------------------------------------------------

    def draw(self, cursor: Cursor, batch: int, gen: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw rows uniformly per column. Returns (logical row [B], column [B], head of that column [B]).

        Row and column are drawn apart and in integers: a float32 uniform has 24 bits, too few for large rings.
        """
        if self.ragged:
            return self._draw_evenly(cursor, batch, gen)
        column = torch.randint(self.num_envs, (batch,), generator=gen, device=self.device)
        shift = 62 - self.rows.bit_length()  # random bits that, times a row count, stay within int64
        bits = torch.randint(1 << shift, (batch,), generator=gen, device=self.device)
        head = cursor.head.index_select(0, column)
        length = head.clamp(1, self.rows - self.guard)
        # A multiplication and a shift scale the random bits to [0, length); an integer division costs many times that.
        age = (bits * length) >> shift
        return head - 1 - age, column, head  # an empty column gives row -1: a cell that nobody is writing, masked

    def _draw_evenly(self, cursor: Cursor, batch: int, gen: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw among all rows of all columns, however long each is."""
        length = cursor.head.clamp(max=self.rows - self.guard)
        ends = length.cumsum(0)
        # The remainder favours some rows by less than rows / 2^62.
        place = torch.randint(1 << 62, (batch,), generator=gen, device=self.device) % ends[-1].clamp(min=1)
        column = torch.searchsorted(ends, place, right=True).clamp(max=self.num_envs - 1)
        age = place - (ends - length).index_select(0, column)
        head = cursor.head.index_select(0, column)
        return head - 1 - age, column, head

    def sample_obs(self, cursor: Cursor, batch: int, gen: Generator) -> ObsBatch:
        """Observations alone, for a policy update: [B, ...] each."""
        row, column, head = self.draw(cursor, batch, gen)
        cell = torch.add(column, row % self.rows, alpha=self.num_envs)
        mask = self.rule("valid", self.flags.index_select(0, cell).int()) & (head > 0)
        return ObsBatch(
            self._gather(cell, self._stack(row, column)), mask.float(), torch.ones_like(mask, dtype=torch.float32)
        )

    def sample(self, cursor: Cursor, batch: int, n: int, gamma: float, gen: Generator) -> Batch:
        """Draw ``batch`` n-step windows. Shapes are static; windows that must not be used have ``mask == 0``."""
        row, column, head = self.draw(cursor, batch, gen)
        return self.windows(cursor, row, column, head, n, gamma)

    def windows(self, cursor: Cursor, row: Tensor, column: Tensor, head: Tensor, n: int, gamma: float) -> Batch:
        """The n-step windows that start at logical ``row`` of ``column`` (both [B]), with their observations."""
        window = self.targets(cursor, row, column, head, n, gamma)
        cursor.lost += window.lost.sum()
        stacks = self._stack_pair(row, window.last, column, window.successor)
        obs, next_obs = self._gather_pair(window.cell, window.successor, stacks)
        action, mask = self.action.index_select(0, window.cell), window.mask.float()
        return Batch(obs, action, window.reward, window.discount, next_obs, mask, torch.ones_like(mask), window.cell)

    def observations(self, row: Tensor, column: Tensor, successor: Tensor | None = None) -> Obs:
        """What was acted on at logical ``row`` of ``column`` (both [B]), or the cells ``successor`` that follow."""
        cell, stack = torch.add(column, row % self.rows, alpha=self.num_envs), self._stack(row, column)
        if successor is not None:
            cell, stack = successor, None if stack is None else torch.cat((stack[:, 1:], successor.unsqueeze(1)), 1)
        return self._gather(cell, stack)

    def targets(self, cursor: Cursor, row: Tensor, column: Tensor, head: Tensor, n: int, gamma: float) -> Window:
        """Rewards, discounts and successors of the windows that start at logical ``row`` of ``column`` (both [B]).

        A window ends at the first of: n steps, a terminated or truncated row, the row before a filler row or before
        an unannounced restart, the head. Its target is ``sum_i gamma^i r_i + gamma^m (1 - terminated) V(s_{t+m})``,
        with each r_i clipped.
        """
        place = row % self.rows
        cell = torch.add(column, place, alpha=self.num_envs)
        flags = self.flags.index_select(0, cell).int()
        usable = self.rule("valid", flags) & (head > 0)
        reward = clip(self.reward.index_select(0, cell), self.reward_clip)
        last, tail, end = row, cell, flags  # the window's last row: this one
        power = self.constants(n, gamma)[2][:1]
        if n > 1:
            reward, more, power = self._extend(reward, flags, place, column, head - 1 - row, n, gamma)
            last, place = row + more, self._wrap(place + more)
            tail = torch.add(column, place, alpha=self.num_envs)
            end = self.flags.index_select(0, tail).int()
        cut, count = self.rule("cut", end), self.final.index_select(0, tail)
        # The `horizon` oldest final observations may be overwritten while this is read; those before them are gone.
        gone = count < cursor.finals.index_select(0, column) - (self.finals - self.horizon)
        lost = usable & ((gone & cut) | self.rule("final lost", end))
        mask = usable & ~lost & self.rule("announced", end)
        after = torch.where(cut, count % self.finals + self.rows, self._wrap(place + 1))
        successor = torch.add(column, after, alpha=self.num_envs)
        return Window(cell, last, reward, power * self.rule("alive", end), mask, lost, cut, successor)

    def _extend(
        self, reward: Tensor, flags: Tensor, place: Tensor, column: Tensor, ahead: Tensor, n: int, gamma: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Steps 2..n of a window. Returns (reward sum [B], steps after the first [B], gamma^m [B])."""
        steps, powers, table = self.constants(n, gamma)
        inside = steps <= ahead  # [n-1, B] the row is complete: at or above the head it is in flight, never read
        later = self._wrap(place + torch.minimum(steps, ahead))
        cell = torch.add(column, later, alpha=self.num_envs).view(-1)
        rows = self.flags.index_select(0, cell).int()
        goes_on = self.rule("goes on", torch.cat((flags, rows[: -flags.shape[0]]))).view_as(later)
        alive = goes_on & inside & self.rule("valid", rows).view_as(later)  # step i follows step i - 1
        for i in range(1, n - 1):
            alive[i] &= alive[i - 1]
        more = alive.sum(0)
        rewards = clip(self.reward.index_select(0, cell), self.reward_clip)
        reward = reward + (rewards.view_as(later) * powers).mul_(alive).sum(0)
        return reward, more, table.index_select(0, more)

    def _wrap(self, row: Tensor) -> Tensor:
        """``row`` modulo the ring's rows, for a row less than one turn ahead."""
        return torch.where(row >= self.rows, row - self.rows, row)

    def rule(self, name: str, flags: Tensor) -> Tensor:
        """What a row's flags (int32) mean, by table: one kernel instead of a chain of bit tests."""
        return self._rules[name].index_select(0, flags)

    def constants(self, n: int, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets 1..n-1 [n-1, 1], gamma^i of those [n-1, 1], gamma^m [n] for m = 1..n. Made once, in float64."""
        if (n, gamma) not in self._constants:
            powers = torch.tensor([gamma**i for i in range(1, n + 1)], dtype=torch.float64).float().to(self.device)
            steps = torch.arange(1, n, device=self.device).unsqueeze(1)
            self._constants[n, gamma] = (steps, powers[:-1].unsqueeze(1), powers)
        return self._constants[n, gamma]

    def _stack(self, row: Tensor, column: Tensor) -> Tensor | None:
        """Cells of the frames of each row's stack [B, S]; None where nothing is stacked."""
        return None if self._stacker is None else self._stacker.cells(self.flags, row, column)

    def _stack_pair(self, row: Tensor, last: Tensor, column: Tensor, successor: Tensor) -> Tensor | None:
        """The same of windows' first rows and, below them, of their successors: [2B, S]."""
        both = self._stack(torch.cat((row, last)), column.repeat(2))
        if both is None:
            return None
        # The successor belongs to the last row's episode, or nobody asks for its value.
        first, last = both.chunk(2)
        return torch.cat((first, torch.cat((last[:, 1:], successor.unsqueeze(1)), 1)))

    def _gather(self, cell: Tensor, stack: Tensor | None) -> Obs:
        """Observations: of ``cell`` [B], or, of stacked groups, of the newest of ``stack`` [B, S]."""
        out: Obs = {}
        for k, store in self.obs.items():
            index = cell if stack is None or self.stacks[k] == 1 else stack[:, -self.stacks[k] :]
            rows = store.index_select(0, index.reshape(-1)).view(*index.shape, *store.shape[1:])
            # Half-precision floats widen here, so no network ever sees the storage type; uint8 frames stay uint8.
            out[k] = rows.float() if rows.is_floating_point() else rows
        return out

    def _gather_pair(self, cell: Tensor, next_cell: Tensor, stacks: Tensor | None) -> tuple[Obs, Obs]:
        both = self._gather(torch.cat((cell, next_cell)), stacks)
        batch = cell.shape[0]
        return {k: v[:batch] for k, v in both.items()}, {k: v[batch:] for k, v in both.items()}

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def used(self) -> int:
        """Rows from the top that hold something. Waits for the device."""
        # Two beyond the longest column: the head's observation, and what was written for an answer yet to come.
        return min(int(self.live.head.max()) + 2, self.rows)

    def _by_row(self) -> dict[str, Tensor]:
        """What is stored of every row, [rows * N, ...] each."""
        cells = self.rows * self.num_envs
        out = {**{f"obs.{k}": v[:cells] for k, v in self.obs.items()}, "flags": self.flags}
        if not self.obs_only:
            out |= {"action": self.action, "reward": self.reward, "final": self.final}
        return out | {f"extra.{k}": v for k, v in self.extra.items()}

    def _by_final(self) -> dict[str, Tensor]:
        """The final observations, [K * N, ...] each."""
        start, end = (rows * self.num_envs for rows in (self.rows, self.rows + self.finals))
        return {f"final_obs.{k}": v[start:end] for k, v in self.obs.items() if self.finals}

    def state_dict(self) -> Rows:
        """The rows and final observations in use (views), and the ring's positions. Waits for the device."""
        cells = self.used() * self.num_envs
        finals = min(int(self.live.finals.max()) + 1, self.finals) * self.num_envs  # the one to be overwritten, too
        state = {k: v[:cells] for k, v in self._by_row().items()} | {"head": self.live.head, "finals": self.live.finals}
        return Rows(state | {k: v[:finals] for k, v in self._by_final().items()})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy in place (captured graphs keep their addresses).

        Raises:
            ConfigError: more rows than this ring has, or fewer than its positions say.
        """
        n = self.num_envs
        for name, position in (("head", self.live.head), ("finals", self.live.finals)):
            fill(name, position, state[name], n)
        least = min(int(state["head"].max()), self.rows) * n
        # Older releases saved all of a ring, with its final observations behind its rows in one tensor.
        older = all(len(state[f"obs.{k}"]) == len(v) > self.rows * n for k, v in self.obs.items())
        stores = self._by_row() | ({f"obs.{k}": v for k, v in self.obs.items()} if older else {})
        for name, store in stores.items():
            fill(name, store, state[name], least)
        for name, store in self._by_final().items() if not older else ():
            fill(name, store, state[name], min(int(state["finals"].max()), self.finals) * n)


def storage_dtype(spec: ObsSpec, dtype: torch.dtype) -> torch.dtype:
    return dtype if spec.dtype.is_floating_point else spec.dtype


def final_rows(rows: int, horizon: int, max_episode_steps: int | None) -> int:
    """K: as many final observations per column as a full ring can refer to, plus those in flight."""
    return (math.ceil(rows / max_episode_steps) if max_episode_steps else 0) + horizon + 1


def action_store(action_size: int | None, cells: int, device: torch.device) -> Tensor:
    """Zeros for the actions of ``cells`` rows: [cells, A] float32, or [cells] int64 where ``action_size`` is None."""
    if action_size is None:
        return torch.zeros(cells, dtype=torch.int64, device=device)
    return torch.zeros(cells, action_size, device=device)


def replay_bytes(
    obs: Mapping[str, ObsSpec],
    action_size: int | None,
    num_envs: int,
    rows: int,
    horizon: int,
    limit: int | None,
    dtype: torch.dtype,
    extra: Sequence[str] = (),
) -> int:
    """Bytes a ring of ``rows`` rows takes, before anything is allocated."""
    sizes = {k: math.prod(kept_shape(s)) * storage_dtype(s, dtype).itemsize for k, s in obs.items()}
    blank = sum(sizes[k] for k, s in obs.items() if s.stack > 1)
    action = 8 if action_size is None else action_size * 4
    cell = action + 4 + 4 + 1 + 4 * len(extra)
    return num_envs * ((rows + final_rows(rows, horizon, limit)) * sum(sizes.values()) + rows * cell) + blank


def preflight(
    obs: Mapping[str, ObsSpec],
    action_size: int | None,
    num_envs: int,
    capacity: int,
    horizon: int,
    limit: int | None,
    dtype: torch.dtype,
    available: int,
    extra: Sequence[str] = (),
) -> int:
    """Rows T of a ring of ``capacity`` transitions that fits in ``available`` bytes.

    Raises:
        ConfigError: it does not fit; says the bytes and the largest capacity that does.
    """

    def size(rows: int) -> int:
        return replay_bytes(obs, action_size, num_envs, rows, horizon, limit, dtype, extra)

    rows = capacity // num_envs
    need = size(rows)
    if need <= available:
        return rows
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= available else (low, middle)
    raise ConfigError(
        "replay.capacity",
        capacity,
        f"at most {low * num_envs} here: this many need {need / 2**30:.3g} GiB, {available / 2**30:.3g} GiB are free",
    )
