"""PPO and A2C learn problems with known answers: values, a swing-up, a balance, Catch, a cue to recall."""

from dataclasses import replace

import pytest
import torch
from conftest import merge, start, ticks
from gates import score, train_until
from ppo_runs import VARIANTS, config_of
from sampling import sample

from pql.algos import ppo
from pql.config.compose import compose
from pql.contract.env import EnvSpec, ObsSpec
from pql.contract.registry import register
from pql.engine.executors import Inline
from pql.envs.classic import Pendulum, TorchEnv, Transition
from pql.errors import ConfigError
from pql.run.build import build
from pql.run.policy import fresh_policy

LONG = {"graphs": "auto"}
WIDE = {"critic": {"hidden": [64, 64]}, "policy": {"hidden": [64, 64]}}


class Pension(TorchEnv):
    """Pays 1 a step; ends with probability ``risk``, or by a time limit that the observation does not show."""

    name, obs_size, action_size, state_size, time_limit = "pension", 2, 1, 2, 5
    terms, risk = (), 0.0

    def draw(self):
        return self.uniform(2)

    def observe(self, state):
        return state.clone()

    def advance(self, state, action):
        ended = self._rand(1)[:, 0] < self.risk
        return Transition(self.uniform(2), torch.ones_like(state[:, 0]), ended, {})


class RiskyPension(Pension):
    risk = 0.2


@pytest.mark.parametrize(
    ("env", "worth", "normalize"), [(Pension, 1 / (1 - 0.9), True), (RiskyPension, 1 / (1 - 0.9 * 0.8), False)]
)
def test_the_value_is_learned_beyond_time_limits_and_not_beyond_terminations(env, worth, normalize, learns):
    # A time limit taken for an end would cost a fifth.
    learns(lambda seed: -abs(learned_value(env, normalize, seed) / worth - 1), -0.06)


def learned_value(env, normalize, seed):
    register("pension", env)
    settings = {"normalize_value": normalize, "horizon": 16, "epochs": 4, "gae_lambda": 0.5, "lr_schedule": "fixed"}
    task = {"name": "pension", "kwargs": {"stagger": True}}
    change = {"task": task, "num_envs": 64, "seed": seed, "algo": {"gamma": 0.9, **WIDE, **settings}}
    parts = ticks(start(config_of(LONG, change), Inline()), 50)
    parts.workers["collector"].run(16)
    state, segment = parts.learners["learner"].state, parts.collector.stores[0].segment()
    scale, shift = ppo.value_scale(state.returns)
    values = ppo.segment_values(state, segment)[:17].detach() * scale + shift
    assert parts.gauges["rollout/bootstrap_lost"] == 0
    return values.mean().item()


class Seeing(Pendulum):
    """The critic sees the pendulum, the policy sees nothing."""

    def __init__(self, num_envs, device, **kwargs):
        super().__init__(num_envs, device, **kwargs)

    @classmethod
    def describe(cls, num_envs=64, device="cpu", max_episode_steps=None, stagger=False) -> EnvSpec:
        spec = super().describe(num_envs, device, max_episode_steps, stagger)
        return replace(spec, obs={"policy": ObsSpec((1,)), "critic": ObsSpec((3,))})

    def _split(self, obs):
        return {"policy": torch.zeros(len(obs["policy"]), 1), "critic": obs["policy"]}

    def reset(self, seed=None):
        return self._split(super().reset(seed))

    def step(self, action):
        step = super().step(action)
        return step._replace(obs=self._split(step.obs), final_obs=self._split(step.final_obs))


def test_the_critic_may_see_more_than_the_policy(learns):
    learns(explained_by_the_critic, 0.5)  # of what the policy cannot see
    change = {"task": {"name": "seeing"}, "num_envs": 32, "algo": {"shared": True}}
    with pytest.raises(
        ConfigError, match=r"algo\.shared=true: expected false: in pendulum policy and critic observe different groups"
    ):
        build(config_of(change))


def explained_by_the_critic(seed):
    register("seeing", Seeing)
    change = {"task": {"name": "seeing", "reward_scale": 0.1, "kwargs": {"stagger": True}}, "num_envs": 32}
    change["seed"] = seed
    parts = start(config_of(LONG, change, {"algo": {"gamma": 0.9, "horizon": 16}}), Inline())
    net = parts.learners["learner"].state.net
    assert (net.policy.body.group, net.value_body.group) == ("policy", "critic")
    ticks(parts, 60)
    parts.jobs["learner"].metrics.drain()
    ticks(parts, 10)
    assert fresh_policy(parts.config, parts.env.spec, "cpu")(torch.zeros(2, 1)).shape == (2, 1)
    return float(parts.jobs["learner"].metrics.drain()["value/explained_variance"])


@pytest.mark.slow
def test_ppo_swings_the_pendulum_up(learns):
    learns(swing_up, -450)  # the best possible is about -150


def swing_up(seed):
    task = {"name": "pendulum", "reward_scale": 0.1, "kwargs": {"stagger": True}}
    algo = {**WIDE, "gamma": 0.95, "horizon": 32, "epochs": 5}
    parts = start(config_of(LONG, {"task": task, "num_envs": 64, "seed": seed, "algo": algo}), Inline())
    assert score(parts) < -700  # untrained: it hangs
    return train_until(parts, -450, 50)


TANH = {"hidden": [64, 64], "activation": "tanh"}  # as in A2C's preset


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_a_cart_pole_is_balanced_by_discrete_actions(name, learns):
    learns(lambda seed: balance(name, seed), 450)  # of 500


def balance(name, seed):
    a2c = merge(VARIANTS["a2c"]["algo"], {"critic": TANH, "policy": {**TANH, "lr": 2e-3}})
    algo = a2c if name == "a2c" else merge(WIDE, {"horizon": 32})
    parts = start(config_of(LONG, {"task": {"name": "cartpole"}, "num_envs": 64, "seed": seed, "algo": algo}), Inline())
    assert score(parts) < 400  # untrained; now and then the first weights balance for long
    return train_until(parts, 450, 20 if name == "ppo" else 300)


@pytest.mark.parametrize(("name", "count"), sample([("ppo", 90), ("a2c", 550)], keep=[("ppo", 90)]))
def test_balls_are_caught_from_pixels_with_the_preset(name, count, learns):
    learns(lambda seed: catch(name, count, seed), 0.8)  # nine balls of ten; chasing the newest frame's gives -0.5


def catch(name, count, seed):
    words = ("device=cpu", f"algo={name}", "task=catch", "placement.matmul=exact", f"seed={seed}")
    parts = start(compose([*words, "placement.threads.collector=1", "placement.threads.v=1"]), Inline())
    assert parts.learners["learner"].state.net.value.body is None  # one network for both
    assert score(parts, 256) < -0.2  # untrained
    assert parts.collector.stores[0].obs["policy"].dtype == torch.uint8
    return train_until(parts, 0.8, count, lambda: score(parts, 256))


@pytest.mark.parametrize("lstm", [16, None])
def test_a_cue_is_recalled_with_a_memory_and_only_with_one(lstm, learns):
    if lstm:
        learns(lambda seed: recall(lstm, seed), 0.9)
    else:
        learns(lambda seed: -abs(recall(lstm, seed)), -0.5)


def recall(lstm, seed):
    algo = {"policy": {"hidden": [32], "lr": 3e-3}, "critic": {"hidden": [32]}, "lstm": lstm, "horizon": 12}
    change = {"task": {"name": "recall"}, "num_envs": 64, "algo": merge(algo, {"minibatches": 2, "epochs": 4})}
    change["seed"] = seed
    parts = ticks(start(config_of(LONG, change), Inline()), 30)
    return score(parts)
