"""The paper's Humanoid: the robot, manually computed reward terms, observations, starts, a scripted policy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import Base, build, derived

from pql.envs.mujoco.isaac.humanoid import JOINTS, IsaacHumanoid
from tools.originals.by_hand import GEARS

pytestmark = pytest.mark.usefixtures("scratch")

DOUBLE = torch.float64


def test_the_humanoid_is_isaacs() -> None:
    env = build("isaac_humanoid", 2)
    model = env.model
    assert env.spec.obs["policy"].shape == (108,)
    assert env.spec.action.size == 21
    assert env.spec.max_episode_steps == 999
    assert model.body_subtreemass[0] == pytest.approx(40.84, abs=0.01)
    names = [model.joint(i + 1).name for i in range(21)]
    assert names == list(JOINTS)
    assert names[:9] == [
        "abdomen_z",
        "abdomen_y",
        "abdomen_x",
        "right_hip_x",
        "right_hip_z",
        "right_hip_y",
        "right_knee",
        "right_ankle_y",
        "right_ankle_x",
    ]
    assert names[15:18] == ["right_shoulder1", "right_shoulder2", "right_elbow"]
    assert model.actuator_gear[:, 0].tolist() == GEARS.tolist()
    assert model.actuator_trnid[:, 0].tolist() == list(range(1, 22))
    degrees = np.rad2deg(model.jnt_range).round(3).tolist()
    leg = [[-45, 15], [-60, 35], [-120, 45], [-160, 2], [-50, 50], [-50, 50]]
    arm = [[-90, 70], [-90, 70], [-90, 50]]
    assert degrees[1:] == [[-45, 45], [-75, 30], [-35, 35], *leg, *leg, *arm, *arm]
    springs = [20, 20, 10] + 2 * [10, 10, 20, 5, 2, 2] + 2 * [10, 10, 2]
    assert model.jnt_stiffness[1:].ravel().tolist()[:: model.jnt_stiffness[0].size] == springs
    damping = [5, 5, 5] + 2 * [5, 5, 5, 0.1, 1, 1] + 2 * [5, 5, 1]
    assert model.dof_damping[6:].tolist() == damping
    armature = [0.02, 0.01, 0.01] + 2 * [0.01, 0.01, 0.01, 0.007, 0.006, 0.006] + 2 * [0.01, 0.01, 0.006]
    assert model.dof_armature[6:].tolist() == armature
    assert model.opt.timestep * env.task.frame_skip == pytest.approx(env.task.dt)


def test_its_feet_are_two_capsules_on_the_ground() -> None:
    model = build("isaac_humanoid", 1).model
    data = mujoco.MjData(model)
    data.qpos[2] = 1.34
    mujoco.mj_forward(model, data)
    for side, out in (("right", -1), ("left", 1)):
        foot = model.body(f"{side}_foot").id
        assert data.xpos[foot][2] == pytest.approx(1.34 - 0.26 - 0.165 - 0.04 - 0.403 - 0.39, abs=1e-3)
        shapes = np.flatnonzero(model.geom_bodyid == foot)
        assert (model.geom_type[shapes] == mujoco.mjtGeom.mjGEOM_CAPSULE.value).all()
        assert model.geom_size[shapes][:, 0].tolist() == [0.027, 0.027]
        # centres of (-.07, .02) to (.14, .04) and (-.07, 0) to (.14, -.02), across mirrored
        np.testing.assert_allclose(model.geom_pos[shapes], [[0.035, 0.03 * out, 0], [0.035, -0.01 * out, 0]], atol=1e-6)
    # both arms are held alike: their joints turn as in a mirror
    data.qpos[7:] = 0.3
    mujoco.mj_forward(model, data)
    hands = [
        data.xpos[model.body(f"{side}_lower_arm").id] - data.xpos[model.body("torso").id] for side in ("right", "left")
    ]
    np.testing.assert_allclose(hands[0], hands[1] * [1, -1, 1], atol=1e-6)


def test_where_its_episodes_begin() -> None:
    env = build("isaac_humanoid", 500)
    obs = env.reset(seed=0)["policy"]
    qpos, qvel = env.engine.fields["qpos"], env.engine.fields["qvel"]
    assert (qpos[:, :7] == torch.tensor([0, 0, 1.34, 1, 0, 0, 0], dtype=DOUBLE)).all()
    knees = qpos[:, [7 + 6, 7 + 12]]
    assert knees.max() == pytest.approx(math.radians(2))  # clamped to the range
    assert (knees == knees.max()).double().mean() == pytest.approx((0.2 - math.radians(2)) / 0.4, abs=0.05)
    others = torch.cat((qpos[:, 7:13], qpos[:, 20:]), 1)
    assert (others.max() > 0.199, others.max() <= 0.2, others.min() >= -0.2, others.min() < -0.199) == (True,) * 4
    assert others.mean().abs() < 0.005
    assert (qvel[:, :6] == 0).all()
    assert 0.099 < qvel[:, 6:].abs().max() <= 0.1
    assert (obs[:, 10:12] == 1).all()
    assert (obs[:, 87:] == 0).all()


def judged(speed: float, turn: float, height: float, joints: Tensor, pace: float, action: float) -> tuple[dict, bool]:
    """At the origin, turned by ``turn`` degrees about z, moving ``speed`` m/s along x."""
    task = build("isaac_humanoid", 1).task
    assert isinstance(task, IsaacHumanoid)
    half = math.radians(turn) / 2
    base = torch.tensor([speed * 0.0166, 0, height, math.cos(half), 0, 0, math.sin(half)], dtype=DOUBLE)
    fields = {
        "qpos": torch.cat((base, joints))[None],
        "qvel": torch.full((1, 27), pace, dtype=DOUBLE),
        "ctrl": torch.full((1, 21), action, dtype=DOUBLE),
    }
    terms, terminated, metrics = task.judge(derived(task, fields), {"place": torch.zeros(1, 2, dtype=DOUBLE)})
    assert metrics["distance"].item() == pytest.approx(speed * 0.0166)
    assert terminated is not None
    return {name: value.item() for name, value in terms.items()}, bool(terminated)


def middle() -> Tensor:
    env = build("isaac_humanoid", 1)
    return torch.tensor(env.model.jnt_range[1:]).mean(1)


def test_each_term_of_the_reward_on_three_states() -> None:
    weight = float(GEARS.sum()) / 135
    terms, over = judged(1.5, 0.0, 1.3, middle(), pace=2.0, action=0.5)
    assert not over
    assert terms == pytest.approx(
        {
            "progress": 1.5,
            "alive": 2.0,
            "up": 0.1,
            "heading": 0.5,
            "action_cost": -0.01 * 21 * 0.25,
            "energy_cost": -0.05 * 0.5 * 0.1 * 2.0 * weight,
            "limit_cost": 0.0,
            "fall": 0.0,
        },
        rel=1e-4,
    )

    bent = middle()
    bent[5], bent[7] = math.radians(-120), math.radians(50)  # at its lower limit, at its upper: both cost
    bent[17] = math.radians(-20 + 0.99 * 70)  # .99 of the way
    terms, _ = judged(-1.0, 60.0, 1.0, bent, pace=0.0, action=-1.0)
    assert terms["progress"] == pytest.approx(-1.0, rel=1e-4)
    assert terms["heading"] == pytest.approx(0.5 * 0.5 / 0.8, rel=1e-3)
    assert terms["limit_cost"] == pytest.approx(-0.25 * (135 + 22.5 + 0.5 * 45) / 135)
    assert terms["action_cost"] == pytest.approx(-0.21)
    assert terms["energy_cost"] == 0.0

    terms, over = judged(1.5, 0.0, 0.79, bent, pace=2.0, action=0.5)
    assert over
    assert sum(terms.values()) == -1.0


def test_what_is_observed() -> None:
    env = build("isaac_humanoid", 2)
    env.reset(seed=1)
    action = torch.linspace(-1, 1, 42).view(2, 21)
    obs = env.step(action).final_obs["policy"]
    qpos, qvel = env.engine.fields["qpos"].float(), env.engine.fields["qvel"].float()
    low, high = torch.tensor(env.model.jnt_range[1:]).float().unbind(1)
    torch.testing.assert_close(obs[:, 0], qpos[:, 2])
    torch.testing.assert_close(obs[:, 4:7], 0.25 * qvel[:, 3:6])
    torch.testing.assert_close(obs[:, 12:33], (2 * qpos[:, 7:] - low - high) / (high - low))
    torch.testing.assert_close(obs[:, 33:54], 0.1 * qvel[:, 6:])
    torch.testing.assert_close(obs[:, 54:75], 0.01 * GEARS * action)
    assert isinstance(env.task, IsaacHumanoid)
    torch.testing.assert_close(obs[:, 75:87], 0.01 * env.task.wrenches(env.engine.fields).float())
    torch.testing.assert_close(obs[:, 87:], action)


def test_what_is_observed_of_the_base() -> None:
    n, gen = 6, torch.Generator().manual_seed(0)
    env = build("isaac_humanoid", n)
    env.reset(seed=0)
    qpos, qvel = torch.randn(n, 28, generator=gen, dtype=DOUBLE), torch.randn(n, 27, generator=gen, dtype=DOUBLE)
    qpos[:, 3:7] = torch.nn.functional.normalize(qpos[:, 3:7], dim=1)
    qpos[:, :2] *= 300.0
    obs = env.task.observe(derived(env.task, {**env.engine.fields, "qpos": qpos, "qvel": qvel}), {})["policy"]
    for i, (q, v) in enumerate(zip(qpos, qvel, strict=True)):
        base, (x, y, z) = Base(q, v), q[:3].tolist()
        bearing = math.atan2(0 - z, 1000 - x) - base.yaw
        angles = [base.yaw, base.roll, math.remainder(bearing, 2 * math.pi)]
        heading = (base.frame[0, 0] * (1000 - x) - base.frame[1, 0] * y) / math.hypot(1000 - x, y)
        expected = [z, *base.linear, *(0.25 * base.angular), *angles, base.frame[2, 2], heading]
        np.testing.assert_allclose(obs[i, :12], expected, rtol=1e-9, atol=1e-9)


def test_angles_are_within_half_a_turn() -> None:
    task = build("isaac_humanoid", 1).task
    assert isinstance(task, IsaacHumanoid)
    yaw, roll = torch.tensor([3.0, -3.0]), torch.tensor([0.1, 0.2])
    seen = task.angles(yaw, roll, torch.tensor([-0.5, 0.5]))
    expected = [[3.0, 0.1, 2 * math.pi - 3.5], [-3.0, 0.2, 3.5 - 2 * math.pi]]
    torch.testing.assert_close(seen, torch.tensor(expected))
