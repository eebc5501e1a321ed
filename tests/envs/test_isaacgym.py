"""The Isaac Gym adapter against a stand-in for ``VecTask``; not run with the simulator itself."""

import sys
import types

import fake_isaacgym
import pytest
import torch

from pql.collect.episodes import EpisodeStats
from pql.contract.optional import set_stage, stage_of
from pql.envs.adapters import isaacgym
from pql.envs.adapters.isaacgym import IsaacGymVec
from pql.errors import ConfigError

L = 6


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    """A process holds one simulation; the package's function for seeds is there."""
    monkeypatch.setattr(fake_isaacgym, "ALIVE", [])
    seeds = types.ModuleType("isaacgymenvs.utils.utils")
    seeds.set_seed = lambda seed: torch.manual_seed(seed)
    for name in ("isaacgymenvs", "isaacgymenvs.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "isaacgymenvs.utils.utils", seeds)


def make(when="post", **kwargs):
    task = fake_isaacgym.FakeVecTask(4, L, when, falls=(1,), **kwargs)
    return IsaacGymVec(task, "Fake", when), task


@pytest.mark.parametrize("when", isaacgym.TIMINGS)
def test_every_timing_conforms(when, conforms):
    env, _ = make(when, states=3)
    untested = conforms(env, 40)
    never = {"final_obs_kept"} if when in ("same", "post", "pre") else set()
    same = {"filler_flags"} if when in ("same", "manual") else set()
    assert untested == {"stack", "determinism", "state_dict", "groups", "describe", "capturable"} | never | same


ROWS = {"post": L - 1, "pre": L - 2, "same": L - 1, "manual": L - 1}


@pytest.mark.parametrize("when", isaacgym.TIMINGS)
def test_rows_are_what_really_happened(when):
    """Row by row: an observation acted on, its successor and its reward belong to one episode; limits are truncations,
    falls terminations; what comes between is nobody's."""
    env, _ = make(when)
    obs, lengths, ends = env.reset(0), torch.zeros(4), []
    assert obs["policy"][:, 0].unique().numel() == 1  # one episode, and not the zeros of the simulator's own reset
    stats = EpisodeStats(4, {}, torch.device("cpu"))
    for _ in range(30):
        step = env.step(torch.zeros(4, 3))
        stats.update(step)
        lengths += step.valid
        for i in torch.arange(4)[step.valid].tolist():
            before, after, done = obs["policy"][i], step.final_obs["policy"][i], step.terminated[i] | step.truncated[i]
            if step.final_ok[i]:
                assert after.tolist() == [before[0], before[1] + 1]
                assert step.reward[i] == 10 * after[0] + after[1]
            if done:
                ends.append((i, int(lengths[i]), bool(step.terminated[i])))
                lengths[i] = 0
            assert not (i != 1 and step.terminated[i])
        obs = step.obs
    begun = 1 if when in ("pre", "same") else 0  # first observations have one step behind them
    fall = fake_isaacgym.FakeVecTask.__init__.__defaults__[4] - (1 if when == "pre" else 0)
    first = {i: next(n for j, n, _ in ends if j == i) for i in range(4)}
    assert first[0] == (ROWS[when] - 1 if when == "same" else ROWS[when])
    assert first[1] == (fall - begun if when == "same" else fall)
    later = [(i, n, t) for i, n, t in ends if (i, n) != (i, first[i]) or when != "same"]
    assert {n for i, n, _ in later if i == 0} == {ROWS[when]}
    assert {n for i, n, _ in later if i == 1} == {fall}
    assert all(t == (i == 1) for i, _, t in ends)
    assert stats.drain()["train/episodes"] > 10


def test_what_is_returned_is_ours_and_the_action_is_clamped():
    env, task = make("post")
    env.reset(0)
    one = env.step(torch.full((4, 3), 5.0))
    reward, flags = one.reward.clone(), one.truncated.clone()
    assert task.actions[-1].eq(1).all()
    for _ in range(L):
        env.step(torch.zeros(4, 3))
    assert torch.equal(one.reward, reward)
    assert torch.equal(one.truncated, flags)


def test_first_episodes_of_random_length():
    task = fake_isaacgym.FakeVecTask(64, 50)
    env = IsaacGymVec(task, "Fake", "post", random_lengths=True)
    env.reset(3)
    starts = env.step(torch.zeros(64, 3)).obs["policy"][:, 1]
    assert starts.unique().numel() > 20
    assert 1 <= starts.min() < starts.max() <= 49


def package(tmp_path, monkeypatch, made):
    """A package with the configuration files that IsaacGymEnvs has, in little."""
    (tmp_path / "cfg" / "task").mkdir(parents=True)
    (tmp_path / "cfg" / "task" / "Ant.yaml").write_text("name: Ant\nenv: {episodeLength: 1000}\n")
    (tmp_path / "cfg" / "config.yaml").write_text(
        "defaults:\n  - task: Ant\n  - _self_\n"
        "num_envs: ''\nsim_device: cuda:0\nrl_device: cuda:0\npipeline: gpu\nheadless: False\n"
    )
    fake = types.ModuleType("isaacgymenvs")
    fake.__file__ = str(tmp_path / "__init__.py")

    def make(seed, task, num_envs, sim_device, rl_device, headless, force_render, cfg):
        made.append((task, num_envs, sim_device, rl_device, headless, force_render, cfg))
        return fake_isaacgym.FakeVecTask(num_envs, L)

    fake.make = make
    monkeypatch.setitem(sys.modules, "isaacgymenvs", fake)
    monkeypatch.setitem(sys.modules, "isaacgym", types.ModuleType("isaacgym"))


@pytest.mark.filterwarnings("ignore")  # Hydra's, of the older versions that Isaac Gym's Python has
def test_the_package_is_asked_for_a_task_by_its_own_configuration(tmp_path, monkeypatch):
    made = []
    package(tmp_path, monkeypatch, made)
    env = isaacgym.isaacgym(5, "cpu", overrides=["task.env.episodeLength=300"])
    ((task, num_envs, sim, rl, headless, render, config),) = made
    assert (task, num_envs, sim, rl, headless, render) == ("Ant", 5, "cpu", "cpu", True, False)
    assert config.task.env.episodeLength == 300
    assert (config.num_envs, config.pipeline, config.sim_device, config.headless) == (5, "cpu", "cpu", True)
    assert (env.timing, env.spec.num_envs, env.spec.single_instance) == ("post", 5, True)
    with pytest.raises(ConfigError, match=r"task=Ent: expected one of Ant"):
        isaacgym.isaacgym(5, "cpu", task="Ent")
    with pytest.raises(ConfigError, match=r"timing=late: expected one of post, pre, same, manual"):
        isaacgym.isaacgym(5, "cpu", timing="late")


def test_observations_of_several_arrays_are_refused():
    task = fake_isaacgym.FakeVecTask(4, L)
    task.clamped = lambda: {"object_pose": task.obs_buf, "goal_pose": task.obs_buf}
    env = IsaacGymVec(task, "AllegroHandDextremeADR", "pre")
    with pytest.raises(ConfigError, match=r"task=AllegroHandDextremeADR: .* one array, not object_pose, goal_pose"):
        env.reset(0)


@pytest.mark.parametrize(
    ("task", "timing"),
    [
        ("Ant", "post"),
        ("FrankaCubeStack", "post"),
        ("ShadowHandOpenAI_LSTM", "pre"),
        ("BallBalance", "pre"),
        ("AllegroKukaLSTM", "pre"),
        ("AnymalTerrain", "same"),
        ("HumanoidAMP", "manual"),
        ("Anymal", "post"),
    ],
)
def test_the_timing_follows_the_task(monkeypatch, task, timing):
    monkeypatch.setattr(isaacgym, "make_task", lambda name, n, device, words: fake_isaacgym.FakeVecTask(n, L))
    assert isaacgym.isaacgym(2, "cpu", task=task).timing == timing


@pytest.mark.parametrize("task", ["FactoryTaskNutBoltPick", "IndustRealTaskPegsInsert"])
def test_environments_that_end_together_cannot_begin_apart(task):
    with pytest.raises(ConfigError, match=f"random_lengths=true: expected false: all environments of {task}"):
        isaacgym.isaacgym(2, "cpu", task=task, random_lengths=True)


def test_an_adaptive_curriculum_is_saved_and_restored():
    env, task = make()
    assert not hasattr(env, "progress")  # a package without it
    fake_isaacgym.ALIVE.clear()
    task = fake_isaacgym.FakeVecTask(4, L)
    task.control_steps, tolerance = 0, [0.075]
    task.get_env_state = lambda: {"success_tolerance": tolerance[0]}
    task.set_env_state = lambda state: tolerance.append(state["success_tolerance"])
    env = IsaacGymVec(task, "Fake", "post")
    task.control_steps = 12
    assert env.progress() == {"control_steps": 12, "success_tolerance": 0.075}
    assert stage_of(env) == {"stage/control_steps": 12, "stage/success_tolerance": 0.075}
    set_stage(env, {"stage/control_steps": 40.0, "stage/success_tolerance": 0.05, "seconds": 3.0})
    assert (task.control_steps, tolerance) == (40, [0.075, 0.05])
    tolerance[0] = -1.0
    assert stage_of(env) == {"stage/control_steps": 40}  # counters of checkpoints are numbers from 0 on
    task.get_env_state = lambda: None
    assert env.progress() == {"control_steps": 40}
