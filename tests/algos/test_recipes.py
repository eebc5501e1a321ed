"""Presets of published recipes: their updates against a second implementation, written from the recipe."""

import copy
import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import make_networks, start, ticks
from oracles import c51_projection
from plain_nets import Norm, Rms, separate
from torch import nn
from torch.nn import functional as F

from pql.algos.registry import family_of
from pql.algos.sac import log_slope
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.data.normalize import Normalizer
from pql.engine.executors import Inline
from pql.engine.flat import Flat
from pql.errors import ConfigError
from pql.nets.encoders import lend_encoder
from pql.nets.layers import BatchNorm, batch_statistics
from pql.nets.mlp import Layers, mlp
from pql.run.store.checkpoint import flatten
from pql.types import Batch, ObsBatch

CPU = torch.device("cpu")
B, D, A = 24, 5, 3  # batch, observation, action
SPEC = EnvSpec("made up", 8, {"policy": ObsSpec((D,))}, Box(A), CPU)
JOINTS = dataclasses.replace(SPEC, action=Box(A, (-0.5, -8.0, -20.0), (1.5, 0.0, 20.0)))  # half ranges 1, 4, 20
UPDATES = 20


def batches(gen):
    """Random batches in float64 without end."""
    while True:
        obs, next_obs = ({"policy": torch.randn(B, D, generator=gen).double()} for _ in range(2))
        action = torch.rand(B, A, generator=gen).double() * 2 - 1
        reward = torch.randn(B, generator=gen).double()
        discount = 0.99 * (torch.rand(B, generator=gen) > 0.2).double()
        one = torch.ones(B).double()
        yield Batch(obs, action, reward, discount, next_obs, one, one, torch.arange(B), one)


class NoDraw:
    """Takes the place of a learner's draw: these tests pass their own batches."""

    worker, replay = "v", SimpleNamespace(device=CPU)
    norm, cursor = SimpleNamespace(frozen=list), SimpleNamespace(tensors=list, lost=None)


def learners(*words, spec=SPEC):
    """The config, and the V- and the P-learner in float64, each with its copy of the other's network."""
    sizes = [] if any("hidden" in word for word in words) else ["algo.critic.hidden=[7,6]", "algo.policy.hidden=[7,6]"]
    config = compose(["task=pendulum", "device=cpu", *words, *sizes])
    policy, critic = (net.double() for net in make_networks(config, spec, 3))
    lend_encoder(critic, policy)
    kind = family_of(config).wire.args[0]
    setup = SimpleNamespace(config=config, spec=spec, generator=lambda worker: None)
    value = kind.value_learner(setup, copy.deepcopy(critic), copy.deepcopy(policy), NoDraw())
    improve = kind.policy_learner(setup, policy, critic, NoDraw())
    for state in (value.state, improve.state):
        if state.atoms is not None:
            state.atoms = state.atoms.double()
    for optimizer, net in ((value.state.optimizer, config.algo.critic), (improve.state.optimizer, config.algo.policy)):
        optimizer.lr = torch.tensor(net.lr, dtype=torch.float64)
    return config, value, improve


@pytest.mark.parametrize("preset", ["pql2", "flashsac", "xqc", "fastsac"])
def test_an_observation_that_follows_no_termination_is_not_read(preset):
    """The simulator did not return it, so temperature and BatchNorm leave such rows out."""
    wide, results = ("algo.critic.hidden=[8,8]", "algo.policy.hidden=[8,8]"), []
    for known, replaced in itertools.product((False, True), (False, True)):
        _, value, _ = learners(f"algo={preset}", "scale=cpu", *wide)
        noise, gen = torch.Generator().manual_seed(9), torch.Generator().manual_seed(4)
        for weights in value.state.policy.parameters():  # some begin with heads of zeros
            weights.data.normal_(0, 0.5, generator=gen)
        for batch in itertools.islice(batches(gen), 3):
            goes_on, other = (batch.discount > 0).double(), torch.randn(B, D, generator=gen).double()
            shown = torch.where(goes_on.bool()[:, None] | (not replaced), batch.next_obs["policy"], other)
            given = batch._replace(followed=batch.mask if known else goes_on, next_obs={"policy": shown})
            value.update(value.state, given, value.settings, noise)
        results.append(flatten(value.state.state_dict()))
    same = [all(torch.allclose(v, b[k], 0, 1e-9) for k, v in a.items()) for a, b in (results[:2], results[2:])]
    assert same == [True, False]


def exchange(value, improve):
    """What a tick without concurrency passes between the learners."""
    improve.state.critic.load_state_dict(value.state.critic.module.state_dict())
    value.state.policy.load_state_dict(improve.state.policy.module.state_dict())
    if hasattr(value.state, "log_alpha"):
        here, there = value.state, improve.state
        learned, copied = (there, here) if here.temperature is None else (here, there)
        copied.log_alpha.copy_(learned.log_alpha.detach())


# At scale=gpu (BTR: on Atari), from the publications named in docs/recipes.md, which lists the values that differ.
PUBLISHED = {
    "fasttd3": {
        "": {"num_envs": 4096},
        "replay": {"capacity": 4096 * 10_240},
        "algo": {"batch_size": 32_768, "gamma": 0.99, "n_step": 1, "warmup_steps": 10, "v_per_step": 2, "p_per_v": 0.5}
        | {"smoothing": 0.001, "smoothing_clip": 0.5, "lr_schedule": "constant"},
        "algo.explore": {"kind": "redrawn", "low": 0.001, "high": 0.4, "repeat": False},
        "algo.critic": {"hidden": [1024, 512, 256], "activation": "relu", "atoms": 251, "v_min": -10, "v_max": 10}
        | {"ensemble": 2, "target": "projected", "tau": 0.1, "lr": 3e-4, "beta2": 0.999, "weight_decay": 0.1}
        | {"grad_clip": None},
        "algo.policy": {"hidden": [512, 256, 128], "activation": "relu", "head": "small", "reduce": "min"}
        | {"lr": 3e-4, "beta2": 0.999, "weight_decay": 0.1, "grad_clip": None},
    },
    "flashsac": {
        "": {"num_envs": 1024},
        "replay": {"capacity": 10_000_000},
        "algo": {"batch_size": 2048, "gamma": 0.99, "n_step": 3, "v_per_step": 2, "p_per_v": 0.5, "alpha": 0.01}
        | {"alpha_lr": 3e-4, "target_sigma": 0.15, "normalize_obs": False, "normalize_reward": True}
        | {"return_cap": 5.0, "reward_scale": 1.0, "lr_schedule": "cosine", "lr_final": 0.5}
        | {"lr_updates": 50_000_000 // 1024 * 2, "lr_clock": "own", "warmup_steps": -(-100_000 // 1024)}
        | {"entropy_unit": "unit"},
        "algo.explore": {"repeat": True},
        "algo.critic": {"hidden": [256, 256], "trunk": "residual", "batch_norm": True, "unit_weights": "all"}
        | {"atoms": 101, "v_min": -5, "v_max": 5, "ensemble": 2, "target": "min", "tau": 0.01, "lr": 3e-4}
        | {"beta2": 0.999, "weight_decay": 0.0, "grad_clip": None, "init": "orthogonal", "activation": "relu"},
        "algo.policy": {"hidden": [128, 128], "trunk": "residual", "batch_norm": True, "unit_weights": "all"}
        | {"reduce": "min", "log_std_min": -10.0, "log_std_max": 2.0, "lr": 3e-4, "weight_decay": 0.0},
    },
    "fastsac": {
        "": {"num_envs": 4096},
        "replay": {"capacity": 4096 * 1024},
        "algo": {"batch_size": 8192, "gamma": 0.97, "n_step": 1, "warmup_steps": 10, "v_per_step": 8, "p_per_v": 0.25}
        | {"alpha": 0.001, "alpha_lr": 3e-4, "alpha_updates": "critic", "entropy_per_action": 0.0}
        | {"entropy_unit": "action", "normalize_obs": True, "normalize_reward": False},
        "algo.critic": {"hidden": [768, 384, 192], "layer_norm": True, "activation": "silu", "atoms": 101}
        | {"v_min": -20, "v_max": 20, "ensemble": 2, "target": "own", "tau": 0.125, "lr": 3e-4, "beta2": 0.95}
        | {"weight_decay": 0.001, "grad_clip": None},
        "algo.policy": {"hidden": [512, 256, 128], "layer_norm": True, "activation": "silu", "head": "zero"}
        | {"reduce": "mean", "log_std_min": -5.0, "log_std_max": 0.0, "lr": 3e-4, "beta2": 0.95}
        | {"weight_decay": 0.001, "grad_clip": None},
    },
    "xqc": {
        "": {"num_envs": 1},
        "replay": {"capacity": 1_000_000},
        "algo": {"batch_size": 256, "gamma": 1 - 5 / 500, "n_step": 1, "warmup_steps": 5000, "v_per_step": 2}
        | {"p_per_v": 0.333333, "alpha": 0.01, "alpha_lr": 3e-4, "entropy_per_action": -0.5}
        | {"normalize_obs": False, "normalize_reward": True, "reward_scale": 1.0}
        | {"return_cap": None, "lr_schedule": "linear", "lr_final": 0.1, "lr_updates": 2 * 1_000_000}
        | {"lr_clock": "own"},
        "algo.critic": {"hidden": [512] * 4, "batch_norm": True, "unit_weights": "linear", "activation": "relu"}
        | {"atoms": 101, "v_min": -5, "v_max": 5, "ensemble": 2, "target": "min", "tau": 0.005, "lr": 3e-4},
        "algo.policy": {"hidden": [256] * 4, "batch_norm": True, "unit_weights": "linear", "activation": "relu"}
        | {"reduce": "min", "log_std": "clip", "log_std_min": -10.0, "log_std_max": 2.0, "lr": 3e-4},
    },
    "simba_sac": {
        "": {"num_envs": 1},
        "replay": {"capacity": 1_000_000},
        "algo": {"batch_size": 256, "gamma": 1 - 5 / 500, "n_step": 1, "warmup_steps": 5000, "v_per_step": 2}
        | {"p_per_v": 1, "alpha": 0.01, "alpha_lr": 1e-4, "entropy_per_action": -0.5, "normalize_obs": True},
        "algo.critic": {"hidden": [512, 512], "trunk": "residual", "norm": "layer", "ensemble": 2, "atoms": None}
        | {"target": "min", "tau": 0.005, "lr": 1e-4, "weight_decay": 0.01},
        "algo.policy": {"hidden": [128], "trunk": "residual", "norm": "layer", "reduce": "min", "lr": 1e-4}
        | {"weight_decay": 0.01},
    },
    "squint": {
        "": {"num_envs": 1024},
        "replay": {"capacity": 1_000_000},
        "algo": {"batch_size": 512, "gamma": 0.9, "n_step": 1, "warmup_steps": 5, "v_per_step": 256, "p_per_v": 0.25}
        | {"alpha": 1.0, "alpha_lr": 3e-4, "alpha_updates": "critic", "entropy_per_action": -1.0},
        "algo.encoder": {"size": 16},
        "algo.critic": {"hidden": [512] * 3, "layer_norm": True, "activation": "relu", "init": "orthogonal"}
        | {"atoms": 101, "v_min": -20, "v_max": 20, "ensemble": 2, "target": "own", "tau": 0.01, "lr": 3e-4}
        | {"weight_decay": 0.0, "grad_clip": None},
        "algo.policy": {"hidden": [256] * 3, "layer_norm": True, "activation": "relu", "init": "orthogonal"}
        | {"encoder": "critic", "reduce": "mean", "log_std_min": -5.0, "log_std_max": 2.0, "lr": 3e-4}
        | {"weight_decay": 0.0, "grad_clip": None},
    },
    "btr": {
        "": {"num_envs": 64},
        "replay": {"capacity": 2**20},
        "algo": {"batch_size": 256, "gamma": 0.997, "n_step": 3, "v_per_step": 1.0, "target_period": 500 * 64}
        | {"warmup_steps": 200_000 // 64, "noisy": 0.5, "dueling": True, "double": False, "optimizer": "adam"},
        "algo.encoder": {"kind": "resnet", "channels": [32, 64, 64], "pool": 6, "spectral_norm": True},
        "algo.critic": {"hidden": [512], "quantiles": 8, "cosines": 64, "lr": 1e-4, "eps": 0.005 / 256}
        | {"grad_clip": 10.0},
        "algo.priority": {"alpha": 0.2, "beta": 0.4, "beta_steps": 49_800_000},
        "algo.epsilon": {"kind": "decayed", "start": 1.0, "end": 0.01, "steps": 2_000_000, "until": 24_800_000},
        "algo.munchausen": {"alpha": 0.9, "tau": 0.03, "clip": -1.0},
    },
    "pqn": {
        "": {"num_envs": 128},
        "algo": {"horizon": 32, "minibatches": 32, "epochs": 2, "gamma": 0.99, "q_lambda": 0.65, "optimizer": "radam"}
        | {"anneal_steps": None},  # LR_LINEAR_DECAY: False
        "algo.critic": {"hidden": [], "lr": 2.5e-4, "grad_clip": 10.0},
        "algo.encoder": {"kind": "nature", "layer_norm": True},
        "algo.epsilon": {"kind": "annealed", "start": 1.0, "end": 0.001, "steps": 5_000_000},
    },
}
ALONE = ["num_envs=1", "algo.batch_size=256", "algo.v_per_step=2", "algo.warmup_steps=5000"]
TASKS = {
    "squint": ["task=ballbalance_pixels", "scale=gpu"],
    "btr": ["task=atari", "task.game=phoenix"],
    "pqn": ["task=atari", "task.game=pong"],
    # ``scale=gpu`` has our sizes for thousands of environments; docs/recipes.md names these words
    "xqc": ["task=pendulum", "scale=gpu", *ALONE, "algo.lr_updates=2000000"],
    "simba_sac": ["task=pendulum", "scale=gpu", *ALONE],
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_presets_have_the_published_values(preset):
    assert_values(PUBLISHED[preset], *TASKS.get(preset, ["task=pendulum", "scale=gpu"]), f"algo={preset}")


def assert_values(published, *words):
    config = compose(["device=cpu", *words])
    for group, values in published.items():
        part = operator.attrgetter(group)(config) if group else config
        assert {name: getattr(part, name) for name in values} == values


def test_fasttd3_on_go1_has_the_published_values():
    """Playground's defaults and Go1's: fast_td3/hyperparams.py, MuJoCoPlaygroundArgs and Go1JoystickFlatTerrainArgs."""
    playground = {
        "": {"num_envs": 1024},
        "replay": {"capacity": 1024 * 10_240},
        "algo": {"gamma": 0.97, "n_step": 1, "batch_size": 32_768, "v_per_step": 2, "p_per_v": 0.5, "smoothing": 0.001},
        "algo.critic": {"atoms": 101, "v_min": -10, "v_max": 10, "target": "projected"},
        "algo.explore": {"kind": "redrawn", "low": 0.001, "high": 0.4},
    }
    go1 = {
        **playground,
        "algo": playground["algo"] | {"v_per_step": 8, "smoothing": 0.2, "smoothing_clip": 0.5},
        "algo.explore": {"kind": "redrawn", "low": 0.2, "high": 0.8},
        "budget": {"env_steps": 50_000 * 1024, "seconds": None},
    }
    assert_values(playground, "task=playground", "task.kwargs.env=CartpoleBalance", "scale=gpu", "algo=fasttd3")
    assert_values(go1, "task=go1_velocity", "scale=gpu", "algo=fasttd3")
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    [command] = re.findall(r"pql train (task=playground .*?)\n```", page, re.DOTALL)
    assert_values(go1, *command.replace("\\\n", " ").split())


TINY = ["algo.critic.hidden=[8]", "algo.policy.hidden=[8]"]
OURS = {
    "xqc": ["task=pendulum", *TINY],
    "simba_sac": ["task=pendulum", *TINY],
    "pqn": ["task.name=cartpole", *TINY[:1]],
    "r2d2": ["task.name=cartpole", *TINY[:1], "algo.lstm=8"],
}


@pytest.mark.parametrize("preset", OURS)
def test_sizes_that_are_ours_learn_within_the_first_ticks(preset):
    """With small networks, but all environments, the whole warm-up and whole batches."""
    config = compose(["device=cpu", "scale=gpu", f"algo={preset}", "graphs=off", *OURS[preset]])
    parts = ticks(start(config, Inline()), 2)
    assert all(job.updates >= 2 for job in parts.jobs.values())
    assert config.num_envs * (config.algo.warmup_steps + 2 * parts.counts.horizon) < 100_000
    for worker, learner in parts.learners.items():
        assert all(v.isfinite().all() for v in flatten(learner.state.state_dict()).values()), worker


@pytest.mark.parametrize("preset", ["fasttd3", "fastsac", "flashsac", "squint"])
def test_updates_are_in_bfloat16_where_the_published_ones_are(preset):
    amp = {scale: compose(["device=cpu", f"algo={preset}", f"scale={scale}"]).algo.amp for scale in ("gpu", "cpu")}
    assert amp == {"gpu": True, "cpu": False}


def test_fasttd3():
    """Two critic updates to one of the policy; targets of the head whose projection has the lower mean, from the
    current policy."""
    narrow = ("algo.critic.v_min=-2", "algo.critic.v_max=2")  # so that targets leave the support
    config, value, improve = learners("algo=fasttd3", "algo.critic.atoms=11", *narrow)
    algo = config.algo
    assert (algo.smoothing, algo.smoothing_clip) == (1e-3, 0.5)
    assert (algo.critic.tau, algo.v_per_step, algo.p_per_v) == (0.1, 2, 0.5)
    for net in (value.state.critic, value.state.target):
        net.module.net[-1].weight.data.mul_(30)  # distributions of all shapes
    critics, targets = members(value.state.critic), members(value.state.target)
    actor = separate(value.state.policy)
    critic_optim = torch.optim.AdamW([p for c in critics for p in c.parameters()], lr=3e-4, weight_decay=0.1)
    actor_optim = torch.optim.AdamW(actor.parameters(), lr=3e-4, weight_decay=0.1)
    atoms, changed = torch.linspace(-2, 2, 11).double(), 0
    gen, noise, theirs = (torch.Generator().manual_seed(seed) for seed in (5, 1, 1))
    for update, batch in enumerate(itertools.islice(batches(gen), UPDATES)):
        metrics = value.update(value.state, batch, value.settings, noise)
        with torch.no_grad():
            drawn = (torch.randn(B, A, generator=theirs) * 0.001).clamp(-0.5, 0.5)
            action = (torch.tanh(actor(batch.next_obs["policy"])) + drawn).clamp(-1, 1)
            x = torch.cat((batch.next_obs["policy"], action), 1)
            heads = [F.softmax(target(x), -1) for target in targets]
            goal = torch.empty(B, 11).double()
            for i in range(B):
                support = [(batch.reward[i] + batch.discount[i] * z).item() for z in atoms]
                projected = [c51_projection(support, h[i].tolist(), atoms.tolist()) for h in heads]
                ends = torch.tensor(projected, dtype=torch.float64)
                goal[i] = min(ends, key=lambda p: float(p @ atoms))
                before, after = (float((one - two) @ atoms) for one, two in (ends, [head[i] for head in heads]))
                changed += before * after < -1e-3
        x = torch.cat((batch.obs["policy"], batch.action), 1)
        loss = sum(-(goal * F.log_softmax(critic(x), -1)).sum(-1).mean() for critic in critics)
        critic_optim.zero_grad()
        loss.backward()
        assert_same_loss(metrics, "critic", loss, critics, 6e-8)
        assert_same_gradients(value.state.critic.module, critics)
        critic_optim.step()
        follow(targets, critics, 0.1)
        exchange(value, improve)
        if update % 2:
            obs = ObsBatch(batch.obs, batch.mask, batch.weight)
            metrics = improve.update(improve.state, obs, improve.settings, noise)
            x = torch.cat((batch.obs["policy"], torch.tanh(actor(batch.obs["policy"]))), 1)
            q = torch.stack([F.softmax(critic(x), -1) @ atoms for critic in critics])
            loss = -q.min(0).values.mean()
            actor_optim.zero_grad()
            loss.backward()
            actor_optim.step()
            assert metrics["loss/policy"].item() == pytest.approx(loss.item(), abs=6e-8)
            assert_same_gradients(improve.state.policy.module, [actor])
            exchange(value, improve)
    assert changed > 0  # rows for which the other head would be chosen before the projection
    assert_same(value.state.critic.module, critics, atol=1e-7)
    assert_same(value.state.target.module, targets, atol=1e-7)
    assert_same(improve.state.policy.module, [actor], atol=1e-7)


# -- recipes with a Gaussian policy ------------------------------------------------------------------------------------


def members(ensemble: Flat) -> list[nn.Sequential]:
    """Return the two critics of an ensemble as networks of their own, with copies of its weights."""
    return [separate(ensemble.module, e) for e in range(2)]


def set_mode(net: nn.Module, training: bool) -> nn.Module:
    for module in net.modules():
        if isinstance(module, Norm):
            module.training_mode = training
    return net


def normalize_weights(net: nn.Module, kind: str) -> None:
    """Unit norm row by row, as the recipes do after each step."""
    for module in net.modules():
        if kind != "none" and isinstance(module, nn.Linear):
            for row in module.weight.data:
                row /= math.sqrt(sum(float(w) ** 2 for w in row) + 1e-8)
        if kind == "all" and isinstance(module, Norm | Rms):
            parts = [module.gain.data] + ([module.bias.data] if isinstance(module, Norm) else [])
            joint = math.sqrt(sum(float(w) ** 2 for part in parts for w in part) + 1e-8)
            for part in parts:
                part *= math.sqrt(len(module.gain)) / joint


def sampled(net, obs, gen, low, high, clip=False, scale=(1.0,)):
    """A tanh-Gaussian action and its log-probability, element by element in the noise's order; the density is that of
    the action times ``scale``."""
    mean, raw = net(obs).chunk(2, -1)
    log_std = raw.clamp(low, high) if clip else low + 0.5 * (high - low) * (torch.tanh(raw) + 1)
    noise = torch.randn(mean.shape, generator=gen).double()
    before = mean + log_std.exp() * noise
    log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - 2 * (math.log(2) - before - F.softplus(-2 * before)) - torch.tensor(scale).double().log()
    return torch.tanh(before), log_prob.sum(-1)


class Eye(nn.Module):
    """Squint's encoder in float64: averages over areas, two convolutions, Linear, LayerNorm, tanh."""

    def __init__(self, weights, side):
        super().__init__()
        self.weights, self.side = nn.ParameterList([nn.Parameter(w.clone()) for w in weights]), side

    def forward(self, x):
        w = self.weights
        x = F.interpolate(x, (self.side, self.side), mode="area")
        x = F.relu(F.conv2d(x, w[0], w[1], stride=2))
        x = F.relu(F.conv2d(x, w[2], w[3]))
        x = F.linear(x.flatten(1), w[4], w[5])
        return torch.tanh(F.layer_norm(x, x.shape[-1:], w[6], w[7]))


def eye_of(net):
    return Eye([p.data for p in net.encoder.parameters()], 10)


IMAGES = (3, 20, 24)


def image_batches(gen):
    """Random batches of images in float64 without end."""
    for batch in batches(gen):
        obs, next_obs = ({"policy": torch.rand(B, *IMAGES, generator=gen).double()} for _ in range(2))
        yield batch._replace(obs=obs, next_obs=next_obs)


HALF_LOG = 0.5 * math.log(2 * math.pi * math.e)  # entropy of a standard normal
GAUSSIAN = {
    # target, reduction for the policy, norm of weights, betas, decay, tau, target entropy per action, log std's range,
    # first temperature, end of the atoms (0: scalar critics)
    "flashsac": ("lower", "min", "all", (0.9, 0.999), 0.0, 0.01, math.log(0.15) + HALF_LOG, (-10, 2), 0.01, 5),
    "xqc": ("lower", "min", "linear", (0.9, 0.999), 0.0, 0.005, -0.5, (-10, 2), 0.01, 5),
    "fastsac": ("own", "mean", "none", (0.9, 0.95), 0.001, 0.125, 0.0, (-5, 0), 0.001, 20),
    "simba_sac": ("scalar", "min", "none", (0.9, 0.999), 0.01, 0.005, -0.5, (-10, 2), 0.01, 0),
    "pql2": ("lower", "mean", "none", (0.9, 0.95), 0.001, 0.05, -0.5, (-5, 0), 0.1, 3),
    "squint": ("own", "mean", "none", (0.9, 0.999), 0.0, 0.01, -1.0, (-5, 2), 1.0, 20),
}
SMALL_EYE = ["algo.encoder.size=10", "algo.encoder.channels=[4,6]", "algo.encoder.features=5"]


def rate(name, update):
    """The learning rate of a network's step: cosine to a half, linear to a tenth, or constant."""
    if name == "flashsac":
        return 3e-4 * (0.5 + 0.5 * 0.5 * (1 + math.cos(math.pi * update / 40)))
    if name == "xqc":
        return 3e-4 * (0.1 + 0.9 * (1 - update / 40))
    return {"fastsac": 3e-4, "simba_sac": 1e-4, "pql2": 1e-3, "squint": 3e-4}[name]


@pytest.mark.parametrize("name", ["flashsac", "pql2"])
def test_atoms_span_up_to_twice_the_returns_that_the_cap_admits(name):
    """A wider range slows learning down (docs/results/ablations.md). squint's CPU scale is wider: +-5 for +-1.5."""
    algo = compose(["device=cpu", f"algo={name}"]).algo
    assert algo.critic.v_min == -algo.critic.v_max
    assert 0.5 <= algo.return_cap * algo.reward_scale / algo.critic.v_max <= 1


@pytest.mark.parametrize("name", GAUSSIAN)
def test_gaussian_recipes(name):
    """Losses, gradients, weights, running statistics and temperature over 20 updates, with bounds other than +-1.

    Ours has the temperature in float32. The critics' loss alone trains Squint's encoder, by Adam like all else; its
    target networks have an average of it.
    """
    kind, reduce, unit, betas, decay, tau, entropy, span, first, bound = GAUSSIAN[name]
    words = [] if kind == "scalar" else ["algo.critic.atoms=11"]
    residual = name in ("flashsac", "simba_sac")
    hidden = ("algo.critic.hidden=[6]", "algo.policy.hidden=[4]") if residual else ()
    horizon = ["algo.lr_updates=40"] if name in ("flashsac", "xqc") else []
    seeing = name == "squint"
    spec = dataclasses.replace(JOINTS, obs={"policy": ObsSpec(IMAGES)}) if seeing else JOINTS
    images = ["scale=gpu", "algo.amp=false", *SMALL_EYE] if seeing else []
    config, value, improve = learners(f"algo={name}", *words, *hidden, *horizon, *images, spec=spec)
    eye, old = (eye_of(net.module) if seeing else nn.Identity() for net in (value.state.critic, value.state.target))
    shape = {"clip": name == "xqc", "scale": (1.0, 4.0, 20.0) if name == "fastsac" else (1.0,)}
    critics, targets, actor = members(value.state.critic), members(value.state.target), separate(value.state.policy)
    assert config.algo.alpha == first
    alpha = nn.Parameter(torch.tensor([first]).double().log())
    trained = [p for net in (*critics, eye) for p in net.parameters()]
    critic_optim = torch.optim.AdamW(trained, 1.0, betas, weight_decay=decay)
    actor_optim = torch.optim.AdamW(actor.parameters(), 1.0, betas, weight_decay=decay)
    alpha_optim = torch.optim.AdamW([alpha], 1.0, betas, weight_decay=0.0)
    atoms = torch.linspace(-bound, bound, 11).double()
    every = round(1 / config.algo.p_per_v)
    batch_norm = name in ("flashsac", "xqc")
    gen, noise, theirs = (torch.Generator().manual_seed(seed) for seed in (5, 1, 1))

    def temper(log_prob, step):
        mean_entropy = -log_prob.detach().mean()
        alpha_optim.zero_grad()
        (alpha.exp() * (mean_entropy - A * entropy)).sum().backward()
        alpha_optim.param_groups[0]["lr"] = rate(name, step)
        alpha_optim.step()

    exchange(value, improve)
    for update, batch in enumerate(itertools.islice((image_batches if seeing else batches)(gen), UPDATES)):
        metrics = value.update(value.state, batch, value.settings, noise)
        obs, ahead = batch.obs["policy"], batch.next_obs["policy"]
        now_alpha = alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = sampled(set_mode(actor, False), eye(ahead), theirs, *span, **shape)

        def heads(nets, encode, pairs=((obs, batch.action), (ahead, action))):
            """Outputs for both halves; networks with BatchNorm see them as one batch."""
            pair = torch.cat([torch.cat((encode(seen), done), 1) for seen, done in pairs])
            if batch_norm:
                return [set_mode(net, True)(pair) for net in nets]
            return [torch.cat((net(pair[:B]), net(pair[B:]))) for net in nets]

        with torch.no_grad():
            future = [out[B:] for out in heads(targets, old)]
            bonus = -now_alpha * log_prob
            if kind == "scalar":
                lowest = torch.min(future[0], future[1])[:, 0]
                goals = [(batch.reward + batch.discount * (lowest + bonus))] * 2
            else:
                goals = [torch.empty(B, 11).double() for _ in range(2)]
                for i in range(B):
                    probs = [F.softmax(out[i], -1) for out in future]
                    if kind == "lower":
                        probs = [min(probs, key=lambda p: float(p @ atoms))] * 2
                    support = [float(batch.reward[i] + batch.discount[i] * (z + bonus[i])) for z in atoms]
                    for goal, p in zip(goals, probs, strict=True):
                        goal[i] = torch.tensor(c51_projection(support, p.tolist(), atoms.tolist()))
        outs = [out[:B] for out in heads(critics, eye)]
        if kind == "scalar":
            loss = sum(((out[:, 0] - goal) ** 2).mean() for out, goal in zip(outs, goals, strict=True))
        else:
            logs = [F.log_softmax(out, -1) for out in outs]
            loss = sum(-(goal * log).sum(-1).mean() for goal, log in zip(goals, logs, strict=True))
        critic_optim.zero_grad()
        loss.backward()
        assert_same_loss(metrics, "critic", loss, [*critics, eye], 1e-6)
        assert_same_gradients(value.state.critic.module, critics)
        for p, q in zip(encoded(value.state.critic), eye.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-7)
        critic_optim.param_groups[0]["lr"] = rate(name, update)
        critic_optim.step()
        for net in critics:
            normalize_weights(net, unit)
        follow((old, *targets), (eye, *critics), tau)
        if name in ("fastsac", "pql2", "squint"):
            temper(log_prob, update)
        exchange(value, improve)
        if update % every == every - 1:
            part = ObsBatch(batch.obs, batch.mask, batch.weight)
            metrics = improve.update(improve.state, part, improve.settings, noise)
            seen = eye(obs).detach()
            action, log_prob = sampled(set_mode(actor, batch_norm), seen, theirs, *span, **shape)
            x = torch.cat((seen, action), 1)
            outs = [set_mode(critic, False)(x) for critic in critics]
            q = torch.stack([out[:, 0] if kind == "scalar" else F.softmax(out, -1) @ atoms for out in outs])
            q = q.mean(0) if reduce == "mean" else q.min(0).values
            loss = (alpha.detach().exp() * log_prob - q).mean()
            actor_optim.zero_grad()
            loss.backward()
            assert_same_gradients(improve.state.policy.module, [actor])
            step = update // every
            actor_optim.param_groups[0]["lr"] = rate(name, step)
            actor_optim.step()
            normalize_weights(actor, unit)
            assert metrics["loss/policy"].item() == pytest.approx(loss.item(), abs=1e-6)
            if name not in ("fastsac", "pql2", "squint"):
                temper(log_prob, step)
            exchange(value, improve)
            assert metrics["policy/alpha"].item() == pytest.approx(alpha.exp().item(), abs=1e-6)
    assert_same(value.state.critic.module, critics)
    assert_same(value.state.target.module, targets, statistics=False)  # those of a target network are never read
    assert_same(improve.state.policy.module, [actor])
    for net, its in ((value.state.critic, eye), (value.state.target, old), (improve.state.policy, eye)):
        for p, q in zip(encoded(net), its.parameters(), strict=True):
            torch.testing.assert_close(p.data, q.data, rtol=0, atol=1e-6)


def encoded(flat: Flat) -> list[nn.Parameter]:
    """Weights of a network's encoder, if it has one."""
    return [] if flat.module.encoder is None else list(flat.module.encoder.parameters())


def assert_same_gradients(ours: nn.Module, theirs: list[nn.Sequential]):
    """Gradients of our network or ensemble, element by element, and of separate networks."""
    copied = copy.deepcopy(ours)
    for p, q in zip(copied.net.parameters(), ours.net.parameters(), strict=True):
        p.data = q.grad.clone()
    for e, net in enumerate(theirs):
        mine = separate(copied, e if len(theirs) > 1 else None)
        for a, b in zip(mine.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(a.data, b.grad, rtol=1e-6, atol=1e-7)


def assert_same_loss(metrics, name: str, loss, nets: list[nn.Sequential], atol: float):
    """Our loss and gradient norm, and those of separate networks."""
    assert metrics[f"loss/{name}"].item() == pytest.approx(loss.item(), abs=atol)
    grads = torch.cat([p.grad.reshape(-1) for net in nets for p in net.parameters()])
    assert metrics[f"grad_norm/{name}"].item() == pytest.approx(math.sqrt(float(grads @ grads)), abs=atol)


@torch.no_grad()
def follow(targets: Sequence[nn.Module], nets: Sequence[nn.Module], tau: float) -> None:
    """Move every parameter of the targets towards that of the networks."""
    for target, net in zip(targets, nets, strict=True):
        for p, q in zip(net.parameters(), target.parameters(), strict=True):
            q += tau * (p - q)


def assert_same(ours: nn.Module, theirs: list[nn.Sequential], statistics: bool = True, atol: float = 1e-6):
    """Weights and running statistics of our network or ensemble, and of separate networks."""
    for e, net in enumerate(theirs):
        mine = separate(ours, e if len(theirs) > 1 else None)
        for a, b in zip(mine.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=atol)
        norms = [[m for m in one.modules() if isinstance(m, Norm)] for one in (mine, net)]
        for a, b in zip(*norms, strict=True):
            if statistics:
                torch.testing.assert_close((a.mean, a.var), (b.mean, b.var), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("preset", "ends"),
    [("flashsac", (1.5e-4, 2.25e-4)), ("xqc", (3e-5, 2.1e-4))],  # after all updates: half, or a third, are the policy's
)
def test_learning_rates_at_the_end_of_a_run(preset, ends):
    config, value, improve = learners(f"algo={preset}", "scale=gpu", "algo.amp=false", "algo.critic.hidden=[4]")
    critic, policy = value.state.optimizer, improve.state.optimizer
    total = torch.tensor(float(config.algo.lr_updates))
    own = total * config.algo.p_per_v
    temperature = improve.state.temperature_optimizer
    for optimizer, count, end in ((critic, total, ends[0]), (policy, own, ends[1]), (temperature, own, ends[1])):
        assert 3e-4 * float(optimizer.schedule(count)) == pytest.approx(end, rel=1e-6)


def entropies(*words, spec):
    """Entropy and loss of the policy's first update of FastSAC, whose heads are zero: sigma is exp(-2.5)."""
    _, value, improve = learners("algo=fastsac", *words, spec=spec)
    exchange(value, improve)
    batch = next(batches(torch.Generator().manual_seed(5)))
    part = ObsBatch(batch.obs, batch.mask, batch.weight)
    metrics = improve.update(improve.state, part, improve.settings, torch.Generator().manual_seed(1))
    return metrics["policy/entropy"].item(), metrics["loss/policy"].item(), improve.settings


def test_entropies_are_in_units_of_the_action():
    """``log_prob -= log(action_scale)``: a target of 0 is -1.9 per joint of [-1, 1] where an action of 1 is 6.686."""
    reach = math.exp(1.9)
    joints = dataclasses.replace(SPEC, action=Box.within(A, reach))
    entropy, loss, settings = entropies(spec=joints)
    plain, plain_loss, _ = entropies("algo.entropy_unit=unit", spec=joints)
    assert entropy - plain == pytest.approx(1.9 * A, abs=1e-6)
    assert loss - plain_loss == pytest.approx(-0.001 * 1.9 * A, abs=1e-8)  # the first temperature is 0.001
    assert plain / A == pytest.approx(-2.5 + HALF_LOG, abs=0.2)
    assert settings.entropy_goal(A) == 0
    assert entropies(spec=SPEC)[:2] == entropies("algo.entropy_unit=unit", spec=SPEC)[:2]  # bounds of +-1
    own = dataclasses.replace(SPEC, info={"action_reach": (reach,) * A})  # a task with a unit other than its bounds
    assert entropies(spec=own)[0] == pytest.approx(entropy, abs=1e-6)


def test_entropies_behind_asymmetric_bounds_and_their_gradients():
    """E[log slope] over the Gaussian by a fine sum; of a sampled slope the gradient would be 0."""
    spec = dataclasses.replace(SPEC, action=Box(2, (-0.5, -3.0), (2.0, 0.5), (0.0, 0.25)))
    slope = log_slope(compose(["device=cpu", "algo=sac", "algo.entropy_unit=action"]), spec, CPU)
    z = torch.linspace(-8, 8, 200_001, dtype=torch.float64)[:, None]
    weight = torch.exp(-0.5 * z.square()) / z.square().mul(-0.5).exp().sum()

    def summed(mean, log_std):
        above = mean + log_std.exp() * z > 0
        return (weight * torch.where(above, torch.tensor([2.0, 0.25]), torch.tensor([0.5, 3.25])).log()).sum()

    mean, log_std = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in ([0.3, -0.1], [-0.5, 0.2]))
    value = slope(mean, log_std)
    assert value.item() == pytest.approx(summed(mean, log_std).item(), abs=1e-4)
    value.sum().backward()
    for i, (of, step) in itertools.product(range(2), (("mean", mean), ("std", log_std))):
        h = 0.05 * torch.eye(2, dtype=torch.float64)[i]
        moved = [summed(mean + s * h, log_std) if of == "mean" else summed(mean, log_std + s * h) for s in (1, -1)]
        assert step.grad[0, i].item() == pytest.approx((moved[0] - moved[1]).item() / 0.1, abs=5e-3)
    low, middle, high = (-0.5, -8.0, -20.0), (0.5, -4.0, 0.0), (1.5, 0.0, 20.0)  # both sides are equally long
    assert entropies(spec=dataclasses.replace(SPEC, action=Box(A, low, high, middle)))[:2] == pytest.approx(
        entropies(spec=JOINTS)[:2], abs=1e-6
    )


@pytest.mark.parametrize(("unit", "wide"), [("action", 0.15), ("unit", 0.6)])
def test_a_wider_range_leaves_the_simulators_noise_as_it_is(unit, wide, monkeypatch):
    """SAC against the reward -2 |simulator's action|^2, with bounds of 1 and of 4, and a target sigma of 0.15."""
    found = []
    for reach in (1.0, 4.0):

        def value(state, obs, action, reduce, reach=reach):
            return -2 * (reach * action).square().sum(-1)

        monkeypatch.setattr("pql.algos.sac.ensemble_value", value)
        spec = dataclasses.replace(SPEC, action=Box.within(A, reach))
        words = ("algo=sac", f"algo.entropy_unit={unit}", "algo.target_sigma=0.15", "algo.alpha_lr=0.02")
        _, _, improve = learners(*words, "algo.policy.lr=0.005", "algo.policy.hidden=[8]", spec=spec)
        gen = torch.Generator().manual_seed(2)
        for batch in itertools.islice(batches(gen), 1500):
            part = ObsBatch(batch.obs, batch.mask, batch.weight)
            metrics = improve.update(improve.state, part, improve.settings, gen)
        assert metrics["policy/entropy"].item() == pytest.approx(improve.settings.entropy_goal(A), abs=0.3)
        log_std = improve.state.policy.module(batch.obs)[1]
        found.append(reach * log_std.exp().mean().item())
    assert found == pytest.approx([0.15, wide], rel=0.1)


@pytest.mark.parametrize(
    ("words", "bound", "named"),
    [
        (
            ["algo=fastsac"],
            0.4,
            r"algo\.entropy_per_action=0(\.0)?: expected below -0\.2231, .*, or algo.entropy_unit=unit$",
        ),
        (["algo=fastsac", "algo.entropy_unit=unit"], 0.4, None),
        (["algo=fastsac"], 1.0, None),
        (
            ["algo=sac", "algo.entropy_per_action=0.7"],
            1.0,
            r"algo\.entropy_per_action=0\.7: .* below 0\.6931, .* ones$",
        ),
        (["algo=sac", "algo.target_entropy=2.1"], 1.0, r"algo\.target_entropy=2\.1: expected below 2\.079, "),
        (["algo=sac", "algo.entropy_unit=action", "algo.auto_alpha=false"], 0.01, None),
        (["algo=flashsac", "algo.target_sigma=0.5"], 1.0, r"algo\.target_sigma=0\.5: expected below 0\.4839, "),
        (["algo=flashsac", "algo.target_sigma=0.48"], 1.0, None),
    ],
)
def test_target_entropies_above_that_of_uniform_actions_are_refused(words, bound, named):
    """No policy within the bounds has them, so that the temperature would grow without end."""
    config = compose(["task=pendulum", "device=cpu", "replay.capacity=10000", *words])
    spec = dataclasses.replace(SPEC, action=Box.within(A, bound), max_episode_steps=200)
    check = partial(family_of(config).check, config, spec, family_of(config).counts(config), CPU)
    if named is None:
        assert check() > 0
    else:
        with pytest.raises(ConfigError, match=named):
            check()


def test_actions_without_a_range_have_no_unit():
    config = compose(["device=cpu", "algo=fastsac"])
    spec = dataclasses.replace(SPEC, action=Box(A, (0, 1, 0), (1, 1, 1)), max_episode_steps=200)
    with pytest.raises(
        ConfigError, match=r"algo\.entropy_unit=action: expected unit: an action of 1 is 0 in dimension 1"
    ):
        family_of(config).check(config, spec, family_of(config).counts(config), CPU)


def test_projected_targets_need_atoms():
    for words in (["algo=td3"], ["algo=fasttd3", "algo.critic.loss=hl_gauss"]):
        with pytest.raises(ConfigError, match=r"algo\.critic\.target=projected: expected min"):
            compose(["device=cpu", *words, "algo.critic.target=projected"])


# -- documented differences --------------------------------------------------------------------------------------------


def test_the_return_at_an_episodes_end_differs_from_flashsacs():
    """Rewards 0, -10, 0, -10, ...; gamma .5. Theirs: G <- gamma (1 - done) G + r; ours is reset after the last row."""
    norm, theirs, returns = Normalizer({}, 1, CPU, reward_gamma=0.5), 0.0, []
    for step in range(40_000):
        reward, over = (0.0, -10.0)[step % 2], step % 2 == 1
        theirs = 0.5 * (1 - over) * theirs + reward
        returns.append(theirs)
        if step < 1000:
            norm.observe_reward(torch.tensor([reward]), torch.tensor([over]), torch.tensor([True]))
    norm.freeze()
    assert returns[:6] == [0, -10, -5, -10, -5, -10]
    assert torch.tensor(returns).std().item() == pytest.approx(2.5, rel=1e-3)
    assert 1 / norm.reward_scale.item() == pytest.approx(5)


def test_xqcs_batch_norm_of_the_policy_moves_at_its_own_updates():
    """Theirs moves at each critic update, three times as often, by 1 % of the biased variance."""
    _, value, improve = learners("algo=xqc")
    assert value.state.critic.statistics.numel() > 0
    batch = next(batches(torch.Generator().manual_seed(5)))
    for _ in range(3):
        value.update(value.state, batch, value.settings, torch.Generator())
    layer = improve.state.policy.module.net[0]
    assert torch.equal(layer.running_mean, torch.zeros_like(layer.running_mean))
    improve.update(improve.state, ObsBatch(batch.obs, batch.mask, batch.weight), improve.settings, torch.Generator())
    seen = batch.obs["policy"]
    torch.testing.assert_close(layer.running_mean.flatten(), 0.01 * seen.mean(0))
    torch.testing.assert_close(layer.running_var.flatten(), 0.99 + 0.01 * seen.var(0, correction=1))


def test_epsilons_are_those_of_the_page():
    """A feature with a deviation of .01: 1 here, .71 with PQL's sqrt(var + 1e-4), .5 with FastTD3's std + .01."""
    norm = Normalizer({"policy": ObsSpec((1,))}, 2, CPU)
    norm.observe({"policy": torch.tensor([[-0.01], [0.01]])})
    norm.freeze()
    assert norm({"policy": torch.tensor([[0.01]])})["policy"].item() == pytest.approx(1, abs=1e-4)
    assert (0.01 / math.sqrt(1e-4 + 1e-4), 0.01 / (0.01 + 0.01)) == pytest.approx((0.7071, 0.5), abs=1e-4)
    for words, kind, epsilon in ((["algo=xqc"], BatchNorm, 1e-5), (["algo=simba_sac"], nn.LayerNorm, 1e-5)):
        policy, _ = make_networks(compose(["device=cpu", *words]), SPEC, 3)
        assert {layer.eps for layer in policy.modules() if isinstance(layer, kind)} == {epsilon}
    assert Layers((4,), layer_norm=True, norm="rms").norm == "rms"
    assert mlp(3, Layers((4,), layer_norm=True, norm="rms"), 1)[1].eps == 1e-6


def test_xqcs_sigma_begins_near_one():
    """A clip keeps the head's output; a tanh around it would halve the range's logarithm, to -4."""
    geometric = {}
    for kind in ("clip", "tanh"):
        config = compose(["device=cpu", "algo=xqc", "scale=gpu", f"algo.policy.log_std={kind}"])
        policy, _ = make_networks(config, SPEC, 3)
        obs = {"policy": torch.randn(256, D, generator=torch.Generator().manual_seed(0))}
        with torch.no_grad(), batch_statistics(policy, torch.ones(256), tracked=False):
            geometric[kind] = policy(obs)[1].mean().exp().item()
    assert 0.7 < geometric["clip"] < 1.4
    assert 0.01 < geometric["tanh"] < 0.03


SAME = {  # rows of docs/recipes.md that say "the same": the tests of this folder compare them
    "FastTD3": "environments, batch; replay; critic; policy; optimiser; exploration; target; target network; "
    "precision; first episodes",
    "FlashSAC": "environments, batch, replay; gamma, n-step; temperature; updates; networks; weights; critic's batch; "
    "target; unit of entropies; learning rate; first episodes",
    "FastSAC": "environments, batch; replay; gamma, n-step; policy; updates; networks; target; temperature; "
    "unit of entropies; optimiser; precision",
    "XQC": "temperature; networks; target; log sigma; learning rate",
    "SimBa's SAC": "temperature; networks; optimiser",
    "Squint": "environments, replay; gamma, n-step; images; log sigma; batch, updates; convolutions; "
    "who trains the encoder; networks; target; temperature; optimiser; precision",
    "REPPO": "environments x steps, minibatches x epochs; gamma, lambda; precision; policy; critic; KL constraint; "
    "entropy; next embedding; optimiser; order; initial value; time limits",
    "PQN": "environments x steps, minibatches x epochs; gamma, lambda; epsilon; optimiser; learning rate; network",
    "BTR": "environments, batch; updates; gamma, n-step; replay; target network; encoder; epsilon; priorities; "
    "quantiles; heads; target; loss; optimiser",
}


def test_rows_that_say_the_same_are_those_that_are_compared():
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    found = {}
    for section in page.split("\n## ")[1:]:
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
        if same := {row[0] for row in rows if len(row) == 4 and row[2].startswith("the same")}:
            found[section.splitlines()[0]] = same
    assert found == {title: {*rows.split("; ")} for title, rows in SAME.items()}
