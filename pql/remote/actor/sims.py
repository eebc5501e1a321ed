"""Simulators for actors, by name: NumPy simulators that need no torch, and any other that is installed."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pql.contract.registry import check_chosen
from pql.errors import ConfigError
from pql.remote.actor.client import Simulator
from pql.remote.process.far_build import build_simulator

PLAIN = {"gymnasium": "pql.envs.adapters.gymnasium_copies:gymnasium_sim", "atari": "pql.envs.atari_core:AtariSim"}
"""NumPy simulators that replace the learner's adapters, with the same settings."""


def make_sim(name: str, num_envs: int, kwargs: Mapping[str, Any]) -> Simulator:
    """Build a simulator with NumPy arrays, or, if torch is installed, with tensors.

    Args:
        name: a key of ``PLAIN``, an entry point of ``pql.envs``, a built-in name or ``module:attribute``.
    Raises:
        ConfigError: unknown name, missing packages, an unknown keyword, or no keyword that chooses the task.
    """
    check_chosen(name, kwargs)
    request = {"name": PLAIN.get(name, name), "num_envs": num_envs, "device": "cpu", "kwargs": kwargs, "offered": {}}
    try:
        with no_grad():  # ``build`` turns gradients off globally; restore the caller's setting
            return Host(build_simulator(request))
    except ConfigError as error:
        if error.setting != "task":
            raise
        raise ConfigError("--task", name, error.allowed) from error


class Host:
    """Environment whose CPU tensors, if it uses torch, are converted to and from arrays [K, ...]."""

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
    """Return ``torch.no_grad()``, or a null context if torch is not imported."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()


def arrays(value: Any) -> Any:
    """Convert a tensor, or a dict of tensors, of any shape to arrays."""
    return {k: np.asarray(v) for k, v in value.items()} if isinstance(value, dict) else np.asarray(value)
