"""The records of the environment contract, in any Python from 3.8 on: a simulator that runs in an interpreter of its
own imports them from here. ::

    from pql.contract.plain import Box, EnvSpec, ObsSpec, Step

Where the library itself can be imported they are its own classes (``pql.contract.env``, ``pql.types``); elsewhere
these stand in: the same names, fields and meaning, with NumPy arrays in place of tensors and names of types ("float32")
in place of ``torch.dtype``.

This file runs on Python 3.8 with the standard library alone.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple

if TYPE_CHECKING or (sys.version_info >= (3, 11) and importlib.util.find_spec("torch") is not None):
    from pql.contract.env import Box as Box
    from pql.contract.env import Discrete as Discrete
    from pql.contract.env import EnvSpec as EnvSpec
    from pql.contract.env import ObsSpec as ObsSpec
    from pql.errors import ConfigError as ConfigError
    from pql.types import Step as Step
else:

    class ConfigError(Exception):
        """A setting that cannot work: which, its value, and what is allowed. The near side raises its own from it."""

        def __init__(self, setting: str, value: Any, allowed: str):
            super().__init__(f"{setting}={value}: expected {allowed}")
            self.setting, self.value, self.allowed = setting, value, allowed

    class ObsSpec(NamedTuple):
        """One environment's observation group, without the N axis."""

        shape: tuple[int, ...]
        dtype: str = "float32"
        stack: int = 1

    class Box(NamedTuple):
        """Actions [N, size] float32 in [-1, 1]; the simulator's own bounds for an exported policy."""

        size: int
        low: tuple[float, ...] | None = None
        high: tuple[float, ...] | None = None

    class Discrete(NamedTuple):
        """Actions [N] int64 in [0, n)."""

        n: int

    class EnvSpec(NamedTuple):
        """What a learner must know before the first step: see ``pql.contract.env.EnvSpec``."""

        name: str
        num_envs: int
        obs: Mapping[str, ObsSpec]
        action: Any
        device: Any = "cpu"
        max_episode_steps: int | None = None
        autoreset: str = "same_step"
        final_obs: str = "on_done"
        log: tuple[str, ...] = ()
        single_instance: bool = False
        deterministic: bool = True
        groups: int = 1
        spread: int = 1
        stream: str = "current"
        info: Mapping[str, Any] = {}

    class Step(NamedTuple):
        """What a step of all environments returns: see ``pql.types.Step``."""

        obs: dict[str, Any]
        reward: Any
        terminated: Any
        truncated: Any
        first: Any
        final_obs: dict[str, Any]
        final_ok: Any
        valid: Any
        log: dict[str, Any]
