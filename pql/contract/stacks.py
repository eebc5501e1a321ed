"""Stacks of the last S observations, whose frames a replay stores once: their layouts, and conversions between them.

A stack's frames are the first axis of its shape, ``[S, ...]``, or, in a flat history ``[S * D]``, each term of the D
numbers has its own history::

    shape (6,)  stack 2  terms (1, 2)      a- a  b- b- b b      frames [a- b- b-], [a b b], oldest first
"""

import torch
from torch import Tensor

from pql.contract.env import ObsSpec


def widths(spec: ObsSpec) -> tuple[int, ...]:
    """Return the widths of the terms of a flat history; () if frames are the first axis, or nothing is stacked."""
    if spec.stack == 1 or len(spec.shape) > 1:
        return ()
    return spec.terms or (spec.shape[0] // spec.stack,)


def kept_shape(spec: ObsSpec) -> tuple[int, ...]:
    """Return the stored shape of an observation: one frame if it is a stack, else its full shape."""
    if spec.stack == 1:
        return spec.shape
    return spec.shape[1:] if len(spec.shape) > 1 else (spec.shape[0] // spec.stack,)


def newest_frame(obs: Tensor, spec: ObsSpec) -> Tensor:
    """Return the stored part of observations: the newest frame of a stack, else all. [n, ...] -> [n, ...]."""
    if not (terms := widths(spec)):
        return obs[:, -1] if spec.stack > 1 else obs
    return _joined([part[:, -w:] for part, w in zip(_of_terms(obs, terms, spec.stack), terms, strict=True)])


def frames_of(obs: Tensor, spec: ObsSpec) -> Tensor:
    """Return the frames of observations, oldest first: [n, ...] -> [n, S, ...]."""
    if not (terms := widths(spec)):
        return obs if spec.stack > 1 else obs.unsqueeze(1)
    return _joined([part.unflatten(1, (spec.stack, -1)) for part in _of_terms(obs, terms, spec.stack)])


def from_frames(frames: Tensor, spec: ObsSpec) -> Tensor:
    """Return the observations with these frames, [n, S, ...] -> [n, ...]: the inverse of :func:`frames_of`."""
    if not (terms := widths(spec)):
        return frames if spec.stack > 1 else frames.squeeze(1)
    return _joined([part.flatten(1) for part in frames.split(terms, -1)])


def order_of(spec: ObsSpec, device: torch.device) -> Tensor | None:
    """Return the places in a stack's frames, [S * D], of the numbers of a flat history: one gather instead of a copy
    for each term. None where :func:`from_frames` copies nothing."""
    if len(widths(spec)) < 2:
        return None
    places = torch.arange(spec.shape[0], device=device).view(1, spec.stack, -1)
    return from_frames(places, spec).squeeze(0)


def _of_terms(obs: Tensor, terms: tuple[int, ...], stack: int) -> tuple[Tensor, ...]:
    """Return the histories of the terms, [n, S * D] -> [n, S * width] each."""
    return obs.split([stack * w for w in terms], 1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
