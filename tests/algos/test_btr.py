"""BTR's update against a second implementation, written from the recipe (Clark et al. 2025), in float64."""

import copy
import math

import pytest
import torch
from oracles import munchausen_bonus, munchausen_value, soft_policy
from torch.nn import functional as F

from pql.algos.dqn import dqn_update
from pql.algos.value import ValueState, make_optimizer, make_q_network
from pql.config.compose import compose
from pql.contract.env import Discrete, EnvSpec, ObsSpec
from pql.engine.flat import Flat
from pql.engine.optim import Clock
from pql.nets.mlp import seeded
from pql.types import Batch

CPU = torch.device("cpu")
B, N, SIDE = 6, 3, 12  # batch, actions, side of an image
UPDATES, PERIOD = 20, 7  # PERIOD: updates between copies to the target network
NET = "encoder.pictures.policy.net"
SPEC = EnvSpec("made up", 8, {"policy": ObsSpec((4, SIDE, SIDE))}, Discrete(N), CPU)
CLIP = 4  # instead of 10: some gradients of so small a network are clipped, others not
SMALL = (
    f"algo.critic.grad_clip={CLIP}",
    "algo.encoder.channels=[3,4]",
    "algo.encoder.pool=2",
    "algo.critic.hidden=[7]",
)


def batches(gen):
    """Random batches in float64 without end."""
    while True:
        obs, next_obs = ({"policy": torch.rand(B, 4, SIDE, SIDE, generator=gen).double()} for _ in range(2))
        reward = 4 * torch.randn(B, generator=gen).double()
        discount = 0.997**3 * (torch.rand(B, generator=gen) > 0.2).double()
        weight = torch.rand(B, generator=gen).double() + 0.5
        action = torch.randint(N, (B,), generator=gen)
        one = torch.ones(B).double()
        yield Batch(obs, action, reward, discount, next_obs, one, weight, torch.arange(B), one)


class Noted:
    """Stand-in for priorities that records its updates."""

    def update(self, index, priority, mask):
        self.reported = priority.tolist()


def trainer():
    """The config of the preset with a smaller network, and the V-learner's state in float64."""
    config = compose(["device=cpu", "task=atari", "task.game=pong", "algo=btr", *SMALL])
    net = seeded(lambda: make_q_network(config, SPEC), 3).double()
    flat, target = Flat(net, trained=True), Flat(copy.deepcopy(net))
    optimizer = make_optimizer(config, flat)
    optimizer.lr = optimizer.lr.double().fill_(1e-4)
    return config.algo, ValueState(flat, target, optimizer, Clock(CPU), PERIOD, Noted())


class Reference:
    """BTR's network by names of weights, its target network and Adam."""

    def __init__(self, net):
        self.now = {k: v.detach().clone().requires_grad_(not k.endswith((".left", ".right"))) for k, v in weights(net)}
        self.target = {k: v.detach().clone() for k, v in self.now.items()}
        self.optimizer = torch.optim.Adam([v for v in self.now.values() if v.requires_grad], lr=1e-4, eps=0.005 / 256)
        self.updates = 0

    def learn(self, batch, gen):
        """One update. Returns (loss, gradient norm before clipping, priorities)."""
        noise, target_noise = draw_noise(self.now, gen), draw_noise(self.now, gen)
        tau = torch.rand(2, B, 8, generator=gen).double()
        now = quantiles(self.now, noise, batch.obs["policy"], tau[0])
        with torch.no_grad():
            ahead = quantiles(self.target, target_noise, batch.next_obs["policy"], tau[1])
        losses, priorities = [], []
        for b in range(B):
            goal = goals(now[b].detach(), ahead[b], int(batch.action[b]), float(batch.reward[b]), batch.discount[b])
            loss, errors = torch.zeros(()).double(), 0.0
            for k in range(8):
                u = goal - now[b, k, int(batch.action[b])]  # [8]
                huber = torch.where(u.abs() <= 1, u**2 / 2, u.abs() - 0.5)
                loss = loss + ((tau[0, b, k] - (u < 0).double()).abs() * huber).mean()  # over the target's quantiles
                errors += float(u.detach().abs().mean())
            losses.append(loss * batch.weight[b])
            priorities.append(errors)
        total = sum(losses) / B
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_([v for v in self.now.values() if v.requires_grad], CLIP)
        self.optimizer.step()
        self.iterate()
        self.updates += 1
        if self.updates % PERIOD == 0:
            self.target = {k: v.detach().clone() for k, v in self.now.items()}
        return float(total.detach()), float(norm), priorities

    @torch.no_grad()
    def iterate(self):
        """One power iteration for each convolution of a residual block."""
        for name in [k.removesuffix(".left") for k in self.now if k.endswith(".left")]:
            matrix = self.now[f"{name}.weight"].flatten(1)
            u = matrix @ self.now[f"{name}.right"]
            self.now[f"{name}.left"] = u / u.norm()
            v = matrix.T @ self.now[f"{name}.left"]
            self.now[f"{name}.right"] = v / v.norm()


def weights(net):
    return net.named_parameters()


def draw_noise(w, gen):
    """Noise of the four noisy layers, for inputs and outputs: sign(z) sqrt(|z|)."""
    layers = [f"{stream}.{layer}" for stream in ("advantage", "value") for layer in (0, 2)]
    sizes = [size for name in layers for size in reversed(w[f"{name}.weight"].shape)]
    z = torch.randn(sum(sizes), generator=gen)
    drawn = (z.sign() * z.abs().sqrt()).double().split(sizes)
    return {name: (drawn[2 * i], drawn[2 * i + 1]) for i, name in enumerate(layers)}


def quantiles(w, noise, x, tau):
    """Z_tau(x, a), [B, K, n]: IMPALA's network with spectral norm, product with the cosines, dueling noisy streams."""
    for section in range(2):
        name = f"{NET}.{4 * section}"
        x = F.max_pool2d(F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=1), 3, 2, 1)
        for block in (4 * section + 2, 4 * section + 3):
            y = x
            for part in ("first", "second"):
                name = f"{NET}.{block}.{part}"
                kernel = w[f"{name}.weight"]
                sigma = w[f"{name}.left"] @ kernel.flatten(1) @ w[f"{name}.right"]
                y = F.conv2d(F.relu(y), kernel / sigma, w[f"{name}.bias"], padding=1)
            x = x + y
    x = F.adaptive_max_pool2d(F.relu(x), 2).flatten(1)
    out = []
    for k in range(tau.shape[1]):
        cosines = torch.cos(math.pi * torch.outer(tau[:, k], torch.arange(64).double()))
        h = x * F.relu(cosines @ w["embedding.weight"].T + w["embedding.bias"])
        value, advantage = (
            noisy(w, noise, f"{stream}.2", F.relu(noisy(w, noise, f"{stream}.0", h)))
            for stream in ("value", "advantage")
        )
        out.append(value + advantage - advantage.mean(1, keepdim=True))
    return torch.stack(out, 1)


def noisy(w, noise, name, x):
    inside, outside = noise[name]
    kernel = w[f"{name}.weight"] + w[f"{name}.weight_sigma"] * torch.outer(outside, inside)
    return x @ kernel.T + w[f"{name}.bias"] + w[f"{name}.bias_sigma"] * outside


def goals(now, ahead, action, reward, discount):
    """The target's quantiles [K], from Z of the trained network at s and of the target network at s', [K, n] both."""
    values, means = (z.mean(0).tolist() for z in (now, ahead))
    policy = soft_policy(means, 0.03)
    reward += munchausen_bonus(values, action, 0.9, 0.03, -1)
    soft = [munchausen_value(row, policy, 0.03) for row in ahead.tolist()]
    return torch.tensor([reward + float(discount) * z for z in soft], dtype=torch.float64)


def test_twenty_updates_are_those_of_the_recipe():
    settings, state = trainer()
    assert (settings.gamma, settings.n_step, settings.critic.eps) == (0.997, 3, 0.005 / 256)
    reference = Reference(state.q.module)
    ours, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    made, norms = batches(torch.Generator().manual_seed(5)), []
    for _ in range(UPDATES):
        batch = next(made)
        metrics = dqn_update(state, batch, settings, ours)
        loss, norm, priorities = reference.learn(batch, theirs)
        assert metrics["loss/critic"].item() == pytest.approx(loss, rel=1e-7)
        assert metrics["grad_norm/critic"].item() == pytest.approx(norm, rel=1e-7)
        assert state.priorities.reported == pytest.approx(priorities, rel=1e-7)
        for name, value in weights(state.q.module):
            if reference.now[name].requires_grad:
                torch.testing.assert_close(value.grad, reference.now[name].grad, rtol=0, atol=1e-8)
        norms.append(norm)
    assert min(norms) < CLIP < max(norms)
    for mine, other in ((state.q, reference.now), (state.target, reference.target)):
        for name, value in weights(mine.module):
            torch.testing.assert_close(value.detach(), other[name].detach(), rtol=0, atol=1e-7)
