"""Adapters of pql environments to other libraries: ``rsl_rl(env)``, ``sb3(env)`` and ``gymnasium(env)``.

Each takes a ``VecEnv`` and returns the environment class of one library, with that library's convention for episode
ends. (``task=gymnasium`` is the reverse: Gymnasium environments in pql.) Actions outside [-1, 1] are clamped. The
wrapper owns the environment: do not step it elsewhere.

Two cases that these libraries cannot express:

* an unannounced restart, or the restart of a simulation that diverged, is reported as truncated;
* if the simulator lost the final observation of an episode, it is replaced by the observation before the step, and
  ``final_lost`` is set. rsl_rl always bootstraps time limits from that observation's value.

The libraries are imported when a function is called, and nothing else in pql imports them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pql.contract.env import VecEnv
from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.wrap.to_gymnasium import GymnasiumEnv
    from pql.wrap.to_rsl_rl import RslRlEnv
    from pql.wrap.to_sb3 import SB3Env


def rsl_rl(env: VecEnv, seed: int | None = None) -> "RslRlEnv":
    """Wrap ``env`` as an ``rsl_rl.env.VecEnv`` (rsl-rl-lib 5), for ``rsl_rl.runners.OnPolicyRunner``.

    Observation groups keep their names: ``obs_groups`` is ``{"actor": ["policy"], "critic": ["policy"]}``, or
    ``["critic"]`` with privileged observations. Stepping does not synchronise with the device.

    Args:
        env: with same-step autoreset or ``reset_where``.
        seed: of the reset, which happens here because rsl_rl never resets.

    Raises:
        ConfigError: rsl-rl-lib is not installed, or the environment has discrete actions or an unsupported autoreset.
    """
    return _adapter("rsl_rl", "rsl-rl-lib", "peers").RslRlEnv(env, seed)


def sb3(env: VecEnv) -> "SB3Env":
    """Wrap ``env`` as a ``stable_baselines3.common.vec_env.VecEnv``.

    Stable-Baselines3 has one observation for actor and critic: it gets only the group ``policy``. It seeds environments
    by ``env.seed(n)`` before a reset.

    Args:
        env: with same-step autoreset or ``reset_where``.

    Raises:
        ConfigError: stable-baselines3 is not installed, or the autoreset mode is unsupported.
    """
    return _adapter("sb3", "stable-baselines3", "peers").SB3Env(env)


def gymnasium(env: VecEnv) -> "GymnasiumEnv":
    """Wrap ``env`` as a ``gymnasium.vector.VectorEnv`` with the environment's autoreset mode (see ``metadata``).

    One observation group becomes a Box, several a Dict. ``reset(options={"reset_mask": mask})`` works if the
    environment has ``reset_where``.

    Raises:
        ConfigError: gymnasium is not installed, or next-step autoreset with episode ends that gymnasium cannot express
            (unannounced restarts, lost lives).
    """
    return _adapter("gymnasium", "gymnasium", "gymnasium").GymnasiumEnv(env)


def _adapter(name: str, package: str, extra: str) -> Any:
    """Import the adapter module for library ``name``."""
    try:
        return importlib.import_module(f"pql.wrap.to_{name}")
    except ImportError as error:
        if (error.name or "").startswith("pql"):
            raise
        wanted = f"{package}, which cannot be imported ({error}): pip install 'pql-rl[{extra}]'"
        raise ConfigError(f"pql.wrap.{name}", package, wanted) from error
