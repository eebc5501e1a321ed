"""The adapters for Isaac Lab and mjlab against stand-ins for their environments. Isaac Lab itself was not run;
``make test-adapters`` runs mjlab in a separate environment."""

import contextlib
import math
import sys
import threading
import types
import warnings

import fake_isaaclab
import gymnasium
import pytest
import torch
from fake_isaaclab import Config, FakeLabEnv, FakeMjlabEnv, JointEffortAction, JointPositionAction
from run_files import rows, words

import pql
from pql.config.compose import compose
from pql.envs.adapters import isaaclab
from pql.envs.adapters.adapt import Actions, change
from pql.envs.adapters.isaaclab import IsaacLabVec
from pql.envs.adapters.managers import Course
from pql.envs.adapters.mjlab import MjlabVec
from pql.envs.adapters.quiet import quiet
from pql.envs.classic import Pendulum
from pql.errors import ConfigError, PqlWarning
from pql.run.environment import build_env, build_eval_env
from pql.run.session import Session


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(fake_isaaclab, "ALIVE", [])
    monkeypatch.setattr(fake_isaaclab, "LAUNCHED", [True])


def lab(**settings):
    return IsaacLabVec(FakeLabEnv(Config(**settings)), "Fake")


def mj(**settings):
    return MjlabVec(FakeMjlabEnv(Config(auto_reset=False, **settings)), "Fake")


KINDS = {
    "lost": lambda **more: lab(**more),
    "computed": lambda **more: lab(compute_final_obs=True, **more),
    "mjlab": lambda **more: mj(**more),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("both", [False, True])
def test_they_conform(kind, both, conforms):
    lost = {"final_obs_kept"} if kind == "lost" else set()
    always = {"filler_flags", "stack", "determinism", "state_dict", "groups", "describe", "capturable"}
    assert conforms(KINDS[kind](both=both), 30) == always | lost


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_really_happened(kind):
    env = KINDS[kind]()
    obs, ended = env.reset(0), [0, 0]
    for _ in range(25):
        step = env.step(torch.zeros(4, 3))
        for i in range(4):
            before, after = obs["policy"][i], step.final_obs["policy"][i]
            assert step.reward[i] == 10 * before[0] + before[1] + 1
            assert bool(step.final_ok[i]) == (kind != "lost" or not step.first[i])
            if step.final_ok[i]:
                assert after.tolist() == [before[0], before[1] + 1]
            if step.first[i]:
                assert step.obs["policy"][i].tolist() == [before[0] + 1, 0]
                assert bool(step.terminated[i]) == (i == 1)
                assert before[1] + 1 == (3 if i == 1 else 5)
                ended[i == 1] += 1
            elif kind != "computed":
                assert torch.equal(step.obs["critic"][i], step.final_obs["critic"][i])
        obs = step.obs
    assert ended == [15, 8]


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_counts_once_for_each_environment_that_was_reset(kind):
    env = KINDS[kind]()
    env.reset(0)
    whole = ("Episode_Reward/walk", "Curriculum/level", "Episode_Termination/time_out")
    per_step = {"Metrics/slip": "step"} if kind == "mjlab" else {}
    assert env.spec.log == {**dict.fromkeys(whole, "episode"), **per_step}
    for t in range(1, 9):
        step = env.step(torch.zeros(4, 3))
        if per_step:
            assert step.log["Metrics/slip"].tolist() == [0.5 * (t - 1)] * 4
        expected = {3: [0, 3, 0, 0], 5: [5, 0, 5, 5], 6: [0, 3, 0, 0]}.get(t, [0] * 4)
        assert step.log["Episode_Reward/walk"].tolist() == expected
        assert step.log["Curriculum/level"].tolist() == [2.0 * (x > 0) for x in expected]
        assert step.log["Episode_Termination/time_out"].tolist() == [float(x == 5) for x in expected]  # shares


def test_both_flags_are_a_termination_and_a_finite_problem_has_no_time_limit():
    for finite, truncated in ((False, [True, False, True, True]), (True, [False] * 4)):
        fake_isaaclab.ALIVE.clear()
        env = lab(both=True, is_finite_horizon=finite)
        env.reset(0)
        for _ in range(5):
            step = env.step(torch.zeros(4, 3))
        assert step.truncated.tolist() == truncated
        assert step.terminated.tolist() == ([False, True, False, False] if not finite else [True] * 4)


def test_actions_reach_the_bound_or_the_spaces_own():
    env = IsaacLabVec(FakeLabEnv(Config()), "Fake", action_bound=3.0)
    env.step(torch.tensor([[0.5, -5.0, 1.0]] * 4))
    assert env.env.actions[-1].tolist() == [[1.5, -3.0, 3.0]] * 4
    assert env.spec.action.bounds == ((-3.0,) * 3, (3.0,) * 3)
    space = gymnasium.spaces.Box(torch.tensor([0.0, -2.0]).numpy(), torch.tensor([1.0, 4.0]).numpy())
    bounded, discrete = (types.SimpleNamespace(single_action_space=s) for s in (space, gymnasium.spaces.Discrete(2)))
    assert Actions(bounded, 1.0)(torch.tensor([[0.0, 1.0]])).tolist() == [[0.5, 4.0]]
    with pytest.raises(
        ConfigError, match=r"action_bound=0: expected a number above 0, a list with one for each of the 2 actions"
    ):
        Actions(bounded, 0)
    with pytest.raises(ConfigError, match=r"task=Discrete\(2\): expected a task whose actions are one array"):
        Actions(discrete, 1.0)


LIMITS = [[-1.0, 2.0], [-3.0, 0.0], [-0.5, 0.5]]  # of the joints 0, 1, 2; the action's order is 2, 0, 1


def jointed(mjlab, limits=LIMITS, scale=0.5, offset=0.0, kind=JointPositionAction):
    """An environment whose action moves three joints, and the dictionary of its action terms."""
    fake_isaaclab.ALIVE.clear()
    inner = (FakeMjlabEnv if mjlab else FakeLabEnv)(Config(auto_reset=not mjlab))
    terms = {"joint_pos": kind(fake_isaaclab.robot(limits), mjlab, [2, 0, 1], scale, offset)}
    inner.action_manager = types.SimpleNamespace(active_terms=[*terms], get_term=terms.__getitem__)
    return inner


EACH, POSE = torch.tensor([[0.25, 0.5, 1.0]] * 4), torch.tensor([[0.1, -0.5, -2.0]] * 4)


@pytest.mark.parametrize("make", [IsaacLabVec, MjlabVec])
def test_actions_of_one_reach_the_joints_limits(make):
    mjlab = make is MjlabVec
    for scale, offset, bound in ((0.5, 0.0, [1.0, 4.0, 6.0]), (EACH, POSE, [0.6 / 0.25, 2.5 / 0.5, 2.0])):
        env = make(jointed(mjlab, LIMITS, scale, offset), "Fake", action_bound="limits")
        assert env.spec.action.bounds[1] == pytest.approx(bound)
        assert env.spec.action.bounds[0] == pytest.approx([-b for b in bound])
        assert env.spec.action.center is None
    with pytest.raises(ConfigError, match="this task's actions are not joint positions"):
        Actions(types.SimpleNamespace(single_action_space=env.env.single_action_space), "limits")
    for bound in ("limits", "limits_asym"):
        for given, why in (
            ({"kind": JointEffortAction}, "a number: the action term joint_pos is a JointEffortAction"),
            ({"limits": [[-1.0, math.inf], *LIMITS[1:]]}, "a number: some joints have no limits"),
        ):
            with pytest.raises(ConfigError, match=f"^action_bound={bound}: expected {why}$"):
                Actions(jointed(mjlab, **given), bound)


@pytest.mark.parametrize("make", [IsaacLabVec, MjlabVec])
def test_asymmetric_bounds_are_the_limits_with_the_pose_at_zero(make):
    """Piecewise linear; the slopes by autograd are both sides' distances."""
    env = make(jointed(make is MjlabVec, LIMITS, -EACH, POSE), "Fake", action_bound="limits_asym")  # a mirrored joint
    box, (low, high) = env.spec.action, env.spec.action.bounds
    assert low == pytest.approx([-0.4 / 0.25, -2.5 / 0.5, -2.0])
    assert high == pytest.approx([0.6 / 0.25, 0.5 / 0.5, 1.0])
    assert box.center == (0.0, 0.0, 0.0)
    rows = torch.tensor([[-1.0] * 3, [0.0] * 3, [1.0] * 3, [-9.0, 0.5, -0.5]])
    env.step(rows)
    taken = env.env.actions[-1]
    assert taken[:3].tolist() == [list(low), [0.0] * 3, list(high)]
    assert taken[3].tolist() == pytest.approx([low[0], high[1] / 2, low[2] / 2])
    targets = POSE[:1] - EACH[:1] * taken[[0, 2]]
    limits = torch.tensor([LIMITS[i] for i in (2, 0, 1)])
    torch.testing.assert_close(targets.sort(0).values.T, limits)
    at = torch.tensor([[-0.3, 0.7, -0.9], [0.2, -0.1, 0.4]])
    slopes = torch.stack([torch.autograd.functional.jacobian(env.actions, row).diagonal() for row in at])
    down, up = -torch.tensor(low), torch.tensor(high)
    torch.testing.assert_close(slopes, torch.where(at < 0, down, up))
    with pytest.raises(ConfigError, match=r"^action_bound=limits_asym: .*: b's pose is not within its limits$"):
        Actions(jointed(False, LIMITS, EACH, torch.tensor([[0.1, -0.5, 0.0]] * 4)), "limits_asym")


def test_each_action_may_have_its_bound():
    env = IsaacLabVec(FakeLabEnv(Config()), "Fake", action_bound=[1, 2.0, 0.5])
    assert env.spec.action.bounds == ((-1.0, -2.0, -0.5), (1.0, 2.0, 0.5))
    known = r"a number above 0, a list with one for each of the 3 actions, limits or limits_asym"
    for bound, shown, hint in (
        ([1.0, 2.0], r"\[1\.0, 2\.0\]", ""),
        ([1.0, 2.0, -1.0], r"\[1\.0, 2\.0, -1\.0\]", ""),
        (math.inf, "inf", ""),
        (True, "true", ""),
        ("limit", "limit", r" \(did you mean limits\?\)"),
    ):
        with pytest.raises(ConfigError, match=f"^action_bound={shown}: expected {known}{hint}$"):
            Actions(env.env, bound)


def test_mjlabs_space_says_its_bounds_once_for_all_actions():
    env = MjlabVec(FakeMjlabEnv(Config(auto_reset=False)), "Fake", action_bound=2.0)
    assert env.spec.action.bounds == ((-2.0,) * 3, (2.0,) * 3)
    env.reset(0)
    env.step(torch.tensor([[0.5, -5.0, 1.0]] * 4))
    assert env.env.actions[-1].tolist() == [[1.0, -2.0, 2.0]] * 4


def test_settings_reach_attributes_and_what_has_keys():
    config = Config()
    change(config, {"scene.num_envs": 7, "rewards.walk.weight": 2.0, "length": 3})
    assert (config.scene.num_envs, config.rewards["walk"].weight, config.length) == (7, 2.0, 3)
    change(config, {"scene": {"num_envs": 8}, "rewards": {"walk": {"weight": 3.0}}})  # as the command line gives them
    assert (config.scene.num_envs, config.rewards["walk"].weight) == (8, 3.0)
    with pytest.raises(ConfigError, match=r"^rewards\.walk\.weigt=1: .* \(did you mean weight\?\)$"):
        change(config, {"rewards": {"walk": {"weigt": 1}}})
    meant = " (did you mean walk?)"
    change(config, {"rewards.walk": None})
    assert config.rewards == {"walk": None}
    for name, hint in (("rewards.wolk", meant), ("scene.fog.depth", ""), ("rewards.walk.weight", "")):
        with pytest.raises(ConfigError) as caught:
            change(config, {name: 1})
        assert str(caught.value) == f"{name}=1: expected a name in the task's configuration{hint}"


def test_a_history_would_lack_its_newest_frame():
    config = Config(compute_final_obs=True)
    config.observations.critic.history_length = 3
    with pytest.raises(ConfigError, match=r"final_obs=true: expected false: critic keeps a history"):
        IsaacLabVec(FakeLabEnv(config), "Fake")


def test_groups_must_be_flat_and_one_is_the_policys():
    with pytest.raises(ConfigError, match="observations=policy: expected a group whose terms are concatenated"):
        isaaclab.group_specs({"policy": {"joint": torch.zeros(2, 3)}})
    with pytest.raises(ConfigError, match=r"observations=critic: expected a group policy"):
        isaaclab.group_specs({"critic": torch.zeros(2, 3)})


def test_first_episodes_of_random_length():
    env = IsaacLabVec(FakeLabEnv(Config(num_envs=64, length=40, falls=())), "Fake", course=Course(True))
    buffer = env.env.episode_length_buf
    env.reset(0)
    assert env.env.episode_length_buf is buffer
    assert buffer.unique().numel() > 15
    assert buffer.max() < 40


# -- log, curricula, restarts, images ------------------------------------------------------------------------------


def test_numbers_written_at_every_step_are_told_from_those_of_a_reset():
    """Isaac Lab keeps the log of the last reset, to which reward terms may add; what a reset removes keeps its last
    value, and what appears later is named."""

    class Chatty(FakeLabEnv):
        def judge(self):
            ids = super().judge()
            self.extras["log"] |= {"Metrics/slip": torch.full((4, 1), float(self.common_step_counter))}
            if self.common_step_counter == 4:
                self.extras["log"]["Metrics/late"] = 1.0
            return ids

    env = IsaacLabVec(Chatty(Config()), "Fake")
    assert env.spec.log_kinds["Metrics/slip"] == "step"
    env.reset(0)
    seen = []
    for t in range(1, 6):
        with (
            pytest.warns(PqlWarning, match="Fake logs Metrics/late only after its first step")
            if t == 4
            else no_warning()
        ):
            step = env.step(torch.zeros(4, 3))
        assert "Metrics/late" not in step.log
        seen.append(step.log["Metrics/slip"].tolist())
    assert seen == [[1.0] * 4, [2.0] * 4, [2.0] * 4, [4.0] * 4, [4.0] * 4]  # resets in steps 3 and 5


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_reasons_of_ends_are_those_of_each_environment_if_a_manager_knows_them():
    """Isaac Lab 2.3 logs shares of all environments' latest ends there, which do not add up to one for a row."""
    env = lab(both=False)
    terms = {"time_out": torch.tensor([True, False, True, True])}
    env.env.termination_manager = types.SimpleNamespace(active_terms=[*terms], get_term=terms.__getitem__)
    env.reset(0)
    steps = [env.step(torch.zeros(4, 3)) for _ in range(5)]
    assert [s.log["Episode_Termination/time_out"].tolist() for s in steps[2::2]] == [[0.0] * 4, [1.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize("make", [IsaacLabVec, MjlabVec])
def test_a_stage_is_saved_scaled_and_set(make):
    inner = (FakeLabEnv if make is IsaacLabVec else FakeMjlabEnv)(Config(auto_reset=make is IsaacLabVec))
    env = make(inner, "Fake", course=Course(curriculum_scale=0.25))
    assert (inner.common_step_counter, env.progress()) == (0, {"common_step_counter": 0})  # after the step in advance
    env.reset(0)
    for _ in range(3):
        step = env.step(torch.zeros(4, 3))
    assert env.progress() == {"common_step_counter": 12}
    if make is MjlabVec:  # Isaac Lab resets before the adapter can count
        assert step.log["Curriculum/level"][1] == 3
    env.load_progress({"common_step_counter": 30.0})
    env.reset(0)
    assert inner.extras["log"]["Curriculum/level"] == 4
    env.step(torch.zeros(4, 3))
    assert inner.common_step_counter == 34
    with pytest.raises(ConfigError, match="curriculum_scale=0: expected a number above 0"):
        make(inner, "Fake", course=Course(curriculum_scale=0))


def test_a_terrain_s_levels_continue_on_resume_and_are_left_alone_elsewhere():
    env = mj()
    env.env.add_terrain()
    terrain = env.env.scene.terrain
    env.reset(0)
    env.reset(0)
    assert terrain.terrain_levels.tolist() == [2] * 4
    env.load_progress({"common_step_counter": 7, "terrain_levels": torch.tensor([0, 4, 1, 9])})
    env.reset(0)
    assert terrain.terrain_levels.tolist() == [0, 4, 1, 4]
    assert terrain.env_origins.flatten().tolist() == [0.0, 4.0, 1.0, 4.0]
    assert env.progress()["terrain_levels"].tolist() == [0, 4, 1, 4]
    env.reset(0)
    assert terrain.terrain_levels.tolist() == [1, 4, 2, 4]  # the curriculum works again
    env.load_progress({"common_step_counter": 7, "terrain_levels": torch.zeros(3)})  # of another number of environments
    env.reset(0)
    assert terrain.terrain_levels.tolist() == [2, 4, 3, 4]


@pytest.mark.parametrize("kind", ["lost", "mjlab"])
def test_single_environments_restart(kind):
    env = KINDS[kind]()
    env.reset(0)
    before = env.step(torch.zeros(4, 3)).obs
    obs = env.reset_where(torch.tensor([False, False, True, False]))
    rows = torch.tensor([0, 1, 3])
    assert torch.equal(obs["policy"][rows], before["policy"][rows])
    assert torch.equal(obs["critic"][rows], before["critic"][rows])  # with its noise
    assert obs["policy"][2].tolist() == [before["policy"][2, 0] + 1, 0]
    assert env.reset_where(torch.zeros(4, dtype=torch.bool))["policy"].equal(obs["policy"])
    step = env.step(torch.zeros(4, 3))
    assert step.obs["policy"][:, 1].tolist() == [2.0, 2.0, 1.0, 2.0]
    assert step.log["Curriculum/level"].tolist() == [0.0] * 4  # nobody ended
    config = Config()
    config.observations.critic.history_length = 3
    fake_isaaclab.ALIVE.clear()
    assert hasattr(IsaacLabVec(FakeLabEnv(config), "Fake"), "reset_where") is False


def test_images_have_the_viewers_size():
    env = mj()
    with pytest.raises(ConfigError, match="render_mode=null: expected rgb_array"):
        env.render()
    env.env.render_mode = "rgb_array"
    env.reset(0)
    env.step(torch.zeros(4, 3))
    assert (env.render().shape, env.render().max()) == ((4, 6, 3), 1)
    with pytest.raises(ConfigError, match=r"width=64: expected none: task\.kwargs\.settings\.viewer sets the size"):
        env.render(0, 64)
    with pytest.raises(ConfigError, match=r"index=2: expected 0, from task\.kwargs\.settings\.viewer\.env_idx"):
        env.render(2)
    shown = []
    env.env.viewport_camera_controller = types.SimpleNamespace(set_view_env_index=shown.append)
    env.render(2)
    assert shown == [2]


def test_evaluations_are_at_the_trainings_stage_and_a_resumed_run_continues_it(tmp_path, monkeypatch):
    def fake(num_envs=4, device="cpu", random_lengths=True, curriculum_scale=1.0, play=False):
        env = FakeMjlabEnv(Config(num_envs=num_envs, auto_reset=False, falls=()))
        return MjlabVec(env, "Fake", course=Course(random_lengths, curriculum_scale, play))

    monkeypatch.setattr("pql.contract.registry._registered", {"fake": fake})
    config = compose(words(tmp_path, "task=env", "task.name=fake", "eval.final=true", "budget.env_steps=192"))
    summary = Session(config, quiet=True).train()
    assert summary.length_mean == 5.0  # whole episodes, although those of training begin at random lengths
    (row,) = [r for r in rows(tmp_path) if "eval/return_mean" in r]
    assert row["stage/common_step_counter"] == row["steps/env"] / 16 == 12
    assert row["eval/episode/Curriculum/level"] == 3
    assert row["eval/step/Metrics/slip"] == 0.5 * row["stage/common_step_counter"]  # it stays
    report = pql.evaluate(summary.checkpoint, 2, 2)
    assert (report["play"], report["stage/common_step_counter"]) == (True, row["stage/common_step_counter"])
    assert report["episode/Curriculum/level"] == 3
    with pytest.warns(PqlWarning, match=r"its curriculum continues at common_step_counter \d+$"):
        resumed = pql.resume(tmp_path, "budget.env_steps=336", quiet=True)
    (_, row) = [r for r in rows(tmp_path) if "eval/return_mean" in r]
    assert resumed.env_steps == row["steps/env"]
    assert row["stage/common_step_counter"] == row["steps/env"] / 16
    assert row["eval/episode/Curriculum/level"] == 4


def stand_in(monkeypatch, modules, ids):
    """Modules of Isaac Lab by name, and the ids that its tasks register."""
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fake_isaaclab, "LAUNCHED", [])
    monkeypatch.setattr(gymnasium, "registry", {**gymnasium.registry, **dict.fromkeys(ids)})
    monkeypatch.setattr(gymnasium, "make", lambda task, cfg: types.SimpleNamespace(unwrapped=FakeLabEnv(cfg)))


@pytest.fixture
def version_2(monkeypatch):
    """Isaac Lab 2.3: the application first, then the tasks. Returns the order of what is called."""
    order = []

    class AppLauncher:
        def __init__(self, launcher_args=None, **kwargs):
            order.append(kwargs)
            fake_isaaclab.LAUNCHED.append(True)
            self.app = types.SimpleNamespace(close=lambda: order.append("app closed"))

    def parse_env_cfg(task, device, num_envs):
        order.append((task, device, num_envs))
        return Config(num_envs=num_envs)

    modules = {
        "isaaclab": {},
        "isaaclab.app": {"AppLauncher": AppLauncher},
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {"parse_env_cfg": parse_env_cfg},
    }
    stand_in(monkeypatch, modules, ["Isaac-Fake-v0"])
    return order


@pytest.fixture
def version_3(monkeypatch):
    """Isaac Lab 3.0: the configuration first, of presets; then what it needs is launched. Returns the order."""
    order = []

    @contextlib.contextmanager
    def launch_simulation(cfg, launcher_args=None):
        order.append((cfg.physics, cfg.sim.device, cfg.scene.num_envs, launcher_args["headless"]))
        fake_isaaclab.LAUNCHED.append(True)
        yield cfg.physics
        order.append("simulation closed")

    def load_cfg_from_registry(task, key):
        order.append((task, key))
        config = Config(num_envs=3)
        config.sim, config.physics = types.SimpleNamespace(device=None), ("physx", "newton_mjwarp")
        return config

    def resolve_presets(cfg, selected=()):
        cfg.physics = next((one for one in cfg.physics if one in selected), cfg.physics[0])
        return cfg

    modules = {
        "isaaclab": {},
        "isaaclab.app": {"launch_simulation": launch_simulation},
        "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {"load_cfg_from_registry": load_cfg_from_registry},
        "isaaclab_tasks.utils.hydra": {"resolve_presets": resolve_presets},
    }
    stand_in(monkeypatch, modules, ["Isaac-Fake"])
    return order


def test_version_2_starts_the_application_and_then_reads_the_task(version_2, monkeypatch):
    env = isaaclab.isaaclab(3, "cpu", "Isaac-Fake", final_obs=True, settings={"episode_length_s": 7.0})
    assert version_2 == [{"headless": True, "device": "cpu", "enable_cameras": False}, ("Isaac-Fake-v0", "cpu", 3)]
    assert env.spec.name == "Isaac-Fake-v0"
    assert env.spec.final_obs == "on_done"
    assert env.env.cfg.episode_length_s == 7.0
    env.close()
    assert version_2[2:] == ["app closed"]
    with pytest.raises(ConfigError, match=r"scene\.num_env=3: .* \(did you mean num_envs\?\)"):
        isaaclab.isaaclab(3, "cpu", "Isaac-Fake", settings={"scene.num_env": 3})
    assert version_2[-1] == "app closed"  # after a failure, too
    with pytest.raises(ConfigError, match=r"presets=\['physx'\]: expected none: Isaac Lab 2 has no presets"):
        isaaclab.isaaclab(3, "cpu", "Isaac-Fake", presets=["physx"])
    older = types.SimpleNamespace(parse_env_cfg=lambda *task, **sizes: types.SimpleNamespace(seed=None))
    monkeypatch.setitem(sys.modules, "isaaclab_tasks.utils", older)
    with pytest.raises(ConfigError, match=r"final_obs=true: expected false: this version of Isaac Lab cannot"):
        isaaclab.isaaclab(3, "cpu", "Isaac-Fake", final_obs=True)


@pytest.mark.parametrize(("presets", "physics"), [((), "physx"), (("newton_mjwarp",), "newton_mjwarp")])
def test_version_3_resolves_the_task_and_then_launches_what_it_needs(version_3, presets, physics):
    env = isaaclab.isaaclab(3, "cpu", "Isaac-Fake-v0", settings={"episode_length_s": 7.0}, presets=presets)
    assert version_3 == [("Isaac-Fake", "env_cfg_entry_point"), (physics, "cpu", 3, True)]
    assert env.spec.name == "Isaac-Fake"
    assert env.env.cfg.episode_length_s == 7.0
    assert env.reset(0)["policy"].shape == (3, 2)
    env.close()
    assert version_3[2:] == ["simulation closed"]


def test_play_is_the_play_configuration_with_the_time_limit_of_training(version_3, monkeypatch, capsys):
    utils = sys.modules["isaaclab_tasks.utils"]
    real = utils.load_cfg_from_registry

    def load(task, key):
        print("resolving", task)
        config = real(task, key)
        config.episode_length_s = 1e9 if "Play" in task else 5.0
        if "Play" in task:
            config.rewards = {}
        return config

    monkeypatch.setattr(utils, "load_cfg_from_registry", load)
    given = {"rewards.walk.weight": 2.0, "fall_at": 2}
    env = isaaclab.isaaclab(3, "cpu", "Isaac-Fake", settings=given, play=True)
    assert (env.spec.name, env.spec.info["play"]) == ("Isaac-Fake", False)  # none is registered
    env.close()
    monkeypatch.setitem(gymnasium.registry, "Isaac-Fake-Play", None)
    env = isaaclab.isaaclab(3, "cpu", "Isaac-Fake", settings=given, play=True)
    assert (env.spec.name, env.spec.info["play"], env.spec.max_episode_steps) == ("Isaac-Fake-Play", True, 5)
    assert env.env.cfg.fall_at == 2  # and the setting that it does not have is left out
    assert capsys.readouterr().out == ""
    env.close()
    monkeypatch.setenv("PQL_VERBOSE", "1")
    env = isaaclab.isaaclab(3, "cpu", "Isaac-Fake")
    assert capsys.readouterr().out == "resolving Isaac-Fake\n"
    assert env.spec.info["random_lengths"] is True


def test_only_the_threads_own_output_is_hidden(capsys):
    with quiet():
        print("hidden")
        thread = threading.Thread(target=print, args=("of another thread",))
        thread.start()
        thread.join()
    print("after")
    assert capsys.readouterr() == ("of another thread\nafter\n", "")

    @quiet()
    def fail():
        print("why")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert capsys.readouterr() == ("", "why\n")


def test_eval_play_can_be_refused_and_required(tmp_path, monkeypatch):
    seen, drawn = [], []

    def fake(num_envs=4, device="cpu", play=False, randomize=False):
        seen.append((num_envs, play))
        drawn.append(randomize)
        env = MjlabVec(FakeMjlabEnv(Config(num_envs=num_envs, auto_reset=False)), "Fake", course=Course(play=play))
        return env if num_envs != 3 else Pendulum(3, "cpu")

    monkeypatch.setattr("pql.contract.registry._registered", {"fake": fake})
    given = [f"run_dir={tmp_path}", "device=cpu", "task=env", "task.name=fake"]
    for word, played in (
        (None, True),
        ("eval.play=false", False),
        ("eval.play=true", True),
        ("task.kwargs.play=false", False),
    ):
        config = compose([*given, *([word] if word else [])])
        assert build_eval_env(config, 2).spec.info["play"] is played
    assert [play for _, play in seen] == [True, False, True, False]
    assert build_env(compose(given), 2).spec.info["play"] is False  # another library's, for training
    with pytest.raises(
        ConfigError, match=r"eval\.play=true: expected null or false: pendulum has no configuration for"
    ):
        build_eval_env(compose([*given, "eval.play=true"]), 3)
    for word in ("null", "false", "true"):  # with its own randomisation, as Playground has
        build_eval_env(compose([*given, "task.kwargs.randomize=7", f"eval.play={word}"]), 3)
    assert drawn[-3:] == [7, 7, False]


def test_a_task_that_is_not_registered_is_named_before_anything_is_launched(version_3):
    with pytest.raises(ConfigError, match=r"task=Isaac-Fale: .* \(did you mean Isaac-Fake\?\)"):
        isaaclab.isaaclab(3, "cpu", "Isaac-Fale")
    assert version_3 == []
