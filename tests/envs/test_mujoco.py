"""The MuJoCo environments against Gymnasium's classes, and the contract of ``VecEnv``.

Gymnasium's environments are stepped in parallel and set to pql's state only at the beginning of an episode, so that any
difference in dynamics, however small, would grow visibly.
"""

import importlib
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it
from mujoco.batch import SimulationError
from mujoco_runs import ROBOT_OF, build, random_actions, task

import pql.envs.mujoco as robots
from pql.contract.env import find_factory, make_env
from pql.engine.tape import Count
from pql.envs.mujoco.engine import BatchEngine
from pql.envs.mujoco.engines import measure
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.isaac.ball import BallBalance
from pql.envs.mujoco.isaac.franka import FrankaCubeStack
from pql.envs.mujoco.locomotion import Ant, Planar, Walker2d
from pql.envs.mujoco.suite import GymTask
from pql.envs.mujoco.task import MODELS, Robot, load_model, load_spec, physics_steps
from pql.errors import ConfigError
from pql.types import Step

CLASSES = {
    "halfcheetah": ("half_cheetah_v5", "HalfCheetahEnv"),
    "hopper": ("hopper_v5", "HopperEnv"),
    "walker2d": ("walker2d_v5", "Walker2dEnv"),
    "ant": ("ant_v5", "AntEnv"),
    "humanoid": ("humanoid_v5", "HumanoidEnv"),
    "humanoidstandup": ("humanoidstandup_v5", "HumanoidStandupEnv"),
    "swimmer": ("swimmer_v5", "SwimmerEnv"),
    "reacher": ("reacher_v5", "ReacherEnv"),
    "pusher": ("pusher_v5", "PusherEnv"),
    "invertedpendulum": ("inverted_pendulum_v5", "InvertedPendulumEnv"),
    "inverteddoublependulum": ("inverted_double_pendulum_v5", "InvertedDoublePendulumEnv"),
}
NAMES = tuple(CLASSES)
SOME = ("halfcheetah", "hopper", "walker2d", "ant", "reacher")  # one of each kind of start and end
REFUSED = ("ant", "humanoid", "humanoidstandup")  # whose shipped model is
FALLING = ("hopper", "walker2d", "ant", "humanoid", "invertedpendulum", "inverteddoublependulum")
UNNAMED = {"reward_alive"}  # terms that gymnasium adds to the reward but not to its info
TOLERANCE = 1e-5


pytestmark = pytest.mark.usefixtures("scratch")


def reference(name: str, model: str | None = None, **kwargs: Any) -> Any:
    """Gymnasium's environment, built with ``kwargs``: on its own model, or on our edition of it where it is edited."""
    try:
        importlib.import_module("imageio")
    except ImportError:  # only Gymnasium's renderer uses it, and nothing is drawn here
        sys.modules["imageio"] = types.ModuleType("imageio")
    module, cls = CLASSES[name]
    ref = getattr(importlib.import_module(f"gymnasium.envs.mujoco.{module}"), cls)(**kwargs)
    if (model or robots.TASKS[name].task.model) != "shipped":
        # not through an XML file: writing one rounds to six digits, which chaos makes visible
        task = robots.TASKS[name].task
        ref.model, ref.frame_skip = load_model(task, model), physics_steps(task, model)
        ref.data = mujoco.MjData(ref.model)
    return ref


def begin(ref: Any, env: MujocoVec, i: int) -> np.ndarray:
    """Start an episode of ``ref`` in the state that environment ``i`` began with: its first observation."""
    mujoco.mj_resetData(ref.model, ref.data)
    fields = env.engine.fields
    ref.set_state(fields["qpos"][i].numpy(), fields["qvel"][i].numpy())
    return ref._get_obs()


def near(ours: Tensor, theirs: Any) -> None:
    torch.testing.assert_close(ours.double(), torch.as_tensor(theirs).double(), rtol=TOLERANCE, atol=TOLERANCE)


def flat(step: Step) -> dict[str, Tensor]:
    """All tensors of a step by name, on the CPU."""
    found: dict[str, Tensor] = {}
    for name, value in step._asdict().items():
        found |= {f"{name}/{key}": part for key, part in (value if isinstance(value, dict) else {"": value}).items()}
    return {name: value.cpu() for name, value in found.items()}


def same(a: Step, b: Step) -> None:
    """Equal in every bit."""
    first, second = flat(a), flat(b)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def steps_of(name: str, model: str | None) -> int:
    """Env steps to compare: more of a cheap robot, the falling ones long enough to fall."""
    if model == "fast":
        return 25
    return {"halfcheetah": 150, "ant": 250, "humanoid": 60, "humanoidstandup": 40}.get(name, 100)


@pytest.mark.parametrize(
    ("name", "model"), [*((n, None) for n in NAMES), *((n, "fast") for n in NAMES if n not in REFUSED)]
)
def test_matches_gymnasium(name: str, model: str | None) -> None:
    steps = steps_of(name, model)
    env = build(name, 3, max_episode_steps=steps * 2 // 5, model=model)
    refs = [reference(name, model) for _ in range(3)]
    terminations = compare(env, refs, steps)
    assert model == "fast" or (terminations > 0) == (name in FALLING)


UNSEEN = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")  # without contact forces
HIDDEN = {
    "ant": {"include_cfrc_ext_in_observation": False},
    "humanoid": {f"include_{field}_in_observation": False for field in UNSEEN},
}
HIDDEN["humanoidstandup"] = HIDDEN["humanoid"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "obs_size"), [("ant", 27), ("humanoid", 45), ("humanoidstandup", 45)])
def test_matches_gymnasium_without_contact_forces(name: str, obs_size: int, model: str) -> None:
    """The shipped model is compared with gymnasium's own."""
    steps, cost = steps_of(name, None), "impact" if name == "humanoidstandup" else "contact"
    kwargs: dict[str, Any] = {**HIDDEN[name], f"{cost}_cost_weight": 0.0}
    settings = {"max_episode_steps": steps * 2 // 5, "contact_forces": False, "model": model}
    env = build(name, 3, **settings)
    refs = [reference(name, model, **kwargs) for _ in range(3)]
    assert env.spec.obs["policy"].shape == refs[0].observation_space.shape == (obs_size,)
    assert robots.TASKS[name].describe(3, **settings) == env.spec
    terminations = compare(env, refs, steps)
    assert (terminations > 0) == (name in FALLING)
    assert {*env.engine.fields}.isdisjoint(UNSEEN)


def test_the_form_of_version_0_2_stays() -> None:
    """Physics steps of 0.01 s; contact forces in the rewards of those that do not observe them."""
    for name in ("ant", "humanoid"):
        env = build(name, 2, contact_forces=False, legacy=True, max_episode_steps=10)
        assert (env.spec.info["frame_skip"], env.model.opt.cone) == (5, mujoco.mjtCone.mjCONE_ELLIPTIC)
        assert "reward_contact" in env.spec.log
        refs = [reference(name, "fast", **HIDDEN[name]) for _ in range(2)]
        for ref in refs:
            ref.model, ref.frame_skip, ref.data = env.model, 5, mujoco.MjData(env.model)
        compare(env, refs, 25)
    assert build("ant", 2, legacy=True).spec.info["frame_skip"] == 5
    for name in ("humanoid", "humanoidstandup"):  # which was the same with contact forces
        assert robots.TASKS[name].describe(2, legacy=True) == robots.TASKS[name].describe(2)
    assert "reward_impact" in robots.TASKS["humanoidstandup"].describe(2, legacy=True, contact_forces=False).log
    for name in ("ant", "humanoid", "humanoidstandup"):
        with pytest.raises(ConfigError, match="model=shipped: expected fast: with legacy=true rewards count cfrc_ext"):
            robots.TASKS[name].describe(2, legacy=True, contact_forces=False, model="shipped")
    named = "ant, humanoid, humanoidstandup, go1_velocity, g1_velocity"
    with pytest.raises(ConfigError, match=f"legacy=true: expected false: only {named} have both forms"):
        build("hopper", 2, legacy=True)


def test_the_fast_ant_takes_shorter_steps_for_the_same_time() -> None:
    """With Euler's method policies of the shipped model fall at its time step."""
    for kwargs, model in (({}, "fast"), ({"contact_forces": False}, "fast"), ({"contact_forces": False}, "shipped")):
        env = build("ant", 2, model=model, **kwargs)
        steps, time_step = env.spec.info["frame_skip"], env.model.opt.timestep
        assert (steps, time_step) == ((10, 0.005) if model == "fast" else (5, 0.01))
        assert steps * time_step == env.spec.info["dt"] == 0.05


def compare(env: MujocoVec, refs: list[Any], steps: int) -> int:
    """Step ``refs`` with ``env`` and compare all their results. Returns the number of terminations."""
    n = len(refs)
    limit = env.spec.action.bounds[1][0]  # type: ignore[union-attr]
    obs = env.reset(seed=1)["policy"]
    for i, ref in enumerate(refs):
        near(obs[i], begin(ref, env, i))
    terminations = restarts = 0
    for action in random_actions(env, steps):
        step = env.step(action)
        theirs = [ref.step(a.double().numpy() * limit) for ref, a in zip(refs, action, strict=True)]
        obs, reward, terminated, _, info = zip(*theirs, strict=True)
        near(step.final_obs["policy"], np.stack(obs))
        near(step.reward, reward)
        assert step.terminated.tolist() == list(terminated)
        for term in {*env.task.terms} - UNNAMED:
            near(step.log[term], [i[term] for i in info])
        if "distance" in step.log:
            near(step.log["distance"], [i["x_velocity"] * refs[0].dt for i in info])
        for i in step.first.nonzero().flatten().tolist():
            near(step.obs["policy"][i], begin(refs[i], env, i))
            restarts += 1
            terminations += int(terminated[i])
    assert restarts >= n
    assert env.task.dt == pytest.approx(refs[0].dt)
    return terminations


@pytest.mark.parametrize("name", ["hopper", "walker2d", "ant"])
def test_healthy_agrees_with_gymnasium_far_from_the_trajectory(name: str) -> None:
    env, ref = build(name, 1), reference(name)
    gen = torch.Generator().manual_seed(0)
    count = 600
    qpos = torch.from_numpy(env.model.qpos0) + torch.randn(count, env.model.nq, generator=gen, dtype=torch.float64) / 3
    qvel = torch.randn(count, env.model.nv, generator=gen, dtype=torch.float64) * 20
    qvel[::7, 1], qpos[::11, -1], qvel[::13, 2] = 150.0, -120.0, float("nan")
    assert isinstance(env.task, Planar | Ant)
    ours = env.task.healthy({"qpos": qpos, "qvel": qvel}).tolist()
    theirs = []
    for q, v in zip(qpos.numpy(), qvel.numpy(), strict=True):
        ref.data.qpos[:], ref.data.qvel[:] = q, v
        theirs.append(bool(ref.is_healthy))
    assert ours == theirs
    assert 50 < sum(ours) < count - 50


@pytest.mark.parametrize("name", NAMES)
def test_start_states_are_distributed_as_gymnasiums(name: str) -> None:
    n = 300 if name.startswith("humanoid") else 1500
    env = build(name, n)
    ours = env.reset(seed=3)["policy"].double()
    ref = reference(name)
    theirs = torch.stack([torch.from_numpy(ref.reset(seed=4 if i == 0 else None)[0]) for i in range(n)])
    error = theirs.std(0) * (2 / n) ** 0.5 + theirs.mean(0).abs() * 1e-6  # the latter for constants, rounded
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 5 * error + 1e-9).all()
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=10 * n**-0.5, atol=1e-6)
    # Kolmogorov-Smirnov distance of each coordinate, at a level of one in a million
    for a, b in zip(ours.T.contiguous(), theirs.float().double().T.contiguous(), strict=True):
        points, a, b = torch.cat((a, b)), a.sort().values, b.sort().values
        gap = torch.searchsorted(a, points, right=True) - torch.searchsorted(b, points, right=True)
        assert gap.abs().max() / n < 2.69 * (2 / n) ** 0.5
    assert isinstance(env.task, GymTask)
    moved = env.engine.fields["qpos"] - torch.from_numpy(env.model.qpos0)
    if name in ("halfcheetah", "hopper", "swimmer", "invertedpendulum"):  # others turn, or draw otherwise
        assert 0.99 * env.task.noise < moved.abs().max() <= env.task.noise
    if not env.task.normal_velocity:
        assert env.engine.fields["qvel"].abs().max() <= env.task.noise


@pytest.mark.parametrize("name", NAMES)
def test_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = reference(name)
    (obs_size,), (action_size,) = ref.observation_space.shape, ref.action_space.shape
    env = build(name, 3, max_episode_steps=7)
    step = (env.reset(0), env.step(torch.zeros(3, action_size)))[1]
    assert env.spec.obs["policy"].shape == (obs_size,) == tuple(step.obs["policy"].shape[1:])
    assert env.spec.action.size == action_size == env.model.nu
    assert env.spec.action.bounds == tuple(map(tuple, env.model.actuator_ctrlrange.T))
    assert env.spec.max_episode_steps == 7
    assert tuple(step.log) == tuple(env.spec.log)
    assert step.obs["policy"].dtype == step.final_obs["policy"].dtype == step.reward.dtype == torch.float32
    assert all(value.dtype == torch.float32 and value.shape == (3,) for value in step.log.values())
    assert env.task.dt == pytest.approx(env.model.opt.timestep * env.spec.info["frame_skip"])

    def load(task: Any) -> None:
        raise AssertionError("describe loaded the model")

    monkeypatch.setattr("pql.envs.mujoco.env.load_model", load)
    assert find_factory(name).describe(3, "cpu", max_episode_steps=7) == env.spec  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_the_fast_model_has_what_both_engines_have(name: str) -> None:
    opt = load_model(robots.TASKS[name].task, "fast").opt
    assert opt.integrator in (mujoco.mjtIntegrator.mjINT_EULER, mujoco.mjtIntegrator.mjINT_IMPLICITFAST)
    assert opt.solver == mujoco.mjtSolver.mjSOL_NEWTON
    assert opt.cone == mujoco.mjtCone.mjCONE_ELLIPTIC
    assert robots.TASKS[name].describe(2, model="fast").info["model"] == "fast"


def test_friction_holds_where_something_stands_or_is_held() -> None:
    """All but gymnasium's models, the arm, whose contacts are stiff already, and the ball, which rolls."""
    soft = (GymTask, FrankaCubeStack, BallBalance)
    for maker in robots.TASKS.values():
        assert maker.task.impratio == (None if issubclass(maker.task, soft) else 10.0), maker.task.name
    ratios = {name: load_model(robots.TASKS[name].task).opt.impratio for name in ("ant", "isaac_ant")}
    assert ratios == {"ant": 1.0, "isaac_ant": 10.0}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_the_shipped_model_is_gymnasiums(name: str) -> None:
    shipped, theirs = load_model(robots.TASKS[name].task).opt, reference(name).model.opt
    assert (shipped.integrator, shipped.solver, shipped.cone) == (theirs.integrator, theirs.solver, theirs.cone)
    assert robots.TASKS[name].describe(2).info["model"] == "shipped"


def test_time_limits_are_gymnasiums() -> None:
    import gymnasium

    for name, (_, cls) in CLASSES.items():
        spec = gymnasium.spec(f"{cls.removesuffix('Env')}-v5")
        assert robots.TASKS[name].describe(2).max_episode_steps == spec.max_episode_steps


def test_time_limit_restarts_and_keeps_the_final_observation() -> None:
    env, unlimited = build("halfcheetah", 5, max_episode_steps=6), build("halfcheetah", 5)
    env.reset(seed=0), unlimited.reset(seed=0)
    for t, action in enumerate(random_actions(env, 6)):
        step, twin = env.step(action), unlimited.step(action)
        assert torch.equal(step.final_obs["policy"], twin.obs["policy"])  # the true successor
        assert torch.equal(step.reward, twin.reward)
        ended = t == 5
        assert (step.truncated == ended).all()
        assert (step.first == ended).all()
        assert not step.terminated.any()
        assert step.final_ok.all()
        assert step.valid.all()
        assert torch.equal(step.obs["policy"], step.final_obs["policy"]) != ended
    assert step.obs["policy"][:, :8].abs().max() < 0.1 + 1e-6  # a start state again
    for t, action in enumerate(random_actions(env, 6)):
        assert (env.step(action).truncated == (t == 5)).all()


def test_the_time_limit_holds_wherever_episodes_began() -> None:
    """Steps are not read before the first of them can reach the limit."""
    env = build("halfcheetah", 5, max_episode_steps=9, stagger=True)
    env.reset(seed=3)
    begun = env.state_dict()
    for i, action in enumerate(random_actions(env, 60)):
        if i == 31:
            env.reset_where(torch.arange(5) < 4)
        if i == 45:
            env.load_state_dict(begun)
        age = env.state_dict()["steps"] + 1
        assert torch.equal(env.step(action).truncated, age >= 9)
        assert torch.equal(env.state_dict()["steps"], age % 9)


def test_a_step_in_which_no_episode_ends_makes_few_calls() -> None:
    """With few environments their time is most of a step's beside the physics."""
    env = build("halfcheetah", 4)
    env.reset(seed=0), env.step(torch.zeros(4, 6))
    with Count() as calls:
        env.step(torch.zeros(4, 6))
    assert calls.total <= 17, calls.names


def test_termination_wins_over_the_time_limit() -> None:
    env = build("hopper", 4, max_episode_steps=1)
    env.reset(seed=0)
    env.engine.fields["qpos"][2, 2] = 0.5  # leaning too far
    step = env.step(torch.zeros(4, 3))
    assert step.terminated.tolist() == [False, False, True, False]
    assert step.truncated.tolist() == [True, True, False, True]
    assert step.first.all()
    assert step.final_obs["policy"][2, 1] == pytest.approx(0.5, abs=0.1)
    assert step.obs["policy"][2, 1].abs() < 0.1


def test_actions_are_clamped_and_rescaled() -> None:
    env = build("walker2d", 2)
    env.reset(seed=0)
    env.step(torch.tensor([[2.0] * 6, [-3.0] * 6]))
    assert env.engine.fields["ctrl"].tolist() == [[1.0] * 6, [-1.0] * 6]
    spec = load_spec(Walker2d)
    spec.actuators[0].ctrlrange = (-2.0, 6.0)
    task = Walker2d(Robot(spec.compile(), torch.device("cpu"), torch.float64))
    ctrl = task.control(torch.tensor([[1.0] * 6, [-0.5] * 6], dtype=torch.float64), {}, {})
    assert ctrl[:, 0].tolist() == [6.0, 0.0]
    assert ctrl[:, 1].tolist() == [1.0, -0.5]


def test_an_action_that_is_not_a_number_shows_in_the_reward() -> None:
    env = build("ant", 2)
    env.reset(seed=0)
    action = torch.zeros(2, 8)
    action[0, 3] = float("nan")
    step = env.step(action)
    assert step.reward.isnan().tolist() == [True, False]
    assert step.obs["policy"].isfinite().all()


def test_reset_where_restarts_only_the_masked() -> None:
    env = build("ant", 6)
    env.reset(seed=0)
    for action in random_actions(env, 5):
        before = env.step(action).obs["policy"]
    state = env.engine.state()
    mask = torch.tensor([False, True, False, False, True, False])
    after = env.reset_where(mask)["policy"]
    assert torch.equal(after[~mask], before[~mask])
    assert torch.equal(env.engine.state()[~mask], state[~mask])
    assert (after[mask] != before[mask]).any(1).all()
    assert env.state_dict()["steps"].tolist() == [5, 0, 5, 5, 0, 5]


@pytest.mark.parametrize("name", SOME)
def test_resume_repeats_every_bit(name: str) -> None:
    env = build(name, 6, max_episode_steps=15)
    actions = random_actions(env, 75)
    env.reset(seed=5)
    for action in actions[:40]:
        env.step(action)
    saved = env.state_dict()
    steps = [env.step(action) for action in actions[40:]]
    assert sum(int(step.first.sum()) for step in steps) >= 12
    other = build(name, 6, max_episode_steps=15, threads=2)
    for twin in (other, env):  # a new environment, and the one that has moved on
        twin.load_state_dict(saved)
        for action, step in zip(actions[40:], steps, strict=True):
            same(twin.step(action), step)


@pytest.mark.parametrize("name", SOME)
def test_same_seed_same_bits_on_any_number_of_threads(name: str) -> None:
    runs = []
    for threads in (1, 2, 3):
        env = build(name, 7, threads=threads, max_episode_steps=20)
        env.reset(seed=11)
        runs.append([env.step(action) for action in random_actions(env, 45)])
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            same(a, b)


def test_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="another task, engine or number of environments"):
        build("hopper", 3).load_state_dict(build("hopper", 1).state_dict())


def test_reset_draws_on_without_a_seed_and_repeats_with_one() -> None:
    env = build("halfcheetah", 3)
    first, second, again = env.reset(seed=1), env.reset(), env.reset(seed=1)
    assert torch.equal(first["policy"], again["policy"])
    assert not torch.equal(first["policy"], second["policy"])
    assert not torch.equal(first["policy"], env.reset(seed=2)["policy"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e12])
@pytest.mark.parametrize("field", ["qpos", "qvel"])
def test_diverged_simulations_end_openly(field: str, value: float) -> None:
    env, twin = build("halfcheetah", 4), build("halfcheetah", 4)
    before = env.reset(seed=0)["policy"]
    twin.reset(seed=0)
    env.engine.fields[field][1, -1] = value
    action = random_actions(env, 1)[0]
    step, expected = env.step(action), twin.step(action)
    bad = torch.tensor([False, True, False, False])
    assert torch.equal(step.truncated, bad)
    assert torch.equal(step.first, bad)
    assert torch.equal(step.final_ok, ~bad)
    assert torch.equal(step.log["diverged"], bad.float())
    assert not step.terminated.any()
    assert step.reward[1] == 0
    assert torch.equal(step.final_obs["policy"][1], before[1])
    assert step.obs["policy"].isfinite().all()
    assert torch.equal(step.obs["policy"][~bad], expected.obs["policy"][~bad])
    assert torch.equal(step.reward[~bad], expected.reward[~bad])
    assert not env.step(action).log["diverged"].any()


def test_mujoco_does_not_restart_a_diverged_simulation_by_itself() -> None:
    for name in SOME:
        env = build(name, 2)
        env.reset(seed=0)
        env.engine.fields["qvel"][1, 0] = float("nan")
        env.engine.step(torch.zeros(2, env.task.action_size), env.spec.info["frame_skip"])
        assert env.engine.diverged().tolist() == [False, True]


def test_an_error_in_one_simulation_counts_as_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    env = build("hopper", 3)
    env.reset(seed=0)
    assert isinstance(env.engine, BatchEngine)
    batch = env.engine.batch
    real = batch.step

    def fail(nstep: int) -> None:
        real(nstep=nstep)
        raise SimulationError(np.array([2]), "out of memory", 3)

    monkeypatch.setattr(batch, "step", fail)
    step = env.step(torch.zeros(3, 3))
    assert step.log["diverged"].tolist() == [0.0, 0.0, 1.0]
    assert step.obs["policy"].isfinite().all()


def test_the_gil_is_released_while_physics_runs() -> None:
    env = build("halfcheetah", 64)
    env.reset(seed=0)
    count, stop = 0, False

    def spin() -> None:
        nonlocal count
        while not stop:
            count += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        before = count
        env.engine.step(torch.zeros(64, 6), 500)  # one call of a few hundred milliseconds
        assert count - before > 1000
    finally:
        stop = True
        thread.join()


def test_torch_threads_are_left_as_they_were() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    env = build("hopper", 2)
    env.reset(seed=0), env.step(torch.zeros(2, 3))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("num_envs", "kwargs", "named"),
    [
        (0, {}, "num_envs"),
        (2, {"threads": -1}, "threads"),
        (2, {"threads": 1.5}, "threads"),
        (2, {"max_episode_steps": 0}, "max_episode_steps"),
        (2, {"model": "shipped"}, "model=shipped: expected fast: .*contact_forces=false"),
        (2, {"model": "fastt"}, "model=fastt: expected shipped or fast .did you mean fast"),
        (2, {"engine": "wrap"}, "engine=wrap: expected auto, batch or warp .did you mean warp"),
        (2, {"contacts": [20]}, r"contacts=\[20\]: expected \[contacts, constraint rows\]"),
        (2, {"contacts": 20}, "contacts=20: expected"),
        (2, {"contact_forces": "no"}, "contact_forces=no: expected true or false"),
        (2, {"contacts": [20, 0.5]}, "contacts=.*whole numbers above 0"),
        (2, {"max_episode_step": 10}, "max_episode_step=10.*did you mean max_episode_steps"),
    ],
)
def test_bad_settings_are_named(num_envs: int, kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_env("ant", num_envs, **kwargs)
    if "max_episode_step" not in kwargs:  # an unknown keyword is the registry's to name
        with pytest.raises(ConfigError, match=named):
            robots.ant.describe(num_envs, **kwargs)


def test_contact_forces_are_left_out_only_where_they_are() -> None:
    for asked in (robots.hopper, robots.hopper.describe):
        with pytest.raises(ConfigError, match="contact_forces=false: expected true: only ant, humanoid, humanoids"):
            asked(2, contact_forces=False)  # type: ignore[operator]


def test_closed_environment_says_so() -> None:
    env = build("hopper", 2)
    env.reset(seed=0)
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(torch.zeros(2, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_results_equal_cpu_results() -> None:
    env, twin = (
        build("hopper", 8, max_episode_steps=10),
        make_env("hopper", 8, "cuda", max_episode_steps=10, engine="batch"),
    )
    assert torch.equal(twin.reset(seed=0)["policy"].cpu(), env.reset(seed=0)["policy"])
    for action in random_actions(env, 25):
        same(twin.step(action.cuda()), env.step(action))


def test_the_model_is_a_setting_of_the_task() -> None:
    from pql.config.compose import compose
    from pql.run.environment import build_env

    for words, model in (((), "shipped"), (("task.model=fast",), "fast")):
        env = build_env(compose(["device=cpu", "task=hopper", "num_envs=2", *words]))
        assert env.spec.info["model"] == model
        env.close()


@pytest.mark.parametrize(
    "name",
    [*map(task, (*NAMES, "isaac_ant", "isaac_humanoid", *ROBOT_OF)), "shipped ant"],
)
def test_capacities_cover_what_c_needs(name: str) -> None:
    shipped = {"contact_forces": False, "model": "shipped"} if name.startswith("shipped") else {}
    env = build(name.removeprefix("shipped "), 1, **shipped)
    steps = 2000 if shipped else 400
    contacts, constraints = measure(env.model, env.spec.info["frame_skip"], steps, seed=7)
    assert env.task.contacts is not None
    assert contacts <= env.task.contacts[0]
    assert constraints <= env.task.contacts[1]
