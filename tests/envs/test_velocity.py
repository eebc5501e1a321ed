"""Legged robots that follow commands: robots, manually computed reward terms, observations, starts, falls."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import Base, build, derived, needs

from pql.envs.mujoco import TASKS as TASK_MAKERS
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.isaac.anymal import Anymal
from pql.envs.mujoco.unitree import G1, SIDES, Go1
from pql.envs.mujoco.velocity import Velocity
from pql.errors import ConfigError
from tools.originals.by_hand import follower

pytestmark = [pytest.mark.usefixtures("scratch"), needs("anymal_c", "go1", "g1")]

DOUBLE = torch.float64
TASKS = {"anymal": Anymal, "go1_velocity": Go1, "g1_velocity": G1}
SIZES = {"anymal": (48, 12, 2499), "go1_velocity": (48, 12, 1000), "g1_velocity": (99, 29, 1000)}
EVERYONE = list(TASKS)
MASSES = {"anymal": 52.13, "go1_velocity": 12.74, "g1_velocity": 33.34}


def task_of(env: MujocoVec) -> Velocity:
    assert isinstance(env.task, Velocity)
    return env.task


def place(env: MujocoVec, **values: Any) -> None:
    """Put all simulations into one state: the pose, changed as said."""
    n, task = env.spec.num_envs, task_of(env)
    qpos, qvel = task.robot.qpos0.repeat(n, 1), task.robot.qvel0.repeat(n, 1)
    qpos[:, 2] = values.get("height", task.height)
    qpos[:, 3:7] = torch.tensor(values.get("quat", (1.0, 0, 0, 0)), dtype=DOUBLE)
    qpos[:, task._q] = task.robot.ctrl_middle
    qvel[:, :6] = torch.tensor(values.get("velocity", (0.0,) * 6), dtype=DOUBLE)
    env.engine.reset(env.engine.rows(torch.ones(n, dtype=torch.bool)), qpos, qvel)
    env.engine.fields["ctrl"].copy_(task.robot.ctrl_middle.expand(n, -1))


# -- the robots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERYONE)
def test_sizes_and_servos(name: str) -> None:
    env = build(name, 2)
    obs, actions, limit = SIZES[name]
    assert env.spec.obs["policy"].shape == (obs,)
    assert (env.spec.action.size, env.spec.max_episode_steps) == (actions, limit)
    model, task = env.model, task_of(env)
    assert model.body_subtreemass[0] == pytest.approx(MASSES[name], abs=0.01)
    assert (model.nv, model.nu) == (6 + actions, actions)
    assert [model.actuator(i).name for i in range(actions)] == list(task.joints)
    assert model.opt.timestep * task.frame_skip == pytest.approx(0.02)
    bits = (model.geom_contype[:, None] & model.geom_conaffinity) | (
        model.geom_contype & model.geom_conaffinity[:, None]
    )
    floor, shapes = model.geom("floor").id, int((model.geom_contype != 0).sum())
    assert bits[floor].sum() == shapes > 4  # everything meets the floor but what is for the eye,
    assert bits.sum() == 2 * shapes  # and nothing else


def test_anymal_is_isaacs() -> None:
    env = build("anymal", 1)
    model, data = env.model, mujoco.MjData(env.model)
    mujoco.mj_forward(model, data)
    assert list(task_of(env).joints)[:4] == ["LF_HAA", "LF_HFE", "LF_KFE", "LH_HAA"]
    masses = {"base": 26.37, "LF_HIP": 2.78, "LF_THIGH": 3.07, "LF_SHANK": 0.588}
    assert {body: round(float(model.body_mass[model.body(body).id]), 3) for body in masses} == pytest.approx(
        masses, abs=0.006
    )
    for leg in ("LF", "LH", "RF", "RH"):
        sign = np.array([1 if leg[1] == "F" else -1, 1 if leg[0] == "L" else -1, 1])
        for body, at in (
            ("HIP", (0.2999, 0.104, 0)),
            ("THIGH", (0.3598, 0.1878, 0)),
            ("SHANK", (0.3598, 0.2881, -0.285)),
        ):
            there = data.xpos[model.body(f"{leg}_{body}").id] - data.xpos[model.body("base").id]
            np.testing.assert_allclose(there, sign * at, atol=2e-4)
        shank = np.flatnonzero(model.geom_bodyid == model.body(f"{leg}_SHANK").id)
        foot = [i for i in shank if model.geom_type[i] == mujoco.mjtGeom.mjGEOM_SPHERE.value]
        assert model.geom_size[foot, 0].tolist() == [0.03]
        np.testing.assert_allclose(data.geom_xpos[foot[0]], sign * (0.4478, 0.3012, -0.623 + 0.0225), atol=2e-4)
    pose = dict(zip(task_of(env).joints, task_of(env).robot.ctrl_middle.tolist(), strict=True))
    assert [pose[f"LF_{j}"] for j in ("HAA", "HFE", "KFE")] == pytest.approx([0.03, 0.4, -0.8])
    assert [pose[f"RH_{j}"] for j in ("HAA", "HFE", "KFE")] == pytest.approx([-0.03, -0.4, 0.8])
    assert model.joint("LF_HAA").range.tolist() == pytest.approx([-0.72, 0.49])
    assert model.joint("RH_HAA").range.tolist() == pytest.approx([-0.49, 0.72])
    assert not (model.geom_type == mujoco.mjtGeom.mjGEOM_CYLINDER.value).any()


@pytest.mark.parametrize(
    ("name", "stiffness", "damping", "effort", "reach"),
    [
        ("anymal", 85.0, 2.0, 80.0, 0.5),
        ("go1_velocity", 15.895, 1.0119, 23.7, 2 * 0.3728),
    ],
)
def test_an_action_moves_the_target_of_a_servo(
    name: str, stiffness: float, damping: float, effort: float, reach: float
) -> None:
    env = build(name, 1)
    task, hip = task_of(env), next(iter(TASKS[name].joints))
    data = mujoco.MjData(env.model)
    data.ctrl[:] = task.control(torch.full((1, 12), 0.5, dtype=DOUBLE), {}, {})[0]
    data.qpos[:] = task.robot.qpos0
    data.joint(hip).qpos, data.joint(hip).qvel = 0.1, -0.7
    mujoco.mj_forward(env.model, data)
    target = task.joints[hip].pose + 0.5 * reach
    expected = stiffness * (target - 0.1) + damping * 0.7
    assert data.actuator(hip).force[0] == pytest.approx(expected, rel=1e-3)
    data.joint(hip).qvel = -1000.0
    mujoco.mj_forward(env.model, data)
    assert data.actuator(hip).force[0] == pytest.approx(effort)


def test_actions_reach_as_far_as_asked_for() -> None:
    near, far = (build("go1_velocity", 1, action_scale=scale, legacy=True) for scale in (1, 3))
    half = torch.full((1, 12), 0.5, dtype=DOUBLE)
    ways = [task_of(env).control(half, {}, {}) - task_of(env).robot.ctrl_middle for env in (near, far)]
    torch.testing.assert_close(ways[1], 3 * ways[0])
    assert ways[0][0, 0].item() == pytest.approx(0.5 * 0.3728, abs=1e-4)
    rough = []
    for env in (near, far):  # the cost of a change is that of mjlab's action, which is not cut off
        place(env)
        rough.append(judged(env, (0.0, 0.0, 0.0), before=half)["action_rate"])
    assert rough == pytest.approx([-0.02 * 0.1 * 12 * 0.25, -0.02 * 0.1 * 12 * 0.25 * 9])
    assert build("anymal", 1).model.actuator_ctrlrange[0] == pytest.approx([0.03 - 0.5, 0.03 + 0.5])  # Isaac's clip


@pytest.mark.parametrize("name", ["go1_velocity", "g1_velocity", "anymal"])
def test_actions_reach_the_joints_limits(name: str) -> None:
    env = build(name, 1, action_scale="limits", legacy=name != "anymal")
    task, model = task_of(env), env.model
    for sign in (-1.0, 1.0):
        ends = task.control(torch.full((1, len(task.joints)), sign, dtype=DOUBLE), {}, {})[0]
        for end, (joint, (pose, _)) in zip(ends.tolist(), task.joints.items(), strict=True):
            low, high = model.joint(joint).range
            assert end == pytest.approx(pose + sign * max(high - pose, pose - low), abs=1e-5)
    if name != "anymal":  # whose reward has no cost of changed actions in the original's units
        place(env)
        size = len(task.joints)
        half = torch.full((1, size), 0.5, dtype=DOUBLE)
        reaches = [
            max(abs(end - pose) for end in model.joint(joint).range) / servo.reach
            for joint, (pose, servo) in task.joints.items()
        ]
        rough = judged(env, (0.0, 0.0, 0.0), before=half)["action_rate"]
        assert rough == pytest.approx(-0.02 * 0.1 * sum((0.5 * r) ** 2 for r in reaches), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "scale", "named"),
    [
        ("go1_velocity", 0, "action_scale=0: expected a number above 0"),
        ("go1_velocity", True, "a number above 0, or limits"),
        ("go1_velocity", "limit", "action_scale=limit: expected a number above 0, or limits"),
        ("go1_velocity", math.inf, "a number above 0"),
        ("isaac_ant", 2, "action_scale=2: expected nothing with isaac_ant: it is for velocity tasks"),
    ],
)
def test_scales_of_actions_are_checked(name: str, scale: float, named: str) -> None:
    for made in (TASK_MAKERS[name], TASK_MAKERS[name].describe):
        with pytest.raises(ConfigError, match=named):
            made(2, action_scale=scale)  # type: ignore[operator]


def test_actions_are_counted_in_the_original_tasks_unit() -> None:
    """An action of 1 is ``action_scale`` of mjlab's or Isaac Gym's; at the joints' limits as many as reach them."""
    assert build("go1_velocity", 1).spec.action_reach == (2.0,) * 12
    assert build("anymal", 1).spec.action_reach == (1.0,) * 12
    env = build("g1_velocity", 1, action_scale="limits")
    low, high = torch.tensor(env.model.actuator_ctrlrange).T
    units = torch.tensor([joint.servo.reach for joint in G1.joints.values()])
    assert env.spec.action_reach == pytest.approx(((high - low) / 2 / units).tolist(), rel=1e-6)
    assert TASK_MAKERS["g1_velocity"].describe(1, action_scale="limits").action_reach == env.spec.action_reach


def test_g1_has_mjlabs_gains() -> None:
    servos = {name: joint.servo for name, joint in G1.joints.items()}
    for joint, stiffness, reach in (
        ("left_knee_joint", 99.1, 0.3507),
        ("right_hip_pitch_joint", 40.18, 0.5475),
        ("waist_roll_joint", 28.5, 0.4386),
        ("left_elbow_joint", 14.25, 0.4386),
        ("right_wrist_yaw_joint", 16.78, 0.0745),
    ):
        assert servos[joint].stiffness == pytest.approx(stiffness, rel=1e-3)
        assert servos[joint].reach == pytest.approx(reach, rel=1e-3)
        assert servos[joint].damping == pytest.approx(4 * servos[joint].armature * 20 * math.pi)
    model = build("g1_velocity", 1).model
    assert [model.joint(1 + i).name for i in range(29)] == list(G1.joints)  # the table is in the model's order


# -- rewards ----------------------------------------------------------------------------------------------------------


def judged(
    env: MujocoVec, command: tuple[float, float, float], before: Tensor | None = None, streak: float = 0.0
) -> dict[str, float]:
    task = task_of(env)
    action = torch.zeros(1, task.action_size, dtype=DOUBLE) if before is None else before
    memory = {
        "command": torch.tensor([command], dtype=DOUBLE),
        "action": action,
        "streak": torch.tensor([streak], dtype=DOUBLE),
    }
    terms, _, metrics = task.judge(derived(task, env.engine.fields), memory)
    return {name: value.item() for name, value in {**terms, **metrics}.items()}


TURNED = (math.sqrt(0.5), 0.0, 0.0, math.sqrt(0.5))  # a quarter turn to the left


def test_each_term_of_anymals_reward_on_three_states() -> None:
    env = build("anymal", 1)
    torques = torch.zeros(1, 18, dtype=DOUBLE)
    fields = {**env.engine.fields, "qfrc_actuator": torques}

    place(env, velocity=(0.0, 1.5, 0.0, 0.0, 0.0, 0.3), quat=TURNED)  # along y of the world: ahead
    terms = judged(env, (1.5, 0.0, 0.3), streak=49)
    rest = {"torque": terms["torque"], "floor": 0.0}  # servos hold up nothing yet, but damp
    assert terms == pytest.approx(
        {
            "linear": 0.02,
            "angular": 0.01,
            "linear_error": 0.0,
            "angular_error": 0.0,
            "tracked": 1.0,
            "success": 1.0,
            **rest,
        },
        abs=1e-9,
    )

    place(env, velocity=(0.6, -0.4, 0.2, 0.0, 0.0, -0.5))
    terms = judged(env, (1.0, -0.1, 0.1), streak=60)
    assert terms["linear"] == pytest.approx(0.02 * math.exp(-(0.4**2 + 0.3**2) / 0.25))
    assert terms["angular"] == pytest.approx(0.01 * math.exp(-(0.6**2) / 0.25))
    assert (terms["linear_error"], terms["angular_error"]) == pytest.approx((0.5, 0.6))
    assert (terms["tracked"], terms["success"]) == (0.0, 0.0)

    torques[0, 6:] = 80.0  # 12 times 6400 (N m)^2 cost more than there is to earn
    memory = {"command": torch.tensor([[2.0, 0.0, 0.0]], dtype=DOUBLE), "streak": torch.zeros(1, dtype=DOUBLE)}
    verdict = env.task.judge(derived(env.task, fields), memory)
    assert verdict.terms["torque"].item() == pytest.approx(-5e-7 * 12 * 6400)
    assert sum(verdict.terms.values()).item() == pytest.approx(0.0, abs=1e-15)
    torques[0, 6:] = 20.0
    verdict = env.task.judge(derived(env.task, fields), memory)
    assert verdict.terms["torque"].item() == pytest.approx(-0.0024)
    assert verdict.terms["floor"].item() == 0.0


def test_each_term_of_the_legacy_reward_on_three_states() -> None:
    env = build("go1_velocity", 1, legacy=True)
    place(env, velocity=(0.0, 0.7, 0.0, 0.0, 0.0, 0.3), quat=TURNED)
    terms = judged(env, (0.7, 0.0, 0.3))
    full = {"linear": 0.04, "angular": 0.04, "upright": 0.02, "posture": 0.02, "limits": 0.0, "action_rate": 0.0}
    assert {name: terms[name] for name in full} == pytest.approx(full, abs=1e-9)
    assert (terms["tracked"], terms["success"]) == (1.0, 0.0)  # for one step

    tilt = math.radians(30)
    place(env, velocity=(0.0, 0.0, 0.0, 0.4, 0.2, 0.1), quat=(math.cos(tilt / 2), math.sin(tilt / 2), 0, 0))
    qpos = env.engine.fields["qpos"]
    qpos[0, env.task._q[0]], qpos[0, env.task._q[2]] = (
        0.1 + 0.3,
        -0.888 + 0.05,
    )  # a hip one slack off; a calf too straight
    terms = judged(env, (0.5, -0.5, 0.0), before=torch.full((1, 12), 0.5, dtype=DOUBLE))
    calf = (1.8 - 0.838) / 0.6
    assert terms["linear"] == pytest.approx(0.04 * math.exp(-0.5 / 0.25))
    assert terms["angular"] == pytest.approx(0.04 * math.exp(-(0.01 + 0.16 + 0.04) / 0.5))
    assert terms["upright"] == pytest.approx(0.02 * math.exp(-0.25 / 0.2))
    assert terms["posture"] == pytest.approx(0.02 * math.exp(-(1 + calf**2) / 12), rel=1e-6)
    assert terms["limits"] == pytest.approx(-0.02 * (0.05 + 0.05 * (2.818 - 0.888)), rel=1e-6)
    assert terms["action_rate"] == pytest.approx(-0.02 * 0.1 * 12 * (2 * 0.5) ** 2)

    place(env, velocity=(0.0, 0.0, 1.0, 0.0, 0.0, 0.0))  # up and down is not over the ground
    terms = judged(env, (0.0, 0.0, -1.0))
    assert terms["linear"] == pytest.approx(0.04 * math.exp(-4))
    assert terms["angular"] == pytest.approx(0.04 * math.exp(-2))
    assert (terms["linear_error"], terms["tracked"]) == (pytest.approx(0.0, abs=1e-9), 0.0)


def test_success_is_a_second_without_a_break() -> None:
    env = build("go1_velocity", 2)
    env.reset(seed=0)
    task, memory = task_of(env), {**env._memory, "command": torch.zeros(2, 3, dtype=DOUBLE)}
    place(env)  # standing still, as is asked
    for step in range(1, 61):
        success = task.judge(derived(task, env.engine.fields), memory).metrics["success"]
        assert (success == (step >= 50)).all()
        memory = {**memory, "streak": task.evolve(derived(task, env.engine.fields), memory, env._draw)["streak"]}
    assert memory["streak"].tolist() == [60, 60]
    place(env, velocity=(1.0, 0, 0, 0, 0, 0))
    assert not task.judge(derived(task, env.engine.fields), memory).metrics["success"].any()
    assert task.evolve(derived(task, env.engine.fields), memory, env._draw)["streak"].tolist() == [0, 0]


# -- observations, starts, ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERYONE)
def test_what_is_observed(name: str) -> None:
    env = build(name, 2)
    env.reset(seed=0)
    task, n = task_of(env), SIZES[name][1]
    action = torch.linspace(-1, 1, 2 * n).view(2, n)
    obs = env.step(action).final_obs["policy"]
    qpos, qvel = (env.engine.fields[field].float() for field in ("qpos", "qvel"))
    torch.testing.assert_close(obs[:, 3:6], 0.25 * qvel[:, 3:6])
    for i in range(2):
        base = Base(qpos[i], qvel[i])
        np.testing.assert_allclose(obs[i, :3], 2 * base.linear, rtol=1e-5, atol=1e-5)
        down = base.frame[:, 2] if name == "anymal" else base.frame[2]
        np.testing.assert_allclose(obs[i, 6:9], -down, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(obs[:, 9:12], env._memory["command"].float() * torch.tensor([2.0, 2.0, 0.25]))
    pose = torch.tensor([joint.pose for joint in task.joints.values()])
    torch.testing.assert_close(obs[:, 12 : 12 + n], qpos[:, task._q] - pose)
    torch.testing.assert_close(obs[:, 12 + n : 12 + 2 * n], (0.05 * qvel[:, task._v]).clamp(-5, 5))
    torch.testing.assert_close(obs[:, 12 + 2 * n :], action)


@pytest.mark.parametrize(
    ("name", "joint"), [("anymal", "LF_HFE"), ("go1_velocity", "FR_thigh_joint"), ("g1_velocity", "left_knee_joint")]
)
def test_where_episodes_begin(name: str, joint: str) -> None:
    env = build(name, 1000)
    env.reset(seed=0)
    task = task_of(env)
    qpos, qvel = env.engine.fields["qpos"], env.engine.fields["qvel"]
    assert (qpos[:, :7] == torch.tensor([0, 0, task.height, 1, 0, 0, 0], dtype=DOUBLE)).all()
    at, pose = qpos[:, task._q[list(task.joints).index(joint)]], task.joints[joint].pose
    assert at.min() == pytest.approx(pose * (1 - task.spread), abs=0.01 * pose)
    assert at.max() == pytest.approx(pose * (1 + task.spread), abs=0.01 * pose)
    assert at.mean() == pytest.approx(pose, rel=0.03)
    assert (qvel[:, :6] == 0).all()
    assert 0.099 < qvel[:, task._v].abs().max() <= 0.1
    command = env._memory["command"]
    still = (command == 0).all(1)
    assert still.double().mean() == pytest.approx(task.resting, abs=0.03)
    for i, most in enumerate(task.fastest):
        drawn = command[~still, i]
        assert 0.99 * most < drawn.max() <= most
        assert -most <= drawn.min() < -0.99 * most
        assert drawn.std() == pytest.approx(most / math.sqrt(3), rel=0.08)
    assert not any(env.engine.fields["sensordata"].any() for _ in task.fragile[:1])
    for state in (qpos[at.argmax()], qpos[at.argmin()]):  # no robot is pushed out of the ground
        data = mujoco.MjData(env.model)
        data.qpos[:] = state
        mujoco.mj_forward(env.model, data)
        assert data.ncon == 0


@pytest.mark.parametrize("name", EVERYONE)
def test_commands_last(name: str) -> None:
    env = build(name, 400)
    env.reset(seed=0)
    task, changed = task_of(env), 0.0
    for _ in range(10):
        before = env._memory["command"]
        env._memory = {**env._memory, **task.evolve(derived(task, env.engine.fields), env._memory, env._draw)}
        changed += (env._memory["command"] != before).any(1).double().sum().item()
    if task.lasting is None:
        assert changed == 0
    else:  # 4,000 chances of .02 s / 5 s; a draw that rests twice is not seen
        assert changed == pytest.approx(4000 * 0.02 / 5, abs=3 * 4)


@pytest.mark.parametrize(
    ("name", "quat", "over"),
    [
        ("anymal", (1, 0, 0, 0), False),
        ("anymal", (0, 1, 0, 0), True),
        ("go1_velocity", (1, 0, 0, 0), False),
        ("go1_velocity", (math.sqrt(0.5), math.sqrt(0.5), 0, 0), True),
        ("g1_velocity", (1, 0, 0, 0), False),
        ("g1_velocity", (math.sqrt(0.5), 0, math.sqrt(0.5), 0), True),
    ],
)
def test_who_falls_is_out_and_who_stands_is_not(name: str, quat: tuple, over: bool) -> None:
    env = build(name, 1)
    env.reset(seed=0)
    place(env, quat=quat, height=TASKS[name].height)
    ended = [env.step(torch.zeros(1, SIZES[name][1])).terminated for _ in range(40)]
    assert torch.stack(ended).any().item() is over


def test_shanks_and_feet_may_touch_the_ground_but_thighs_may_not() -> None:
    env = build("anymal", 1)
    env.reset(seed=0)
    task, data = task_of(env), mujoco.MjData(env.model)
    for fold, touches in ((0.0, False), (1.0, True)):
        data.qpos[:] = task.robot.qpos0
        data.qpos[2] = 0.54
        data.qpos[task._q.numpy()] = task.robot.ctrl_middle.numpy()
        if fold:  # on its knees: shanks folded back, thighs upright
            data.qpos[2] = 0.335
            for leg in ("LF", "LH", "RF", "RH"):
                data.joint(f"{leg}_HFE").qpos, data.joint(f"{leg}_KFE").qpos = 0.0, 2.6 if leg[1] == "H" else -2.6
        mujoco.mj_forward(env.model, data)
        assert data.ncon >= 4
        felt = task.touched({"sensordata": torch.tensor(data.sensordata)[None]})
        assert felt.item() is touches


@pytest.mark.parametrize(("name", "slip", "height"), [("anymal", 2.0, 0.45), ("go1_velocity", 1.0, 0.245)])
def test_who_stands_stays_for_a_whole_episode(name: str, slip: float, height: float) -> None:
    """Feet creep by 1.3 and .5 mm/s. Under ``impratio`` 1 it was 12.7 and 4.8 at first, and ANYmal's thighs came down
    on the ground after 788 to 1,200 of 2,499 steps."""
    env = build(name, 1)
    env.reset(seed=0)
    model, data, task = env.model, mujoco.MjData(env.model), task_of(env)
    own = [
        i for i in range(model.ngeom) if model.geom_type[i] == mujoco.mjtGeom.mjGEOM_SPHERE and model.geom_contype[i]
    ]
    own = own[-4:] if name == "anymal" else [model.geom(foot).id for foot in Go1.feet]
    data.qpos, data.qvel = env.engine.fields["qpos"][0].numpy(), env.engine.fields["qvel"][0].numpy()
    data.ctrl[:] = task.robot.ctrl_middle.numpy()
    begun, start, steps = np.zeros((4, 3)), 2.0, SIZES[name][2]
    for i in range(0, steps, 10):  # only MuJoCo, which is faster
        mujoco.mj_step(model, data, 10 * task.frame_skip)
        assert not task.touched({"sensordata": torch.tensor(data.sensordata)[None]}), f"down after {i} steps"
        if data.time <= start:  # it comes to rest
            begun = data.geom_xpos[own].copy()
    creep = 1000 * np.linalg.norm(data.geom_xpos[own] - begun, axis=1).mean() / (data.time - start)
    print(f"{name}: feet creep by {creep:.2f} mm/s; at last the base is at {data.qpos[2]:.3f} m")
    assert creep < slip
    assert data.qpos[2] > height


# -- scripts and the contract -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "pace", "margin"), [("anymal", 0.8, 0.006), ("go1_velocity", 0.6, 0.005)])
def test_a_scripted_trot_follows_and_earns_more_than_standing(name: str, pace: float, margin: float) -> None:
    n, steps, start = 4, 120, 40
    means, speeds = [], []
    for walks in (True, False):
        env = build(name, n)
        obs, play = env.reset(seed=0), follower(env)
        command, total, moved = torch.tensor([[pace, 0.0, 0.0]]).expand(n, 3), 0.0, 0.0
        for t in range(steps):
            env._memory = {**env._memory, "command": command.to(DOUBLE)}
            obs["policy"][:, 9:12] = command * torch.tensor([2.0, 2.0, 0.25])
            step = env.step(play(obs) if walks else torch.zeros(n, 12))
            assert not step.terminated.any()
            obs = {"policy": step.obs["policy"].clone()}
            total += float(step.reward.mean()) * (t >= start)
            moved += float(obs["policy"][:, 0].mean() / 2) * (t >= start)
        means.append(total / (steps - start))
        speeds.append(moved / (steps - start))
    print(f"{name}: reward a step {means[0]:.4f}, standing {means[1]:.4f}; {speeds[0]:.2f} m/s of {pace}")
    assert means[0] > means[1] + margin
    assert speeds[0] == pytest.approx(pace, abs=0.2)
    assert speeds[1] == pytest.approx(0.0, abs=0.05)


def test_a_missing_package_is_named_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pql.envs.mujoco.robots.importlib.util.find_spec", lambda name: None)
    assert TASK_MAKERS["anymal"].describe(4).obs["policy"].shape == (48,)  # parts that need no model exist
    with pytest.raises(ConfigError, match=r"genesis with .*anymal_c[.]urdf installed: make robots"):
        build("anymal", 1)


def test_g1_has_soles() -> None:
    model = build("g1_velocity", 1).model
    for side in SIDES:
        sole = np.flatnonzero(model.geom_bodyid == model.body(f"{side}_ankle_roll_link").id)
        assert len(sole) == 2
        assert (model.geom_friction[sole, 0] == 1).all()
