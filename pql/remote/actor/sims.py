"""Simulators for actors, by name: those that speak NumPy and need no torch, and any other that is installed."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pql.contract.registry import check_chosen
from pql.errors import ConfigError
from pql.remote.actor.client import Simulator
from pql.remote.process.far_build import UnknownError, build

PLAIN = {"gymnasium": "pql.remote.actor.gymnasium:GymnasiumSim", "atari": "pql.remote.actor.atari:AtariSim"}
"""In place of the learner's own adapters, with the same settings."""


def make_sim(name: str, num_envs: int, kwargs: Mapping[str, Any]) -> Simulator:
    """A simulator that speaks NumPy, or, where torch is installed, tensors.

    Args:
        name: one of ``PLAIN``, of the entry-point group ``pql.envs`` or built in; or ``module:attribute``.

    Raises:
        ConfigError: no such name, packages are missing, a keyword it does not take, or none that chooses a task.
    """
    check_chosen(name, kwargs)
    request = {"name": PLAIN.get(name, name), "num_envs": num_envs, "device": "cpu", "kwargs": kwargs, "offered": {}}
    try:
        with no_grad():  # building turns gradients off for good, which is the caller's to say
            return Host(build(request))
    except UnknownError as error:
        setting, value = ("--task", name) if error.setting == "task" else (error.setting, error.value)
        raise ConfigError(setting, value, error.allowed) from error


class Host:
    """An environment whose tensors, if it has any, are on the CPU: as arrays."""

    def __init__(self, env: Any):
        self.env, self.spec = env, env.spec
        self.speaks_torch = False

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        with no_grad():
            obs = self.env.reset(seed)
        self.speaks_torch = any(hasattr(value, "detach") for value in obs.values())
        return arrays(obs)

    def step(self, action: np.ndarray) -> Any:
        if not self.speaks_torch:
            return self.env.step(action)
        import torch

        with no_grad():
            step = self.env.step(torch.from_numpy(action.copy()))  # a message's bytes cannot be written to
        return type(step)._make(map(arrays, step))

    def close(self) -> None:
        self.env.close()


def no_grad() -> AbstractContextManager[Any]:
    """Inside, torch keeps no gradients, if it is there at all."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()


def arrays(value: Any) -> Any:
    """Tensors, or dicts of them, as arrays."""
    return {k: np.asarray(v) for k, v in value.items()} if isinstance(value, dict) else np.asarray(value)
