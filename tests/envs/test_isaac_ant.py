"""The paper's Ant: sizes, manually computed reward terms, foot forces against momentum, a scripted policy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import Base, build, derived, quat

from pql.envs.mujoco.isaac.ant import FEET, JOINTS, IsaacAnt
from pql.envs.mujoco.isaac.measure import roll_yaw, rotation

pytestmark = pytest.mark.usefixtures("scratch")


def test_roll_and_yaw() -> None:
    for axis, degrees, expected in (((1, 0, 0), 30.0, (30.0, 0.0)), ((0, 0, 1), -120.0, (0.0, -120.0))):
        angles = [math.degrees(float(angle)) for angle in roll_yaw(rotation(quat(axis, math.radians(degrees))[None]))]
        assert angles == pytest.approx(expected)


def test_the_ant_is_isaacs() -> None:
    env = build("isaac_ant", 3)
    model = env.model
    assert env.spec.obs["policy"].shape == (60,)
    assert env.spec.action.size == 8
    assert env.spec.max_episode_steps == 999
    assert model.body_subtreemass[0] == pytest.approx(0.911, abs=5e-4)
    assert tuple(model.actuator(i).trnid[0] for i in range(8)) == tuple(model.joint(name).id for name in JOINTS)
    assert (model.actuator_gear[:, 0] == 15).all()
    assert model.dof_armature[6:].tolist() == [0.01] * 8
    assert model.dof_damping[6:].tolist() == [0.1] * 8
    assert model.dof_damping[:6].max() == model.dof_armature[:6].max() == 0
    assert (model.geom_friction[:, 0] == 1.5).all()
    degrees = np.rad2deg(model.jnt_range[1:]).round().tolist()
    up, down = [30.0, 100.0], [-100.0, -30.0]
    assert degrees[::2] == [[-40.0, 40.0]] * 4
    assert degrees[1::2] == [up, down, down, up]
    assert model.opt.timestep * env.task.frame_skip == pytest.approx(env.task.dt)


def test_the_ants_start() -> None:
    env = build("isaac_ant", 500)
    obs = env.reset(seed=0)["policy"]
    qpos, qvel = env.engine.fields["qpos"], env.engine.fields["qvel"]
    assert (qpos[:, :7] == torch.tensor([0, 0, 0.44, 1, 0, 0, 0], dtype=torch.float64)).all()
    assert qpos[:, 7::2].abs().max() <= 0.2
    ankles = qpos[:, 8::2].abs()
    assert ankles.min() == pytest.approx(math.radians(30))
    assert (ankles == ankles.min()).float().mean() == pytest.approx(0.5, abs=0.05)  # half the draws sit on the limit
    assert (qvel[:, :6] == 0).all()
    assert 0.099 < qvel[:, 6:].abs().max() <= 0.1
    torch.testing.assert_close(obs[:, 9], torch.full((500,), math.atan2(-0.44, 1000.0)))
    assert (obs[:, 10:12] == 1).all()
    assert (obs[:, 52:] == 0).all()


def test_every_number_that_is_observed() -> None:
    n, gen = 6, torch.Generator().manual_seed(0)
    env = build("isaac_ant", n)
    env.reset(seed=0)
    assert isinstance(env.task, IsaacAnt)
    qpos, qvel, noise = (
        torch.randn(n, size, generator=gen, dtype=torch.float64) for size in (15, 14, env.model.nsensordata)
    )
    qpos[:, 3:7] = torch.nn.functional.normalize(qpos[:, 3:7], dim=1)
    qpos[:, :2] *= 300.0
    action = torch.rand(n, 8, generator=gen, dtype=torch.float64) * 2 - 1
    fields = {"qpos": qpos, "qvel": qvel, "sensordata": noise, "ctrl": action}
    obs = env.task.observe(derived(env.task, fields), {})["policy"]
    yaws = []
    for i, (q, v) in enumerate(zip(qpos, qvel, strict=True)):
        base, (x, y, z) = Base(q, v), q[:3].tolist()
        yaws.append(base.yaw)
        around = base.yaw % (2 * math.pi)
        angles = [around, base.roll % (2 * math.pi), math.atan2(0 - z, 1000 - x) - around]
        heading = (base.frame[0, 0] * (1000 - x) - base.frame[1, 0] * y) / math.hypot(1000 - x, y)
        expected = [z, *base.linear, *base.angular, *angles, base.frame[2, 2], heading]
        np.testing.assert_allclose(obs[i, :12], expected, rtol=1e-9, atol=1e-9)
    assert min(yaws) < 0 < max(yaws)
    low, high = torch.tensor(env.model.jnt_range[1:]).unbind(1)
    torch.testing.assert_close(obs[:, 12:20], (2 * qpos[:, 7:] - low - high) / (high - low))
    torch.testing.assert_close(obs[:, 20:28], 0.2 * qvel[:, 6:])
    torch.testing.assert_close(obs[:, 28:52], 0.1 * env.task.wrenches(fields))
    torch.testing.assert_close(obs[:, 52:], action)


def ant_terms(place: Tensor, before: Tensor, height: float, turn: Tensor, joints: Tensor, speed: float, action: float):
    task = build("isaac_ant", 1).task
    assert isinstance(task, IsaacAnt)
    qpos = torch.cat((place, torch.tensor([height], dtype=torch.float64), turn, joints))[None]
    qvel = torch.full((1, 14), speed, dtype=torch.float64)
    ctrl = torch.full((1, 8), action, dtype=torch.float64)
    terms, terminated, _ = task.judge(
        derived(task, {"qpos": qpos, "qvel": qvel, "ctrl": ctrl}), {"place": before[None]}
    )
    assert terminated is not None
    return {name: float(value) for name, value in terms.items()}, bool(terminated)


def test_each_term_of_the_ants_reward_on_three_states() -> None:
    middle = torch.tensor([0.0, 1.0, 0.0, -1.0, 0.0, -1.0, 0.0, 1.0], dtype=torch.float64)
    origin, ahead = torch.zeros(2, dtype=torch.float64), torch.tensor([0.0166, 0.0], dtype=torch.float64)
    straight = quat((0, 0, 1), math.radians(0))

    high = middle.clone()
    high[0], high[2] = math.radians(39.99), math.radians(-39.99)  # only the upper side costs
    terms, terminated = ant_terms(ahead, origin, 0.5, straight, high, 2.0, 0.5)
    assert not terminated
    assert terms == pytest.approx(
        {
            "progress": 1.0,
            "alive": 0.5,
            "up": 0.1,
            "heading": 0.5,
            "action_cost": -0.005 * 8 * 0.25,
            "energy_cost": -0.05 * 8 * 0.5 * 0.2 * 2.0,
            "limit_cost": -0.1,
            "fall": 0.0,
        }
    )

    aside = torch.tensor([0.0, 500.0], dtype=torch.float64)  # the target is not along x from here
    back = aside + torch.tensor([0.0, 0.0166], dtype=torch.float64)
    terms, _ = ant_terms(back, aside, 0.5, quat((0, 0, 1), math.radians(60)), middle, 0.0, 0.0)
    angle = math.radians(60.0) + math.atan2(500.0, 1000.0)
    assert terms["progress"] == pytest.approx(-math.sin(math.atan2(500.0, 1000.0)), rel=1e-4)
    assert terms["heading"] == pytest.approx(0.5 * math.cos(angle) / 0.8, rel=1e-3)
    assert terms["up"] == pytest.approx(0.1)

    terms, _ = ant_terms(origin, origin, 0.5, quat((1, 0, 0), math.radians(30)), middle, 0.0, 0.0)
    assert terms["up"] == 0.0  # cos 30 = .87
    terms, terminated = ant_terms(ahead, origin, 0.30, straight, high, 2.0, 0.5)
    assert terminated
    assert sum(terms.values()) == -2.0


def test_net_forces_on_the_feet_are_the_change_of_their_momentum() -> None:
    env = build("isaac_ant", 2)
    env.reset(seed=3)
    gen = torch.Generator().manual_seed(0)
    for _ in range(8):
        env.step(torch.rand(2, 8, generator=gen) * 2 - 1)
    assert isinstance(env.task, IsaacAnt)
    model = env.engine.batch.get_model(0)  # type: ignore[attr-defined]
    model.opt.timestep = 1e-8  # within 1e-6 s forces of contacts change by up to 0.005 N
    before, after = mujoco.MjData(model), mujoco.MjData(model)
    for data in (before, after):
        data.qpos[:], data.qvel[:] = (env.engine.fields[name][0].numpy() for name in ("qpos", "qvel"))
        data.ctrl[:] = 0.7
    mujoco.mj_forward(model, before)
    mujoco.mj_step(model, after)
    mujoco.mj_forward(model, after)
    fields = {"sensordata": torch.from_numpy(before.sensordata.copy())[None]}
    ours = env.task.wrenches(fields)[0].view(4, 2, 3)
    for foot, (force, torque) in zip(FEET, ours, strict=True):
        i = model.body(foot).id
        moments = []
        for data in (before, after):
            velocity = np.zeros(6)
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_BODY, i, velocity, 0)
            frame = data.ximat[i].reshape(3, 3)
            moments.append(
                (model.body_mass[i] * velocity[3:], frame @ (model.body_inertia[i] * (frame.T @ velocity[:3])))
            )
        f, t = ((late - early) / 1e-8 for early, late in zip(*moments, strict=True))
        t = t + np.cross(before.xipos[i] - before.xpos[i], f)
        axes = before.xmat[i].reshape(3, 3)
        np.testing.assert_allclose(force, axes.T @ f, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(torque, axes.T @ t, rtol=1e-3, atol=1e-3)


def test_at_rest_nothing_pulls_on_the_feet() -> None:
    env = build("isaac_ant", 2)
    env.reset(seed=0)
    for _ in range(90):
        step = env.step(torch.zeros(2, 8))
    assert step.obs["policy"][:, 28:52].abs().max() < 0.01
    assert step.obs["policy"][0, 0] > 0.31  # standing
