"""The tasks of the PQL paper: sizes, manually computed reward terms, sensors against known forces, images."""

import math

import numpy as np
import pytest
import torch

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import task
from run_files import words

import pql
from pql.config.compose import compose
from pql.envs.mujoco.isaac import raster
from pql.envs.mujoco.isaac.ball import BALL, LEG, LEGS, TRAY
from pql.envs.mujoco.isaac.measure import Wrench, into, rotation
from pql.envs.mujoco.task import Robot
from pql.nets.encoders import groups_of
from pql.run.session import Session
from tools.originals.by_hand import BY_HAND, chance

DOUBLE = torch.float64


# -- measures ---------------------------------------------------------------------------------------------------------


def test_rotations_are_mujocos():
    quat = torch.nn.functional.normalize(torch.randn(5, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)))
    for one, matrix in zip(quat, rotation(quat), strict=True):
        flat = torch.zeros(9, dtype=DOUBLE).numpy()
        mujoco.mju_quat2Mat(flat, one.numpy())
        assert torch.allclose(matrix.flatten(), torch.from_numpy(flat), atol=1e-12)
    vector = torch.tensor([1.0, -2.0, 3.0], dtype=DOUBLE)
    assert torch.allclose(into(rotation(quat), vector), rotation(quat).mT @ vector)


FLYING = """
<mujoco><option timestep="0.001" gravity="0 0 -9.81"/><worldbody><body name="plank"><freejoint/>
  <geom type="box" size=".1 .2 .05" pos=".1 0 .02" euler="20 30 40" mass="2"/>
  <geom type="sphere" size=".05" pos="-.2 .1 0" mass=".5"/>
</body></worldbody></mujoco>"""


def test_a_wrench_is_the_sum_of_the_forces_that_act():
    spec = mujoco.MjSpec.from_string(FLYING)
    Wrench.sense(spec, "plank")
    model = spec.compile()
    data = mujoco.MjData(model)
    data.qpos[3:7] = torch.nn.functional.normalize(torch.tensor([0.8, 0.3, -0.4, 0.2], dtype=DOUBLE), dim=0).numpy()
    data.qvel[3:] = (3.0, -2.0, 4.0)  # it turns, so I omega turns with it
    force, torque = (torch.tensor(v, dtype=DOUBLE) for v in ((1.0, -3.0, 2.0), (0.2, 0.1, -0.3)))
    data.xfrc_applied[1] = torch.cat((force, torque)).numpy()  # at the centre of mass, in the world
    mujoco.mj_forward(model, data)
    wrench = Wrench(Robot(model, torch.device("cpu"), DOUBLE), ("plank",))
    felt, turning = wrench.read({"sensordata": torch.tensor(data.sensordata)[None]})
    turn = torch.tensor(data.xmat[1]).view(3, 3)
    whole = force + torch.tensor([0.0, 0.0, -9.81 * 2.5], dtype=DOUBLE)
    assert torch.allclose(felt[0, 0], turn.T @ whole, atol=1e-9)
    assert torch.allclose(turning[0, 0], turn.T @ torque, atol=1e-9)
    arm = torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE)  # a force acts about a point by lever and turning
    expected = turning - torch.linalg.cross(arm.view(1, 1, 3), felt)
    assert torch.equal(Wrench.about(felt, turning, arm), expected)


# -- Ball Balance -----------------------------------------------------------------------------------------------------


def ball_env(count, place, velocity=(0.0, 0.0, 0.0)):
    """Every ball at ``place``, moving at ``velocity``."""
    env = pql.make_env("ballbalance", num_envs=count)
    env.reset(0)
    qpos, qvel = env.task.robot.qpos0.repeat(count, 1), env.task.robot.qvel0.repeat(count, 1)
    qpos[:, env.task._ball_qpos] = torch.tensor(place, dtype=DOUBLE)
    qvel[:, env.task._ball_qvel] = torch.tensor(velocity, dtype=DOUBLE)
    env.engine.reset(env.engine.rows(torch.ones(count, dtype=torch.bool)), qpos, qvel)
    return env


@pytest.mark.parametrize(
    ("place", "velocity", "reward", "over"),
    [
        ((0.0, 0.0, 0.7), (0.0, 0.0, 0.0), 1.0, False),
        ((0.3, 0.0, 0.3), (0.0, -1.0, 0.0), 1 / 1.5 / 2, False),
        ((0.0, 0.0, 0.1), (0.0, 3.0, 4.0), 1 / 1.6 / 6, True),
    ],
)
def test_ball_balance_pays_for_a_ball_at_rest_in_its_place(place, velocity, reward, over):
    env = ball_env(1, place, velocity)
    verdict = env.task.judge(env.engine.fields, {})
    assert verdict.terms["balance"].item() == pytest.approx(reward, rel=1e-9)
    assert verdict.terminated.item() is over


def test_ball_balance_observes_24_numbers_of_which_sensors_rest_at_zero():
    env = ball_env(3, (3.0, 0.0, 9.0))  # for a second, it falls beside the tray
    assert env.spec.obs["policy"].shape == (24,)
    assert env.spec.action.size == 3
    for _ in range(100):
        obs = env.step(torch.zeros(3, 3)).obs["policy"]
    assert obs[:, :6].abs().max() < 1e-3  # knees
    assert obs[:, 12:].abs().max() < 1e-3  # twentieths of N and N m
    fallen = torch.tensor([3.0, 0.0, 9.0 - 9.81 / 2, 0.0, 0.0, -5.0])  # all within +-5
    assert torch.allclose(obs[:, 6:12], fallen, atol=0.02)


def test_the_balancing_robot_is_isaacs():
    model = pql.make_env("ballbalance", num_envs=1).model
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    masses = {model.body(i).name: model.body_mass[i] for i in range(1, model.nbody)}
    legs = {f"{part}_leg{i}": 0.486 for part in ("upper", "lower") for i in range(3)}
    assert masses == pytest.approx({"tray": 1.571, "ball": 0.838, **legs}, abs=5e-4)
    assert data.body("tray").xpos.tolist() == [0, 0, 0.559117]
    assert model.geom("tray").size[:2].tolist() == [0.5, 0.01]
    for i, angle in enumerate(LEGS):
        out = np.array([math.cos(angle), math.sin(angle), 0])
        hip, knee = (data.body(f"{part}_leg{i}").xpos for part in ("upper", "lower"))
        shin = model.geom_bodyid.tolist().index(model.body(f"lower_leg{i}").id)
        foot = 2 * data.geom_xpos[shin] - knee
        for at, (radius, height) in ((hip, (0.4, 0.5291)), (knee, (0.1454, 0.2746)), (foot, (0.4, 0.02))):
            np.testing.assert_allclose(at, radius * out + [0, 0, height], atol=1e-9)
        for part, degrees in (("upper", (-45, 45)), ("lower", (-70, 90))):
            joint = model.joint(f"{part}_leg{i}")
            assert np.rad2deg(joint.range).tolist() == pytest.approx(degrees)
            np.testing.assert_allclose(data.xaxis[joint.id], np.cross([0, 0, 1], out), atol=1e-9)
    assert [model.joint(at).name for at in model.actuator_trnid[:, 0]] == ["lower_leg0", "lower_leg1", "lower_leg2"]
    assert model.actuator_gainprm[:, 0].tolist() == [4000] * 3
    assert model.actuator_biasprm[:, :3].tolist() == [[0, -4000, -100]] * 3


def test_sensors_on_the_rim_feel_what_changes_the_trays_momentum():
    """x-forces of the three sensors, then their torques by component, in the tray's frame, twentieths."""
    env = ball_env(1, (0.15, 0.1, 0.66), (0.5, -1.0, -1.0))  # about to touch
    for action in ([1.0, -0.5, 0.0], [0.5, 0.5, -1.0]):
        env.step(torch.tensor([action]))
    model = env.engine.batch.get_model(0)
    model.opt.timestep = 1e-6
    early, late = mujoco.MjData(model), mujoco.MjData(model)
    for data in (early, late):
        data.qpos[:], data.qvel[:] = (env.engine.fields[name][0].numpy() for name in ("qpos", "qvel"))
        data.ctrl[:] = (0.3, -0.2, 0.1)
    mujoco.mj_forward(model, early)
    mujoco.mj_step(model, late)
    mujoco.mj_forward(model, late)
    i, moments = model.body("tray").id, []
    for data in (early, late):
        velocity, frame = np.zeros(6), data.ximat[model.body("tray").id].reshape(3, 3)
        mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_BODY, i, velocity, 0)
        spin = frame @ (model.body_inertia[i] * (frame.T @ velocity[:3]))
        moments.append((model.body_mass[i] * velocity[3:], spin))
    axes = early.xmat[i].reshape(3, 3)
    force, torque = (axes.T @ (b - a) / 1e-6 for a, b in zip(*moments, strict=True))
    rim = [0.4 * np.array([math.cos(angle), math.sin(angle), 0]) for angle in LEGS]
    torques = np.stack([torque - np.cross(at, force) for at in rim])  # [sensor, component]
    expected = np.concatenate(([force[0]] * 3, torques.T.ravel())) / 20
    assert np.abs(expected).min() > 0.05
    assert np.abs(expected).max() < 5
    fields = {name: torch.tensor(getattr(early, name))[None] for name in ("qpos", "qvel", "sensordata")}
    seen = env.task.state(fields)[0]
    np.testing.assert_allclose(seen[12:], expected, rtol=2e-3, atol=2e-3)
    knees = [model.joint(f"lower_leg{leg}") for leg in range(3)]
    np.testing.assert_allclose(seen[:3], [early.qpos[knee.qposadr[0]] for knee in knees])
    np.testing.assert_allclose(seen[3:6], np.clip([early.qvel[knee.dofadr[0]] for knee in knees], -5, 5))
    ball = early.joint("ball")
    np.testing.assert_allclose(seen[6:12], np.clip([*ball.qpos[:3], *ball.qvel[:3]], -5, 5))


def test_targets_of_the_knees_add_up_within_their_range():
    env = pql.make_env("ballbalance", num_envs=1)
    env.reset(0)
    action, seen = torch.tensor([[1.0, -1.0, 0.5]]), []
    for _ in range(9):
        env.step(action)
        seen.append(env.engine.fields["ctrl"][0].tolist())
    for step, target in enumerate(seen, 1):
        expected = [min(0.2 * step, math.pi / 2), max(-0.2 * step, -math.radians(70)), 0.1 * step]
        assert target == pytest.approx(expected, abs=1e-9)
    env.reset(0)
    env.step(torch.zeros(1, 3))
    assert env.engine.fields["ctrl"].abs().max() == 0  # an episode begins with targets at 0


def test_balls_fall_towards_the_trays_axis():
    env = pql.make_env("ballbalance", num_envs=4000)
    obs = env.reset(0)["policy"]
    place, velocity = obs[:, 6:9], env.engine.fields["qvel"][:, env.task._ball_qvel].float()
    distance = place[:, :2].norm(dim=1)
    assert (distance.min() < 0.005, distance.max() > 0.495, distance.max() <= 0.5) == (True, True, True)
    assert place[:, 2].aminmax() == (pytest.approx(1.0, abs=0.005), pytest.approx(2.0, abs=0.005))
    assert velocity[:, 2].eq(-5.0).all()
    inward = (velocity[:, :2] * place[:, :2]).sum(1) / distance
    assert torch.allclose(inward.abs(), velocity[:, :2].norm(dim=1), atol=1e-5)  # along the radius
    assert (inward <= 0).all()
    # uniform: E[D] = .2505, E[speed] = E[(D - .001) / .499] * 2.5 = 1.25, and no direction is preferred
    assert distance.mean().item() == pytest.approx(0.2505, abs=0.008)
    assert inward.mean().item() == pytest.approx(-1.25, abs=0.08)
    assert place[:, :2].mean(0).abs().max() < 0.015


CONFORMS = {  # task: environments, length of an episode, steps
    "ballbalance": (3, 20, 50),
    "ballbalance_pixels": (3, 20, 50),
    "isaac_ant": (4, 25, 60),
    "isaac_humanoid": (3, 25, 60),
    "franka_cube_stack": (3, 15, 35),
    "franka_cube_stack_torque": (3, 15, 35),
    "dclaw": (3, 6, 14),
    "shadow_hand": (3, 8, 20),
    "shadow_hand_openai": (3, 6, 14),
    "allegro_hand": (3, 8, 20),
    "anymal": (3, 20, 45),
    "go1_velocity": (3, 20, 45),
    "g1_velocity": (3, 20, 45),
}


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("name", [*map(task, CONFORMS)])
def test_the_contract_holds(name, conforms):
    num_envs, length, steps = CONFORMS[name]
    conforms(pql.make_env(name, num_envs, max_episode_steps=length), steps)


SCRIPTED = {  # task: environments, steps, and by how much its policy by hand earns more than chance, a step
    "ballbalance": (24, 250, 0.22),
    "ballbalance_pixels": (4, 250, 0.14),
    "isaac_ant": (16, 120, 0.8),
    "isaac_humanoid": (24, 100, 0.6),
    "dclaw": (8, 20, 1.2),
    "shadow_hand": (16, 45, 0.15),
    "shadow_hand_openai": (16, 45, 0.25),
    "allegro_hand": (16, 45, 0.3),
    "anymal": (24, 60, 0.002),
    "go1_velocity": (24, 60, 0.003),
    "g1_velocity": (24, 60, 0.003),
}


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("name", [*map(task, SCRIPTED)])
def test_a_policy_by_hand_beats_random_actions(name):
    """In the first episodes, without what a goal that is reached by chance pays."""
    num_envs, steps, margin = SCRIPTED[name]
    means = []
    for policy in (next(iter(BY_HAND[name].values())), chance):
        env = pql.make_env(name, num_envs)
        play, obs, total = policy(env), env.reset(0), torch.zeros(num_envs)
        alive = torch.ones_like(total, dtype=torch.bool)
        for _ in range(steps):
            step = env.step(play(obs).clamp(-1, 1))
            total += (step.reward - step.log.get("bonus", 0.0)) * alive
            obs, alive = step.obs, alive & ~step.first
        means.append(total.mean().item() / steps)
    print(f"reward per step: by hand {means[0]:.4f}, random {means[1]:.4f}")
    assert means[0] > means[1] + margin


# -- its images -------------------------------------------------------------------------------------------------------

FLAT = torch.tensor([0.0, 0.0, 1.0])
FAR = torch.full((1, 6, 2, 3), 9.0)  # legs that are not visible


def picture(ball, tray=(0.0, 0.0, 0.5), normal=FLAT, legs=FAR):
    camera = raster.Camera(torch.device("cpu"), BALL, TRAY, LEG)
    return camera.picture(torch.tensor([ball]), torch.tensor([tray]), normal[None], legs)[0]


def places(mask):
    """Of the pixels in ``mask``: how many, and the mean of their coordinates in the view, in metres."""
    rows, columns = mask.nonzero().double().unbind(1)
    pixel = raster.WIDTH / raster.SIZE
    return len(rows), (columns.mean().item() - 41.5) * pixel, raster.MIDDLE - (rows.mean().item() - 41.5) * pixel


def seen(x, y, z):
    """Return the image position of a point: sideways, and upwards."""
    return y, z * math.cos(raster.ELEVATION) - x * math.sin(raster.ELEVATION)


def test_a_picture_shows_ball_tray_and_shadow_where_they_are():
    pixel = raster.WIDTH / raster.SIZE
    image = picture((0.2, -0.15, 0.8))
    assert (image.shape, image.dtype) == ((84, 84), torch.uint8)
    count, x, y = places(image == 255)
    assert (x, y) == pytest.approx(seen(0.2, -0.15, 0.8), abs=pixel / 4)
    assert count == pytest.approx(math.pi * (BALL - pixel / 2) ** 2 / pixel**2, rel=0.15)  # soft edges are not white
    count, x, y = places(image == 90)
    assert (x, y) == pytest.approx(seen(0.2, -0.15, 0.5), abs=pixel / 2)
    whole = math.pi * (BALL - pixel / 2) * (BALL * math.sin(raster.ELEVATION) - pixel / 2)
    assert count == pytest.approx(whole / pixel**2, rel=0.25)
    count, x, y = places(picture((9.0, 9.0, 9.0)) == 160)
    assert (x, y) == pytest.approx(seen(0.0, 0.0, 0.5), abs=pixel / 4)
    whole = math.pi * (TRAY - pixel / 2) * (TRAY * math.sin(raster.ELEVATION) - pixel / 2)  # less soft edges
    assert count == pytest.approx(whole / pixel**2, rel=0.05)


def test_the_ball_is_in_the_first_frame_wherever_it_starts():
    obs = pql.make_env("ballbalance_pixels", num_envs=400).reset(seed=0)["policy"]
    shown = (obs[:, -1] == 255).flatten(1).sum(1)  # pixels that the ball covers whole
    pixel = raster.WIDTH / raster.SIZE
    assert (shown > 0).double().mean() >= 0.99
    assert shown.double().mean().item() == pytest.approx(math.pi * (BALL - pixel / 2) ** 2 / pixel**2, rel=0.15)
    highest = 2.0 * math.cos(raster.ELEVATION) + 0.5 * math.sin(raster.ELEVATION) + BALL  # of all starts, in the view
    assert highest < raster.MIDDLE + raster.WIDTH / 2


def test_a_ball_below_the_tray_is_behind_it():
    empty, under = picture((9.0, 9.0, 9.0)), picture((0.0, 0.0, 0.35))
    assert torch.equal(empty, under)
    half_out = picture((0.5, 0.0, 0.2)) == 255  # in front of the legs, beyond the tray's edge
    assert half_out.any()


def test_a_tilted_tray_is_seen_from_its_side():
    # its normal at right angles to the line of sight: nothing but a line is left of it
    along = torch.tensor([math.sin(raster.ELEVATION), 0.0, -math.cos(raster.ELEVATION)])
    assert (picture((9.0, 9.0, 9.0), normal=along) == 160).sum() < 150
    facing = torch.tensor([math.cos(raster.ELEVATION), 0.0, math.sin(raster.ELEVATION)])
    count, _, _ = places(picture((9.0, 9.0, 9.0), normal=facing) == 160)
    pixel = raster.WIDTH / raster.SIZE
    assert count == pytest.approx(math.pi * (TRAY - pixel / 2) ** 2 / pixel**2, rel=0.04)  # less soft edges


def test_legs_are_drawn_from_end_to_end():
    legs = FAR.clone()
    legs[0, 2] = torch.tensor([[0.0, -0.4, 0.2], [0.0, 0.4, 0.2]])
    image = picture((9.0, 9.0, 9.0), tray=(0.0, 0.0, -9.0), legs=legs)
    height, pixel = seen(0, 0, 0.2)[1], raster.WIDTH / raster.SIZE
    _, x, y = places(image > 70)  # more than half of a pixel
    assert (x, y) == pytest.approx((0.0, height), abs=pixel / 2)
    area = ((image.double() - raster.NIGHT) / (raster.LEG - raster.NIGHT)).sum().item()
    assert area == pytest.approx((0.8 * 2 * LEG + math.pi * LEG**2) / pixel**2, rel=0.1)


def test_frames_follow_the_physics_and_scenes_do_not_mix():
    env = pql.make_env("ballbalance_pixels", num_envs=3)
    obs = env.reset(0)["policy"]
    assert (obs.shape, obs.dtype) == ((3, 4, 84, 84), torch.uint8)
    assert obs[:, :3].eq(0).all()  # no frame before the episode
    for _ in range(12):
        last = obs
        obs = env.step(torch.zeros(3, 3)).obs["policy"]
        assert torch.equal(obs[:, :3], last[:, 1:])
    fields = env.engine.fields
    for i in range(3):
        ball = fields["xpos"][i, env.task._ball].tolist()
        _, x, y = places(obs[i, 3] == 255)
        assert (x, y) == pytest.approx(seen(*ball), abs=0.01)


def test_a_policy_that_sees_pictures_trains_beside_a_critic_that_sees_the_state(tmp_path):
    overrides = words(
        tmp_path / "run",
        "task=ballbalance_pixels",
        "algo=pql",
        "num_envs=2",
        "replay.capacity=128",
        "algo.batch_size=8",
        "algo.warmup_steps=2",
        "algo.encoder.channels=[4]",
        "algo.encoder.features=8",
        "budget.env_steps=24",
        "task.kwargs.max_episode_steps=9",
    )
    session = Session(compose(overrides), quiet=True, overrides=overrides)
    session.train()
    spec, config = session.parts.env.spec, session.config
    assert (groups_of(config, spec, "policy"), groups_of(config, spec, "critic")) == (("policy",), ("critic",))
    frames = torch.randint(256, (3, 4, 84, 84), dtype=torch.uint8)
    action = pql.load_policy(tmp_path / "run")({"policy": frames})
    assert action.shape == (3, 3)
    assert not torch.equal(action[0], action[1])  # it looks
