"""Presets of published recipes: their updates against a second implementation, written from the recipe."""

import copy
import itertools
import math

import pytest
import torch
from conftest import make_networks
from oracles import c51_projection
from torch import nn
from torch.nn import functional as F

from pql.algos.registry import family_of
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.nets.layers import EnsembleLinear
from pql.types import Batch, ObsBatch

CPU = torch.device("cpu")
B, D, A = 24, 5, 3  # batch, observation, action
SPEC = EnvSpec("made up", 8, {"policy": ObsSpec((D,))}, Box(A), CPU)
UPDATES = 20


def members(net: nn.Module) -> list[nn.Sequential]:
    """The critics of an ensemble as networks of their own, with copies of its weights."""
    out = []
    for e in range(2):
        layers = []
        for module in net.net:
            if isinstance(module, EnsembleLinear):
                layer = nn.Linear(*module.weight.shape[1:], dtype=torch.float64)
                layer.weight.data, layer.bias.data = module.weight.data[e].T.clone(), module.bias.data[e, 0].clone()
                layers.append(layer)
            else:
                layers.append(type(module)())
        out.append(nn.Sequential(*layers))
    return out


def batches(gen):
    """Random batches in float64 without end."""
    while True:
        obs, next_obs = ({"policy": torch.randn(B, D, generator=gen).double()} for _ in range(2))
        action = torch.rand(B, A, generator=gen).double() * 2 - 1
        reward = torch.randn(B, generator=gen).double()
        discount = 0.99 * (torch.rand(B, generator=gen) > 0.2).double()
        one = torch.ones(B).double()
        yield Batch(obs, action, reward, discount, next_obs, one, one, torch.arange(B))


def trainers(*words):
    """The config, and the V- and the P-learner's trainers in float64, each with its copy of the other's network."""
    config = compose(["task=pendulum", "device=cpu", *words, "algo.critic.hidden=[7,6]", "algo.policy.hidden=[7,6]"])
    policy, critic = (net.double() for net in make_networks(config, SPEC, 3))
    kind = family_of(config).wire.args[0]
    value = kind.value(config, copy.deepcopy(critic), copy.deepcopy(policy), CPU)
    improve = kind.improve(config, policy, critic, A, CPU)
    for state in (value.state, improve.inputs):
        if state.atoms is not None:
            state.atoms = state.atoms.double()
    for optimizer, net in ((value.state.optimizer, config.algo.critic), (improve.state.optimizer, config.algo.policy)):
        optimizer.lr = torch.tensor(net.lr, dtype=torch.float64)
    return config, value, improve


def exchange(value, improve):
    """What a tick without concurrency passes between the learners."""
    improve.inputs.critic.load_state_dict(value.state.critic.module.state_dict())
    value.inputs.policy.load_state_dict(improve.state.policy.module.state_dict())


def assert_equal_networks(ours: nn.Module, theirs: list[nn.Sequential]):
    mine = [m for m in ours.net if hasattr(m, "weight")]
    for e, net in enumerate(theirs):
        for a, b in zip(mine, [m for m in net if hasattr(m, "weight")], strict=True):
            single = isinstance(a, nn.Linear)
            torch.testing.assert_close(a.weight if single else a.weight[e].T, b.weight, rtol=0, atol=1e-7)
            torch.testing.assert_close(a.bias if single else a.bias[e, 0], b.bias, rtol=0, atol=1e-7)


def test_fasttd3():
    """Two critic updates to one of the policy; targets of the head with the lower mean, from the current policy."""
    config, value, improve = trainers("algo=fasttd3", "algo.critic.atoms=11")
    algo = config.algo
    assert (algo.smoothing, algo.smoothing_clip, algo.critic.tau, algo.v_per_step, algo.p_per_v) == (
        1e-3,
        0.5,
        0.1,
        2,
        0.5,
    )
    critics, targets = members(value.state.critic.module), members(value.state.target.module)
    actor = copy.deepcopy(value.inputs.policy.net).requires_grad_(True)  # the policy at the start
    critic_optim = torch.optim.AdamW([p for c in critics for p in c.parameters()], lr=3e-4, weight_decay=0.1)
    actor_optim = torch.optim.AdamW(actor.parameters(), lr=3e-4, weight_decay=0.1)
    atoms = torch.linspace(-10, 10, 11).double()
    gen, noise, theirs = (
        torch.Generator().manual_seed(5),
        torch.Generator().manual_seed(1),
        torch.Generator().manual_seed(1),
    )
    for update, batch in enumerate(itertools.islice(batches(gen), UPDATES)):
        metrics = value.update(value.state, value.inputs, batch, noise)
        with torch.no_grad():
            drawn = (torch.randn(B, A, generator=theirs) * 0.001).clamp(-0.5, 0.5)
            action = (torch.tanh(actor(batch.next_obs["policy"])) + drawn).clamp(-1, 1)
            x = torch.cat((batch.next_obs["policy"], action), 1)
            heads = [F.softmax(target(x), -1) for target in targets]
            goal = torch.empty(B, 11).double()
            for i in range(B):
                lower = min((head[i] for head in heads), key=lambda p: float(p @ atoms))
                support = [(batch.reward[i] + batch.discount[i] * z).item() for z in atoms]
                goal[i] = torch.tensor(c51_projection(support, lower.tolist(), atoms.tolist()))
        x = torch.cat((batch.obs["policy"], batch.action), 1)
        loss = sum(-(goal * F.log_softmax(critic(x), -1)).sum(-1).mean() for critic in critics)
        critic_optim.zero_grad()
        loss.backward()
        assert metrics["loss/critic"].item() == pytest.approx(loss.item(), abs=6e-8)
        grads = torch.cat([p.grad.reshape(-1) for c in critics for p in c.parameters()])
        assert metrics["grad_norm/critic"].item() == pytest.approx(math.sqrt(float(grads @ grads)), abs=6e-8)
        critic_optim.step()
        with torch.no_grad():
            for critic, target in zip(critics, targets, strict=True):
                for p, q in zip(critic.parameters(), target.parameters(), strict=True):
                    q += 0.1 * (p - q)
        exchange(value, improve)
        if update % 2:
            obs = ObsBatch(batch.obs, batch.mask, batch.weight)
            metrics = improve.update(improve.state, improve.inputs, obs, noise)
            x = torch.cat((batch.obs["policy"], torch.tanh(actor(batch.obs["policy"]))), 1)
            q = torch.stack([F.softmax(critic(x), -1) @ atoms for critic in critics])
            loss = -q.min(0).values.mean()
            actor_optim.zero_grad()
            loss.backward()
            actor_optim.step()
            assert metrics["loss/policy"].item() == pytest.approx(loss.item(), abs=6e-8)
            exchange(value, improve)
    assert_equal_networks(value.state.critic.module, critics)
    assert_equal_networks(value.state.target.module, targets)
    assert_equal_networks(improve.state.policy.module, [actor])
