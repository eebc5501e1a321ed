"""What the wrappers share: episode ends in the one form that libraries without filler rows know, and host arrays.

No library is imported here, and nothing waits for the device except ``to_host``.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import Box, VecEnv
from pql.errors import ConfigError
from pql.types import Obs, Step, chosen


class Row(NamedTuple):
    """One step under same-step autoreset, where ``done`` means that ``obs`` begins another episode (or life)."""

    obs: Obs  # act on this next: [N, ...]
    reward: Tensor  # [N] float32
    done: Tensor  # [N] bool
    time_out: Tensor  # [N] bool; done, and the value of ``final_obs`` stands beyond this row
    final_obs: Obs  # the true successor, or (lost) the observation acted in
    lost: Tensor  # [N] bool; done, and the simulator lost the true successor
    log: dict[str, Tensor]  # name -> [N] float32


def ends(step: Step, before: Obs) -> tuple[Tensor, Tensor, Obs]:
    """How the episodes of a step ended, an unannounced restart included.

    Args:
        before: the observations acted in.

    Returns:
        (time_out, lost, final_obs) as in :class:`Row`.
    """
    restart = step.first & step.valid & ~(step.terminated | step.truncated)
    time_out = step.truncated | restart
    lost = restart | ((step.terminated | step.truncated) & ~step.final_ok)
    final = chosen(lost, before, step.final_obs)
    return time_out, lost, final


class SameStep:
    """Steps any environment as one with same-step autoreset: no filler rows.

    Where ``env`` resets on the next step, it is made to reset at once with ``reset_where``.

    Raises:
        ConfigError: next-step autoreset without ``reset_where``, or with lives (they end without a filler row).
    """

    def __init__(self, env: VecEnv):
        spec = env.spec
        self._next = spec.autoreset == "next_step"
        if self._next and (not hasattr(env, "reset_where") or spec.info.get("lost_life")):
            wanted = "same_step, or an environment with reset_where and without lives: filler rows cannot be told apart"
            raise ConfigError("env.spec.autoreset", spec.autoreset, wanted)
        self.env = env
        self.obs: Obs = {}

    def reset(self, seed: int | None = None) -> Obs:
        """See ``VecEnv.reset``."""
        self.obs = self.env.reset(seed)
        return self.obs

    def step(self, action: Tensor) -> Row:
        """See ``VecEnv.step``; ``action`` may lie outside [-1, 1]."""
        step = self.env.step(clamped(self.env, action))
        time_out, lost, final = ends(step, self.obs)
        done = step.terminated | time_out
        obs = step.obs
        if self._next:
            obs = self.env.reset_where(step.terminated | step.truncated)  # type: ignore[attr-defined]
        self.obs = obs
        return Row(obs, step.reward, done, time_out, final, lost, step.log)


def clamped(env: VecEnv, action: Tensor) -> Tensor:
    """``action`` on the environment's device, continuous ones clamped to [-1, 1]; never the tensor that was given."""
    if isinstance(env.spec.action, Box):
        return action.to(env.spec.device, torch.float32).clamp(-1, 1)
    return action.to(env.spec.device, torch.int64, copy=True)


def to_host(value: Tensor) -> np.ndarray:
    """A copy as a numpy array."""
    return value.to("cpu", copy=True).numpy()


def to_device(array: Any, env: VecEnv) -> Tensor:
    """A numpy array (or a sequence) as a tensor on the environment's device."""
    return torch.as_tensor(np.asarray(array), device=env.spec.device)
