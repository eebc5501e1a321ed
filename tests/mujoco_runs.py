"""MuJoCo environments for the tests."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from pql.env import make_env
from pql.envs.mujoco.env import MujocoVec

LEGGED = ("anymal", "go1_velocity", "g1_velocity")
legged = pytest.mark.skipif(
    not all(map(find_spec, ("genesis", "mjlab"))), reason="needs the robots' packages: make robots"
)


def build(name: str, num_envs: int, **kwargs: Any) -> MujocoVec:
    env = make_env(name, num_envs, "cpu", **{"threads": 1, **kwargs})
    assert isinstance(env, MujocoVec)
    return env


def random_actions(env: MujocoVec, steps: int, seed: int = 0) -> Tensor:
    """[steps, N, A] in [-1, 1]."""
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(steps, env.spec.num_envs, env.task.action_size, generator=gen) * 2 - 1
