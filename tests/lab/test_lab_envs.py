"""Environments of robot stacks in pql's terms: final observations of every source, groups, actions."""

from types import SimpleNamespace

import fake_isaaclab
import pytest
import torch
from fake_isaaclab import Config, FakeLabEnv, FakeMjlabEnv

import pql
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.lab import from_rsl_rl
from pql.lab.describe import Described

N = 4


class Manager2(FakeLabEnv):
    """Isaac Lab 2: managers, and nothing that returns final observations."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.observation_manager = SimpleNamespace(compute=self.observe)

    def reset_ids(self, ids):
        self._reset_idx(ids)

    def _reset_idx(self, ids):
        super().reset_ids(ids)


class Wrapper:
    """As the wrappers of Isaac Lab and mjlab for rsl_rl: flags joined, time limits in ``extras``."""

    num_actions, clip_actions = 3, None

    def __init__(self, env):
        self.env = self.unwrapped = env
        self.num_envs, self.device, self.max_episode_length = env.num_envs, "cpu", env.max_episode_length
        env.reset()

    def reset(self, seed=None):
        return self.env.reset(seed=seed)

    def get_observations(self):
        return self.env.observe()

    def step(self, action):
        obs, reward, terminated, truncated, extras = self.env.step(action)
        extras["time_outs"] = truncated
        return obs, reward, (terminated | truncated).long(), extras

    def close(self):
        self.env.close()


def simulator(kind, *lacks, **more):
    known = {k: v for k, v in vars(Config(**more)).items() if k not in lacks}
    return Wrapper(kind(SimpleNamespace(**known)))


@pytest.fixture(autouse=True)
def _launched(monkeypatch):
    monkeypatch.setattr(fake_isaaclab, "LAUNCHED", [True])
    monkeypatch.setattr(fake_isaaclab, "ALIVE", [])


SOURCES = {
    "resets": (FakeMjlabEnv,),
    "computed": (FakeLabEnv, "auto_reset"),
    "intercepted": (Manager2, "auto_reset", "compute_final_obs"),
    "never": (FakeLabEnv, "auto_reset", "compute_final_obs"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_final_observations_come_from_the_first_source_there_is(source):
    env = from_rsl_rl(simulator(*SOURCES[source]))
    assert env._described.source == source
    assert env.spec.final_obs == ("never" if source == "never" else "on_done")
    assert list(env.spec.obs) == ["policy", "critic"]
    env.reset(0)
    age, seen = torch.zeros(N), 0
    for _ in range(17):
        step, age = env.step(torch.zeros(N, 3)), age + 1
        falls, late = (torch.arange(N) == 1) & (age == 3), age == 5
        assert torch.equal(step.terminated, falls)
        assert torch.equal(step.truncated, late)
        assert torch.equal(
            step.final_obs["policy"][:, 1], torch.where(falls | late, 0, age) if source == "never" else age
        )
        assert torch.equal(step.obs["policy"][:, 1], torch.where(falls | late, 0, age))
        assert torch.equal(step.final_ok, ~(falls | late) if source == "never" else torch.ones(N, dtype=torch.bool))
        if source != "never" and (falls | late).any():  # the critic's, of the same observation, whose noise it holds
            assert (step.final_obs["critic"][falls | late, 2] < step.obs["critic"][falls | late, 2]).all()
        seen += int((falls | late).sum())
        age[falls | late] = 0
    assert seen == 3 * 3 + 5
    env.close()


def test_the_contract_holds_on_each_of_them():
    for source, args in SOURCES.items():
        env = from_rsl_rl(simulator(*args))
        report = pql.check_env(env, steps=30)
        assert report.ok, (source, report)
        env.close()


def test_per_step_metrics_stay_in_the_log_where_resets_are_done_here():
    wrapper = simulator(FakeMjlabEnv)
    plain, described = wrapper.env.step, Described(wrapper, wrapper.get_observations())
    assert described.source == "resets"
    assert wrapper.env.cfg.auto_reset is False
    wrapper.env.step, hooked = plain, wrapper.env.step
    judge = wrapper.env.judge

    def logging():
        wrapper.env.extras["log"]["Metrics/slip"] = 0.5
        return judge()

    wrapper.env.judge = logging
    for _ in range(3):
        *_, extras = hooked(torch.zeros(N, 3))
    assert extras["log"]["Metrics/slip"] == 0.5
    assert extras["log"]["Episode_Reward/walk"] == 3.0  # of the environment that fell
    wrapper.close()


def test_histories_and_delays_are_not_observed_twice():
    history = SimpleNamespace(policy=SimpleNamespace(term=SimpleNamespace(history_length=3)))
    delay = SimpleNamespace(policy=SimpleNamespace(term=SimpleNamespace(delay_max_lag=2)))
    for observations in (history, delay):
        wrapper = simulator(Manager2, "auto_reset", "compute_final_obs", observations=observations)
        with pytest.raises(
            ConfigError, match=r"final_obs=intercepted: expected auto: policy keeps a history or a delay"
        ):
            from_rsl_rl(wrapper, final_obs="intercepted")
        assert from_rsl_rl(wrapper)._described.source == "never"
        wrapper.close()
    wrapper = simulator(FakeLabEnv, "auto_reset", observations=history)
    with pytest.raises(ConfigError, match=r"final_obs=computed: expected auto: policy keeps a history"):
        from_rsl_rl(wrapper, final_obs="computed")
    with pytest.raises(ConfigError, match=r"final_obs=later: expected one of auto, resets, computed, extras"):
        from_rsl_rl(wrapper, final_obs="later")
    wrapper.close()


def test_a_wrapped_environment_of_pql_is_itself_again():
    env, same = Counter(N), from_rsl_rl(pql.wrap.rsl_rl(Counter(N)))
    env.reset(0), same.reset(0)
    for _ in range(20):
        one, other = env.step(torch.zeros(N, 2)), same.step(torch.zeros(N, 2))
        for name in ("reward", "terminated", "truncated", "first", "valid", "final_ok"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        for name in ("obs", "final_obs"):
            assert torch.equal(getattr(one, name)["policy"], getattr(other, name)["policy"])


# -- groups and actions -----------------------------------------------------------------------------------------------


def described(obs_groups, *names):
    obs = {name: torch.zeros(N, 2) for name in names}
    env = SimpleNamespace(num_envs=N, num_actions=3, device="cpu", max_episode_length=5)
    return Described(env, obs, obs_groups)


BOTH = {"actor": "policy", "critic": "critic"}
READ = ["algo.policy.obs=[policy,scan]", "algo.critic.obs=[policy,state]"]
GROUPS = [  # rsl_rl's sets, the environment's groups, their names here, settings
    (None, ("policy",), {"policy": "policy"}, []),
    (None, ("actor", "critic", "scan"), {**BOTH, "scan": "scan"}, []),
    ({"actor": ("actor",), "critic": ("critic",)}, ("actor", "critic", "unread"), BOTH, []),
    ({"actor": ["policy"]}, ("policy", "critic"), {"policy": "policy", "critic": "critic"}, []),
    ({"actor": ["policy"], "critic": ["policy"]}, ("policy", "critic"), {"policy": "policy"}, []),
    (
        {"actor": ["policy", "scan"], "critic": ["policy", "state"]},
        ("policy", "scan", "state"),
        {"policy": "policy", "scan": "scan", "state": "state"},
        READ,
    ),
    (
        {"actor": ["body"], "critic": ["policy"]},
        ("policy", "body"),
        {"body": "policy", "policy": "policy_group"},
        ["algo.critic.obs=[policy_group]"],
    ),
]


@pytest.mark.parametrize(("sets", "groups", "names", "words"), GROUPS)
def test_observation_groups_are_those_that_are_read(sets, groups, names, words):
    found = described(sets, *groups)
    assert (found.names, found.words) == (names, words)
    assert set(found.spec.obs) == set(names.values())


class JointPositionAction:
    def __init__(self, low, high, scale):
        limits = torch.tensor([[low, high]]).transpose(1, 2)
        self._joint_names = ["hip", "knee"]
        data = SimpleNamespace(soft_joint_pos_limits=limits)
        self._asset = SimpleNamespace(data=data, joint_names=self._joint_names)
        self._joint_ids, self._offset, self._scale = slice(None), torch.zeros(1, 2), scale


def robot(clip=None):
    term = JointPositionAction([-1.0, -2.0], [0.5, 4.0], 0.5)
    manager = SimpleNamespace(active_terms=["joint_pos"], get_term=lambda name: term)
    env = SimpleNamespace(num_envs=N, num_actions=2, device="cpu", max_episode_length=5, action_manager=manager)
    env.clip_actions = clip
    return env


AUTO = [("auto", None, (2.0, 8.0)), ("auto", 4.0, (2.0, 4.0))]
GIVEN = [("limits", None, (2.0, 8.0)), (3.0, None, (3.0, 3.0)), ("1.5", None, (1.5, 1.5))]


@pytest.mark.parametrize(("bound", "clip", "high"), AUTO + GIVEN)
def test_actions_reach_the_joints_limits(bound, clip, high):
    found = Described(robot(clip), {"policy": torch.zeros(N, 2)}, None, bound)
    assert found.spec.action.high == high
    assert torch.equal(found.actions(torch.ones(1, 2)), torch.tensor([high]))
    with pytest.raises(ConfigError, match=r"action_bound=most: expected a number above 0, .*limits or limits_asym"):
        Described(robot(), {"policy": torch.zeros(N, 2)}, None, "most")
