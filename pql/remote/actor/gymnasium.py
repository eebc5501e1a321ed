"""Gymnasium environments for actors: Gymnasium's vector environments, with NumPy arrays.

Settings, spaces, action rescaling, seeds and episode ends equal those of ``task=gymnasium``
(``pql/envs/adapters/gymnasium.py``).
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from pql.contract.plain import Box, Discrete, EnvSpec, ObsSpec, Step
from pql.errors import ConfigError, nearest

MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


class CopyObservation(gymnasium.ObservationWrapper):
    """Copies observations, for environments that reuse their array in ``reset``."""

    def observation(self, observation: Any) -> Any:
        return copy.deepcopy(observation)


class GymnasiumSim:
    """``num_envs`` copies of the environment ``id``. Fields are arrays [N, ...].

    Args:
        autoreset: ``same_step``, or ``next_step`` (a filler row follows each end).
        vectorization: ``sync`` (sequential) or ``async`` (one process each).
        kwargs: keywords for ``gymnasium.make``.

    Raises:
        ConfigError: unknown id or unsupported spaces.
    """

    def __init__(
        self,
        num_envs: int,
        id: str = "Pendulum-v1",
        autoreset: str = "same_step",
        vectorization: str = "sync",
        kwargs: Mapping[str, Any] | None = None,
        device: Any = "cpu",
    ):
        for setting, value, allowed in (
            ("autoreset", autoreset, (*MODES,)),
            ("vectorization", vectorization, ("sync", "async")),
        ):
            if value not in allowed:
                raise ConfigError(setting, value, " or ".join(allowed))
        wrappers = [CopyObservation] if autoreset == "same_step" else []
        vector = {"autoreset_mode": MODES[autoreset], "copy": False}
        try:
            self.envs = gymnasium.make_vec(id, num_envs, vectorization, vector, wrappers, **(kwargs or {}))
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ConfigError("id", id, f"an id that works here{nearest(id, gymnasium.registry)} ({error})") from error
        self.space = self.envs.single_action_space
        limit = getattr(self.envs.spec, "max_episode_steps", None)
        rate = self.envs.metadata.get("render_fps")
        self.spec = EnvSpec(
            name=id,
            num_envs=num_envs,
            obs=obs_spec(self.envs.single_observation_space),
            action=action_spec(self.space),
            device="cpu",
            max_episode_steps=limit if limit and limit > 0 else None,
            autoreset=autoreset,
            final_obs="always",
            info={"dt": 1 / rate} if rate else {},
        )
        self.next = autoreset == "next_step"
        self.ended = np.zeros(num_envs, dtype=bool)

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        self.ended[:] = False
        return groups(self.envs.reset(seed=seed)[0])

    def step(self, action: np.ndarray) -> Step:
        obs, reward, terminated, truncated, info = self.envs.step(rescale_action(self.space, action))
        over = terminated | truncated
        filler = self.ended if self.next else np.zeros_like(over)
        self.ended = over
        seen = groups(obs)
        final = seen
        if not self.next and over.any():
            final = {k: v.copy() for k, v in seen.items()}
            for i in np.flatnonzero(over):
                for k, row in groups(info["final_obs"][i]).items():
                    final[k][i] = row
        return Step(
            obs=seen,
            reward=reward,
            terminated=terminated & ~filler,
            truncated=truncated & ~terminated & ~filler,
            first=filler if self.next else over,
            final_obs=final,
            final_ok=np.ones_like(over),
            valid=~filler,
            log={},
        )

    def close(self) -> None:
        self.envs.close()


def groups(obs: Any) -> dict[str, np.ndarray]:
    return dict(obs) if isinstance(obs, dict) else {"policy": obs}


def rescale_action(space: spaces.Space, action: np.ndarray) -> np.ndarray:
    """Map actions [K, A] in [-1, 1] to [K, ...] within the space's bounds; shift [K] by the start of a Discrete."""
    if isinstance(space, spaces.Discrete):
        return action + space.start
    assert isinstance(space, spaces.Box)
    low, high = (b.astype(np.float64).reshape(-1) for b in (space.low, space.high))
    scaled = low + (action.astype(np.float64).clip(-1, 1) + 1) / 2 * (high - low)
    return scaled.clip(low, high).reshape(-1, *space.shape).astype(space.dtype)


def obs_spec(space: spaces.Space) -> dict[str, ObsSpec]:
    """Return the observation groups: the entries of a Dict space, which must include ``policy``, or one group."""
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"policy": space}
    for part in parts.values():
        fine = isinstance(part, spaces.Box) and (part.dtype == np.uint8 or np.issubdtype(part.dtype, np.floating))
        if not fine or "policy" not in parts:
            raise ConfigError("observation_space", space, "a Box of floats or uint8, or a Dict of these with 'policy'")
    return {k: ObsSpec(p.shape, "uint8" if p.dtype == np.uint8 else "float32") for k, p in parts.items()}


def action_spec(space: spaces.Space) -> Box | Discrete:
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    wanted = "a Box of floats with finite bounds, or Discrete"
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError("action_space", space, wanted)
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ConfigError("action_space", space, wanted)
    low, high = (tuple(b.astype(float).reshape(-1).tolist()) for b in (space.low, space.high))
    return Box(math.prod(space.shape), low, high)
