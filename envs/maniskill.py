"""ManiSkill 3's tasks: ``task=maniskill task.kwargs.task=PickCube-v1``.

Its simulation on a GPU steps all environments at once; on the CPU it holds one. It needs a driver for rendering
(Vulkan) even for tasks without pictures. Success and failure terminate, the time limit truncates; episodes begin in
the step that ends one, which keeps the final observation.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pql.env import Box, EnvSpec, ObsSpec
from pql.errors import ConfigError
from pql.types import Obs, Step


def maniskill(
    num_envs: int = 1024,
    device: str | torch.device = "cuda:0",
    task: str = "PickCube-v1",
    settings: Mapping[str, Any] | None = None,
    random_lengths: bool = False,
) -> "ManiSkillVec":
    """A registered task of ManiSkill.

    Args:
        num_envs: N; 1 on the CPU.
        device: of the simulation and the tensors.
        task: its gymnasium id.
        settings: keywords of ``gymnasium.make``: ``obs_mode``, ``control_mode``, ``reward_mode``, ``render_backend``.
        random_lengths: first episodes begin at random places, so that their limits do not come all at once.
    Raises:
        ConfigError: more environments than the CPU's simulation holds.
    """
    cuda = torch.device(device).type == "cuda"
    if not cuda and num_envs > 1:
        raise ConfigError("num_envs", num_envs, "1 with ManiSkill on the CPU: its simulation there holds no more")
    os.environ.setdefault("MS_SKIP_ASSET_DOWNLOAD_PROMPT", "1")  # it would ask on the terminal
    import gymnasium
    import mani_skill.envs  # noqa: F401  registers the ids
    from mani_skill.utils import gym_utils
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    backend = "physx_cuda" if cuda else "physx_cpu"
    given = {"obs_mode": "state", "sim_backend": backend, **(settings or {})}
    env = gymnasium.make(task, num_envs=num_envs, **given)
    limit = gym_utils.find_max_episode_steps_value(env)
    vector = ManiSkillVectorEnv(env, auto_reset=True, ignore_terminations=False, record_metrics=False)
    return ManiSkillVec(vector, task, limit, device, random_lengths)


class ManiSkillVec:
    """A ``ManiSkillVectorEnv`` with automatic resets, with the contract of ``pql.env.VecEnv``."""

    def __init__(
        self, env: Any, name: str, limit: int | None, device: str | torch.device, random_lengths: bool = False
    ):  # fmt: skip
        self.env, self.limit, self.random_lengths = env, limit, random_lengths
        space = env.single_action_space
        low, high = (torch.as_tensor(getattr(space, k), dtype=torch.float32).flatten() for k in ("low", "high"))
        if not (low.isfinite() & high.isfinite()).all():
            raise ConfigError("control_mode", name, "a controller with bounds")
        self.low, self.high = low.to(device), high.to(device)
        obs = self.groups(env.reset(seed=0)[0])
        self.spec = EnvSpec(
            name, env.num_envs, {k: ObsSpec(tuple(v.shape[1:]), v.dtype) for k, v in obs.items()},
            Box(len(low), tuple(low.tolist()), tuple(high.tolist())), torch.device(device),
            max_episode_steps=limit, final_obs="on_done", log=("success",), deterministic=False, stream="default",
        )  # fmt: skip

    def reset(self, seed: int | None = None) -> Obs:
        obs, _ = self.env.reset(seed=None if seed is None else seed % 2**31)
        if self.random_lengths and self.limit:
            steps = self.env.base_env._elapsed_steps
            steps[:] = torch.randint_like(steps, self.limit)
        return self.groups(obs)

    def step(self, action: Tensor) -> Step:
        scaled = self.low + (action.clamp(-1, 1) + 1) / 2 * (self.high - self.low)
        obs, reward, terminated, truncated, info = self.env.step(scaled)
        terminated, seen = terminated.clone(), self.groups(obs)
        truncated = truncated & ~terminated
        # Where any episode ended, what is told of this step lies below final_info: the rest is the reset's.
        final, told = dict(seen), info
        if "final_observation" in info:
            final, told = self.groups(info["final_observation"]), info["final_info"]
        over, none = terminated | truncated, torch.zeros_like(terminated)
        success = told.get("success", none).float().view(-1)
        final = {k: torch.where(over.view(-1, *(1,) * (v.dim() - 1)), final[k], v) for k, v in seen.items()}
        return Step(seen, reward.float().clone().view(-1), terminated, truncated, over, final, ~none, ~none,
                    {"success": success})  # fmt: skip

    def groups(self, obs: Any) -> Obs:
        """Copies of its observations: one array, or what it gives by name, the state first."""
        if isinstance(obs, Tensor):
            return {"policy": obs.clone()}
        flat = {k: v.clone() for k, v in obs.items() if isinstance(v, Tensor)}
        if "state" not in flat:
            raise ConfigError("obs_mode", ", ".join(obs), "state, or one with a flat state: state+rgb flattened")
        return {("policy" if k == "state" else k): v for k, v in flat.items()}

    def close(self) -> None:
        self.env.close()
