"""The adapters for Isaac Lab and mjlab against stand-ins for their environments. Isaac Lab itself was not run;
``make test-adapters`` runs mjlab in a separate environment."""

import contextlib
import math
import sys
import types

import fake_isaaclab
import gymnasium
import pytest
import torch
from fake_isaaclab import Config, FakeLabEnv, FakeMjlabEnv

from pql.envs.adapters import isaaclab
from pql.envs.adapters.adapt import Actions, change
from pql.envs.adapters.isaaclab import IsaacLabVec
from pql.envs.adapters.mjlab import MjlabVec
from pql.errors import ConfigError


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
    assert env.spec.log == ("Episode_Reward/walk", "Curriculum/level", "Episode_Termination/time_out")
    for t in range(1, 9):
        step = env.step(torch.zeros(4, 3))
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
    with pytest.raises(ConfigError, match=r"action_bound=0: expected a number above 0"):
        Actions(bounded, 0)
    with pytest.raises(ConfigError, match=r"task=Discrete\(2\): expected a task whose actions are one array"):
        Actions(discrete, 1.0)


class JointPositionAction:
    """A term of the action manager, with Isaac Lab's names for its parts or mjlab's."""

    def __init__(self, limits, names, scale, offset):
        owner = types.SimpleNamespace(data=types.SimpleNamespace(soft_joint_pos_limits=torch.tensor([limits] * 4)))
        setattr(self, names[0], owner)
        setattr(self, names[1], torch.tensor([2, 0, 1]))
        self._scale, self._offset = scale, offset


class JointEffortAction(JointPositionAction):
    pass


@pytest.mark.parametrize("make", [IsaacLabVec, MjlabVec])
def test_actions_of_one_reach_the_joints_limits(make):
    mine = make is IsaacLabVec
    names = ("_asset", "_joint_ids") if mine else ("_entity", "_target_ids")
    limits = [[-1.0, 2.0], [-3.0, 0.0], [-0.5, 0.5]]  # of the joints 0, 1, 2; the action's order is 2, 0, 1
    each = torch.tensor([[0.25, 0.5, 1.0]] * 4)
    for scale, offset, bound in (
        (0.5, 0.0, [1.0, 4.0, 6.0]),
        (each, torch.tensor([[0.1, -0.5, -3.0]] * 4), [0.6 / 0.25, 2.5 / 0.5, 3.0 / 1.0]),
    ):
        inner = (FakeLabEnv if mine else FakeMjlabEnv)(Config(auto_reset=mine))
        terms = {"joint_pos": JointPositionAction(limits, names, scale, offset)}
        inner.action_manager = types.SimpleNamespace(active_terms=[*terms], get_term=terms.__getitem__)
        env = make(inner, "Fake", action_bound="limits")
        assert env.spec.action.bounds[1] == pytest.approx(bound)
        assert env.spec.action.bounds[0] == pytest.approx([-b for b in bound])
        for kind, edges, why in (
            (JointEffortAction, limits, "a number: the action term joint_pos is a JointEffortAction"),
            (JointPositionAction, [[-1.0, math.inf], *limits[1:]], "some joints have no limits"),
        ):
            terms["joint_pos"] = kind(edges, names, scale, offset)
            with pytest.raises(ConfigError, match=f"action_bound=limits: expected .*{why}"):
                Actions(inner, "limits")
        inner.close()
    with pytest.raises(ConfigError, match="this task's actions are not joint positions"):
        Actions(types.SimpleNamespace(single_action_space=inner.single_action_space), "limits")
    with pytest.raises(ConfigError, match="action_bound=limit: expected a number above 0, or limits"):
        Actions(inner, "limit")


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
    env = IsaacLabVec(FakeLabEnv(Config(num_envs=64, length=40, falls=())), "Fake", random_lengths=True)
    buffer = env.env.episode_length_buf
    env.reset(0)
    assert env.env.episode_length_buf is buffer
    assert buffer.unique().numel() > 15
    assert buffer.max() < 40


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


def test_a_task_that_is_not_registered_is_named_before_anything_is_launched(version_3):
    with pytest.raises(ConfigError, match=r"task=Isaac-Fale: .* \(did you mean Isaac-Fake\?\)"):
        isaaclab.isaaclab(3, "cpu", "Isaac-Fale")
    assert version_3 == []
