"""Sizes of replay storage: types, rows, bytes, and whether they fit into memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pql.contract.env import ObsSpec
from pql.contract.stacks import kept_shape
from pql.errors import ConfigError, gib


def storage_dtype(spec: ObsSpec, dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` for floating observations, else the spec's own."""
    return dtype if spec.dtype.is_floating_point else spec.dtype


def action_store(action_size: int | None, cells: int, device: torch.device) -> Tensor:
    """Return zeros [cells, A] float32, or [cells] int64 if ``action_size`` is None."""
    if action_size is None:
        return torch.zeros(cells, dtype=torch.int64, device=device)
    return torch.zeros(cells, action_size, device=device)


@dataclass(frozen=True)
class ReplayLayout:
    """Size and types of a ring of ``rows`` x ``num_envs`` transitions.

    Attributes:
        obs: observation groups as they are stored (:func:`pql.data.frames.stored_spec`).
        action_size: A; None: discrete actions, int64.
        rows: T, rows per column.
        horizon: most rows written per column and tick, filler rows included.
        fillers: insert a filler row with the final observation where an episode ends (same-step autoreset).
        dtype: storage of floating observations (uint8 stays uint8).
        extra: names of float32 values stored with each action.
    """

    obs: Mapping[str, ObsSpec]
    action_size: int | None
    num_envs: int
    rows: int
    horizon: int
    fillers: bool
    dtype: torch.dtype = torch.float32
    extra: Sequence[str] = ()


def replay_bytes(layout: ReplayLayout) -> int:
    """Return the bytes of a ring."""
    obs, rows, action = layout.obs, layout.rows, layout.action_size
    sizes = {k: math.prod(kept_shape(s)) * storage_dtype(s, layout.dtype).itemsize for k, s in obs.items()}
    blank = sum(sizes[k] for k, s in obs.items() if s.stack > 1)
    cell = (8 if action is None else action * 4) + 4 + 1 + 4 * len(layout.extra)
    return layout.num_envs * rows * (sum(sizes.values()) + cell) + blank


def preflight(layout: ReplayLayout, capacity: int, available: int) -> int:
    """Return the rows T of a ring of ``capacity`` transitions; ``layout.rows`` is not read.

    Raises:
        ConfigError: it needs more than ``available`` bytes; the message names the largest capacity that fits.
    """

    def size(rows: int) -> int:
        return replay_bytes(replace(layout, rows=rows))

    num_envs = layout.num_envs
    rows = capacity // num_envs
    need = size(rows)
    if need <= available:
        return rows
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= available else (low, middle)
    allowed = f"at most {low * num_envs} here: this many need {gib(need)}, {gib(available)} are free"
    raise ConfigError("replay.capacity", capacity, allowed)
