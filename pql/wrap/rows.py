"""Helpers of the wrappers: conversion to same-step autoreset without filler rows, and to host arrays.

Imports none of the wrapped libraries. Only ``to_host`` synchronises with the device.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import Box, VecEnv
from pql.contract.optional import PartialReset, supports
from pql.errors import ConfigError
from pql.types import Obs, Step, chosen


class WrappedRow(NamedTuple):
    """One step under same-step autoreset."""

    obs: Obs  # [N, ...]; observation to act on next
    reward: Tensor  # [N] float32
    done: Tensor  # [N] bool; ``obs`` begins another episode (or life)
    time_out: Tensor  # [N] bool; done, and learners bootstrap from the value of ``final_obs``
    final_obs: Obs  # [N, ...]; the successor of the action, or, if lost, the observation before it
    lost: Tensor  # [N] bool; done, and the simulator did not return the final observation
    log: dict[str, Tensor]  # name -> [N] float32


def ends(step: Step, before: Obs) -> tuple[Tensor, Tensor, Obs]:
    """Classify the episode ends of a step, unannounced restarts included.

    Args:
        step: fields [N, ...].
        before: [N, ...]; the observations before the step.

    Returns:
        (time_out, lost, final_obs) as in :class:`WrappedRow`.
    """
    restart = step.first & step.valid & ~(step.terminated | step.truncated)
    time_out = step.truncated | restart
    lost = restart | ((step.terminated | step.truncated) & ~step.final_ok)
    final = chosen(lost, before, step.final_obs)
    return time_out, lost, final


class SameStep:
    """Steps any environment with same-step autoreset, hence without filler rows.

    An environment with next-step autoreset is reset immediately by ``reset_where``.

    Raises:
        ConfigError: next-step autoreset without ``reset_where``, or with lives (they end without a filler row).
    """

    def __init__(self, env: VecEnv):
        spec = env.spec
        self._next = spec.autoreset == "next_step"
        if self._next and (not supports(env, PartialReset) or spec.info.get("lost_life")):
            wanted = "same_step, or reset_where and an environment without lives: filler rows cannot be distinguished"
            raise ConfigError("env.spec.autoreset", spec.autoreset, wanted)
        self.env = env
        self.obs: Obs = {}

    def reset(self, seed: int | None = None) -> Obs:
        """See ``VecEnv.reset``."""
        self.obs = self.env.reset(seed)
        return self.obs

    def step(self, action: Tensor) -> WrappedRow:
        """See ``VecEnv.step``; ``action`` [N, A] is clamped to [-1, 1]."""
        step = self.env.step(clamped(self.env, action))
        time_out, lost, final = ends(step, self.obs)
        done = step.terminated | time_out
        obs = step.obs
        if self._next:
            obs = cast(PartialReset, self.env).reset_where(step.terminated | step.truncated)
        self.obs = obs
        return WrappedRow(obs, step.reward, done, time_out, final, lost, step.log)


def clamped(env: VecEnv, action: Tensor, from_start: bool = False) -> Tensor:
    """Copy ``action`` [N, A], [N] or [N, K] to the environment's device, with continuous actions clamped to [-1, 1].
    ``from_start``: discrete actions are the simulator's, from ``spec.action.start`` on; False: from 0 on."""
    space = env.spec.action
    if isinstance(space, Box):
        return action.to(env.spec.device, torch.float32).clamp(-1, 1)
    counted = action.to(env.spec.device, torch.int64, copy=True)
    return counted - torch.tensor(space.start, device=counted.device) if from_start and space.start else counted


def to_host(value: Tensor) -> np.ndarray:
    """Copy a tensor of any shape to a numpy array; waits for the device."""
    return value.to("cpu", copy=True).numpy()


def to_device(array: Any, env: VecEnv) -> Tensor:
    """Convert a numpy array or a sequence to a tensor of the same shape on the environment's device."""
    return torch.as_tensor(np.asarray(array), device=env.spec.device)
