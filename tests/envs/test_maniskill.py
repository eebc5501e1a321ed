"""The adapter for ManiSkill against a stand-in for its vector environment; ``make test-adapters`` runs the real one if
there is a driver for rendering."""

import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from pql.contract.conformance import check_env
from pql.envs.adapters.maniskill import ManiSkillVec, backend, maniskill
from pql.errors import ConfigError


class FakeVector:
    """``ManiSkillVectorEnv`` with automatic resets: on steps with an end, the info is the reset's, and what was to be
    said of the step lies below ``final_info``. obs = [episode, step].

    Args:
        judged: the task knows success; the info of a reset tells it, too.
    """

    control_mode = "pd_joint_pos"

    def __init__(self, num_envs=4, limit=5, judged=True, high=0.5, pictures=False):
        self.num_envs, self.limit, self.judged, self.pictures = num_envs, limit, judged, pictures
        self.single_action_space = Box(np.float32([-1, 0]), np.float32([1, high]))
        self.episode = torch.full((num_envs,), -1)
        self._elapsed_steps = torch.zeros(num_envs, dtype=torch.int32)
        self.base_env, self.actions = self, []
        self.terminated = torch.zeros(num_envs, dtype=torch.bool)

    def obs(self):
        state = torch.stack((self.episode, self._elapsed_steps), 1).float()
        return {"state": state, "sensor_data": {}} if self.pictures else state

    def info(self):
        won = (torch.arange(self.num_envs) == 1) & (self._elapsed_steps == 3)
        return {"elapsed_steps": self._elapsed_steps.clone(), **({"success": won} if self.judged else {})}

    def reset(self, *, seed=None, options=None):
        ids = torch.arange(self.num_envs) if options is None else options["env_idx"]
        self.episode[ids] += 1
        self._elapsed_steps[ids] = 0
        return self.obs(), {**self.info(), "reconfigure": False}

    def step(self, actions):
        self.actions.append(actions.clone())
        self._elapsed_steps += 1
        obs, info = self.obs(), self.info()
        self.terminated[:] = info["success"] if self.judged else False
        truncated = self._elapsed_steps >= self.limit
        reward = self.terminated.clone()  # a sparse one, and bool
        done = self.terminated | truncated
        if done.any():
            final = obs.clone()
            obs, fresh = self.reset(options={"env_idx": torch.arange(self.num_envs)[done]})
            info = {
                **fresh,
                "final_info": info,
                "_final_info": done,
                "final_observation": final,
                "_final_observation": done,
            }
        return obs, reward, self.terminated, truncated, info

    def close(self):
        pass


def test_it_conforms(conforms):
    untested = conforms(ManiSkillVec(FakeVector(), "Fake", 5, "cpu"), 30)
    assert untested == {"filler_flags", "stack", "determinism", "state_dict", "groups", "describe", "capturable"}


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


def test_a_task_that_knows_no_success_logs_none():
    env = ManiSkillVec(FakeVector(judged=False), "Fake", 5, "cpu")
    assert env.spec.log == ()  # every evaluation would report a success of 0
    assert check_env(env, 30).ok


def test_first_episodes_of_random_length():
    env = ManiSkillVec(FakeVector(64, limit=40), "Fake", 40, "cpu", random_lengths=True)
    env.reset(0)
    assert env.env._elapsed_steps.unique().numel() > 15
    assert env.env._elapsed_steps.max() < 40


def test_single_environments_restart_and_images_show_one():
    env = ManiSkillVec(FakeVector(), "Fake", 5, "cpu")
    env.reset(0)
    before = env.step(torch.zeros(4, 2)).obs["policy"]
    obs = env.reset_where(torch.tensor([False, False, True, False]))["policy"]
    assert obs.tolist() == [*before[:2].tolist(), [before[2, 0] + 1, 0], before[3].tolist()]
    assert torch.equal(env.reset_where(torch.zeros(4, dtype=torch.bool))["policy"], obs)
    assert env.step(torch.zeros(4, 2)).obs["policy"][:, 1].tolist() == [2.0, 2.0, 1.0, 2.0]
    with pytest.raises(ConfigError, match="render_mode=null: expected rgb_array"):
        env.render()
    env.env.render_mode = "rgb_array"
    env.env.render = lambda: torch.arange(4).view(4, 1, 1, 1).expand(4, 5, 6, 3)
    assert (env.render(3).shape, env.render(3).max()) == ((5, 6, 3), 3)
    with pytest.raises(ConfigError, match=r"height=64: expected none: task\.kwargs\.settings\.human_render"):
        env.render(0, None, 64)


def test_the_simulation_is_on_the_device_asked_for():
    names = [backend(torch.device(name)) for name in ("cpu", "cuda", "cuda:1")]
    assert names == ["physx_cpu", "physx_cuda", "physx_cuda:1"]


def test_what_has_no_place_here_is_refused(monkeypatch):
    for name in ("mani_skill", "mani_skill.envs", "mani_skill.utils", "mani_skill.vector.wrappers.gymnasium"):
        package = types.ModuleType(name)
        package.gym_utils = package.ManiSkillVectorEnv = None
        monkeypatch.setitem(sys.modules, name, package)

    with pytest.raises(ConfigError, match="num_envs=2: expected 1 with ManiSkill on the CPU"):
        maniskill(2, "cpu")
    for message in ("failed to find a rendering device", 'Failed to find a supported physical device "cpu"'):
        monkeypatch.setattr("gymnasium.make", mock.Mock(side_effect=RuntimeError(message)))
        with pytest.raises(
            ConfigError, match=rf"device=cpu: expected one that Vulkan can render on \({message}\); .*Mesa"
        ):
            maniskill(1, "cpu")
    monkeypatch.setattr("gymnasium.make", mock.Mock(side_effect=RuntimeError("no such asset")))
    with pytest.raises(RuntimeError, match="no such asset"):
        maniskill(1, "cpu")
    with pytest.raises(ConfigError, match="control_mode=pd_joint_pos: expected a controller with bounds"):
        ManiSkillVec(FakeVector(high=np.inf), "Fake", 5, "cpu")
    with pytest.raises(ConfigError, match="obs_mode=state, sensor_data: expected state: one flat array"):
        ManiSkillVec(FakeVector(pictures=True), "Fake", 5, "cpu")
