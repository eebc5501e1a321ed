"""A rollout: ``horizon`` rows of every environment, as one policy with one set of statistics saw and made them.

Time runs down the rows, as in the replay, and each observation is stored once; but nothing wraps: every tick fills the
segment anew. ::

      row 0     |  o a p r f     o  observation acted on        p  parameters of the distribution that acted
      row 1     |  o a p r f     a  action, before clamping     r  reward, raw      f  flags (+ number of the final
      ...       |                                                                      observation, if cut off)
      row T     |  o             the observation acted on next
      finals    |  o o           K true final observations of truncated rows, in order, and one row to waste

All observations live in one tensor, so the values of rows, of row T and of finals are one pass. The collector writes
it during its part of a tick; a learner reads it after. A schedule that lets both work at once gives each a segment of
its own and swaps them between ticks.

This file knows nothing of networks or losses.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from pql.env import Discrete, EnvSpec
from pql.frames import put
from pql.normalize import Normalizer, clip
from pql.types import Memory, Obs, Step


class Acted(NamedTuple):
    """What a policy did in one row: more than the simulator sees."""

    raw: Tensor  # [N, A] before clamping or squashing, or [N] int64
    params: Tensor  # [N, P] of its distribution


class Segment(NamedTuple):
    """A full rollout, read with the statistics it was made with. T rows, then row T, then K + 1 finals.

    ``mask`` is 0 for filler rows and where the true successor is unknown (an unannounced restart, a time limit whose
    final observation was lost): such rows are not learned from, and rows before them end with their value.
    """

    obs: Obs  # [T + 1 + K + 1, N, ...] normalised
    action: Tensor  # [T, N, A] raw, or [T, N] int64
    params: Tensor  # [T, N, P]
    reward: Tensor  # [T, N] clipped and scaled
    alive: Tensor  # [T, N] float32; 0 where terminated: no value lies beyond
    goes_on: Tensor  # [T, N] float32; 1 where the next row is the successor
    successor: Tensor  # [T, N] int64; row of ``obs`` whose value lies beyond
    first: Tensor  # [T, N] bool; the next row begins an episode
    mask: Tensor  # [T, N] float32
    lost: Tensor  # 0-dim int64; time limits whose final observation was lost
    carry: Tensor  # [N, C] the policy's memory before row 0
    fresh: Tensor  # [N] bool; row 0 begins an episode (with memory)
    final_row: Tensor  # [K + 1, N] int64; the row that each final observation followed


class Rollout:
    """Storage for one segment, and the collector's way to write it (a store, as the replay is).

    Args:
        spec: of the environment.
        norm: the collector's normaliser; its frozen statistics are copied when a segment begins.
        horizon: T.
        params_size: P.
        carry_size: C, of the policy's memory; 0 without.
    """

    def __init__(
        self, spec: EnvSpec, norm: Normalizer, horizon: int, params_size: int, device: torch.device, carry_size: int = 0
    ):
        n = spec.num_envs
        self.horizon, self.num_envs, self.device = horizon, n, device
        self.finals = final_rows(horizon, spec.max_episode_steps)  # K
        rows = horizon + 1 + self.finals + 1
        self.obs = {k: torch.zeros(rows * n, *s.shape, dtype=s.dtype, device=device) for k, s in spec.obs.items()}
        discrete = isinstance(spec.action, Discrete)
        self.action = (
            torch.zeros(horizon, n, dtype=torch.int64, device=device)
            if discrete else torch.zeros(horizon, n, spec.action.size, device=device)  # type: ignore[union-attr]
        )  # fmt: skip
        self.params = torch.zeros(horizon, n, params_size, device=device)
        self.reward = torch.zeros(horizon, n, device=device)
        self.flags = torch.zeros(5, horizon, n, dtype=torch.bool, device=device)
        self.final = torch.zeros(horizon, n, dtype=torch.int64, device=device)  # finals in the column so far
        self.final_row = torch.zeros((self.finals + 1) * n, dtype=torch.int64, device=device)
        self.carry = torch.zeros(n, carry_size, device=device)
        self.fresh = torch.ones(n, dtype=torch.bool, device=device)
        self.norm = norm.copy_to(device)
        self._source = norm.frozen()
        self.row = torch.zeros(n, dtype=torch.int64, device=device)  # columns advance alone, as in the replay
        self.count = torch.zeros(n, dtype=torch.int64, device=device)
        self.columns = torch.arange(n, device=device)
        self._here = torch.arange(horizon, device=device).unsqueeze(1)

    # -- the collector's side -------------------------------------------------------------------------------------

    def begin(self, obs: Obs) -> None:
        """Nothing to keep: the tick's ``open`` brings the observation."""

    def restart(self, obs: Obs) -> None:
        """Nothing to cut: no segment outlives its tick."""

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """A tick begins: from ``obs`` [N, ...] and the policy's memory, with the statistics in use now."""
        for k, store in self.obs.items():
            store[: self.num_envs].copy_(obs[k])
        if memory is not None:
            self.carry.copy_(memory.carry)
            self.fresh.copy_(memory.fresh)
        torch._foreach_copy_(self.norm.frozen(), self._source)
        self.row.zero_()
        self.count.zero_()

    def insert(self, acted: Acted, step: Step, columns: Tensor | None = None) -> None:
        """Append one row to ``columns`` [n] (default: all); steps beyond the horizon overwrite from row 0."""
        columns = self.columns if columns is None else columns
        row, count = self.row[columns], self.count[columns]
        here = row * self.num_envs + columns
        self.action.flatten(0, 1).index_copy_(0, here, acted.raw)
        self.params.flatten(0, 1).index_copy_(0, here, acted.params)
        self.reward.flatten().index_copy_(0, here, step.reward)
        flags = torch.stack((step.terminated, step.truncated, step.first, step.valid, step.final_ok))
        self.flags.flatten(1).index_copy_(1, here, flags)
        self.final.flatten().index_copy_(0, here, count)
        # Written whether or not this row was cut off: the place counts only once the counter has passed it. Where
        # more rows were cut off than there are places, the last one takes what is wasted.
        place = count.clamp(max=self.finals) * self.num_envs + columns
        self.final_row.index_copy_(0, place, row)
        for k, store in self.obs.items():
            put(store, here + self.num_envs, step.obs[k])
            put(store, place + (self.horizon + 1) * self.num_envs, step.final_obs[k])
        self.count.index_copy_(0, columns, count + (step.truncated & step.valid))
        self.row.index_copy_(0, columns, (row + 1).remainder(self.horizon))

    def positions(self) -> list[Tensor]:
        """What a warm-up of the recording must leave as it was."""
        return [self.row, self.count]

    # -- the learner's side ---------------------------------------------------------------------------------------

    def segment(self) -> Segment:
        """The rows of the tick that has just ended: normalised, rewards clipped and scaled, episode ends settled."""
        terminated, truncated, first, valid, final_ok = self.flags.unbind()
        cut = truncated & ~terminated
        lost = cut & valid & (~final_ok | (self.final >= self.finals))
        unknown = lost | (first & ~terminated & ~truncated)
        successor = torch.where(cut, self.final.clamp(max=self.finals) + self.horizon + 1, self._here + 1)
        rows = {k: v.view(-1, self.num_envs, *v.shape[1:]) for k, v in self.obs.items()}
        reward = clip(self.reward, self.norm.reward_clip) * self.norm.reward_scale
        return Segment(
            self.norm(rows), self.action, self.params, reward, (~terminated).float(),
            (~(terminated | truncated | first)).float(), successor, first, (valid & ~unknown).float(), lost.sum(),
            self.carry, self.fresh, self.final_row.view(-1, self.num_envs),
        )  # fmt: skip

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: between ticks, what the next segment depends on is all with the collector."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def final_rows(horizon: int, max_episode_steps: int | None) -> int:
    """K: as many final observations per column as time limits can fall in ``horizon`` rows, plus one for other cuts."""
    return min(horizon, math.ceil(horizon / max_episode_steps) + 1) if max_episode_steps else horizon


def rollout_bytes(spec: EnvSpec, horizon: int, params_size: int) -> int:
    """Bytes that a segment takes."""
    obs = sum(math.prod(s.shape) * s.dtype.itemsize for s in spec.obs.values())
    action = 8 if isinstance(spec.action, Discrete) else 4 * spec.action.size
    finals = final_rows(horizon, spec.max_episode_steps) + 1
    return spec.num_envs * ((horizon + 1 + finals) * obs + 8 * finals + horizon * (action + 4 * params_size + 17))


def by_parts(function: Callable[[Obs], Tensor], obs: Obs, count: int) -> Tensor:
    """``function`` of observations [T, ...], in at most ``count`` calls on consecutive rows: images take four and more
    times the room of their bytes inside a network."""
    rows = next(iter(obs.values())).shape[0]
    size = math.ceil(rows / count)
    return torch.cat([function({k: v[i : i + size] for k, v in obs.items()}) for i in range(0, rows, size)])


def permutations(count: int, size: int, gen: Generator, device: torch.device) -> Tensor:
    """``count`` random orders of ``range(size)``, [count, size] int64, without a host sync."""
    return torch.randint(1 << 62, (count, size), generator=gen, device=device).argsort(1)


def minibatches(rows: Mapping[str, Tensor], epochs: int, count: int, dim: int, gen: Generator) -> Iterator[Any]:
    """Every epoch cuts all rows, in an order of its own, into ``count`` equal minibatches.

    Args:
        rows: by name; the same size along ``dim`` (0: transitions; 1: environments, whole sequences of them).
    Yields:
        ``epochs * count`` dicts, each copied when it is asked for: of images, no more than a minibatch lies twice.
    """
    like = next(iter(rows.values()))
    for order in permutations(epochs, like.shape[dim], gen, like.device):
        for part in order.chunk(count):
            yield {k: v.index_select(dim, part) for k, v in rows.items()}
