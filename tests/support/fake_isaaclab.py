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
    stages: tuple = (0, 0, 10, 20)  # steps at which a stage of the curriculum begins: levels 2, 3 and 4
    both: bool = False  # environments fall at the time limit, so that both flags are set
    seed: int | None = None
    is_finite_horizon: bool = False
    compute_final_obs: bool = False
    auto_reset: bool = True
    episode_length_s: float = 5.0
    observations: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(policy=Group(), critic=Group()))
    scene: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(num_envs=4))
    viewer: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(env_idx=0))
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
        self.common_step_counter, self.render_mode = 0, None
        self.scene, self.curriculum_manager = SimpleNamespace(terrain=None), SimpleNamespace(compute=self.move_levels)

    def observe(self):
        self.noise += 1
        seen = torch.stack((self.episode, self.episode_length_buf), 1).float()
        return {self.names[0]: seen, self.names[1]: torch.cat((seen, torch.full_like(seen[:, :1], self.noise)), 1)}

    def add_terrain(self):
        """Five rows of terrain; who is reset moves up one."""
        levels, origins = torch.zeros(self.num_envs, dtype=torch.long), torch.arange(5.0).view(5, 1, 1)
        self.scene.terrain = SimpleNamespace(terrain_levels=levels, terrain_types=torch.zeros_like(levels))
        self.scene.terrain.terrain_origins, self.scene.terrain.env_origins = origins, torch.zeros(self.num_envs, 1)

    def move_levels(self, ids):
        if (terrain := self.scene.terrain) is not None:
            terrain.terrain_levels[ids] = (terrain.terrain_levels[ids] + 1).clamp(max=4)

    def reset_ids(self, ids):
        self.curriculum_manager.compute(ids)
        self.extras["log"] = {
            "Episode_Reward/walk": self.episode_length_buf[ids].float().mean(),
            "Curriculum/level": float(sum(self.common_step_counter >= s for s in self.cfg.stages)),
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
        self.common_step_counter += 1
        self.time_outs[:] = self.episode_length_buf >= self.max_episode_length
        at = self.max_episode_length if self.cfg.both else self.cfg.fall_at
        self.terminated[:] = self.falls & (self.episode_length_buf == at)
        self.reward_buf[:] = 10.0 * self.episode + self.episode_length_buf
        return (self.terminated | self.time_outs).nonzero().squeeze(-1)

    def step(self, action):
        self.take(action)
        ids = self.judge()
        if len(ids):
            if getattr(self.cfg, "compute_final_obs", False):
                self.extras["final_obs"] = self.observe()
            self.reset_ids(ids)
        return self.observe(), self.reward_buf, self.terminated, self.time_outs, self.extras

    def render(self):
        return np.full((4, 6, 3), self.episode_length_buf[0], np.uint8)

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
        self.due -= set(range(self.num_envs) if env_ids is None else env_ids.tolist())
        self.extras["log"] = {}
        return super().reset(seed, env_ids)

    def step(self, action):
        if self.due:
            raise RuntimeError(f"environments {self.due} have ended and were not reset")
        self.extras["log"] = {"Metrics/slip": torch.tensor(0.5 * self.common_step_counter)}
        self.take(action)
        ids = self.judge()
        if self.cfg.auto_reset:
            self.reset_ids(ids)
        else:
            self.due = set(ids.tolist())
        return self.observe(), self.reward_buf, self.terminated, self.time_outs, self.extras


# -- managers ----------------------------------------------------------------------------------------------------------


class JointPositionAction:
    """A term of the action manager over the joints ``ids`` of a robot, with Isaac Lab's attributes or mjlab's."""

    def __init__(self, robot, mjlab, ids, scale, offset):
        self._scale, self._offset = scale, offset
        names = [robot.joint_names[i] for i in ids]
        places = ("_entity", "_target_ids", "_target_names") if mjlab else ("_asset", "_joint_ids", "_joint_names")
        for place, value in zip(places, (robot, torch.tensor(ids), names), strict=True):
            setattr(self, place, value)


class JointEffortAction(JointPositionAction):
    pass


class Actuator:
    """An actuator model in Python: gains of each of its joints."""

    def __init__(self, names, kp, kd, effort):
        self.joint_names = names
        self.stiffness, self.damping, self.effort_limit = (torch.tensor([x] * 4) for x in (kp, kd, effort))


def robot(limits):
    """An articulation with the joints a, b and c."""
    data = SimpleNamespace(soft_joint_pos_limits=torch.tensor([limits] * 4), default_joint_pos=torch.zeros(4, 3))
    data.default_joint_pos[:] = torch.tensor([0.25, -0.5, 0.0])
    acts = {
        "legs": Actuator(["c", "a"], [30.0, 10.0], [3.0, 1.0], [7.0, 5.0]),
        "arm": Actuator(["b"], [20.0], [2.0], [6.0]),
    }
    return SimpleNamespace(joint_names=["a", "b", "c"], data=data, actuators=acts)


def last_action(env):
    """Named as both simulators' function."""


def add_managers(env, terms, observed):
    """Give ``env`` the managers of a manager-based one: action terms by name, and for each observation group (name,
    function, scale, clip, history, width) of its terms."""
    named = {name: [one[0] for one in parts] for name, parts in observed.items()}
    fields = ("func", "scale", "clip", "history_length", "flatten_history_dim")
    env.action_manager = SimpleNamespace(active_terms=[*terms], get_term=terms.__getitem__)
    env.command_manager = SimpleNamespace(active_terms=["twist"])
    env.observation_manager = SimpleNamespace(
        active_terms=named,
        _group_obs_term_cfgs={
            k: [SimpleNamespace(**dict(zip(fields, (*one[1:5], True), strict=True))) for one in parts]
            for k, parts in observed.items()
        },
        group_obs_term_dim={k: [((one[4] or 1) * one[5],) for one in parts] for k, parts in observed.items()},
    )
    return env
