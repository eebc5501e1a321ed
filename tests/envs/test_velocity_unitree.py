"""Go1 and G1: reward against NumPy, ends by tilt, what standing earns, the legacy form's bits."""

import hashlib
import math

import numpy as np
import pytest
import torch

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import build, derived, needs, quat

from pql.envs.mujoco import TASKS as TASK_MAKERS
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.unitree import Unitree
from pql.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("scratch"), needs("go1", "g1")]

DOUBLE = torch.float64
BOTH = ("go1_velocity", "g1_velocity")


def task_of(env: MujocoVec) -> Unitree:
    assert isinstance(env.task, Unitree)
    return env.task


def turned(w: float, x: float, y: float, z: float) -> np.ndarray:
    """Return the rotation matrix [3, 3] of a unit quaternion: columns are the body's axes in the world."""
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def reward_by_hand(model, qpos, qvel, torque, ctrl, before, command, pose):
    """Return the terms of one simulation, per step of .02 s, from the documented formulas."""
    frame = turned(*qpos[3:7])
    linear, angular, up = frame.T @ qvel[:3], qvel[3:6], frame[2]
    joints, pace, torque = qpos[7:], qvel[6:], torque[6:]
    low, high = model.jnt_range[1:].T
    middle, half = (low + high) / 2, 0.9 * (high - low) / 2
    beyond = np.maximum(joints - (middle + half), 0) + np.maximum(middle - half - joints, 0)
    terms = {
        "linear": math.exp(-((command[0] - linear[0]) ** 2 + (command[1] - linear[1]) ** 2) / 0.25),
        "angular": 0.5 * math.exp(-((command[2] - angular[2]) ** 2) / 0.25),
        "vertical": -0.5 * linear[2] ** 2,
        "tilt_rate": -0.05 * (angular[0] ** 2 + angular[1] ** 2),
        "tilt": -5.0 * (up[0] ** 2 + up[1] ** 2),
        "torque": -0.0002 * (math.sqrt(sum(torque**2)) + sum(abs(torque))),
        "energy": -0.001 * sum(abs(torque) * abs(pace)),
        "limits": -1.0 * sum(beyond),
        "action_rate": -0.01 * sum(((ctrl - before) / 0.5) ** 2),
        "stand_still": -1.0 * sum(abs(joints - pose)) if math.sqrt(sum(command**2)) < 0.01 else 0.0,
        "pose": -0.1 * sum((joints - pose) ** 2),
    }
    terms = {name: 0.02 * value for name, value in terms.items()}
    return {**terms, "floor": max(0.0, -sum(terms.values()))}


@pytest.mark.parametrize("name", BOTH)
def test_each_reward_term_is_that_of_the_formulas(name: str) -> None:
    n = 64
    env = build(name, n)
    task, model, gen = task_of(env), env.model, torch.Generator().manual_seed(1)
    size = task.action_size

    def draw(scale: float, *shape: int) -> torch.Tensor:
        calm = 1 - 0.9 * (torch.arange(n) % 2)[:, None]  # every second row, so that costs leave a reward
        return scale * calm * torch.randn(*shape, generator=gen, dtype=DOUBLE)

    pose = task.robot.ctrl_middle
    qpos = torch.cat((draw(1, n, 3), draw(1, n, 4), pose + draw(0.3, n, size)), 1)
    qpos[:, 3] += 4.0  # mostly upright
    qpos[:, 3:7] /= torch.linalg.vector_norm(qpos[:, 3:7], dim=1, keepdim=True)
    qvel, torque = draw(0.5, n, 6 + size), draw(5.0, n, 6 + size)
    action, before = draw(0.3, n, size), draw(0.3, n, size)
    command = draw(0.5, n, 3) * (torch.arange(n) % 3 > 0)[:, None]
    at = [model.joint(joint).qposadr[0] for joint in task.joints]
    assert at == list(range(7, 7 + size))  # in the model's order, as the formulas assume
    ctrl = pose + action * task.robot.ctrl_half
    fields = {**env.engine.fields, "qpos": qpos, "qvel": qvel, "qfrc_actuator": torque, "ctrl": ctrl}
    memory = {"command": command, "action": before, "streak": torch.zeros(n, dtype=DOUBLE)}
    terms = task.judge(derived(task, fields), memory).terms
    assert tuple(terms) == task.terms
    earlier = (pose + before * task.robot.ctrl_half).numpy()
    rows = [x.numpy() for x in (qpos, qvel, torque, ctrl)]
    for i in range(n):
        wanted = reward_by_hand(model, *(x[i] for x in rows), earlier[i], command[i].numpy(), pose.numpy())
        assert {term: value[i].item() for term, value in terms.items()} == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    total = torch.stack([*terms.values()]).sum(0)
    assert total.min() > -1e-12
    assert (total < 1e-12).any()  # the floor counts in some rows,
    assert (total > 0.001).any()  # and in others it does not


def mean_square(reach: float, sigma: float) -> float:
    """Return the mean of exp(-c^2 / sigma) for c uniform within +-reach."""
    return math.sqrt(math.pi * sigma) / 2 * math.erf(reach / math.sqrt(sigma)) / reach


@pytest.mark.parametrize(
    ("name", "legacy", "share"),
    [
        ("go1_velocity", False, 0.3066),
        ("g1_velocity", False, 0.3490),
        ("go1_velocity", True, 0.6378),
        ("g1_velocity", True, 0.6378),
    ],
)
def test_what_standing_still_in_the_pose_earns(name: str, legacy: bool, share: float) -> None:
    """As a share of the maximum, which a robot earns that follows in the pose: exactly, and by draws of commands."""
    env = build(name, 2, legacy=legacy)
    task = task_of(env)
    ahead, side, around = task.fastest
    weights, sigma, rest = ((2.0, 2.0), 0.5, 2.0) if legacy else ((1.0, 0.5), 0.25, 0.0)
    moves = 1 - task.resting
    still = (
        task.resting + moves * mean_square(ahead, 0.25) * mean_square(side, 0.25),
        task.resting + moves * mean_square(around, sigma),
    )
    most = sum(weights) + rest
    exact = (weights[0] * still[0] + weights[1] * still[1] + rest) / most
    assert exact == pytest.approx(share, abs=1e-4)

    n = 40_000
    command = task._command(n, env._draw)
    qpos = task.robot.qpos0.repeat(n, 1)
    qpos[:, task._q] = task.robot.ctrl_middle
    fields = {
        "qpos": qpos,
        "qvel": task.robot.qvel0.repeat(n, 1),
        "qfrc_actuator": torch.zeros(n, 6 + task.action_size, dtype=DOUBLE),
        "ctrl": task.robot.ctrl_middle.repeat(n, 1),
        "sensordata": torch.zeros(n, env.model.nsensordata, dtype=DOUBLE),
    }
    memory = {"action": torch.zeros(n, task.action_size, dtype=DOUBLE), "streak": torch.zeros(n, dtype=DOUBLE)}
    earned = torch.stack([*task.judge(derived(task, fields), {**memory, "command": command}).terms.values()]).sum(0)
    assert earned.mean().item() / (0.02 * most) == pytest.approx(share, abs=0.005)
    fields["qvel"][:, :2], fields["qvel"][:, 5] = command[:, :2], command[:, 2]
    earned = torch.stack([*task.judge(derived(task, fields), {**memory, "command": command}).terms.values()]).sum(0)
    torch.testing.assert_close(earned, torch.full_like(earned, 0.02 * most))


@pytest.mark.parametrize("name", BOTH)
def test_an_episode_ends_where_the_base_tilts_by_more_than_70_degrees(name: str) -> None:
    env = build(name, 1)
    task = task_of(env)
    qpos = env.engine.fields["qpos"].clone()
    for degrees in (0, 45, 69.9, 70.1, 120, 180):
        for way in range(0, 360, 45):  # the way it falls, and its heading, do not matter
            axis = (math.cos(math.radians(way)), math.sin(math.radians(way)), 0.0)
            qpos[0, 3:7] = quat(axis, math.radians(degrees))
            fields = derived(task, {**env.engine.fields, "qpos": qpos})
            assert task.down(fields, task.motion(fields)).item() is (degrees > 70), (degrees, way)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_trunk_on_the_ground_ends_only_legacy_episodes(legacy: bool) -> None:
    env = build("go1_velocity", 1, legacy=legacy)
    env.reset(seed=0)
    task = task_of(env)
    qpos, crouch = task.robot.qpos0.repeat(1, 1), torch.tensor([0.0, 2.2, -2.0], dtype=DOUBLE).repeat(4)
    qpos[0, 2], qpos[0, task._q] = 0.12, crouch
    env.engine.reset(env.engine.rows(torch.ones(1, dtype=torch.bool)), qpos, task.robot.qvel0.repeat(1, 1))
    folded = ((crouch - task.robot.ctrl_middle) / task.robot.ctrl_half).float()[None]
    ends = [env.step(folded).terminated.item() for _ in range(50)]
    assert any(ends) is legacy
    assert env.model.nsensor == (5 if legacy else 0)


BITS = {
    "go1_velocity": "3279a5aad69744d9eaedb8c06925116b20cef933808f58b98d7c611a2648fb11",
    "g1_velocity": "d542157f61cb305c6e69456c83ba68c885d3b5517d6ab678bd7e70a0918e9802",
}
MADE_WITH = ("2.13", "4.0", "AVX512")
"""torch, MuJoCo and instructions with which the hashes were made: others round differently."""


@pytest.mark.skipif(
    not torch.__version__.startswith(MADE_WITH[0])
    or not mujoco.__version__.startswith(MADE_WITH[1])
    or torch.backends.cpu.get_cpu_capability() != MADE_WITH[2],
    reason=f"hashes were made with torch {MADE_WITH[0]}, MuJoCo {MADE_WITH[1]} and {MADE_WITH[2]}",
)
@pytest.mark.parametrize("name", BOTH)
def test_the_legacy_form_repeats_its_bits(name: str) -> None:
    env = build(name, 8, legacy=True)
    digest, gen, ends = hashlib.sha256(env.reset(seed=3)["policy"].numpy().tobytes()), torch.Generator(), 0
    gen.manual_seed(0)
    for _ in range(60):
        step = env.step(torch.rand(8, env.task.action_size, generator=gen) * 2 - 1)
        for value in (step.obs["policy"], step.reward, step.terminated):
            digest.update(value.numpy().tobytes())
        ends += int(step.terminated.sum())
    assert ends > 0
    assert digest.hexdigest() == BITS[name]


def test_legacy_is_refused_where_there_is_none() -> None:
    for name, value, named in (
        (
            "anymal",
            True,
            "legacy=true: expected false: only ant, humanoid, humanoidstandup, go1_velocity, g1_velocity have",
        ),
        ("go1_velocity", 1, "legacy=1: expected true or false"),
    ):
        for made in (TASK_MAKERS[name], TASK_MAKERS[name].describe):
            with pytest.raises(ConfigError, match=named):
                made(2, legacy=value)  # type: ignore[operator]


@pytest.mark.parametrize("name", BOTH)
def test_the_legacy_form_has_the_same_spaces(name: str) -> None:
    new, old = (TASK_MAKERS[name].describe(2, legacy=legacy) for legacy in (False, True))
    assert (new.name, new.obs, new.action, new.max_episode_steps) == (old.name, old.obs, old.action, 1000)
    assert set(old.log) - set(new.log) == {"upright", "posture"}
