"""The MuJoCo environments against Gymnasium's own classes, and the promises of ``VecEnv``.

Gymnasium's environments are stepped beside ours and set to our state only where an episode begins, so that any
difference in dynamics, however small, would grow in sight.
"""

import importlib
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it
from mujoco.batch import SimulationError

import pql.envs.mujoco as robots
from pql.env import find_factory, make_env
from pql.envs.mujoco.engine import BatchEngine
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.tasks import ANT, load_spec
from pql.errors import ConfigError
from pql.types import Step

NAMES = ("halfcheetah", "hopper", "walker2d", "ant")
FALLING = ("hopper", "walker2d", "ant")
CLASSES = {
    "halfcheetah": ("half_cheetah_v5", "HalfCheetahEnv"),
    "hopper": ("hopper_v5", "HopperEnv"),
    "walker2d": ("walker2d_v5", "Walker2dEnv"),
    "ant": ("ant_v5", "AntEnv"),
}
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file in the working directory


def build(name: str, num_envs: int, **kwargs: Any) -> MujocoVec:
    env = make_env(name, num_envs, "cpu", **{"threads": 1, **kwargs})
    assert isinstance(env, MujocoVec)
    return env


def reference(name: str) -> Any:
    """Gymnasium's environment: on its own model, for Ant on our edition of it."""
    try:
        importlib.import_module("imageio")
    except ImportError:  # only Gymnasium's renderer uses it, and nothing is drawn here
        sys.modules["imageio"] = types.ModuleType("imageio")
    module, cls = CLASSES[name]
    ref = getattr(importlib.import_module(f"gymnasium.envs.mujoco.{module}"), cls)()
    if name == "ant":  # not through an XML file: writing one rounds to six digits, which chaos makes visible
        ref.model = load_spec(ANT).compile()
        ref.data = mujoco.MjData(ref.model)
    return ref


def begin(ref: Any, env: MujocoVec, i: int) -> np.ndarray:
    """Start an episode of ``ref`` in the state that environment ``i`` began with: its first observation."""
    mujoco.mj_resetData(ref.model, ref.data)
    fields = env.engine.fields
    ref.set_state(fields["qpos"][i].numpy(), fields["qvel"][i].numpy())
    return ref._get_obs()


def random_actions(env: MujocoVec, steps: int, seed: int = 0) -> Tensor:
    """[steps, N, A] float32 in [-1, 1]."""
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(steps, env.spec.num_envs, env.task.action_size, generator=gen) * 2 - 1


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


@pytest.mark.parametrize("name", NAMES)
def test_matches_gymnasium(name: str) -> None:
    n, steps = 4, 250
    env = build(name, n, max_episode_steps=100)
    refs = [reference(name) for _ in range(n)]
    obs = env.reset(seed=1)["policy"]
    for i, ref in enumerate(refs):
        near(obs[i], begin(ref, env, i))
    terminations = restarts = 0
    for action in random_actions(env, steps):
        step = env.step(action)
        for i, ref in enumerate(refs):
            obs, reward, terminated, _, info = ref.step(action[i].double().numpy())
            near(step.final_obs["policy"][i], obs)
            near(step.reward[i], reward)
            assert bool(step.terminated[i]) == terminated
            for term in env.task.terms:
                near(step.log[term][i], info[term])
            near(step.log["distance"][i], info["x_velocity"] * ref.dt)
            if step.first[i]:
                near(step.obs["policy"][i], begin(ref, env, i))
                restarts += 1
                terminations += int(terminated)
    assert restarts >= n
    assert (terminations > 0) == (name in FALLING)
    assert env.task.dt == pytest.approx(refs[0].dt)


@pytest.mark.parametrize("name", FALLING)
def test_healthy_agrees_with_gymnasium_far_from_the_trajectory(name: str) -> None:
    env, ref = build(name, 1), reference(name)
    gen = torch.Generator().manual_seed(0)
    count = 600
    qpos = torch.from_numpy(env.model.qpos0) + torch.randn(count, env.model.nq, generator=gen, dtype=torch.float64) / 3
    qvel = torch.randn(count, env.model.nv, generator=gen, dtype=torch.float64) * 20
    qvel[::7, 1], qpos[::11, -1], qvel[::13, 2] = 150.0, -120.0, float("nan")
    assert env.task.healthy is not None
    ours = env.task.healthy({"qpos": qpos, "qvel": qvel}).tolist()
    theirs = []
    for q, v in zip(qpos.numpy(), qvel.numpy(), strict=True):
        ref.data.qpos[:], ref.data.qvel[:] = q, v
        theirs.append(bool(ref.is_healthy))
    assert ours == theirs
    assert 50 < sum(ours) < count - 50


@pytest.mark.parametrize("name", NAMES)
def test_start_states_are_distributed_as_gymnasiums(name: str) -> None:
    n = 3000
    env = build(name, n)
    ours = env.reset(seed=3)["policy"].double()
    ref = reference(name)
    theirs = torch.stack([torch.from_numpy(ref.reset(seed=4 if i == 0 else None)[0]) for i in range(n)])
    error = theirs.std(0) * (2 / n) ** 0.5
    assert ((ours.mean(0) - theirs.mean(0)).abs() <= 5 * error + 1e-9).all()
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0.1, atol=1e-7)
    # Kolmogorov-Smirnov distance of each coordinate, at a level of one in a million
    for a, b in zip(ours.T.contiguous(), theirs.float().double().T.contiguous(), strict=True):
        points, a, b = torch.cat((a, b)), a.sort().values, b.sort().values
        gap = torch.searchsorted(a, points, right=True) - torch.searchsorted(b, points, right=True)
        assert gap.abs().max() / n < 2.69 * (2 / n) ** 0.5
    moved = env.engine.fields["qpos"] - torch.from_numpy(env.model.qpos0)
    if name != "ant":  # its quaternion is normalised after the draw
        assert moved.abs().max() <= env.task.noise
        assert moved.abs().max() > 0.99 * env.task.noise
    if not env.task.normal_velocity:
        assert env.engine.fields["qvel"].abs().max() <= env.task.noise


@pytest.mark.parametrize("name", NAMES)
def test_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    obs_size, action_size = {"halfcheetah": (17, 6), "hopper": (11, 3), "walker2d": (17, 6), "ant": (105, 8)}[name]
    env = build(name, 3, max_episode_steps=7)
    step = (env.reset(0), env.step(torch.zeros(3, action_size)))[1]
    assert env.spec.obs["policy"].shape == (obs_size,) == tuple(step.obs["policy"].shape[1:])
    assert env.spec.action.size == action_size == env.model.nu
    assert env.spec.action.bounds == tuple(map(tuple, env.model.actuator_ctrlrange.T))
    assert env.spec.max_episode_steps == 7
    assert tuple(step.log) == env.spec.log
    assert step.obs["policy"].dtype == step.final_obs["policy"].dtype == step.reward.dtype == torch.float32
    assert all(value.dtype == torch.float32 and value.shape == (3,) for value in step.log.values())
    assert env.task.dt == pytest.approx(env.model.opt.timestep * env.task.frame_skip)

    def load(task: Any) -> None:
        raise AssertionError("describe loaded the model")

    monkeypatch.setattr("pql.envs.mujoco.env.load_model", load)
    assert find_factory(name).describe(3, "cpu", max_episode_steps=7) == env.spec  # type: ignore[attr-defined]


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
    spec = load_spec(env.task)
    spec.actuators[0].ctrlrange = (-2.0, 6.0)
    engine = BatchEngine(spec.compile(), 2, 1)
    engine.step(torch.tensor([[1.0] * 6, [-0.5] * 6]), 1)
    assert engine.fields["ctrl"][:, 0].tolist() == [6.0, 0.0]


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


@pytest.mark.parametrize("name", NAMES)
def test_resume_repeats_every_bit(name: str) -> None:
    env = build(name, 6, max_episode_steps=30)
    actions = random_actions(env, 110)
    env.reset(seed=5)
    for action in actions[:40]:
        env.step(action)
    saved = env.state_dict()
    steps = [env.step(action) for action in actions[40:]]
    assert sum(int(step.first.sum()) for step in steps) >= 12
    other = build(name, 6, max_episode_steps=30, threads=2)
    for twin in (other, env):  # a new environment, and the one that has moved on
        twin.load_state_dict(saved)
        for action, step in zip(actions[40:], steps, strict=True):
            same(twin.step(action), step)


@pytest.mark.parametrize("name", NAMES)
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
    with pytest.raises(ValueError, match="another task or number of environments"):
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
    for name in NAMES:
        env = build(name, 2)
        env.reset(seed=0)
        env.engine.fields["qvel"][1, 0] = float("nan")
        env.engine.step(torch.zeros(2, env.task.action_size), env.task.frame_skip)
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
        (2, {"max_episode_step": 10}, "max_episode_step=10.*did you mean max_episode_steps"),
    ],
)
def test_bad_settings_are_named(num_envs: int, kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_env("ant", num_envs, **kwargs)
    if "max_episode_step" not in kwargs:  # an unknown keyword is the registry's to name
        with pytest.raises(ConfigError, match=named):
            robots.ant.describe(num_envs, **kwargs)


def test_closed_environment_says_so() -> None:
    env = build("hopper", 2)
    env.reset(seed=0)
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(torch.zeros(2, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_results_equal_cpu_results() -> None:
    env, twin = build("hopper", 8, max_episode_steps=10), make_env("hopper", 8, "cuda", max_episode_steps=10)
    assert torch.equal(twin.reset(seed=0)["policy"].cpu(), env.reset(seed=0)["policy"])
    for action in random_actions(env, 25):
        same(twin.step(action.cuda()), env.step(action))
