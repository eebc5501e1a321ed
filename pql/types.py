"""Records passed between environments, replay buffers and learners: ``Step``, ``Batch``, ``ObsBatch``.

Shape letters used in every docstring and shape comment of this package:

    N  environments          T  time steps (rows of a replay ring, steps of a rollout)
    B  batch size            D  features of one observation group
    A  action dimensions     Z  atoms of a categorical value distribution
    E  critics in an ensemble

``[N, ...]`` stands for N followed by the shape of one observation. Lower-case n is a subset of the N environments.
This file imports no simulator and no network.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pql.errors import ConfigError

Obs = dict[str, Tensor]
"""Observation groups: name -> ``[N, ...]``. ``"policy"`` is always present; ``"critic"`` holds privileged observations
for the value function, if the environment has any."""


class Rows(dict[str, Any]):
    """State dict of a partly filled buffer: a checkpoint stores only the rows in use, the first of each tensor."""


Metrics = dict[str, Tensor]
"""Metrics of an update: name -> scalar float tensor on the device. Do not read one on the host inside the training
loop: that waits for the device."""


class Step(NamedTuple):
    """Result of stepping all N environments once: tensors on ``EnvSpec.device`` whose shapes never change.

    Row i belongs to environment i. Autoreset is either *same-step* (the row that ends an episode already returns the
    next episode's first observation in ``obs``) or *next-step* (that row returns the final observation in ``obs``, and
    the next row is a filler that returns the new episode's first observation); see ``EnvSpec.autoreset``.

    Attributes:
        obs: group name -> [N, ...] in the dtype of ``EnvSpec.obs``. Observation to act on next.
        reward: [N] float32, unscaled and unclipped.
        terminated: [N] bool. The task ended at this row: the value after it is 0.
        truncated: [N] bool. The episode was cut off at this row, by a time limit for example: learners bootstrap from
            the value of ``final_obs``. Never set together with ``terminated``, which wins where a simulator sets both.
        first: [N] bool. ``obs`` is the first observation of an episode, including one after a restart without a
            preceding end (``EnvSpec.info["restarts"]``).
        final_obs: group name -> [N, ...]. Next observation in the MDP sense, s_{t+1}: the final observation where an
            episode ended, else equal to ``obs``, with which it may share memory.
        final_ok: [N] bool. False where an episode ended and the simulator did not return its final observation.
        valid: [N] bool. False in a filler row of next-step autoreset: the action was ignored, and learners skip it.
        log: name -> [N] float32, one entry per name in ``EnvSpec.log``, which says how each is averaged: reward terms,
            for example.
    """

    obs: Obs
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    first: Tensor
    final_obs: Obs
    final_ok: Tensor
    valid: Tensor
    log: dict[str, Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Step":
        """Apply ``change`` to every tensor [N, ...]."""
        return Step._make({k: change(t) for k, t in v.items()} if isinstance(v, dict) else change(v) for v in self)


class Batch(NamedTuple):
    """Transitions for a value update.

    The target is ``reward + discount * value(next_obs)``, with ``discount = gamma**m * (1 - terminated)`` for an
    n-step window of ``m <= n`` steps; losses read episode ends only from ``discount``. Rows with ``mask == 0`` are
    padding that keeps the shape static: every loss is ``sum(mask * weight * l) / sum(mask)``. Rows with
    ``followed == 0`` have no ``next_obs`` (the simulator did not return it after a termination): whatever reads more of
    ``next_obs`` than ``discount * value`` leaves them out.
    """

    obs: Obs  # [B, ...]
    action: Tensor  # [B, A] float32 in [-1, 1], or [B] int64
    reward: Tensor  # [B] float32, discounted n-step sum
    discount: Tensor  # [B] float32 in [0, 1]
    next_obs: Obs  # [B, ...], m steps after obs
    mask: Tensor  # [B] float32, 0 or 1
    weight: Tensor  # [B] float32, importance-sampling weight (1 without prioritised replay)
    index: Tensor  # type: ignore[assignment]  # [B] int64, row * N + column in the ring (hides tuple.index)
    followed: Tensor  # [B] float32, 0 or 1; 0 where ``mask`` is


class ObsBatch(NamedTuple):
    """Observations for a policy update; ``mask`` and ``weight`` as in :class:`Batch`."""

    obs: Obs  # [B, ...]
    mask: Tensor  # [B] float32
    weight: Tensor  # [B] float32


class Acted(NamedTuple):
    """Actions of n environments, and per-action data that the replay stores with them, such as a value estimate."""

    action: Tensor  # [n, A] float32 in [-1, 1], or [n] int64
    extra: dict[str, Tensor]  # name -> [n] float32; of a recurrent policy also "carry", [n, C], its state before


class Memory(NamedTuple):
    """Recurrent state of a policy between two steps."""

    carry: Tensor  # [N, C] float32; zeros at the beginning of an episode
    fresh: Tensor  # [N] bool; the next action is the first of an episode


AnyBatch = TypeVar("AnyBatch", Batch, ObsBatch)


def split(batch: AnyBatch, count: int) -> list[AnyBatch]:
    """Split a batch of ``count * B`` rows into ``count`` batches [B, ...]. They are views: nothing is copied."""

    def cut(field: Any) -> list[Any]:
        if isinstance(field, dict):
            parts = {k: v.chunk(count) for k, v in field.items()}
            return [{k: v[i] for k, v in parts.items()} for i in range(count)]
        return list(field.chunk(count))

    if count == 1:
        return [batch]
    return [type(batch)(*fields) for fields in zip(*map(cut, batch), strict=True)]


def interleaved(parts: Sequence[Any], count: int) -> Any:
    """Join parts that are ``count`` batches each, [count * B_i, ...], to ``count`` batches of the rows of all parts.
    Parts are tensors, or dicts or tuples of parts."""
    first = parts[0]
    if isinstance(first, dict):
        return {k: interleaved([part[k] for part in parts], count) for k in first}
    if isinstance(first, tuple):
        return type(first)(*(interleaved(fields, count) for fields in zip(*parts, strict=True)))
    return torch.cat([part.view(count, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def selected(which: Tensor, one: Any, other: Any) -> Any:
    """Return the rows of ``one`` where ``which`` [B] is True, else of ``other``; tensors [B, ...], dicts or tuples."""
    if isinstance(one, dict):
        return {k: selected(which, v, other[k]) for k, v in one.items()}
    if isinstance(one, tuple):
        return type(one)(*(selected(which, *pair) for pair in zip(one, other, strict=True)))
    return torch.where(column(which, one), one, other)


def fill(name: str, store: Tensor, rows: Tensor, least: int = 0) -> None:
    """Copy ``rows`` [n, ...] into the first n rows of ``store`` [m, ...].

    Args:
        name: of the state in the checkpoint, for the error.
    Raises:
        ConfigError: ``n < least`` or ``n > m``.
    """
    count, most = rows.shape[0], store.shape[0]
    if not least <= count <= most:
        raise ConfigError("checkpoint", name, f"{least} to {most} rows, from this run's settings, not {count}")
    store[:count].copy_(rows)


def column(mask: Tensor, value: Tensor) -> Tensor:
    """Reshape ``mask`` [N] to [N, 1, ...], so that it broadcasts over ``value`` [N, ...]."""
    return mask.view(-1, *[1] * (value.dim() - 1))


def chosen(mask: Tensor, one: Obs, other: Obs) -> Obs:
    """Select ``one`` where ``mask`` [N] is True, else ``other``; both are observation groups [N, ...]."""
    return {k: torch.where(column(mask, v), one[k], v) for k, v in other.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor of any shape and strides, in order: ``[n]`` uint8, a view where possible.

    A dimension of size 1 may have any stride, also in a contiguous tensor, and ``view(-1)`` would keep it.
    """
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
