"""Records of the environment contract for Python 3.8 and later, for simulators that need their own interpreter. ::

    from pql.contract.plain import Box, EnvSpec, ObsSpec, Step

If the library can be imported, these are its classes (``pql.contract.env``, ``pql.types``). Otherwise they are
substitutes with the same names, fields and meaning, which hold NumPy arrays instead of tensors and dtype names
("float32") instead of ``torch.dtype``.

This file runs on Python 3.8 with only the standard library.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple

from pql.errors import ConfigError as ConfigError

if TYPE_CHECKING or (sys.version_info >= (3, 11) and importlib.util.find_spec("torch") is not None):
    from pql.contract.env import Box as Box
    from pql.contract.env import Discrete as Discrete
    from pql.contract.env import EnvSpec as EnvSpec
    from pql.contract.env import MultiDiscrete as MultiDiscrete
    from pql.contract.env import ObsSpec as ObsSpec
    from pql.types import Step as Step
else:

    class ObsSpec(NamedTuple):
        """One observation group of a single environment: see ``pql.contract.env.ObsSpec``."""

        shape: tuple[int, ...]
        dtype: str = "float32"
        stack: int = 1
        terms: tuple[int, ...] = ()
        fill: str = "zeros"

    class Box(NamedTuple):
        """Continuous actions [N, size] float32 in [-1, 1]: see ``pql.contract.env.Box``."""

        size: int
        low: tuple[float, ...] | None = None
        high: tuple[float, ...] | None = None
        center: tuple[float, ...] | None = None

    class Discrete(NamedTuple):
        """Discrete actions [N] int64 in [0, n): see ``pql.contract.env.Discrete``."""

        n: int
        start: int = 0

    class MultiDiscrete(NamedTuple):
        """Several discrete actions [N, K] int64 at once: see ``pql.contract.env.MultiDiscrete``."""

        nvec: tuple[int, ...]
        start: tuple[int, ...] | None = None

    class EnvSpec(NamedTuple):
        """Static description of an environment: see ``pql.contract.env.EnvSpec``."""

        name: str
        num_envs: int
        obs: Mapping[str, ObsSpec]
        action: Any
        device: Any = "cpu"
        max_episode_steps: int | None = None
        autoreset: str = "same_step"
        final_obs: str = "on_done"
        log: Any = ()  # names, or a mapping of names to kinds
        single_instance: bool = False
        deterministic: bool = True
        groups: int = 1
        spread: int = 1
        stream: str = "current"
        info: Mapping[str, Any] = {}

    class Step(NamedTuple):
        """Result of stepping all N environments once, in NumPy arrays [N, ...]: see ``pql.types.Step``."""

        obs: dict[str, Any]
        reward: Any
        terminated: Any
        truncated: Any
        first: Any
        final_obs: dict[str, Any]
        final_ok: Any
        valid: Any
        log: dict[str, Any]
