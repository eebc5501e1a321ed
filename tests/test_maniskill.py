"""The adapter for ManiSkill against a stand-in for its vector environment; the simulator itself was not run: it needs a
driver for rendering even on the CPU."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from pql.conformance import check_env
from pql.envs.maniskill import ManiSkillVec, maniskill
from pql.errors import ConfigError


class FakeVector:
    """``ManiSkillVectorEnv`` with automatic resets: on steps with an end, the info is the reset's, and what was to be
    said of the step lies below ``final_info``. obs = [episode, step]."""

    def __init__(self, num_envs=4, limit=5):
        self.num_envs, self.limit = num_envs, limit
        self.single_action_space = Box(np.float32([-1, 0]), np.float32([1, 0.5]))
        self.episode = torch.full((num_envs,), -1)
        self._elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self.base_env, self.actions = self, []
        self.terminated = torch.zeros(num_envs, dtype=torch.bool)

    def obs(self):
        return torch.stack((self.episode, self._elapsed_steps), 1).float()

    def reset(self, *, seed=None, options=None):
        ids = torch.arange(self.num_envs) if options is None else options["env_idx"]
        self.episode[ids] += 1
        self._elapsed_steps[ids] = 0
        return self.obs(), {"reconfigure": False}

    def step(self, actions):
        self.actions.append(actions.clone())
        self._elapsed_steps += 1
        success = (torch.arange(self.num_envs) == 1) & (self._elapsed_steps == 3)
        self.terminated[:] = success
        truncated = self._elapsed_steps >= self.limit
        obs, info = self.obs(), {"success": success.clone(), "elapsed_steps": self._elapsed_steps.clone()}
        reward = success  # a sparse one, and bool
        done = self.terminated | truncated
        if done.any():
            final = obs.clone()
            obs, fresh = self.reset(options={"env_idx": torch.arange(self.num_envs)[done]})
            info = {**fresh, "final_info": info, "_final_info": done, "final_observation": final,
                    "_final_observation": done}  # fmt: skip
        return obs, reward, self.terminated, truncated, info

    def close(self):
        pass


def test_it_conforms():
    report = check_env(ManiSkillVec(FakeVector(), "Fake", 5, "cpu"), 30)
    assert report.ok, report
    untested = {r.name for r in report.results if r.ok is None}
    assert untested == {"filler_flags", "stack", "determinism", "state_dict", "groups", "describe"}


def test_rows_are_what_really_happened():
    env = ManiSkillVec(FakeVector(), "Fake", 5, "cpu")
    obs, solved = env.reset(0)["policy"], 0
    for _ in range(20):
        step = env.step(torch.tensor([[3.0, 0.0]] * 4))
        assert torch.equal(step.final_obs["policy"], obs + torch.tensor([0.0, 1.0]))
        assert torch.equal(step.terminated, step.log["success"] > 0)
        assert step.reward.dtype == torch.float32
        assert torch.equal(step.truncated, step.final_obs["policy"][:, 1] == 5)
        obs, solved = step.obs["policy"], solved + int(step.log["success"].sum())
    assert solved == 6
    assert env.env.actions[-1].tolist() == [[1.0, 0.25]] * 4


def test_the_cpu_holds_one():
    with pytest.raises(ConfigError, match="num_envs=2: expected 1 with ManiSkill on the CPU"):
        maniskill(2, "cpu")
