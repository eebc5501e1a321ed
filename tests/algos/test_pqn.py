"""PQN: Q(lambda) returns, manual updates, bit-exact runs, learning."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import run_files
import torch
from conftest import configured, start, ticks
from gates import score, train_until
from histories import CPU, Column
from run_files import rows
from test_rollout import make_rollout, record
from torch import Generator, nn

from pql.algos import pqn
from pql.algos.pqn import PqnState, rollout_values
from pql.cli.main import main
from pql.config import PqnConfig
from pql.config.compose import compose
from pql.config.networks import TrainedNetConfig
from pql.data.returns import lambda_returns, valued_rows
from pql.data.rollout import Progress
from pql.engine.executors import Inline
from pql.engine.flat import Flat
from pql.engine.optim import AdamW
from pql.nets.mlp import Layers, NetInput
from pql.nets.q import QNetwork
from pql.run.policy import load_policy

SETTINGS = PqnConfig(epochs=2, minibatches=4, gamma=0.9, q_lambda=0.65, critic=TrainedNetConfig(lr=0.1))
BASE = {
    "task": {"name": "cartpole", "kwargs": {"max_episode_steps": 11, "stagger": True}},
    "placement": {"matmul": "exact"},
    "algo": {
        "family": "pqn",
        "name": "pqn",
        "schedule": "lockstep",
        "warmup_steps": 4,
        "critic": {"hidden": [16, 16], "layer_norm": True, "lr": 1e-3, "weight_decay": 0.0},
        "horizon": 8,
        "epochs": 2,
        "minibatches": 4,
        "epsilon": {"steps": 400},
    },
}
VARIANTS = {
    "radam": {},
    "adam, annealed": {"algo": {"optimizer": "adam", "anneal_steps": 1000}},
    "bfloat16, ladder": {"algo": {"amp": True, "epsilon": {"kind": "ladder"}}},
    "pixels": {
        "task": {"name": "catch", "kwargs": {}},
        "algo": {"critic": {"hidden": []}, "encoder": {"channels": [4], "features": 8, "layer_norm": True}},
    },
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


config_of = partial(configured, BASE)


# -- returns ----------------------------------------------------------------------------------------------------------


def q_of(number):
    """Any action values of an observation, two of them."""
    return (number * 37 % 101) / 50 - 1, (number * 53 % 97) / 48 - 1


class Table(nn.Module):
    """Action values of made-up observations."""

    def values(self, obs):
        return torch.stack(q_of(obs["policy"][..., 0].double()), -1).float()


@pytest.mark.parametrize("next_step", [False, True])
def test_returns_are_those_of_the_largest_values(next_step):
    """Of the rows those stored when acting; beyond them, and of final observations, the network's."""
    rollout, _ = make_rollout(40, 11, next_step)
    record(rollout, [Column(i, next_step) for i in range(40)], 11, random.Random(next_step))
    segment = rollout.segment()
    beyond = Table().values({k: v[11:] for k, v in segment.obs.items()}).amax(-1)
    value = torch.cat((segment.action[..., 0].abs(), beyond))  # stored are an action and its negative
    got = pqn.returns(SimpleNamespace(net=Table()), segment, SETTINGS)
    torch.testing.assert_close(got, lambda_returns(valued_rows(segment, 0.9, value), 0.65), rtol=0, atol=1e-6)
    assert segment.mask.mean() < 1


@EVERY_VARIANT
def test_stored_values_are_those_of_the_network_that_learns(variant):
    """Weights and statistics are those that acted, so nothing is computed twice."""
    parts = ticks(start(config_of(variant), Inline()), 3)
    parts.workers["collector"].run(8)
    segment, state = parts.collector.stores[0].segment(), parts.learners["learner"].state
    obs = {k: v[:8].flatten(0, 1) for k, v in segment.obs.items()}
    with torch.no_grad():
        q = rollout_values(state.net, obs, parts.learners["learner"].settings.amp)
    assert (q - segment.params.flatten(0, 1)).abs().max() < 1e-5
    greedy = segment.params.argmax(-1) == segment.action
    assert 0.1 < greedy.float().mean() < 1  # epsilon is at work
    assert segment.obs["policy"].dtype == parts.env.spec.obs["policy"].dtype


# -- updates ----------------------------------------------------------------------------------------------------------


def linear_state(lr=0.1):
    net = QNetwork(NetInput("policy", 2), 3, Layers((), "relu"))
    flat = Flat(net, trained=True)
    return PqnState(flat, AdamW(flat, lr), Progress(CPU))


def test_an_update_by_hand():
    """0.5 (Q(s, a) - R)^2, averaged over the rows that count; others, whatever they hold, have no part in it."""
    state = linear_state()
    layer = state.net.advantage[0]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]))
        layer.bias.zero_()
    obs = torch.tensor([[1.0, 1.0], [2.0, 0.0], [5.0, 5.0]])
    batch = pqn.ValueMinibatch(
        {"policy": obs}, torch.tensor([1, 0, 2]), torch.tensor([1.0, 4.0, -99.0]), torch.tensor([1.0, 1.0, 0.0])
    )
    out = pqn.pqn_update(state, batch, SETTINGS, Generator())
    # errors: 2 - 1 = 1, 2 - 4 = -2
    assert out["loss/critic"].item() == pytest.approx(0.5 * (1 + 4) / 2)
    assert out["value/q"].item() == pytest.approx(2.0)
    weight = torch.tensor([[-2.0 * 2 / 2, 0.0], [0.5, 0.5], [0.0, 0.0]])  # gradient: error * obs / 2, by action
    bias = torch.tensor([-1.0, 0.5, 0.0])
    torch.testing.assert_close(layer.weight.grad, weight)
    torch.testing.assert_close(layer.bias.grad, bias)
    assert out["grad_norm/critic"].item() == pytest.approx((4 + 0.5 + 1.25) ** 0.5, rel=1e-5)


def test_minibatches_cover_every_row_once_an_epoch_and_the_rate_falls():
    config = config_of(VARIANTS["adam, annealed"])
    parts = ticks(start(config, Inline()), 2)
    parts.workers["collector"].run(8)
    learner = parts.learners["learner"]
    segment = parts.collector.stores[0].segment()
    drawn = list(learner.draw(8, learner.gen))
    assert len(drawn) == 8
    for epoch in (drawn[:4], drawn[4:]):
        seen = torch.cat([b.obs["policy"] for b in epoch])
        assert seen.shape == (64, 4)
        assert torch.equal(seen.sum(1).sort().values, segment.obs["policy"][:8].sum(-1).flatten().sort().values)
    assert learner.state.optimizer.lr.item() == pytest.approx(1e-3 * (1 - 2 * 64 / 1000))
    ticks(parts, 20)
    assert learner.state.optimizer.lr.item() == 0


def test_epsilon_falls_by_env_steps_and_is_logged():
    parts = start(config_of(), Inline())
    got = []
    for _ in range(8):
        ticks(parts, 1)
        got.append(parts.gauges["explore/epsilon"].item())
    # the last step of tick k is step 8 k + 7 of 50 that the fall takes
    assert got == pytest.approx([max(0.1, 1 - 0.9 * (8 * k + 7) / 50) for k in range(8)], abs=1e-6)


# -- runs -------------------------------------------------------------------------------------------------------------


WORDS = (
    *("algo=pqn", "task=cartpole", "task.kwargs.max_episode_steps=11", *run_files.QUICK),
    *("algo.horizon=4", "algo.minibatches=4", "algo.anneal_steps=2000"),
)


def run(run_dir, *more):
    return run_files.run(*WORDS, f"run_dir={run_dir}", *more)


@pytest.mark.fault(14, form="pqn", count=10)
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, trial):
    half, full = (16 * (8 + 4 * n) for n in (5, 10))
    _, one, _ = run_files.whole_and_resumed(tmp_path, [*WORDS, f"seed={trial}"], half, full)
    assert "learners/learner/state/progress/ticks" in one
    log = [row for row in rows(tmp_path / "whole") if "updates/v" in row]
    assert (log[-1]["updates/v"], log[-1]["updates/p"], log[-1]["lag/policy_ticks"]) == (80, 80, 0)
    assert {"loss/critic", "value/q", "policy/lr", "explore/epsilon", "rollout/bootstrap_lost"} <= {*log[-1]}
    policy = load_policy(tmp_path / "whole")
    action = policy(torch.randn(3, 4))
    assert (action.shape, action.dtype) == ((3,), torch.int64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algo.minibatches=5", "algo.minibatches=5: expected a divisor of num_envs=16 x algo.horizon=4"),
        ("task=pendulum", "task=pendulum: expected a task with discrete actions"),
        (
            "algo.policy.lr=1e-3",
            "algo.policy.lr=0.001: expected no such setting: algo=pqn does not read it: see algo.c",
        ),
        ("algo.clip=0.1", "algo.clip=0.1: expected no such setting: algo=pqn does not read it; ppo would"),
        (
            "algo=ppo algo.q_lambda=0.5",
            "algo.q_lambda=0.5: expected no such setting: algo=ppo does not read it; pqn would",
        ),
        (
            "algo.schedule=concurrent",
            "algo.schedule=concurrent: expected lockstep: pqn learns from what its policy did",
        ),
        (
            "algo.schedule=replicas",
            "algo.schedule=replicas: expected lockstep with algo=pqn; only ppo can have replicas",
        ),
        ("algo.epsilon.start=0", "algo.epsilon.start=0.0: expected at least algo.epsilon.end="),
        ("algo.q_lambda=1.5", "algo.q_lambda=1.5: expected a number from 0 up to 1"),
        ("algo.optimizer=rmsprop", "algo.optimizer=rmsprop: expected one of radam, adam"),
        ("algo.lr_schedule=linear", "algo=pqn does not read it: see algo.anneal_steps"),
        ("replay.capacity=5000", "replay.capacity=5000: expected no such setting: algo=pqn does not read it"),
        ("algo.epsilon.exponent=3", "exponent=3.0: expected algo.epsilon.kind=ladder with it"),
        ("replay.save=true", "replay.save=true: expected false: for off-policy algorithms alone"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path, capsys, words, message):
    known = [w for w in WORDS if not (words == "task=pendulum" and w.startswith("task"))]
    assert main(["train", *known, f"run_dir={tmp_path}", "budget.env_steps=1000", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "count", "before", "enough"),
    [
        pytest.param(
            "catch", 90, -0.2, 0.9, marks=pytest.mark.slow
        ),  # of 1; chasing what the newest frame shows gives -0.5
        ("cartpole", 90, 400, 450),  # of 500
    ],
)
def test_the_presets_learn(task, count, before, enough, learns):
    learns(lambda seed: learn(task, count, before, enough, seed), enough)


def learn(task, count, before, enough, seed):
    words = ("device=cpu", "algo=pqn", f"task={task}", "placement.matmul=exact", f"seed={seed}")
    parts = start(compose([*words, "placement.threads.collector=1", "placement.threads.v=1"]), Inline())
    assert score(parts, 256) < before
    return train_until(parts, enough, count, lambda: score(parts, 256))
