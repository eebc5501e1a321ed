"""Simulators for actors, by name: those that speak NumPy and need no torch, and any other where it is installed."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pql.actor.client import Simulator
from pql.errors import ConfigError, nearest

PLAIN = {"gymnasium": "pql.actor.gymnasium:GymnasiumSim", "atari": "pql.actor.atari:AtariSim"}
PACKAGES = {"gymnasium": "gymnasium", "atari": "ale-py gymnasium"}


def make_sim(name: str, num_envs: int, kwargs: Mapping[str, Any]) -> Simulator:
    """A built-in simulator that speaks NumPy, ``module:factory`` of one, or a task of ``pql.env`` (needs torch).

    A factory is called as ``factory(num_envs=..., **kwargs)``.

    Raises:
        ConfigError: no such name, packages are missing, or a keyword it does not take.
    """
    target = PLAIN.get(name, name if ":" in name else None)
    if target is None:
        return TorchSim(name, num_envs, kwargs)
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        need = f"pip install {PACKAGES[name]}" if name in PACKAGES else "a module that can be imported"
        raise ConfigError("--task", name, f"{need} ({error})") from error
    try:
        return factory(num_envs=num_envs, **kwargs)
    except TypeError as error:
        raise ConfigError("--task", name, f"keywords that it takes ({error})") from error


class TorchSim:
    """A task of this library, on the CPU, as arrays."""

    def __init__(self, name: str, num_envs: int, kwargs: Mapping[str, Any]):
        try:
            import torch
        except ModuleNotFoundError as error:
            raise ConfigError("--task", name, f"{', '.join(PLAIN)} or module:factory: all others need torch here"
                              f"{nearest(name, PLAIN)}") from error  # fmt: skip
        from pql.env import make_env

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.env = make_env(name, num_envs, "cpu", **kwargs)
        self.spec = self.env.spec

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        return {k: v.numpy() for k, v in self.env.reset(seed).items()}

    def step(self, action: np.ndarray) -> Any:
        import torch

        step = self.env.step(torch.from_numpy(action.copy()))  # a message's bytes cannot be written to
        return type(step)._make(
            {k: v.numpy() for k, v in field.items()} if isinstance(field, dict) else field.numpy() for field in step
        )

    def close(self) -> None:
        self.env.close()
