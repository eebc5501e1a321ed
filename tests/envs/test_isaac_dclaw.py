"""D'Claw on ROBEL's finger: the model, starts, manual reward terms, both ends, observations, holding still."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import build, needs, quat

from pql.envs.mujoco import TASKS
from pql.envs.mujoco.isaac.dclaw import DAMPING, EFFORT, HALF, POSE, STIFFNESS, DClaw
from pql.envs.mujoco.isaac.measure import conjugate, product, unscale

pytestmark = [needs("dclaw"), pytest.mark.usefixtures("scratch")]
DOUBLE = torch.float64


def claw(num_envs: int):
    env = build("dclaw", num_envs)
    assert isinstance(env.task, DClaw)
    return env, env.task


def test_four_equal_fingers_hang_around_the_middle() -> None:
    env, _ = claw(1)
    model = env.model
    assert model.opt.impratio == 10
    assert model.opt.timestep * env.task.frame_skip == pytest.approx(env.task.dt)
    data = mujoco.MjData(model)
    data.qpos[:12] = POSE * 4
    mujoco.mj_forward(model, data)
    for i in range(4):
        out = np.array([math.cos(math.pi / 2 * i), -math.sin(math.pi / 2 * i)])  # upside down
        assert [model.joint(3 * i + j).name for j in range(3)] == [f"F{i}J1{j}" for j in range(3)]
        # plate, base and links of ROBEL's finger, and where .8 and -1.1 rad lead: elbows out, tips in
        down = 0.25 - 0.003 - 0.01425 - 0.0675
        elbow = [0.06 + 0.068 * math.sin(0.8), down - 0.068 * math.cos(0.8)]
        tip = [elbow[0] - 0.076 * math.sin(0.3), elbow[1] - 0.076 * math.cos(0.3)]
        for at, (radius, height) in ((data.xanchor[3 * i + 2], elbow), (data.site(f"F{i}tip").xpos, tip)):
            np.testing.assert_allclose(at, [*(radius * out), height], atol=1e-3)  # ROBEL's angles have two digits
        masses = [model.body(f"F{i}{part}").mass[0] for part in ("base", "10", "L11", "L12")]
        np.testing.assert_allclose(masses, [0.093, 0.105, 0.105, 0.032])
    np.testing.assert_allclose(model.actuator_gainprm[:, 0], STIFFNESS * 4)
    np.testing.assert_allclose(model.actuator_biasprm[:, 1:3], np.tile(-np.array([STIFFNESS, DAMPING]).T, (4, 1)))
    np.testing.assert_allclose(model.actuator_forcerange, [[-EFFORT, EFFORT]] * 12)
    np.testing.assert_allclose(model.dof_damping[:12], 0)
    np.testing.assert_allclose(data.qfrc_bias[:12] - data.qfrc_passive[:12], 0, atol=1e-9)  # no weight
    assert model.body("object").mass[0] == pytest.approx(400 * (2 * HALF) ** 3)
    assert data.ncon == 0


def test_starts() -> None:
    spec = TASKS["dclaw"].describe(2)
    assert (spec.obs["policy"].shape, spec.action.size, spec.max_episode_steps) == ((109,), 12, 119)
    env, _ = claw(200)
    obs = env.reset(seed=0)["policy"]
    qpos, goal = env.engine.fields["qpos"], env._memory["goal"]
    shift = qpos[:, :12] - torch.tensor(POSE * 4, dtype=DOUBLE)
    assert shift.aminmax() == (pytest.approx(-0.1, abs=2e-3), pytest.approx(0.1, abs=2e-3))
    place = qpos[:, 12:15] - torch.tensor([0, 0, 0.12], dtype=DOUBLE)
    assert place.aminmax() == (pytest.approx(-0.01, abs=2e-4), pytest.approx(0.01, abs=2e-4))
    for turned in (qpos[:, 15:], goal):  # uniform: each component has mean 0 and mean square 1/4
        torch.testing.assert_close(turned.norm(dim=1), torch.ones(200, dtype=DOUBLE))
        assert turned.mean(0).abs().max() < 0.18
        torch.testing.assert_close(turned.square().mean(0), torch.full((4,), 0.25, dtype=DOUBLE), atol=0.09, rtol=0)
    assert (qpos[:, 15:] * goal).mean(0).abs().max() < 0.1
    assert (obs[:, -12:] == 0).all()


def judged(shift: tuple[float, float, float], turned: float, rate: float = 0.0, torque: float = 0.0):
    """Terms, whether it ended and success: the cube ``shift`` from its place and ``turned`` from its goal, all joints
    turning at ``rate`` against ``torque``, targets where joints are."""
    env, task = claw(1)
    env.reset(seed=0)
    goal, place = quat((0.0, 0.6, 0.8), 1.1), torch.tensor([0, 0, 0.08], dtype=DOUBLE)
    hand, cube = torch.tensor(POSE * 4, dtype=DOUBLE), place + torch.tensor(shift, dtype=DOUBLE)
    qpos = torch.cat((hand, cube, product(quat((0.8, -0.6, 0.0), turned), goal)))[None]
    qvel = torch.cat((torch.full((12,), rate, dtype=DOUBLE), torch.zeros(6, dtype=DOUBLE)))[None]
    data = mujoco.MjData(env.model)
    data.qpos[:] = qpos[0].numpy()
    mujoco.mj_forward(env.model, data)
    tips = np.stack([data.site(f"F{i}tip").xpos for i in range(4)])
    fields = {
        "qpos": qpos,
        "qvel": qvel,
        "ctrl": hand[None],
        "sensordata": torch.tensor(data.sensordata)[None],
        "qfrc_actuator": torch.cat((torch.full((12,), torque, dtype=DOUBLE), torch.zeros(6, dtype=DOUBLE)))[None],
    }
    memory = {**env._memory, "goal": goal[None], "angles": hand[None]}
    terms, ended, metrics = task.judge(fields, memory)
    far = -np.linalg.norm(tips - cube.numpy(), axis=1).mean()
    assert float(terms.pop("distance")) == pytest.approx(far)
    return {k: float(v) for k, v in terms.items()}, bool(ended), float(metrics["success"])


@pytest.mark.parametrize(
    ("given", "terms", "ended", "success"),
    [
        (((0.1, 0, 0), 1.5), {"rotation": 1 / 1.6, "energy": 0, "bonus": 0, "fall": 0}, False, 0),
        (((0, 0, -0.05), 0.39), {"rotation": 1 / 0.49, "energy": 0, "bonus": 800, "fall": 0}, True, 1),
        # 12 joints: |rates| = .05 sqrt(12) < .25; power = 12 * .05 * .2
        (((0, 0, 0), -0.39, 0.05, -0.2), {"rotation": 1 / 0.49, "energy": -2.4, "bonus": 800, "fall": 0}, True, 1),
        (((0, 0, 0), 0.39, 0.08, 0.0), {"rotation": 1 / 0.49, "energy": 0, "bonus": 0, "fall": 0}, False, 0),  # moving
        (((0, 0.151, 0), 3.0, 1.0, 2.0), {"rotation": 1 / 3.1, "energy": -200, "bonus": 0, "fall": -100}, True, 0),
    ],
)
def test_each_term_of_the_reward(given, terms, ended, success) -> None:
    found = judged(*given)
    assert found[0] == pytest.approx(terms)
    assert found[1:] == (ended, success)


def test_targets_follow_smoothed_actions_from_where_joints_are() -> None:
    env, task = claw(2)
    env.reset(seed=0)
    done, gen = torch.zeros(2, 12, dtype=DOUBLE), torch.Generator().manual_seed(0)
    for _ in range(4):
        before, action = env.engine.fields["qpos"][:, :12].clone(), torch.rand(2, 12, generator=gen) - 0.5
        obs = env.step(action).obs["policy"]
        done = 0.8 * action.double() + 0.2 * done
        expected = (before + 3.5 * 0.0833 * done).clamp(task.low, task.high)
        torch.testing.assert_close(env.engine.fields["ctrl"], expected)
        free = (expected > task.low) & (expected < task.high)
        torch.testing.assert_close(obs[:, -12:][free], action[free], atol=1e-5, rtol=0)
        done = env._memory["done"]


def test_what_is_seen() -> None:
    env, task = claw(2)
    env.reset(seed=3)
    gen = torch.Generator().manual_seed(0)
    for _ in range(3):
        obs = env.step(torch.rand(2, 12, generator=gen) * 2 - 1).obs["policy"].double()
    qpos, qvel, goal = env.engine.fields["qpos"], env.engine.fields["qvel"], env._memory["goal"]

    def close(where: slice, expected: Tensor, tolerance: float = 1e-5) -> None:
        torch.testing.assert_close(obs[:, where], expected.clamp(-5, 5), atol=tolerance, rtol=tolerance)

    close(slice(0, 12), unscale(qpos[:, :12], task.low, task.high))
    close(slice(12, 24), 0.2 * qvel[:, :12])
    close(slice(24, 31), torch.cat((qpos[:, 12:15], qpos[:, 15:].roll(-1, 1)), 1))
    close(slice(31, 34), qvel[:, 12:15])
    close(slice(37, 41), goal.roll(-1, 1))
    close(slice(41, 45), product(qpos[:, 15:], conjugate(goal)).roll(-1, 1))
    for i in range(2):
        data = env._data(i)  # a physics step later than the tips that are seen
        for finger in range(4):
            tip = obs[i, 45 + 13 * finger : 58 + 13 * finger]
            np.testing.assert_allclose(tip[:3], data.site(f"F{finger}tip").xpos, atol=0.02)
            assert tip[3:7].norm() == pytest.approx(1, abs=1e-5)
