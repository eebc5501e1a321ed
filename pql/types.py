"""The records that travel between environments, replay and learners.

Shape letters used in every docstring and shape comment of this package:

    N  environments          T  time (rows of a ring, steps of a rollout)
    B  batch                 D  features of one observation group
    A  action dimensions     Z  atoms of a categorical value distribution
    E  critics in an ensemble

This file knows nothing of simulators, networks or devices.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pql.errors import ConfigError

Obs = dict[str, Tensor]
"""Observation groups by name. ``"policy"`` is always there; ``"critic"`` where an environment has
privileged observations for the value function. Each is ``[N, ...]``."""


class Rows(dict[str, Any]):
    """State by name, of whose tensors a checkpoint holds the first rows alone, those in use: how many, it knows."""


Metrics = dict[str, Tensor]
"""Name -> 0-dim float tensor on the device. Reading one on the host would wait for the device: don't."""


class Step(NamedTuple):
    """What one step of all environments returns: device tensors of static shape.

    ``terminated`` and ``truncated`` are disjoint; where a simulator raises both, ``terminated`` wins.
    Reading a ``Step`` needs no host synchronisation.
    """

    obs: Obs  # act on this next: [N, ...]; already the new episode's where one ended (same-step autoreset)
    reward: Tensor  # [N] float32, raw
    terminated: Tensor  # [N] bool; the task ended: no value beyond this row
    truncated: Tensor  # [N] bool; cut off (time limit): the value of final_obs stands beyond this row
    first: Tensor  # [N] bool; ``obs`` begins an episode (also after an unannounced restart)
    final_obs: Obs  # the true successor of this row's action; may alias ``obs`` where nothing ended
    final_ok: Tensor  # [N] bool; False: the simulator lost the final observation
    valid: Tensor  # [N] bool; False: a filler row (next-step autoreset); never learned from
    log: dict[str, Tensor]  # name -> [N] float32, e.g. reward terms; summed per episode


class Batch(NamedTuple):
    """Transitions for a value update. ``discount`` is all a loss sees of episode ends.

    The target is ``reward + discount * value(next_obs)``, with ``discount = gamma**m * (1 - terminated)`` for a
    window of ``m <= n`` steps. Rows with ``mask == 0`` are fill that keeps the shape static: every loss is
    ``sum(mask * weight * l) / sum(mask)``.
    """

    obs: Obs  # [B, ...]
    action: Tensor  # [B, A] float32, or [B] int64
    reward: Tensor  # [B] float32, n-step sum
    discount: Tensor  # [B] float32
    next_obs: Obs  # [B, ...]
    mask: Tensor  # [B] float32, 0 or 1
    weight: Tensor  # [B] float32, importance weight (1 without priorities)
    index: Tensor  # type: ignore[assignment]  # [B] int64, row * N + column in the ring (hides tuple.index)


class ObsBatch(NamedTuple):
    """Observations for a policy update; ``mask`` and ``weight`` as in :class:`Batch`."""

    obs: Obs  # [B, ...]
    mask: Tensor  # [B] float32
    weight: Tensor  # [B] float32


class Acted(NamedTuple):
    """An action, and numbers that the actor gives beside it for a replay to keep (say, the value that it expects)."""

    action: Tensor  # [n, A] float32, or [n] int64
    extra: dict[str, Tensor]  # name -> [n] float32; of a recurrent policy also "carry", [n, C]: what it remembered


class Memory(NamedTuple):
    """What a recurrent policy at work remembers."""

    carry: Tensor  # [N, C]; zeros where an episode begins
    fresh: Tensor  # [N] bool; an episode begins with the next action


AnyBatch = TypeVar("AnyBatch", Batch, ObsBatch)


def split(batch: AnyBatch, count: int) -> list[AnyBatch]:
    """Cut a batch of ``count * B`` rows into ``count`` batches of B (views, nothing is copied)."""

    def cut(field: Any) -> list[Any]:
        if isinstance(field, dict):
            parts = {k: v.chunk(count) for k, v in field.items()}
            return [{k: v[i] for k, v in parts.items()} for i in range(count)]
        return list(field.chunk(count))

    if count == 1:
        return [batch]
    return [type(batch)(*fields) for fields in zip(*map(cut, batch), strict=True)]


def fill(name: str, store: Tensor, rows: Tensor, least: int = 0) -> None:
    """Copy ``rows`` [n, ...] to the beginning of ``store`` [m, ...].

    Raises:
        ConfigError: there are fewer than ``least`` of them, or more than the store takes; names the state.
    """
    count, most = rows.shape[0], store.shape[0]
    if not least <= count <= most:
        raise ConfigError("checkpoint", name, f"{least} to {most} rows, as this run's settings make it, not {count}")
    store[:count].copy_(rows)


def column(mask: Tensor, value: Tensor) -> Tensor:
    """``mask`` [N] in a shape that covers ``value`` [N, ...]."""
    return mask.view(-1, *[1] * (value.dim() - 1))


def chosen(mask: Tensor, one: Obs, other: Obs) -> Obs:
    """``one`` in the rows of ``mask`` [N], else ``other``."""
    return {k: torch.where(column(mask, v), one[k], v) for k, v in other.items()}
