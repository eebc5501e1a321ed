"""Stand-ins for Isaac Lab and mjlab, after their manager-based environments: signatures, keys of ``extras``, the order
of counters, terminations, rewards and resets, and which buffers live on. Observations are [episode, step]."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium.spaces import Box

LAUNCHED = []
ALIVE = []


@dataclass
class Group:
    history_length: int | None = None


@dataclass
class Config:
    """Fields of the results of ``parse_env_cfg`` and ``load_env_cfg`` that an adapter reads."""

    num_envs: int = 4
    length: int = 5
    falls: tuple = (1,)
    fall_at: int = 3
    both: bool = False  # environments fall at the time limit, so that both flags are set
    seed: int | None = None
    is_finite_horizon: bool = False
    compute_final_obs: bool = False
    auto_reset: bool = True
    episode_length_s: float = 5.0
    observations: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(policy=Group(), critic=Group()))
    scene: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(num_envs=4))
    rewards: dict = field(default_factory=lambda: {"walk": SimpleNamespace(weight=1.0)})  # a dict only in mjlab


class FakeLabEnv:
    """Isaac Lab: same-step resets; ``extras["log"]`` stays until the next reset, ``final_obs`` indefinitely."""

    names = ("policy", "critic")
    needs_launcher = True

    def __init__(self, cfg, device="cpu"):
        if self.needs_launcher and not LAUNCHED:
            raise RuntimeError("the application was not launched")
        if self.needs_launcher and ALIVE:
            raise RuntimeError("one simulation context at a time")
        ALIVE.append(self)
        self.cfg, self.device, n = cfg, device, cfg.num_envs
        self.num_envs, self.step_dt = n, cfg.episode_length_s / cfg.length
        self.max_episode_length = math.ceil(cfg.episode_length_s / self.step_dt)
        self.single_action_space = Box(-np.inf, np.inf, (3,))
        self.falls = torch.tensor([i in cfg.falls for i in range(n)])
        self.episode_length_buf = torch.zeros(n, dtype=torch.long)
        self.episode = torch.full((n,), -1)
        self.terminated, self.time_outs = torch.zeros(2, n, dtype=torch.bool)
        self.reward_buf = torch.zeros(n)
        self.extras, self.actions, self.noise, self.closed = {}, [], 0, False

    def observe(self):
        self.noise += 1
        seen = torch.stack((self.episode, self.episode_length_buf), 1).float()
        return {self.names[0]: seen, self.names[1]: torch.cat((seen, torch.full_like(seen[:, :1], self.noise)), 1)}

    def reset_ids(self, ids):
        self.extras["log"] = {
            "Episode_Reward/walk": self.episode_length_buf[ids].float().mean(),
            "Curriculum/level": 2.0,
            "Episode_Termination/time_out": int(self.time_outs[ids].sum()),  # a count, unlike the others
        }
        self.episode[ids] += 1
        self.episode_length_buf[ids] = 0

    def reset(self, seed=None, env_ids=None, options=None):
        if seed is not None:
            torch.manual_seed(seed)
        self.reset_ids(torch.arange(self.num_envs) if env_ids is None else env_ids)
        return self.observe(), self.extras

    def take(self, action):
        if action.shape != (self.num_envs, *self.single_action_space.shape):
            raise ValueError(f"Invalid action shape, expected: 3, received: {action.shape[1]}.")
        self.actions.append(action.clone())

    def judge(self):
        self.episode_length_buf += 1
        self.time_outs[:] = self.episode_length_buf >= self.max_episode_length
        at = self.max_episode_length if self.cfg.both else self.cfg.fall_at
        self.terminated[:] = self.falls & (self.episode_length_buf == at)
        self.reward_buf[:] = 10.0 * self.episode + self.episode_length_buf
        return (self.terminated | self.time_outs).nonzero().squeeze(-1)

    def step(self, action):
        self.take(action)
        ids = self.judge()
        if len(ids):
            if self.cfg.compute_final_obs:
                self.extras["final_obs"] = self.observe()
            self.reset_ids(ids)
        return self.observe(), self.reward_buf, self.terminated, self.time_outs, self.extras

    def close(self):
        ALIVE.remove(self)
        self.closed = True


@dataclass
class Space:
    """mjlab's ``Box``, which has one number for all bounds instead of an array."""

    shape: tuple = (3,)
    low: float = -math.inf
    high: float = math.inf


class FakeMjlabEnv(FakeLabEnv):
    """mjlab: a new log at every step; without ``auto_reset`` the flagged environments must be reset before the next."""

    names = ("actor", "critic")
    needs_launcher = False

    def __init__(self, cfg, device="cpu"):
        super().__init__(cfg, device)
        self.single_action_space = Space()
        self.due = set()

    def reset(self, *, seed=None, env_ids=None, options=None):
        if env_ids is not None:
            self.due -= set(env_ids.tolist())
        self.extras["log"] = {}
        return super().reset(seed, env_ids)

    def step(self, action):
        if self.due:
            raise RuntimeError(f"environments {self.due} have ended and were not reset")
        self.extras["log"] = {}
        self.take(action)
        ids = self.judge()
        if self.cfg.auto_reset:
            self.reset_ids(ids)
        else:
            self.due = set(ids.tolist())
        return self.observe(), self.reward_buf, self.terminated, self.time_outs, self.extras
