"""The check against IsaacGymEnvs: on a small imitation, correct and wrong; on the real one if available.

PQL_ISAACGYMENVS=PATH pytest tests/envs/test_originals.py
"""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("mujoco")  # first: the imports below need it
pytest.importorskip("yaml")

from mujoco_runs import task

ORIGINALS = os.environ.get("PQL_ISAACGYMENVS", "")
TASKS = (
    "isaac_ant",
    "isaac_humanoid",
    "anymal",
    "ballbalance",
    "franka_cube_stack",
    "franka_cube_stack_torque",
    "shadow_hand",
    "shadow_hand_full",
    "shadow_hand_full_no_vel",
    "shadow_hand_openai",
    "allegro_hand",
)
SETTINGS = """
env: {maxEpisodeLength: 500, actionSpeedScale: 20, clipObservations: 5.0, clipActions: 1.0}
sim: {dt: 0.01}
"""
SMALL = """
import torch
from isaacgym import gymtorch
from isaacgym.torch_utils import *
from .base.vec_task import VecTask

@torch.jit.script
def earned(ball, velocity, height: float):
    away = torch.norm(ball - torch.tensor([0.0, 0.0, height]), dim=-1)
    return 1.0 / (1.0 + away) / (1.0 + torch.norm(velocity, dim=-1))

class BallBalance(VecTask):
    def __init__(self, cfg, **where):
        cfg["env"]["numObservations"], cfg["env"]["numActions"] = 24, 3
        super().__init__(config=cfg, **where)
        self.stride = self.dt * cfg["env"]["actionSpeedScale"]
        root = gymtorch.wrap_tensor(self.gym.acquire_actor_root_state_tensor(self.sim)).view(self.num_envs, 2, 13)
        self.ball_positions, self.ball_linvels = root[:, 1, :3], root[:, 1, 7:10]
        self.dofs = gymtorch.wrap_tensor(self.gym.acquire_dof_state_tensor(self.sim)).view(self.num_envs, 6, 2)
        felt = gymtorch.wrap_tensor(self.gym.acquire_force_sensor_tensor(self.sim))
        self.felt = felt.view(self.num_envs, 3, 6)
        self.dof_position_targets = torch.zeros((self.num_envs, 6), dtype=torch.float32)

    def compute_observations(self):
        self.gym.refresh_dof_state_tensor(self.sim)
        moved = self.felt[..., [0, 3, 4, 5]].transpose(1, 2).flatten(1) / 20
        knees = self.dofs[:, 1::2]
        self.obs_buf[:] = torch.cat((knees[..., 0], knees[..., 1], self.ball_positions, self.ball_linvels, moved), 1)

    def compute_reward(self):
        self.rew_buf[:] = earned(self.ball_positions, self.ball_linvels, HEIGHT)
        self.reset_buf[:] = self.ball_positions[:, 2] < 0.15

    def pre_physics_step(self, actions):
        self.dof_position_targets[:, 1::2] += self.stride * actions
        targets = tensor_clamp(self.dof_position_targets, self.bbot_dof_lower_limits, self.bbot_dof_upper_limits)
        self.gym.set_dof_position_target_tensor(self.sim, gymtorch.unwrap_tensor(targets))

    def reset_idx(self, env_ids):
        count = len(env_ids)
        away, way = torch_rand_float(0.001, 0.5, (count, 1), self.device), torch_random_dir_2((count, 1), self.device)
        speed = -(away - 0.001) / 0.499 * torch_rand_float(0, 5, (count, 1), self.device)
        self.ball_positions[env_ids, :2], self.ball_linvels[env_ids, :2] = away * way, speed * way
        self.ball_positions[env_ids, 2] = torch_rand_float(1.0, 2.0, (count, 1), self.device).squeeze()
        self.ball_linvels[env_ids, 2] = -5.0
"""


def small(root: Path, height: str) -> Path:
    """A checkout of one task, which wants the ball at ``height``."""
    tasks, cfg = root / "isaacgymenvs" / "tasks", root / "isaacgymenvs" / "cfg" / "task"
    tasks.mkdir(parents=True), cfg.mkdir(parents=True)
    (tasks / "ball_balance.py").write_text(SMALL.replace("HEIGHT", height))
    (cfg / "BallBalance.yaml").write_text(SETTINGS)
    return root


def differences(tool, root: Path, names: list[str], states: int) -> dict[str, float]:
    rows = tool("originals.check").main(["--isaacgymenvs", str(root), "--states", str(states), "--tasks", *names])
    assert {row.task for row in rows} == {*names}
    return {row.quantity: row.difference for row in rows}


def test_an_original_that_agrees_and_one_that_does_not(tool, tmp_path, capsys):
    right = differences(tool, small(tmp_path / "right", "0.7"), ["ballbalance"], 96)
    assert right.pop("start (Kolmogorov-Smirnov)") < 0.28  # 1.95 sqrt(2 / 96): a level of one in a thousand
    assert set(right) == {"observation", "reward", "ended", "control"}
    assert max(right.values()) < 1e-6
    assert "| `ballbalance` | reward | 96 |" in capsys.readouterr().out
    wrong = differences(tool, small(tmp_path / "wrong", "0.8"), ["ballbalance"], 96)
    assert wrong["reward"] > 1e-3
    assert max(wrong[name] for name in ("observation", "ended", "control")) < 1e-6
    assert not [name for name in sys.modules if name.startswith("isaacgym")]


def test_a_folder_that_is_no_checkout_is_refused(tool, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool("originals.check").main(["--isaacgymenvs", str(tmp_path)])
    assert "expected a checkout with isaacgymenvs/tasks" in capsys.readouterr().err


@pytest.mark.skipif(not ORIGINALS, reason="PQL_ISAACGYMENVS is not set to a checkout of IsaacGymEnvs")
@pytest.mark.parametrize("name", [task(name) for name in TASKS])
def test_the_task_is_the_originals(tool, name):
    found = differences(tool, Path(ORIGINALS), [name], 256)
    assert found.pop("start (Kolmogorov-Smirnov)") < 2.7 * (2 / 256) ** 0.5  # one in a million, by column
    assert found.pop("ended") == 0
    assert max(found.values()) < 1e-6
