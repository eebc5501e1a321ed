"""MuJoCo environments for the tests."""

import math
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from pql.contract.env import make_env
from pql.envs.mujoco.engine import Fields
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.robots import model_file
from pql.envs.mujoco.task import Task
from pql.errors import ConfigError

ROBOT_OF = {
    "anymal": "anymal_c",
    "go1_velocity": "go1",
    "g1_velocity": "g1",
    "shadow_hand": "shadow_hand",
    "shadow_hand_openai": "shadow_hand",
    "allegro_hand": "allegro_hand",
    "dclaw": "dclaw",
    "franka_cube_stack": "panda",
    "franka_cube_stack_torque": "panda",
}
"""Tasks whose robot is a file of another package."""


def build(name: str, num_envs: int, **kwargs: Any) -> MujocoVec:
    env = make_env(name, num_envs, "cpu", **{"threads": 1, **kwargs})
    assert isinstance(env, MujocoVec)
    return env


def derived(task: Task, fields: Fields) -> Fields:
    """Return ``fields`` as the task's functions receive them."""
    return {**fields, **task.derive(fields)}


def random_actions(env: MujocoVec, steps: int, seed: int = 0) -> Tensor:
    """Draw actions [steps, N, A] in [-1, 1]."""
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(steps, env.spec.num_envs, env.task.action_size, generator=gen) * 2 - 1


def needs(*robots: str) -> pytest.MarkDecorator:
    """Skip a test if a robot's model is not installed; the reason is the command that installs it."""
    missing = ""
    for robot in robots:
        try:
            model_file(robot)
        except ConfigError as error:
            missing = str(error)
    return pytest.mark.skipif(bool(missing), reason=missing)


def task(name: str, *marks: pytest.MarkDecorator) -> Any:
    """Return a test parameter: a task, skipped if its robot is not installed."""
    found = [needs(ROBOT_OF[name])] if name in ROBOT_OF else []
    return pytest.param(name, marks=[*marks, *found])


def quat(axis: tuple[float, float, float], angle: float) -> Tensor:
    """Return the quaternion of a turn by ``angle`` radians about a unit axis, in float64."""
    half = angle / 2
    return torch.tensor([math.cos(half), *(math.sin(half) * part for part in axis)], dtype=torch.float64)


class Base:
    """Motion of a robot's free body, computed from its ``qpos`` and ``qvel`` and MuJoCo's matrix."""

    def __init__(self, qpos: Tensor, qvel: Tensor):
        matrix = np.zeros(9)
        mujoco.mju_quat2Mat(matrix, qpos[3:7].double().numpy())
        self.frame = frame = matrix.reshape(3, 3)  # body -> world
        # Both in the body's frame.
        self.linear, self.angular = frame.T @ qvel[:3].double().numpy(), qvel[3:6].double().numpy()
        self.roll, self.yaw = math.atan2(frame[2, 1], frame[2, 2]), math.atan2(frame[1, 0], frame[0, 0])
