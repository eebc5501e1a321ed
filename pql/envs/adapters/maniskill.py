"""ManiSkill 3's tasks: ``task=maniskill task.kwargs.task=PickCube-v1``.

The GPU simulation steps all environments at once; the CPU simulation has one environment. A Vulkan driver for rendering
is needed even for tasks without images; without a GPU, Mesa 24.3 or newer provides one. Success and failure terminate,
the time limit truncates. An episode begins in the step that ends the previous one, which returns the final observation.
Success is logged if the task defines it. Observations are one flat state: images are not supported yet.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pql.contract.env import EnvSpec, ObsSpec
from pql.envs.adapters.adapt import Actions
from pql.errors import ConfigError
from pql.types import Obs, Step, chosen


def maniskill(
    num_envs: int = 1024,
    device: str | torch.device = "cuda:0",
    task: str = "PickCube-v1",
    settings: Mapping[str, Any] | None = None,
    random_lengths: bool = False,
    render_mode: str | None = None,
) -> "ManiSkillVec":
    """Make a registered task of ManiSkill.

    Args:
        num_envs: N; 1 on the CPU.
        device: device of the simulation and the tensors.
        task: its gymnasium id.
        settings: keywords of ``gymnasium.make``: ``obs_mode``, ``control_mode``, ``reward_mode``, ``render_backend``.
        random_lengths: start the first episodes at random points of the time limit, so that they do not end together.
        render_mode: ``rgb_array`` makes ``render`` work.
    Raises:
        ConfigError: more environments than the CPU simulation supports, or no Vulkan driver.
    """
    device = torch.device(device)
    if device.type != "cuda" and num_envs > 1:
        raise ConfigError("num_envs", num_envs, "1 with ManiSkill on the CPU, whose simulation has one environment")
    os.environ.setdefault("MS_SKIP_ASSET_DOWNLOAD_PROMPT", "1")  # it would prompt on the terminal
    import gymnasium
    import mani_skill.envs  # noqa: F401  registers the ids
    from mani_skill.utils import gym_utils
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    given = {"obs_mode": "state", "sim_backend": backend(device), **(settings or {})}
    given |= {} if render_mode is None else {"render_mode": render_mode}
    try:
        env = gymnasium.make(task, num_envs=num_envs, **given)
    except RuntimeError as error:
        if "physical device" not in str(error) and "rendering device" not in str(error):
            raise
        allowed = f"one that Vulkan can render on ({error}); without a GPU, Mesa 24.3 or newer: mesa-vulkan-drivers"
        raise ConfigError("device", device, allowed) from error
    limit = gym_utils.find_max_episode_steps_value(env)
    vector = ManiSkillVectorEnv(env, auto_reset=True, ignore_terminations=False, record_metrics=False)
    return ManiSkillVec(vector, task, limit, device, random_lengths)


def backend(device: torch.device) -> str:
    """Return ManiSkill's name of the simulation backend on ``device``."""
    if device.type != "cuda":
        return "physx_cpu"
    return "physx_cuda" if device.index is None else f"physx_cuda:{device.index}"


class ManiSkillVec:
    """``ManiSkillVectorEnv`` with automatic resets as a ``pql.contract.env.VecEnv``."""

    def __init__(
        self, env: Any, name: str, limit: int | None, device: str | torch.device, random_lengths: bool = False
    ):
        self.env, self.limit, self.random_lengths = env, limit, random_lengths
        self.actions = Actions(env, 1.0)
        if not self.actions.bounded:
            raise ConfigError("control_mode", env.base_env.control_mode, "a controller with bounds")
        seen, info = env.reset(seed=0)
        obs = {k: ObsSpec(tuple(v.shape[1:]), v.dtype) for k, v in self.groups(seen).items()}
        about = {"random_lengths": random_lengths, "time_limit": "settings.max_episode_steps"}
        if (dt := getattr(env.base_env, "control_timestep", None)) is not None:
            about["dt"] = float(dt)
        more: dict[str, Any] = {"log": ("success",) if "success" in info else (), "deterministic": False, "info": about}
        spaces = (obs, self.actions.spec)
        self.spec = EnvSpec(name, env.num_envs, *spaces, torch.device(device), limit, stream="default", **more)

    def reset(self, seed: int | None = None) -> Obs:
        obs, _ = self.env.reset(seed=None if seed is None else seed % 2**31)
        if self.random_lengths and self.limit:
            steps = self.env.base_env._elapsed_steps
            steps[:] = torch.randint_like(steps, self.limit)
        self.seen = self.groups(obs)  # [N, ...] as last returned
        return dict(self.seen)

    def step(self, action: Tensor) -> Step:
        """Step all environments with ``action`` [N, A]."""
        obs, reward, terminated, truncated, info = self.env.step(self.actions(action))
        terminated, seen = terminated.clone(), self.groups(obs)
        self.seen = dict(seen)
        truncated = truncated & ~terminated
        over, yes = terminated | truncated, torch.ones_like(terminated)
        # If an episode ended, final_info has the information on this step, and the rest is about the reset.
        final, facts = dict(seen), info
        if "final_observation" in info:
            final, facts = chosen(over, self.groups(info["final_observation"]), seen), info["final_info"]
        log = {k: facts[k].float().clone().view(-1) for k in self.spec.log}
        return Step(seen, reward.float().clone().view(-1), terminated, truncated, over, final, yes, yes.clone(), log)

    def reset_where(self, mask: Tensor) -> Obs:
        """Restart the environments of ``mask`` [N] bool; return all observations."""
        if not len(ids := mask.nonzero().flatten()):
            return dict(self.seen)
        self.seen = self.groups(self.env.reset(options={"env_idx": ids})[0])
        return dict(self.seen)

    def render(self, index: int = 0, width: int | None = None, height: int | None = None) -> np.ndarray:
        """Return an image of environment ``index``, uint8 [H, W, 3], of the size of ``human_render_camera_configs``.
        Raises ``ConfigError``: another size is asked for, or it was not built with ``render_mode=rgb_array``."""
        for setting, value in (("width", width), ("height", height)):
            if value is not None:
                raise ConfigError(setting, value, "none: task.kwargs.settings.human_render_camera_configs has the size")
        if (mode := getattr(self.env.base_env, "render_mode", None)) != "rgb_array":
            raise ConfigError("render_mode", mode, "rgb_array, given when the environment is made")
        return self.env.base_env.render()[index].cpu().numpy().astype(np.uint8)

    def groups(self, obs: Any) -> Obs:
        """Copy the observation to a group. Raises ``ConfigError`` if there are several."""
        if not isinstance(obs, Tensor):
            raise ConfigError("obs_mode", ", ".join(obs), "state: one flat array of numbers")
        return {"policy": obs.clone()}

    def close(self) -> None:
        self.env.close()
