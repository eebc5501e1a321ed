"""Rollout storage: ``horizon`` rows of every environment, collected with one policy and one set of statistics.

Time runs down the rows, as in the replay, and each observation is stored once; but nothing wraps: every tick overwrites
the segment. ::

      row 0     |  o a p r f     o  observation acted on        p  parameters of the distribution that acted
      row 1     |  o a p r f     a  action, before clamping     r  reward, raw      f  flags (+ number of the final
      ...       |                                                                      observation, if cut off)
      row T     |  o             the next observation to act on
      finals    |  o o           K final observations of truncated rows, in order, and one scratch row

With next-step autoreset K is 0: a filler row has the final observation. With same-step autoreset every row may end an
episode, so K is T, unless the simulator truncates at its time limit only (``EnvSpec.info``). All observations are in
one tensor, so their values take one forward pass. The collector
writes during its part of a tick; a learner reads afterwards. If both run at once there are two halves: the collector
fills one while the learner reads the other, and they swap between ticks. The learner pulls the index of the full half
and its statistics like weights (:class:`View`).

Does not depend on networks or losses.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from pql.contract.env import EnvSpec
from pql.data.frames import put
from pql.data.normalize import Normalizer, clip
from pql.data.store import Store
from pql.types import Memory, Obs, Rows, Step

STEPS = ("action", "params", "reward", "flags", "final", "version")
"""Stored fields with shape [T, N, ...]; all others have one joint axis of rows and columns."""


class Progress:
    """Counters of an on-policy run, 0-dim tensors on the device.

    Args:
        steps_per_tick: env steps of a rollout, T * N.
    """

    def __init__(self, device: torch.device, steps_per_tick: int = 1):
        self.steps_per_tick = steps_per_tick
        self.ticks = torch.zeros((), dtype=torch.int64, device=device)
        self.lost = torch.zeros((), dtype=torch.int64, device=device)  # time limits without a final observation

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class PolicyOutput(NamedTuple):
    """Policy output of one step: raw action, distribution parameters, weight version."""

    raw: Tensor  # [N, A] before clamping or squashing, or [N] int64
    params: Tensor  # [N, P] of the action's distribution
    version: Tensor  # [N] int64 of the weights that acted, in the learner's ticks; -1: another source chose the action
    carry: Tensor | None = None  # [N, C] recurrent state before; stored if environments may answer late

    def map(self, change: Callable[[Tensor], Tensor]) -> "PolicyOutput":
        """Apply ``change`` to every tensor."""
        return PolicyOutput._make(None if t is None else change(t) for t in self)


class Segment(NamedTuple):
    """A full rollout, normalised with the statistics in use when it was collected. T rows, row T, then K + 1 finals.

    ``mask`` is 0 for filler rows and rows with an unknown true successor (an unannounced restart, a time limit whose
    final observation was lost): such rows are excluded from losses, and trajectories end before them.
    """

    obs: Obs  # [T + 1 + K + 1, N, ...] normalised
    action: Tensor  # [T, N, A] raw, or [T, N] int64
    params: Tensor  # [T, N, P]
    reward: Tensor  # [T, N] clipped and scaled
    alive: Tensor  # [T, N] float32; 0 if terminated: no bootstrap
    goes_on: Tensor  # [T, N] float32; 1 if the next row is the successor
    successor: Tensor  # [T, N] int64; row of ``obs`` to bootstrap from
    first: Tensor  # [T, N] bool; the next row begins an episode
    mask: Tensor  # [T, N] float32
    lost: Tensor  # 0-dim int64; time limits whose final observation was lost
    carry: Tensor  # [N, C] the policy's recurrent state before row 0
    fresh: Tensor  # [N] bool; row 0 begins an episode (with a recurrent policy)
    final_row: Tensor  # [K + 1, N] int64; the row that each final observation followed
    version: Tensor  # [T, N] int64; of the weights that acted


class View:
    """Index of the half of a rollout that was filled last, and its statistics."""

    def __init__(self, norm: Normalizer, device: torch.device):
        self.half = torch.zeros((), dtype=torch.int64, device=device)
        self.norm = norm.copy_to(device)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the collector publishes and a reader pulls, in a fixed order."""
        return [self.half, *self.norm.frozen()]


class Rollout(Store):
    """Storage for one or two segments, each of a tick: ``open`` gets its first observation.

    Args:
        spec: of the environment.
        norm: the collector's normaliser; its frozen statistics are copied when a segment begins.
        horizon: T.
        params_size: P.
        carry_size: C, size of the policy's recurrent state; 0 without.
        halves: 2 if one is read while the other is filled.

    Attributes:
        sealed: view of the half filled last (between ticks) or being filled.
    """

    def __init__(
        self,
        spec: EnvSpec,
        norm: Normalizer,
        horizon: int,
        params_size: int,
        device: torch.device,
        carry_size: int = 0,
        halves: int = 1,
    ):
        n = spec.num_envs
        self.horizon, self.num_envs, self.device, self.halves = horizon, n, device, halves
        self.finals = rollout_final_rows(horizon, spec)  # K
        self.rows = horizon + 1 + self.finals + 1
        count = halves * self.rows * n
        self.obs = {k: torch.zeros(count, *s.shape, dtype=s.dtype, device=device) for k, s in spec.obs.items()}
        steps = halves * horizon
        self.action = torch.zeros(steps, n, *spec.action.shape, dtype=spec.action.dtype, device=device)
        self.params = torch.zeros(steps, n, params_size, device=device)
        self.reward = torch.zeros(steps, n, device=device)
        self.flags = torch.zeros(steps, n, 5, dtype=torch.bool, device=device)
        self.final = torch.zeros(steps, n, dtype=torch.int64, device=device)  # final observations in the column so far
        self.version = torch.zeros(steps, n, dtype=torch.int64, device=device)
        self.final_row = torch.zeros(halves * (self.finals + 1) * n, dtype=torch.int64, device=device)
        self.carry = torch.zeros(halves * n, carry_size, device=device)
        self.fresh = torch.ones(halves * n, dtype=torch.bool, device=device)
        self.sealed = View(norm, device)
        self._source = norm.frozen()
        self.row = torch.zeros(n, dtype=torch.int64, device=device)  # columns advance independently, as in the replay
        self.count = torch.zeros(n, dtype=torch.int64, device=device)
        self.columns = torch.arange(n, device=device)
        self._next = torch.arange(1, horizon + 1, device=device).unsqueeze(1)

    # -- writing ------------------------------------------------------------------------------------------------------

    def take_statistics(self) -> None:
        """Use the current statistics for all later reads."""
        torch._foreach_copy_(self.norm.frozen(), self._source)

    def open(self, obs: Obs, memory: Memory | None) -> None:
        """Begin a tick at ``obs`` [N, ...] and the policy's recurrent state, with the statistics now in use."""
        half = self.sealed.half
        half.add_(1).remainder_(self.halves)
        for k, store in self.obs.items():
            put(store, self.columns + half * (self.rows * self.num_envs), obs[k])
        if memory is not None:
            self.carry.index_copy_(0, self.columns + half * self.num_envs, memory.carry.to(self.device))
            self.fresh.index_copy_(0, self.columns + half * self.num_envs, memory.fresh.to(self.device))
        self.take_statistics()
        self.row.zero_()
        self.count.zero_()

    def insert(self, acted: PolicyOutput, step: Step, columns: Tensor | None = None) -> None:
        """Append one row to ``columns`` [n] (default: all); steps beyond the horizon overwrite from row 0."""
        columns = self.columns if columns is None else columns
        row, count, n, half = self.row[columns], self.count[columns], self.num_envs, self.sealed.half
        here = (row + half * self.horizon) * n + columns
        flags = torch.stack((step.terminated, step.truncated, step.first, step.valid, step.final_ok), -1)
        rows = [
            (self.action, acted.raw),
            (self.params, acted.params),
            (self.reward, step.reward),
            (self.flags, flags),
            (self.final, count),
            (self.version, acted.version),
        ]
        for store, new in rows:
            store.flatten(0, 1).index_copy_(0, here, new)
        # Written for every row: an entry is valid only once the counter has passed it. The scratch row is the last.
        place = count.clamp(max=self.finals)
        self.final_row.index_copy_(0, (place + half * (self.finals + 1)) * n + columns, row)
        for k, store in self.obs.items():
            put(store, (row + 1 + half * self.rows) * n + columns, step.obs[k])
            put(store, (place + self.horizon + 1 + half * self.rows) * n + columns, step.final_obs[k])
        self.count.index_copy_(0, columns, count + needs_room(step))
        self.row.index_copy_(0, columns, (row + 1).remainder(self.horizon))

    def positions(self) -> list[Tensor]:
        """Return the write positions, which are restored after a warm-up of the captured graph."""
        return [self.row, self.count]

    # -- reading -----------------------------------------------------------------------------------------------------

    def segment(self, view: View | None = None, columns: Tensor | None = None) -> Segment:
        """Return the rows of the tick that has just ended: normalised, rewards clipped and scaled, ends resolved.

        Args:
            view: the reader's view; None: the collector's, between ticks.
            columns: [n] int64, the columns to read; None: all.
        """
        view = self.sealed if view is None else view
        norm, parts = view.norm, {k: self._read(k, t, view, columns) for k, t in self.storage().items()}
        width = parts["reward"].shape[1]
        terminated, truncated, first, valid, final_ok = parts["flags"].unbind(-1)
        cut, final, successor = truncated & ~terminated, parts["final"], self._next.expand(-1, width)
        apart, unknown = cut & first, ~final_ok
        if self.finals < self.horizon:  # else there is room for all
            unknown = unknown | (first & (final >= self.finals))
        lost = cut & valid & unknown
        if self.finals:
            successor = torch.where(apart, final.clamp(max=self.finals) + (self.horizon + 1), successor)
        unknown = lost | (first & ~terminated & ~truncated)
        rows = {k: parts[f"obs/{k}"].unflatten(0, (-1, width)) for k in self.obs}
        reward = clip(parts["reward"], norm.reward_clip) * norm.reward_scale
        return Segment(
            norm(rows),
            parts["action"],
            parts["params"],
            reward,
            (~terminated).float(),
            (~(terminated | truncated | first)).float(),
            successor,
            first,
            (valid & ~unknown).float(),
            lost.sum(),
            parts["carry"],
            parts["fresh"],
            parts["final_row"].view(-1, width),
            parts["version"],
        )

    @property
    def norm(self) -> Normalizer:
        """Return the statistics of the segment filled last."""
        return self.sealed.norm

    def storage(self) -> dict[str, Tensor]:
        """Return all stored fields, with the halves concatenated along the first axis."""
        names = (*STEPS, "final_row", "carry", "fresh")
        return {**{f"obs/{k}": v for k, v in self.obs.items()}, **{k: getattr(self, k) for k in names}}

    def _read(self, name: str, store: Tensor, view: View, columns: Tensor | None) -> Tensor:
        """Return the field ``name`` at ``view``, only for ``columns`` if given."""
        store = self._half(store, view)
        if columns is None:
            return store
        if name in STEPS:
            return store.index_select(1, columns)
        return store.unflatten(0, (-1, self.num_envs)).index_select(1, columns).flatten(0, 1)

    def _half(self, store: Tensor, view: View) -> Tensor:
        """Return the half of ``store`` at ``view``; with two halves, a copy at a fixed address."""
        if self.halves == 1:
            return store
        return store.unflatten(0, (2, -1)).index_select(0, view.half.view(1)).squeeze(0)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> Rows:
        """Return the unread segment if there are two halves. With one it is empty: between ticks, everything that the
        next segment depends on belongs to the collector."""
        if self.halves == 1:
            return Rows()
        return Rows({**self.storage(), **{f"sealed/{i}": t for i, t in enumerate(self.sealed.tensors())}})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for k, t in self.state_dict().items():
            self.restore(t, state[k])

    def restore(self, store: Tensor, saved: Tensor) -> None:
        """Copy a ``saved`` field [rows, ...]; release 0.2 had another number of final observations in each half."""
        if store.shape != saved.shape:
            store, saved = (t.unflatten(0, (self.halves, -1, self.num_envs)) for t in (store, saved))
            rows = min(store.shape[1], saved.shape[1])
            store, saved = store[:, :rows], saved[:, :rows]
        store.copy_(saved)


def rollout_final_rows(horizon: int, spec: EnvSpec) -> int:
    """Return K, final observations per column that ``horizon`` rows may need a place for."""
    if spec.autoreset == "next_step" or spec.final_obs == "never":
        return 0
    limit = spec.max_episode_steps if spec.info.get("truncates_at_limit") else None
    return min(horizon, math.ceil(horizon / limit) + 1) if limit else horizon


def needs_room(step: Step) -> Tensor:
    """Return the rows whose final observation is in no other row, [n] bool."""
    return step.truncated & step.first & step.valid & step.final_ok


def rollout_bytes(spec: EnvSpec, horizon: int, params_size: int) -> int:
    """Return the bytes of a segment."""
    obs = sum(math.prod(s.shape) * s.dtype.itemsize for s in spec.obs.values())
    action = math.prod(spec.action.shape) * spec.action.dtype.itemsize
    finals = rollout_final_rows(horizon, spec) + 1
    return spec.num_envs * ((horizon + 1 + finals) * obs + 8 * finals + horizon * (action + 4 * params_size + 25))


def by_parts(function: Callable[[Obs], Tensor], obs: Obs, count: int) -> Tensor:
    """Apply ``function`` to observations [T, ...] in at most ``count`` calls on consecutive rows, to bound memory:
    activations of an image network take at least four times the images' bytes."""
    rows = next(iter(obs.values())).shape[0]
    size = math.ceil(rows / count)
    return torch.cat([function({k: v[i : i + size] for k, v in obs.items()}) for i in range(0, rows, size)])


def permutations(count: int, size: int, gen: Generator, device: torch.device) -> Tensor:
    """Return ``count`` random orders of ``range(size)``, [count, size] int64, without a host sync."""
    return torch.randint(1 << 62, (count, size), generator=gen, device=device).argsort(1)


def minibatches(rows: Mapping[str, Tensor], epochs: int, count: int, dim: int, gen: Generator) -> Iterator[Any]:
    """Shuffle all rows in every epoch and split them into ``count`` equal minibatches.

    Args:
        rows: by name; the same size along ``dim`` (0: transitions; 1: environments, with their whole sequences).
    Yields:
        ``epochs * count`` dicts, each copied on request, so that no more than one minibatch is held twice.
    """
    like = next(iter(rows.values()))
    for order in permutations(epochs, like.shape[dim], gen, like.device):
        for part in order.chunk(count):
            yield {k: v.index_select(dim, part) for k, v in rows.items()}
