"""Other libraries train on any pql environment: ``rsl_rl(env)``, ``sb3(env)`` and ``gymnasium(env)``.

Each takes a ``VecEnv`` and returns the environment class of one library, with episode ends told as that library expects
them. (The other direction, gymnasium's environments in pql, is ``task=gymnasium``.) Actions outside [-1, 1] are
clamped. The wrapped environment belongs to the wrapper: step it from nowhere else.

Two things that these libraries have no words for:

* an unannounced restart, and the restart of a simulation that diverged, become a time limit (truncated);
* where the simulator lost the final observation of an episode, the observation acted in stands in for it and
  ``final_lost`` says so. Its value is what rsl_rl bootstraps from at every time limit.

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
    """``env`` as an ``rsl_rl.env.VecEnv`` (rsl-rl-lib 5), for ``rsl_rl.runners.OnPolicyRunner``.

    Observation groups keep their names, so a configuration's ``obs_groups`` is ``{"actor": ["policy"], "critic":
    ["policy"]}``, or ``["critic"]`` where the environment has privileged observations. Nothing waits for the device.

    Args:
        env: same-step autoreset, or one that has ``reset_where``.
        seed: of the reset that takes place now, since rsl_rl never resets.

    Raises:
        ConfigError: rsl-rl-lib is not installed, or the environment has discrete actions or an autoreset mode that
            cannot be translated.
    """
    return _adapter("rsl_rl", "rsl-rl-lib", "peers").RslRlEnv(env, seed)


def sb3(env: VecEnv) -> "SB3Env":
    """``env`` as a ``stable_baselines3.common.vec_env.VecEnv``.

    Stable-Baselines3 has one observation for actor and critic, so it gets the group ``policy`` and no other. It seeds
    environments through ``env.seed(n)`` before a reset.

    Args:
        env: same-step autoreset, or one that has ``reset_where``.

    Raises:
        ConfigError: stable-baselines3 is not installed, or an autoreset mode that cannot be translated.
    """
    return _adapter("sb3", "stable-baselines3", "peers").SB3Env(env)


def gymnasium(env: VecEnv) -> "GymnasiumEnv":
    """``env`` as a ``gymnasium.vector.VectorEnv``, in the environment's own autoreset mode (see ``metadata``).

    One observation group becomes a Box, several a Dict. ``reset(options={"reset_mask": mask})`` works where the
    environment has ``reset_where``.

    Raises:
        ConfigError: gymnasium is not installed, or next-step autoreset with episode ends that gymnasium cannot express
            (unannounced restarts, lost lives).
    """
    return _adapter("gymnasium", "gymnasium", "gymnasium").GymnasiumEnv(env)


def _adapter(name: str, package: str, extra: str) -> Any:
    """The module that holds the class for library ``name``."""
    try:
        return importlib.import_module(f"pql.wrap.to_{name}")
    except ImportError as error:
        if (error.name or "").startswith("pql"):
            raise
        wanted = f"{package}, which cannot be imported ({error}): pip install 'pql-rl[{extra}]'"
        raise ConfigError(f"pql.wrap.{name}", package, wanted) from error
