"""The Warp engine against C, on the CPU: same states and controls give the same numbers within float32 and chaos.

Compiling Warp's kernels takes one core half a minute for each kind of model, the first time (they are kept in
``WARP_CACHE_PATH``), so two robots are in the suite and the others are marked slow (``make test-warp``).
"""

import copy
import gc
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need them
pytest.importorskip("mujoco_warp")

import mujoco_runs
import warp as wp
from conftest import SummaryTables, never_waiting
from mujoco_runs import ROBOT_OF, derived, random_actions, task

from pql.contract.env import make_env, preparation
from pql.envs.mujoco import TASKS, kernels
from pql.envs.mujoco.engine import Masked
from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.randomize import base_dofs
from pql.envs.mujoco.warp import WarpEngine
from pql.errors import ConfigError, PqlWarning

SLOW = (
    "walker2d",
    "ant",
    "humanoid",
    "humanoidstandup",
    "swimmer",
    "reacher",
    "pusher",
    "invertedpendulum",
    "inverteddoublependulum",
)
# pinned feet on stiff servos, seen by force sensors: float32 shows; fingertips' forces, seen tenfold; the forces on
# a body with a dozen contacts; ten physics steps instead of five
STIFF = {"ballbalance": 3000.0, "shadow_hand": 10.0, "shadow_hand_openai": 10.0, "humanoidstandup": 10.0, "ant": 4.0}
PAPER = ("isaac_ant", "isaac_humanoid", "ballbalance")
# share of rows that may differ: fingers side by side touch in one point or two
ODD = {"shadow_hand": 0.4, "shadow_hand_openai": 0.4}
# in these, fewer than a tenth of random episodes end within 40 steps; in the others more do within LIMIT, or 40
LASTING = (
    "halfcheetah",
    "humanoidstandup",
    "swimmer",
    "reacher",
    "pusher",
    "shadow_hand",
    "shadow_hand_openai",
    "franka_cube_stack",
    "franka_cube_stack_torque",
    "dclaw",
)
LIMIT = {"ballbalance": 80, "g1_velocity": 80, "go1_velocity": 160, "anymal": 160, "isaac_ant": 160}
ROBOTS = ["halfcheetah", "hopper", *(task(name, pytest.mark.slow) for name in (*SLOW, *PAPER, *ROBOT_OF))]


pytestmark = pytest.mark.usefixtures("scratch")


def build(name: str, num_envs: int, engine: str = "warp", **kwargs: Any) -> MujocoVec:
    return mujoco_runs.build(name, num_envs, engine=engine, **kwargs)


def warp_of(env: MujocoVec) -> WarpEngine:
    assert isinstance(env.engine, WarpEngine)
    return env.engine


def follow(env: MujocoVec, other: MujocoVec) -> None:
    """Put the simulations of ``env`` into the state of ``other``, and into its memory of goals and targets."""
    n = env.spec.num_envs
    qpos, qvel = (other.engine.fields[name].to(env.engine.dtype) for name in ("qpos", "qvel"))
    env.engine.reset(env.engine.rows(torch.ones(n, dtype=torch.bool)), qpos.clone(), qvel.clone())
    memory = {k: v.to(env.engine.dtype) if v.is_floating_point() else v for k, v in other._memory.items()}
    env._memory = {**memory, **env.task.track(derived(env.task, env.engine.fields))}


@pytest.mark.parametrize("name", ROBOTS)
def test_engines_agree_step_by_step_and_over_a_short_horizon(
    name: str, monkeypatch: pytest.MonkeyPatch, summary_tables: SummaryTables
) -> None:
    """Each step from C's own state, and 3 steps without putting it right again."""
    monkeypatch.setattr("pql.envs.mujoco.unitree.Unitree.lasting", None)  # each engine draws its own commands
    n, steps, stiff, odd = 16, 12, STIFF.get(name, 1.0), ODD.get(name, 0.1)
    c, w, free = (build(name, n, engine, max_episode_steps=1000) for engine in ("batch", "warp", "warp"))
    for env in (c, w, free):
        env.reset(seed=0)
    follow(c, c)  # away from C's memory of its last solution, which Warp has not
    follow(free, c)
    gaps: dict[str, list[Tensor]] = {"after one step": [], "after three": [], "of the reward": []}
    for t, action in enumerate(random_actions(c, steps)):
        follow(c, c)
        follow(w, c)
        a, b = c.step(action), w.step(action)
        drifted = free.step(action) if t < 3 else None
        for theirs, size, when in ((b, 1e-4 * stiff, "after one step"), (drifted, 1e-3 * stiff, "after three")):
            if theirs is None:
                continue
            scale = a.final_obs["policy"].abs().amax(0).clamp(min=1.0)
            gap = ((theirs.final_obs["policy"] - a.final_obs["policy"]).abs() / scale).amax(1)
            gaps[when].append(gap)
            assert gap.median() < size / 10
            assert (gap > size).float().mean() <= odd, gap  # where a contact begins a substep earlier
            assert torch.equal(theirs.terminated, a.terminated)
            assert not theirs.log["overflow"].any()
        apart = (b.reward - a.reward).abs() / a.reward.abs().clamp(min=1.0)
        gaps["of the reward"].append(apart)
        assert (apart > 1e-4 * stiff).float().mean() <= odd, apart
    last = {**gaps, "after three": gaps["after three"][-1:]}
    found = ", ".join(f"{what} {float(torch.cat(gap).quantile(0.9)):.0e}" for what, gap in last.items())
    summary_tables.row("agreement", f"{name:26} {found}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ant", "humanoid", "humanoidstandup"])
def test_engines_agree_without_contact_forces(name: str) -> None:
    c, w = (build(name, 8, engine, contact_forces=False) for engine in ("batch", "warp"))
    c.reset(seed=0), w.reset(seed=0)
    for action in random_actions(c, 4):
        follow(c, c), follow(w, c)
        a, b = c.step(action), w.step(action)
        torch.testing.assert_close(b.final_obs["policy"], a.final_obs["policy"], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(b.reward, a.reward, rtol=1e-3, atol=1e-3)
        assert torch.equal(b.terminated, a.terminated)
    assert {*w.engine.fields} == {*c.engine.fields}


@pytest.mark.parametrize("name", ROBOTS)
def test_random_episodes_have_the_same_statistics(name: str, summary_tables: SummaryTables) -> None:
    """Tasks that fail do so in some of these episodes, so that their lengths differ."""
    n, limit = 64, LIMIT.get(name, 40)
    lengths, returns = [], []
    for engine in ("batch", "warp"):
        env = build(name, n, engine, max_episode_steps=limit)
        env.reset(seed=1 if engine == "warp" else 2)
        alive, total, length = torch.ones(n, dtype=torch.bool), torch.zeros(n), torch.zeros(n)
        for action in random_actions(env, limit, seed=3 if engine == "warp" else 4):
            step = env.step(action)
            total += step.reward * alive
            length += alive
            alive &= ~step.first
            assert engine == "batch" or not step.log["overflow"].any()
        lengths.append(length)
        returns.append(total)
    assert name in LASTING or all((length < limit).float().mean() > 0.1 for length in lengths)
    for (a, b), least in ((lengths, 0.0), (returns, 1e-3)):
        gen = torch.Generator().manual_seed(0)
        picks = torch.randint(n, (1000, 2, n), generator=gen)
        error = (a[picks[:, 0]].mean(1) - b[picks[:, 1]].mean(1)).std()  # bootstrap
        assert (a.mean() - b.mean()).abs() <= 4 * error + least
    (length, other), (total_c, total_w) = lengths, returns
    summary_tables.row(
        "episodes",
        f"{name:26} length C {length.mean():.1f}, Warp {other.mean():.1f} of {limit}; "
        f"return C {total_c.mean():.4g}, Warp {total_w.mean():.4g}",
    )


def test_fields_are_shared_not_copied() -> None:
    engine = warp_of(build("halfcheetah", 2))
    for name, field in engine.fields.items():
        assert field.data_ptr() == getattr(engine._data, name).ptr
        assert field.dtype == torch.float32


def test_a_masked_reset_changes_only_its_rows() -> None:
    env = build("halfcheetah", 5)
    env.reset(seed=0)
    for action in random_actions(env, 3):
        before = env.step(action).obs["policy"]
    state = env.engine.state()
    mask = torch.tensor([False, True, False, False, True])
    after = env.reset_where(mask)["policy"]
    assert torch.equal(after[~mask], before[~mask])
    assert torch.equal(env.engine.state()[~mask], state[~mask])
    assert (after[mask] != before[mask]).any(1).all()
    assert env.state_dict()["steps"].tolist() == [3, 0, 3, 3, 0]
    assert env.engine.state()[mask][:, 0].tolist() == [0.0, 0.0]  # time


def test_the_contract_holds(conforms) -> None:
    conforms(build("halfcheetah", 4, max_episode_steps=12), 30)


def test_randomised_parameters_mean_the_same_on_both_engines() -> None:
    wanted = {"mass": [0.5, 2.0], "friction": [0.5, 1.5], "gain": [0.7, 1.3]}
    c, w = (build("halfcheetah", 6, engine, randomize=wanted) for engine in ("batch", "warp"))
    c.reset(seed=0), w.reset(seed=0)
    c._randomizer.load_state_dict(  # type: ignore[union-attr]
        {**c.state_dict()["randomizer"], "factors": {k: v.double() for k, v in w._randomizer.factors.items()}},  # type: ignore[union-attr]
        c.engine.rows(torch.ones(6, dtype=torch.bool)),
    )
    follow(c, c), follow(w, c)
    action = random_actions(c, 1)[0]
    a, b = c.step(action), w.step(action)
    torch.testing.assert_close(a.final_obs["policy"], b.final_obs["policy"], rtol=1e-3, atol=1e-3)
    for name in ("dof_invweight0", "body_invweight0"):
        theirs = torch.tensor(c.engine.batch.expanded(name)).float()  # type: ignore[attr-defined]
        torch.testing.assert_close(warp_of(w)._parameters[name], theirs, rtol=1e-4, atol=0)
    plain = build("halfcheetah", 6)
    plain.reset(seed=0), follow(plain, c)
    assert (plain.step(action).final_obs["policy"] - b.final_obs["policy"]).abs().amax(1).min() > 0.05


def test_an_overflow_is_counted_and_warned_about() -> None:
    env = build("halfcheetah", 3)
    small = WarpEngine(env.model, 3, torch.device("cpu"), need=(1, 1))  # room for 8 rows; lying down takes 16
    qpos = env.task.robot.qpos0.repeat(3, 1)
    qpos[1:, 1], qpos[1:, 2] = -0.6, 0.0  # pressed into the ground
    everyone = torch.ones(3, dtype=torch.bool)
    small.reset(Masked(everyone), qpos, torch.zeros(3, env.model.nv))
    with pytest.warns(PqlWarning, match=r"8 contacts and 8 constraint rows.*lost.*task.kwargs.contacts=\[8,8\]"):
        small.step(torch.zeros(3, env.model.nu), 1)
    assert small.overflowed().tolist() == [False, True, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            small.step(torch.zeros(3, env.model.nu), 1)  # once is enough


class NoHostReads(TorchDispatchMode):
    """Refuses what a capture on a device would: reading a value, shapes that depend on values, copying a constant."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "lift_fresh", "lift_fresh_copy")

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.known = {address(t) for t in gc.get_objects() if isinstance(t, Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.NAMES:
            raise AssertionError(f"{func} waits for the device, or copies to it")
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        assert all(address(t) in self.known for t in given), f"{func} copies a list of numbers to the device"
        out = func(*args, **(kwargs or {}))
        self.known |= {address(t) for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("name", ROBOTS)
def test_a_step_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pql.envs.mujoco.warp.Overflows._warn", lambda self: None)  # which asks before it reads
    wanted: dict[str, Any] = {"friction": [0.5, 1.5], "obs_noise": 0.01, "obs_delay": [0, 2]}
    if base_dofs(build(name, 1, "batch").model):
        wanted["push"] = 0.5
    env = build(name, 4, max_episode_steps=3, randomize=wanted, curriculum={"kind": "survive"})
    env.reset(seed=0)
    actions = random_actions(env, 5)
    env.step(actions[0])  # captures
    with NoHostReads():
        ended = [env.step(action).first for action in actions[1:].unbind(0)]
    assert torch.stack(ended).any()


@pytest.mark.parametrize(("name", "axis", "down"), [("halfcheetah", 1, 0.1), ("ant", 2, 0.65)])
def test_sensors_are_left_out_of_all_substeps_but_the_last(name: str, axis: int, down: float) -> None:
    """The state, all fields, sensors and contact forces are then the same numbers."""
    env, results = build(name, 4), []
    engine, qpos = warp_of(env), env.task.robot.qpos0.repeat(4, 1)
    qpos[:, axis] -= down  # into the ground
    names = ["cfrc_ext", "sensordata", *engine.fields]
    engine._model.opt.run_rne_postconstraint = True
    for works in (["step 2"], ["step 1"] * 2):
        engine.reset(Masked(torch.ones(4, dtype=torch.bool)), qpos, torch.zeros(4, env.model.nv))
        engine.fields["ctrl"].fill_(0.5)
        for work in works:
            engine._launch(work)
        results.append([engine.state(), *(wp.to_torch(getattr(engine._data, n)).clone() for n in names)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert results[0][1].any()


@pytest.mark.parametrize(
    ("name", "kwargs", "work"),
    [
        ("halfcheetah", {}, []),
        ("ant", {"contact_forces": False, "legacy": True}, ["positions"]),
        ("go1_velocity", {}, []),
        pytest.param("ant", {}, ["forward"], marks=pytest.mark.slow),
    ],
)
def test_a_restart_computes_only_the_fields_that_are_read_then(
    name: str, kwargs: dict[str, Any], work: list[str]
) -> None:
    env, whole = build(name, 4, **kwargs), build(name, 4, **kwargs)
    engine = warp_of(env)
    assert engine._forward == work
    warp_of(whole).read_at_start(engine._outputs)
    assert warp_of(whole)._forward == (["forward"] if engine._outputs else [])
    for one in (env, whole):
        one.reset(seed=0)
    for action in random_actions(env, 3):
        a, b = env.step(action), whole.step(action)
        assert torch.equal(a.obs["policy"], b.obs["policy"])
        assert torch.equal(a.reward, b.reward)
        mask = torch.tensor([True, False, False, True])
        assert torch.equal(env.reset_where(mask)["policy"], whole.reset_where(mask)["policy"])


def test_state_keeps_its_addresses_where_entries_are_written_over_each_other() -> None:
    env = build("halfcheetah", 2)
    env.reset(seed=0)
    first = {"new": torch.ones(2), "old": torch.zeros(2)}
    env._memory = {**env._memory, **first}
    env._keep()
    new, old = env._memory["new"], env._memory["old"]
    env._memory = {**env._memory, "new": torch.full((2,), 2.0), "old": new}
    env._keep()
    assert env._memory["new"] is new
    assert env._memory["old"] is old
    assert (new.tolist(), old.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_what_is_prepared_is_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation's thread must capture nothing during a run. Preparing changes no bit of what follows."""
    wanted = {"mass": [0.8, 1.2]}
    ready, lazy = (build("halfcheetah", 4, max_episode_steps=3, randomize=wanted) for _ in range(2))
    ready.prepare()
    captured: list[Any] = []
    capture = WarpEngine._capture
    monkeypatch.setattr(WarpEngine, "_capture", lambda self, launch: captured.append(self) or capture(self, launch))
    for env in (ready, lazy):
        env.reset(seed=0)
        for action in random_actions(env, 5):
            step = env.step(action)
        assert not step.log["overflow"].any()
    assert torch.equal(ready.engine.state(), lazy.engine.state())
    assert captured == [lazy.engine] * 2  # constants and a step


def loads_of(monkeypatch: pytest.MonkeyPatch) -> dict[Any, None]:
    """Modules that Warp loads from now on, in order."""
    found: dict[Any, None] = {}
    load: Any = wp.Module.load

    def noted(module: Any, device: Any, block_dim: int | None = None, *more: Any, **named: Any) -> Any:
        found[module, block_dim] = None
        return load(module, device, block_dim, *more, **named)

    monkeypatch.setattr(wp.Module, "load", noted)
    return found


@pytest.mark.parametrize("name", [*ROBOTS[:1], task("ant", pytest.mark.slow)])
def test_the_modules_that_a_run_loads_are_known_before_and_nothing_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = build(name, 4, max_episode_steps=3, randomize={"mass": [0.8, 1.2]})
    engine, before = warp_of(env), warp_of(env).state()
    keys = ["constants", *engine._forward, f"step {env.spec.info['frame_skip']}"]
    listed = kernels.variants([partial(engine._launch, key) for key in keys])
    assert torch.equal(before, engine.state())
    loaded = loads_of(monkeypatch)
    for key in keys:
        engine._launch(key)
    assert {*loaded} == {*listed}
    assert len(listed) > 30


def test_a_module_that_is_asked_for_outside_of_a_launch_is_loaded() -> None:
    """On a GPU MuJoCo Warp asks a kernel for its best block size before it launches it."""
    engine, got = warp_of(build("halfcheetah", 2)), []
    module, block = kernels.variants([partial(engine._launch, "positions")])[0]
    assert kernels.variants([lambda: got.append(module.load("cpu", block))]) == []
    assert got[0] is not None


def test_compilation_says_how_far_it_is_and_that_it_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    env, clock, said = build("halfcheetah", 4), iter(range(0, 900, 3)), []
    monkeypatch.setattr(kernels, "AT_ONCE", 4)
    monkeypatch.setattr(kernels.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(kernels, "variants", lambda launches: [(name, 1) for name in "abcdefghij"])
    force = lambda device, modules, block_dim, max_workers: said.append((preparation(env), modules, block_dim))  # noqa: E731
    monkeypatch.setattr(kernels.wp, "force_load", force)
    with pytest.warns(PqlWarning, match=r"compiles 10 modules .* minutes .* \(WARP_CACHE_PATH\)\. pql warm-up") as told:
        warp_of(env)._kernels.load([], "cpu")
    assert len(told) == 1
    text = "module {} of 10 of MuJoCo Warp's kernels"
    assert said == [
        (text.format(1), ["a", "b", "c", "d"], 1),
        (text.format(5), ["e", "f", "g", "h"], 1),
        (text.format(9), ["i", "j"], 1),
    ]
    assert preparation(env) == ""


def test_memory_per_environment() -> None:
    """Almost all of it belongs to simulations, so it hardly depends on their number."""
    few, many = (warp_of(build("halfcheetah", n)).bytes_per_env() for n in (256, 1024))
    assert 8_000 < many <= few < 20_000


def test_friction_is_as_stiff_as_in_c() -> None:
    for name, ratio in (("hopper", 1.0), ("isaac_ant", 10.0)):
        assert warp_of(build(name, 2))._model.opt.impratio_invsqrt.numpy() == pytest.approx(ratio**-0.5)


def test_buffers_are_as_large_as_asked_for() -> None:
    given, small, large = (build("halfcheetah", 64, contacts=sizes) for sizes in (None, [6, 24], [60, 240]))
    assert warp_of(given).bytes_per_env() == warp_of(small).bytes_per_env()  # the task's own
    assert warp_of(large).bytes_per_env() > 2 * warp_of(small).bytes_per_env()


def test_a_model_that_warp_cannot_simulate_is_refused() -> None:
    model = copy.copy(build("halfcheetah", 1, "batch").model)
    model.opt.solver = mujoco.mjtSolver.mjSOL_PGS
    with pytest.raises(ConfigError, match="engine=warp: expected batch: Warp cannot simulate this model"):
        WarpEngine(model, 2, torch.device("cpu"))


def test_the_engine_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from pql.envs.mujoco.engines import choose

    assert choose("auto", torch.device("cpu")) == "batch"
    assert choose("auto", torch.device("cuda:1")) == "warp"
    assert TASKS["hopper"].describe(2, "cuda").deterministic is False
    assert list(TASKS["hopper"].describe(2, "cuda").log)[-1] == "overflow"
    assert TASKS["hopper"].describe(2, "cpu").deterministic is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_steps_agree_with_c_and_wait_for_nothing() -> None:
    n = 64
    c, w = (
        build("halfcheetah", n, "batch", max_episode_steps=20),
        make_env("halfcheetah", n, "cuda", max_episode_steps=20),
    )
    assert isinstance(w, MujocoVec)
    c.reset(seed=0), w.reset(seed=0)
    actions = random_actions(c, 40)
    follow(c, c)
    qpos, qvel = (c.engine.fields[name].float().cuda() for name in ("qpos", "qvel"))
    w.engine.reset(w.engine.rows(torch.ones(n, dtype=torch.bool, device="cuda")), qpos, qvel)
    w._memory = {**w._memory, **w.task.track(derived(w.task, w.engine.fields))}
    a, b = c.step(actions[0]), w.step(actions[0].cuda())
    torch.testing.assert_close(a.final_obs["policy"], b.final_obs["policy"].cpu(), rtol=1e-3, atol=1e-3)
    there = actions.cuda()
    for action in there:
        step = w.step(action)
    with never_waiting():
        for action in there:
            step = w.step(action)
    assert step.obs["policy"].isfinite().all()
    assert step.obs["policy"].device.type == "cuda"
