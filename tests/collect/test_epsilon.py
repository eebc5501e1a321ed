"""Epsilon-greedy exploration: values of the ladder, annealing by env steps, columns stored by an actor."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from histories import CPU
from oracles import chi_square_fits, epsilon_ladder
from torch import Generator

from pql.collect.actors import EpsilonActor
from pql.collect.epsilon import Epsilon, ladder
from pql.config import EpsilonConfig
from pql.contract.env import Discrete, EnvSpec, ObsSpec
from pql.nets.mlp import Layers, NetInput
from pql.nets.q import QNetwork, redraw_noise

N, D, A = 512, 3, 5


def spec(num_envs=N):
    return EnvSpec("made up", num_envs, {"policy": ObsSpec((D,))}, Discrete(A), CPU)


def network(**kwargs):
    torch.manual_seed(0)
    return QNetwork(NetInput("policy", D), A, Layers((8,), "relu", noisy=kwargs.pop("noisy", None)), **kwargs)


def obs(num_envs=N):
    return {"policy": torch.randn(num_envs, D, generator=Generator().manual_seed(3))}


def actor(tells=False, net=None, **config):
    epsilon = Epsilon(EpsilonConfig(**{"kind": "fixed", **config}), N, CPU)
    return EpsilonActor(net or network(), epsilon, spec(), tells)


def test_the_ladders_numbers():
    published = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.0041, 0.00164, 0.00066]
    assert ladder(8, 0.4, 7).tolist() == pytest.approx(published, rel=1e-2)  # two digits are given
    assert ladder(8, 0.4, 7).tolist() == pytest.approx(epsilon_ladder(8), rel=1e-6)
    assert ladder(300, 0.4, 7).tolist() == pytest.approx(epsilon_ladder(300), rel=1e-6)
    assert ladder(1, 0.4, 7).tolist() == pytest.approx([0.4])
    config = EpsilonConfig(kind="ladder", base=0.5, exponent=3)
    assert Epsilon(config, 4, CPU)().tolist() == pytest.approx([0.5, 0.25, 0.125, 0.0625])


def test_annealing_counts_env_steps_of_all_environments():
    epsilon = Epsilon(EpsilonConfig(kind="annealed", start=1.0, end=0.1, steps=90), 10, CPU)
    got = [epsilon()[3].item() for _ in range(12)]
    assert got == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1], abs=1e-6)
    assert epsilon.mean.item() == pytest.approx(0.1)
    fixed = Epsilon(EpsilonConfig(kind="fixed", end=0.25), 10, CPU)
    assert [fixed()[0].item() for _ in range(3)] == [0.25] * 3


def test_decay_is_exponential_in_env_steps_of_all_environments():
    """At each env step, a share 1 / steps of the distance from the end goes (BTR)."""
    steps, wanted = 10_000, [1.0]
    for _ in range(40_000):
        wanted.append(max(wanted[-1] - (wanted[-1] - 0.01) / steps, 0.01))
    epsilon = Epsilon(EpsilonConfig(kind="decayed", start=1.0, end=0.01, steps=steps), 100, CPU)
    got = [epsilon()[7].item() for _ in range(401)]
    assert got == pytest.approx(wanted[::100], abs=2e-5)
    assert got[100] == pytest.approx(0.01 + 0.99 / math.e, abs=1e-6)
    assert epsilon.mean.item() == pytest.approx(got[-1])


@pytest.mark.parametrize("kind", ["decayed", "annealed", "fixed", "ladder"])
def test_epsilon_is_off_from_an_env_step_on(kind):
    config = EpsilonConfig(kind=kind, start=1.0, end=0.25, steps=90)
    always, until = Epsilon(config, 10, CPU), Epsilon(replace(config, until=31), 10, CPU)
    for step in range(6):
        want, got = always(), until()
        on = step * 10 < 31
        assert torch.equal(got, want if on else torch.zeros(10))
        assert until.mean.item() == (always.mean.item() if on else 0)


def test_groups_of_environments_count_for_all():
    config = EpsilonConfig(kind="annealed", start=1.0, end=0.1, steps=90)
    whole = Epsilon(config, 10, CPU)
    parts = [whole.part(slice(0, 5)), whole.part(slice(5, 10))]
    got = [part()[0].item() for _ in range(10) for part in parts]
    assert got[::2] == pytest.approx([1.0 - 0.1 * i for i in range(10)], abs=1e-6)
    assert whole.steps == 100
    assert whole.mean.item() == pytest.approx(0.1, abs=0.051)
    rungs = Epsilon(EpsilonConfig(kind="ladder"), 8, CPU)
    assert rungs.part(slice(4, 8))().tolist() == pytest.approx(epsilon_ladder(8)[4:])
    assert rungs.mean.item() == pytest.approx(sum(epsilon_ladder(8)) / 8)


def test_a_part_of_an_actor_writes_into_the_whole():
    whole, gen = actor(tells=True, end=0.0), Generator().manual_seed(0)
    for columns in (slice(0, N // 2), slice(N // 2, N)):
        part = whole.part(columns)
        part.act({"policy": obs()["policy"][columns]}, gen)
        assert torch.equal(part.record(CPU).action, whole.action[columns])
    assert torch.equal(whole.action, network().values(obs()).argmax(-1))
    assert torch.equal(whole.stored["q"], network().values(obs()).amax(1))
    assert whole.epsilon.steps == N


def test_actions_are_greedy_but_for_a_share_of_uniform_ones():
    greedy = network().values(obs()).argmax(-1)
    one = actor(end=0.0)
    one.act(obs(), Generator().manual_seed(0))
    assert torch.equal(one.action, greedy)
    some, gen = actor(end=0.3), Generator().manual_seed(0)
    others = torch.zeros(A)
    for _ in range(100):
        some.act(obs(), gen)
        wrong = some.action != greedy
        others += torch.bincount(some.action[wrong], minlength=A)
    share = others.sum().item() / (100 * N)
    assert share == pytest.approx(0.3 * (A - 1) / A, rel=0.05)
    # A random action that is not the greedy one is any of the others, alike.
    per = [(greedy != a).sum().item() for a in range(A)]
    want = [others.sum().item() * p / sum(per) for p in per]
    assert chi_square_fits(others.tolist(), want)


def test_each_environment_has_its_own_epsilon():
    some, gen = actor(kind="ladder"), Generator().manual_seed(0)
    greedy, wrong = network().values(obs()).argmax(-1), torch.zeros(N)
    for _ in range(200):
        some.act(obs(), gen)
        wrong += some.action != greedy
    first, last = wrong[:64].mean().item() / 200, wrong[-64:].mean().item() / 200
    want = ladder(N, 0.4, 7)
    assert first == pytest.approx(want[:64].mean().item() * 0.8, rel=0.1)
    assert last < 0.003


def test_an_actor_stores_the_value_of_what_it_did_and_of_the_best():
    some, gen = actor(tells=True, end=0.5), Generator().manual_seed(0)
    assert all(torch.isnan(v).all() for v in some.record(CPU).extra.values())  # the warm-up: no values were computed
    some.act(obs(), gen)
    acted, values = some.record(CPU), network().values(obs())
    assert torch.equal(acted.action, some.action)
    assert torch.equal(acted.extra["value"], values.amax(1))
    assert torch.equal(acted.extra["q"], values[torch.arange(N), some.action])
    assert (acted.extra["q"] < acted.extra["value"]).any()
    assert isinstance(actor().record(CPU), torch.Tensor)


def test_noise_is_drawn_anew_for_every_act():
    net = network(noisy=0.5)
    some, gen = actor(net=net, end=0.0), Generator().manual_seed(4)
    twin, other = copy.deepcopy(net), Generator().manual_seed(4)
    chosen = []
    for _ in range(4):
        some.act(obs(), gen)
        redraw_noise(twin, other)
        assert torch.equal(some.action, twin.values(obs()).argmax(-1))
        chosen.append(some.action.clone())
        torch.randint(A, (N,), generator=other)
        torch.rand(N, generator=other)
    assert any(not torch.equal(chosen[0], c) for c in chosen[1:])
