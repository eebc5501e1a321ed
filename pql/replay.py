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

The successor of row t is row t + 1's observation; a row that was cut off finds its true successor in ``finals``.
Both live in one tensor, so a batch's next observations are one gather.

Writer and readers never meet: readers see a :class:`Cursor`, sealed at a tick's boundary, and draw only rows that
the collector cannot overwrite before the next one (the guard band of ``horizon + 1`` oldest rows). The observation
of row ``head`` itself is sealed too, so the newest transition has its successor.

This file knows nothing of streams, threads or algorithms.
"""

import math
from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from pql.env import ObsSpec
from pql.errors import ConfigError
from pql.types import Batch, Obs, ObsBatch, Step

TERMINATED, TRUNCATED, NEXT_FIRST, VALID, FINAL_OK = 1, 2, 4, 8, 16
_ENDS = TERMINATED | TRUNCATED | NEXT_FIRST


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


class Replay:
    """A ring of ``rows`` x ``num_envs`` transitions on one device.

    Args:
        obs: observation groups to store.
        action_size: A.
        rows: T, rows per column.
        horizon: rows the collector writes between two seals.
        max_episode_steps: time limit; sizes the store of final observations (None: no time limit).
        dtype: storage of floating observations (uint8 observations always stay uint8).
        obs_only: keep observations alone (for a policy learner on a device of its own).
    """

    def __init__(
        self,
        obs: Mapping[str, ObsSpec],
        action_size: int,
        num_envs: int,
        rows: int,
        horizon: int,
        max_episode_steps: int | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        obs_only: bool = False,
    ):
        self.rows, self.num_envs, self.horizon, self.device = rows, num_envs, horizon, device
        self.obs_only = obs_only
        self.finals = 0 if obs_only else final_rows(rows, horizon, max_episode_steps)  # K
        cells = rows * num_envs
        self.obs = {
            k: torch.zeros((rows + self.finals) * num_envs, *s.shape, dtype=storage_dtype(s, dtype), device=device)
            for k, s in obs.items()
        }
        self.flags = torch.zeros(cells, dtype=torch.uint8, device=device)
        if not obs_only:
            self.action = torch.zeros(cells, action_size, device=device)
            self.reward = torch.zeros(cells, device=device)
            self.final = torch.zeros(cells, dtype=torch.int32, device=device)  # which final observation, if truncated
        self.live = Cursor(num_envs, device)  # the collector's own view, ahead of every sealed one
        self.columns = torch.arange(num_envs, device=device)
        self._constants: dict[tuple[int, float], tuple[Tensor, Tensor, Tensor]] = {}

    # -- the collector's side -------------------------------------------------------------------------------------

    def begin(self, obs: Obs, columns: Tensor | None = None) -> None:
        """Write the observation ([n, ...]) that ``columns`` (default: all) will act on first."""
        columns = self.columns if columns is None else columns
        self._write_obs(self.live.head[columns] % self.rows * self.num_envs + columns, obs)

    def insert(self, action: Tensor, step: Step, columns: Tensor | None = None) -> None:
        """Append one row to ``columns`` (default: all): the action taken there and what followed.

        Args:
            action: [n, A] as acted.
            step: fields of shape [n, ...].
            columns: [n] int64, distinct.
        """
        columns = self.columns if columns is None else columns
        head = self.live.head[columns]
        here = head % self.rows * self.num_envs + columns
        flags = (
            step.terminated * TERMINATED + step.truncated * TRUNCATED + step.first * NEXT_FIRST + step.valid * VALID
        ) + step.final_ok * FINAL_OK
        self.flags.index_copy_(0, here, flags.to(torch.uint8))
        if not self.obs_only:
            self.action.index_copy_(0, here, action)
            self.reward.index_copy_(0, here, step.reward)
            count = self.live.finals[columns]
            self.final.index_copy_(0, here, count.to(torch.int32))
            # Written whether or not this row was cut off: the slot counts only once the counter has passed it.
            self._write_obs((self.rows + count % self.finals) * self.num_envs + columns, step.final_obs)
            self.live.finals.index_add_(0, columns, (step.truncated & step.valid).to(torch.int64))
        self._write_obs((head + 1) % self.rows * self.num_envs + columns, step.obs)
        self.live.head.index_copy_(0, columns, head + 1)

    def _write_obs(self, index: Tensor, obs: Obs) -> None:
        for name, store in self.obs.items():
            store.index_copy_(0, index, obs[name].to(store.dtype))

    # -- the learners' side ---------------------------------------------------------------------------------------

    def draw(self, cursor: Cursor, batch: int, gen: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw rows uniformly per column. Returns (logical row [B], column [B], head of that column [B]).

        Row and column are drawn apart and in integers: a float32 uniform has 24 bits, too few for large rings.
        """
        column = torch.randint(self.num_envs, (batch,), generator=gen, device=self.device)
        bits = torch.randint(2**62, (batch,), generator=gen, device=self.device)
        head = cursor.head[column]
        length = head.clamp(1, self.rows - self.horizon - 1)
        return (head - 1 - bits % length).clamp_(min=0), column, head

    def sample_obs(self, cursor: Cursor, batch: int, gen: Generator) -> ObsBatch:
        """Observations alone, for a policy update: [B, ...] each."""
        row, column, head = self.draw(cursor, batch, gen)
        index = row % self.rows * self.num_envs + column
        mask = ((self.flags[index] & VALID) != 0) & (head > 0)
        return ObsBatch(self._gather(index), mask.float(), torch.ones_like(mask, dtype=torch.float32))

    def sample(self, cursor: Cursor, batch: int, n: int, gamma: float, gen: Generator) -> Batch:
        """Draw ``batch`` n-step windows. Shapes are static; windows that must not be used have ``mask == 0``."""
        row, column, head = self.draw(cursor, batch, gen)
        return self.windows(cursor, row, column, head, n, gamma)

    def windows(self, cursor: Cursor, row: Tensor, column: Tensor, head: Tensor, n: int, gamma: float) -> Batch:
        """The n-step windows that start at logical ``row`` of ``column`` (both [B]).

        A window ends at the first of: n steps, a terminated or truncated row, the row before a filler row or before
        an unannounced restart, the head. Its target is ``sum_i gamma^i r_i + gamma^m (1 - terminated) V(s_{t+m})``.
        """
        steps, powers, table = self._tables(n, gamma)
        # A window never reads flags or rewards of a row at or above the head: that row is in flight.
        ahead = head - 1 - row  # [B] rows between this one and the newest complete one
        offset = torch.minimum(steps, ahead)  # [n+1, B]
        cell = (row + offset) % self.rows * self.num_envs + column  # [n+1, B]
        flags = self.flags[cell]  # [n+1, B]
        inside = steps[1:] <= ahead  # [n, B] the row after this one is complete
        stop = ((flags[:-1] & _ENDS) != 0) | ~inside | ((flags[1:] & VALID) == 0)
        # alive[i]: step i belongs to the window, i.e. nothing before it stopped
        alive = torch.cat((torch.ones_like(stop[:1]), ~stop[:-1])).to(torch.int64).cumprod(0)  # [n, B]
        length = alive.sum(0)  # [B] m
        reward = (self.reward[cell[:-1]] * (alive * powers)).sum(0)
        last = (length - 1).unsqueeze(0)
        end = flags.gather(0, last).squeeze(0)
        terminated, truncated = (end & TERMINATED) != 0, (end & TRUNCATED) != 0
        count = self.final[cell.gather(0, last).squeeze(0)].to(torch.int64)
        lost = truncated & (((end & FINAL_OK) == 0) | (count < cursor.finals[column] - self.finals + self.horizon))
        unannounced = (end & _ENDS) == NEXT_FIRST
        usable = ((flags[0] & VALID) != 0) & (head > 0)
        cursor.lost += (lost & usable).sum()
        mask = (usable & ~lost & ~unannounced).float()
        successor = torch.where(truncated, self.rows + count % self.finals, (row + length) % self.rows)
        obs, next_obs = self._gather_pair(cell[0], successor * self.num_envs + column)
        discount = table[length] * (~terminated)
        return Batch(obs, self.action[cell[0]], reward, discount, next_obs, mask, torch.ones_like(mask), cell[0])

    def _tables(self, n: int, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
        """Constants of a window: offsets [n+1, 1], gamma^i [n, 1], gamma^m [n+1]. Made once, in float64."""
        if (n, gamma) not in self._constants:
            powers = torch.tensor([gamma**i for i in range(n + 1)], dtype=torch.float64).float().to(self.device)
            steps = torch.arange(n + 1, device=self.device).unsqueeze(1)
            self._constants[n, gamma] = (steps, powers[:-1].unsqueeze(1), powers)
        return self._constants[n, gamma]

    def _gather(self, index: Tensor) -> Obs:
        # Half-precision floats widen here, so no network ever sees the storage type; uint8 frames stay uint8.
        return {
            k: rows.float() if (rows := v.index_select(0, index)).is_floating_point() else rows
            for k, v in self.obs.items()
        }

    def _gather_pair(self, index: Tensor, next_index: Tensor) -> tuple[Obs, Obs]:
        both = self._gather(torch.cat((index, next_index)))
        batch = index.shape[0]
        return {k: v[:batch] for k, v in both.items()}, {k: v[batch:] for k, v in both.items()}

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Every stored tensor, by name; the ring's positions too."""
        state = {f"obs.{k}": v for k, v in self.obs.items()}
        state |= {"flags": self.flags, "head": self.live.head, "finals": self.live.finals}
        if not self.obs_only:
            state |= {"action": self.action, "reward": self.reward, "final": self.final}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy in place (captured graphs keep their addresses)."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def storage_dtype(spec: ObsSpec, dtype: torch.dtype) -> torch.dtype:
    return dtype if spec.dtype.is_floating_point else spec.dtype


def final_rows(rows: int, horizon: int, max_episode_steps: int | None) -> int:
    """K: as many final observations per column as a full ring can refer to, plus those in flight."""
    return (math.ceil(rows / max_episode_steps) if max_episode_steps else 0) + horizon + 1


def replay_bytes(
    obs: Mapping[str, ObsSpec], action_size: int, num_envs: int, rows: int, horizon: int, limit: int | None,
    dtype: torch.dtype,
) -> int:  # fmt: skip
    """Bytes a ring of ``rows`` rows takes, before anything is allocated."""
    obs_bytes = sum(math.prod(s.shape) * storage_dtype(s, dtype).itemsize for s in obs.values())
    cell = action_size * 4 + 4 + 4 + 1
    return num_envs * ((rows + final_rows(rows, horizon, limit)) * obs_bytes + rows * cell)


def preflight(
    obs: Mapping[str, ObsSpec], action_size: int, num_envs: int, capacity: int, horizon: int, limit: int | None,
    dtype: torch.dtype, available: int,
) -> int:  # fmt: skip
    """Rows T of a ring of ``capacity`` transitions that fits in ``available`` bytes.

    Raises:
        ConfigError: it does not fit; says the bytes and the largest capacity that does.
    """
    rows = capacity // num_envs
    need = replay_bytes(obs, action_size, num_envs, rows, horizon, limit, dtype)
    if need <= available:
        return rows
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        fits = replay_bytes(obs, action_size, num_envs, middle, horizon, limit, dtype) <= available
        low, high = (middle, high) if fits else (low, middle)
    raise ConfigError(
        "replay.capacity", capacity,
        f"at most {low * num_envs} here: this many need {need / 2**30:.3g} GiB, {available / 2**30:.3g} GiB are free",
    )  # fmt: skip
