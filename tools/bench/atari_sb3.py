"""Stable-Baselines3's DQN on Atari games, for ``atari.py``: on ale_py's vector environment.

Settings are rl-baselines3-zoo's (hyperparams/dqn.yml, atari) except for the buffer size and epsilon, which is fixed
because the library skips the network for random actions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import VecEnv

BUFFER = 20_000
BLOCK = 16  # steps of all environments per call of ``learn``
NEVER = 10**9  # episodes between two lines of Stable-Baselines3's log


class AleVec(VecEnv):
    """``AtariVectorEnv`` (same-step autoreset) as Stable-Baselines3's ``VecEnv``; rewards are clipped to their sign."""

    def __init__(self, env: Any):
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> np.ndarray:
        return self.env.reset(seed=0)[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.env.send(actions)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, reward, terminated, truncated, info = self.env.recv()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(terminated | truncated):
            infos[i] = {"terminal_observation": info["final_obs"][i], "TimeLimit.truncated": bool(truncated[i])}
        return obs, np.sign(reward).astype(np.float32), terminated | truncated, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def learner(env: VecEnv, batch: int, updates: int, device: str, warm_up: int, block: int) -> Callable[[], Any]:
    """Return a function that makes ``block`` steps of every environment, with ``updates`` after each.

    ``warm_up`` env steps without updates and a first block are made here.
    """
    steps = block * env.num_envs
    epsilon: dict[str, Any] = {"exploration_initial_eps": 0.01, "exploration_final_eps": 0.01}
    sizes: dict[str, Any] = {"batch_size": batch, "buffer_size": BUFFER, "gradient_steps": updates, "train_freq": 1}
    sizes |= {"learning_starts": warm_up, "target_update_interval": 1000, "learning_rate": 1e-4}
    model = DQN("CnnPolicy", env, device=device, seed=0, **sizes, **epsilon)
    model.learn(warm_up + steps, log_interval=NEVER)
    return lambda: model.learn(steps, reset_num_timesteps=False, log_interval=NEVER)
