"""A ``VecEnv`` for Stable-Baselines3. Reached through ``pql.wrap.sb3``."""

from dataclasses import replace
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv as SB3VecEnv

from pql.contract.env import Discrete, MultiDiscrete, VecEnv
from pql.errors import ConfigError
from pql.wrap.rows import SameStep, to_device, to_host
from pql.wrap.to_gymnasium import action_space, box


class SB3Env(SB3VecEnv):
    """Adapter for Stable-Baselines3; see ``pql.wrap.sb3``.

    Where an episode ended, ``infos[i]`` holds ``terminal_observation``, ``TimeLimit.truncated`` (Stable-Baselines3
    then adds ``gamma V(terminal_observation)`` to the reward), the environment's log terms of that step by name, and
    ``final_lost`` where the true final observation was lost. Wrap it in ``VecMonitor`` for episode statistics.
    """

    def __init__(self, env: VecEnv):
        self.env, self._rows = env, SameStep(env)
        spec = env.spec
        match spec.action:  # its algorithms count from 0, whatever the start of the space
            case Discrete(n=n):
                spec = replace(spec, action=Discrete(n))
            case MultiDiscrete(nvec=nvec):
                spec = replace(spec, action=MultiDiscrete(nvec))
        super().__init__(spec.num_envs, box(spec.obs["policy"]), action_space(spec))

    def reset(self) -> np.ndarray:
        """Restart all environments: [N, ...]. A seed passed to ``seed(n)`` is used."""
        if any(self._options):
            raise ConfigError("options", self._options[0], "none: the environment takes no options at a reset")
        obs = self._rows.reset(self._seeds[0])  # one generator serves all environments
        self._reset_seeds()
        return to_host(obs["policy"])

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Return (observations [N, ...], rewards [N] float32, dones [N] bool, one info dict per environment)."""
        row = self._rows.step(to_device(self._actions, self.env))
        done, time_out = to_host(row.done), to_host(row.time_out)
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        ended = np.flatnonzero(done)
        if len(ended):
            final, lost = to_host(row.final_obs["policy"]), to_host(row.lost)
            log = {name: to_host(value) for name, value in row.log.items()}
            for i in ended:
                infos[i] |= {name: value[i].item() for name, value in log.items()}
                infos[i] |= {"TimeLimit.truncated": bool(time_out[i]), "terminal_observation": final[i]}
                if lost[i]:
                    infos[i]["final_lost"] = True
        return to_host(row.obs["policy"]), to_host(row.reward), done, infos

    def close(self) -> None:
        self.env.close()

    # One object steps all environments, so per-environment calls return the same answer for all.

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        value = None if attr_name == "render_mode" else getattr(self.env, attr_name)
        return [value] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self._all(indices, "set_attr")
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        self._all(indices, "env_method")
        return [getattr(self.env, method_name)(*method_args, **method_kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))

    def _all(self, indices: Any, method: str) -> None:
        if indices is not None:
            raise ConfigError(f"{method}.indices", indices, "null: one object steps all environments")
