"""DQN, Rainbow and Ape-X learn Catch from pixels within its budget of env steps; all variants learn known values."""

import copy

import pytest
import torch
from conftest import start
from dqn_runs import VARIANTS, config_of
from gates import score, train_until
from sampling import sample

from pql.algos.dqn import dqn_update
from pql.algos.value import ValueState
from pql.config import DqnConfig
from pql.config.compose import compose
from pql.contract.registry import register
from pql.engine.executors import Inline
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, Clock
from pql.envs.classic import TorchEnv, Transition
from pql.nets.mlp import Layers, NetInput, seeded
from pql.nets.q import QuantileNetwork
from pql.types import Batch


# c51 learns values and btr's network quantiles below; here they take three quarters of a minute.
@pytest.mark.parametrize("algo", sample(["dqn", "rainbow", "apex"], keep=["rainbow"]))
def test_catch_is_solved_from_pixels(algo, learns):
    learns(lambda seed: catch(algo, seed), 0.85)  # of 1: one ball in thirteen may fall


def catch(algo, seed):
    parts = start(compose(["device=cpu", "task=catch", f"algo={algo}", f"seed={seed}"]), Inline())
    assert score(parts, 256) < 0
    ticks = parts.config.budget.env_steps // (parts.counts.horizon * parts.env.spec.num_envs)
    reached = train_until(parts, 0.85, ticks, lambda: score(parts, 256))
    parts.schedule.executor.close()
    return reached


def test_an_implicit_network_learns_the_quantiles_of_rewards(learns):
    """Rewards are uniform from a to a + 1 after action a, so the quantile tau is a + tau."""
    learns(lambda seed: -error_of_quantiles(seed), -0.08)


def error_of_quantiles(seed):
    gen = torch.Generator().manual_seed(seed)
    net = seeded(lambda: QuantileNetwork(NetInput("policy", 1), 3, Layers((16, 32), "relu"), (8, 16)), seed)
    flat = Flat(net, trained=True)
    state = ValueState(flat, Flat(copy.deepcopy(net)), AdamW(flat, 3e-3), Clock(torch.device("cpu")), 1000)
    obs, one = {"policy": torch.ones(64, 1)}, torch.ones(64)
    settings = DqnConfig(huber=0.02)  # with a large one, only the medians would be right
    for update in range(1000):
        action = torch.randint(3, (64,), generator=gen)
        reward = action + torch.rand(64, generator=gen)
        state.optimizer.lr.fill_(3e-3 * (1 - update / 1000))
        dqn_update(state, Batch(obs, action, reward, 0 * one, obs, one, one, torch.arange(64), one), settings, gen)
    tau = torch.tensor([[0.1, 0.3, 0.5, 0.7, 0.9]])
    want = torch.arange(3.0).unsqueeze(-1) + tau
    return (net({"policy": torch.ones(1, 1)}, tau)[0] - want).abs().max().item()


class Annuity(TorchEnv):
    """Rewards 1 per step, for any action, for the observed number of steps; a time limit of 4 is not observed."""

    name, obs_size, action_size, discrete, state_size, time_limit = "annuity", 2, 3, True, 1, 4
    terms, most = (), 6

    def draw(self):
        return (self._rand(1) * self.most).floor() + 1

    def observe(self, state):
        return torch.cat((state / self.most, 1 - state / self.most), 1)

    def advance(self, state, action):
        return Transition(state - 1, torch.ones_like(state[:, 0]), state[:, 0] <= 1, {})


@pytest.mark.parametrize("variant", ["dqn", "prioritized", "c51", "ape-x"])
def test_values_go_on_beyond_time_limits_and_not_beyond_terminations(variant, learns):
    # With a time limit taken for an end, no value would be above 3.4.
    learns(lambda seed: -error_of_values(variant, seed), -0.2)


def error_of_values(variant, seed):
    """The largest error of a value, of which the true ones are 1 + .9 + ... for all that is left: 1 to 4.69."""
    register("annuity", Annuity)
    critic = {"hidden": [32], "lr": 3e-3}
    change = {"gamma": 0.9, "v_per_step": 4, "normalize_obs": False, "optimizer": "adam", "critic": critic}
    task = {"name": "annuity", "kwargs": {"stagger": True, "max_episode_steps": 4}}
    parts = start(
        config_of(VARIANTS[variant], change, {"task": task, "num_envs": 32, "seed": seed, "graphs": "auto"}), Inline()
    )
    for _ in range(150):
        parts.schedule.tick()
    left = torch.arange(1.0, 7).unsqueeze(1)
    values = parts.policy.module.values({"policy": torch.cat((left / 6, 1 - left / 6), 1)}).mean(1)
    assert parts.gauges["replay/bootstrap_lost"] == 0
    return (values - torch.tensor([(1 - 0.9**k) / 0.1 for k in range(1, 7)])).abs().max().item()
