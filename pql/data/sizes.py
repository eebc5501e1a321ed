"""Sizes of replay storage: types, rows, bytes, and whether they fit into memory."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.data.frames import kept_shape
from pql.errors import ConfigError


def storage_dtype(spec: ObsSpec, dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` for floating observations, else the spec's own."""
    return dtype if spec.dtype.is_floating_point else spec.dtype


def final_rows(rows: int, horizon: int, max_episode_steps: int | None) -> int:
    """Return K, the final observations per column that a full ring can refer to, plus those being written."""
    return (math.ceil(rows / max_episode_steps) if max_episode_steps else 0) + horizon + 1


def action_store(action_size: int | None, cells: int, device: torch.device) -> Tensor:
    """Return zeros [cells, A] float32, or [cells] int64 if ``action_size`` is None."""
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
    """Return the bytes that a ring of ``rows`` rows takes."""
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
    """Return the rows T of a ring of ``capacity`` transitions.

    Raises:
        ConfigError: it takes more than ``available`` bytes; names the largest capacity that fits.
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
