"""The last action and reward as an observation group, in every row and for every kind of environment."""

from dataclasses import replace

import pytest
import torch

from pql.contract.conformance import check_env
from pql.contract.env import Discrete, MultiDiscrete, make_env
from pql.contract.grouped import Grouped
from pql.contract.last_action import LastAction, last_action_spec
from pql.envs.classic import Cartpole
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.types import Step


class Choices(Counter):
    """The counter with four discrete actions, which do nothing either."""

    @classmethod
    def describe(cls, *args, **kwargs):
        return replace(super().describe(*args, **kwargs), action=Discrete(4))


class Pairs(Counter):
    """The counter with two discrete actions at once."""

    @classmethod
    def describe(cls, *args, **kwargs):
        return replace(super().describe(*args, **kwargs), action=MultiDiscrete((3, 2)))


def test_several_actions_at_once_are_one_hot_each():
    env = LastAction(Pairs(3, "cpu"))
    assert check_env(env, 60, described=last_action_spec(Pairs.describe(3, "cpu"))).ok
    env.reset(0)
    step = env.step(torch.tensor([[0, 1], [2, 0], [1, 1]]))
    assert step.final_obs["last"][:, :5].tolist() == [[1, 0, 0, 0, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]
    assert torch.equal(step.final_obs["last"][:, 5], step.reward)


MODES = [
    {},
    {"autoreset": "next_step", "restart_every": 4, "stagger": True},
    {"final_obs": "never", "restart_every": 4},
    {"autoreset": "next_step", "final_obs": "never"},
]


@pytest.mark.parametrize("kwargs", MODES)
def test_it_keeps_the_contract(kwargs):
    env = LastAction(Choices(6, "cpu", **kwargs))
    report = check_env(env, 60, described=last_action_spec(Choices.describe(6, "cpu", **kwargs)))
    assert report.ok, report


def test_groups_that_step_apart_are_told_the_same():
    env = LastAction(Grouped([Cartpole(3, "cpu", max_episode_steps=9) for _ in range(2)]))
    report = check_env(env, 40)
    assert report.ok, report
    assert {r.name: r.ok for r in report.results}["groups"] is True
    env.close()


@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("kwargs", MODES)
def test_it_says_what_was_done_last_and_what_that_paid(kwargs, clip):
    env, gen = LastAction(Choices(5, "cpu", **kwargs), clip), torch.Generator().manual_seed(0)
    assert not env.reset(0)["last"].any()
    for _ in range(40):
        action = torch.randint(4, (5,), generator=gen)
        step = env.step(action)
        for i in range(5):
            paid = float(step.reward[i]) if clip is None else max(-clip, min(clip, float(step.reward[i])))
            reported = [float(a == action[i]) for a in range(4)] + [paid]
            assert step.obs["last"][i].tolist() == ([0.0] * 5 if step.first[i] else reported)
            assert step.final_obs["last"][i].tolist() == (reported if step.valid[i] else [0.0] * 5)


def test_single_environments_are_restarted_with_nothing_done():
    env = LastAction(Choices(3, "cpu"))
    env.reset(0)
    step = env.step(torch.tensor([1, 2, 3]))
    obs = env.reset_where(torch.tensor([False, True, False]))
    assert obs["last"][1].tolist() == [0.0] * 5
    assert torch.equal(obs["last"][::2], step.obs["last"][::2])


def test_it_offers_what_its_environment_offers():
    plain, drawn = LastAction(Choices(2, "cpu")), LastAction(make_env("tmaze", 2))
    assert hasattr(drawn, "render")
    assert not hasattr(plain, "render")
    assert not hasattr(plain, "send")
    assert hasattr(plain, "state_dict")


def test_continuous_actions_and_a_group_of_its_name_are_refused():
    with pytest.raises(ConfigError, match="a task with discrete actions"):
        LastAction(Counter(2, "cpu"))
    with pytest.raises(ConfigError, match="without an observation group 'last'"):
        LastAction(LastAction(Choices(2, "cpu")))


class Late(Choices):
    """Two groups of two; only the first of a group has answered. Evaluations have environments of their own."""

    def send(self, action, ids):
        self.sent = action

    def recv(self):
        raise AssertionError

    def answers(self, group):
        part = slice(2 * group, 2 * group + 2)
        step = super().step(torch.zeros(4, dtype=torch.int64))
        return torch.tensor([2 * group]), Step(
            *({k: v[part] for k, v in f.items()} if isinstance(f, dict) else f[part] for f in step)
        )

    def beside(self):
        return Choices(3, "cpu")


def test_who_is_late_is_told_nothing_new():
    late = Late(4, "cpu")
    late.spec = replace(late.spec, groups=2)
    env = LastAction(late)
    env.reset(0)
    env.send(torch.tensor([3, 1]), torch.tensor([2, 3]))
    ids, step = env.answers(1)
    assert ids.tolist() == [2]
    assert step.obs["last"][0].tolist() == [0.0, 0.0, 0.0, 1.0, step.reward[0].item()]
    assert not step.obs["last"][1].any()
    assert {*env.beside().reset(0)} == {"policy", "last"}
