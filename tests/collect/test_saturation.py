"""Saturated and frozen actions: metrics against a loop, over groups, masks, replicas; training bits are unchanged."""

import math

import pytest
import torch
from conftest import small_config, start, ticks
from ppo_runs import config_of

from pql.collect.actors import NoisyActor
from pql.collect.saturation import FROZEN, SATURATED, WINDOW, Saturation, drain
from pql.engine.executors import Inline

CPU = torch.device("cpu")


def reported(*meters):
    return {k: v.item() for k, v in drain(meters).items()}


def oracle(actions):
    """[T][N][A] -> (share beyond .95, share of components whose running mean is beyond .9), in floats."""
    flat = [a for step in actions for row in step for a in row]
    means = [[0.0 for _ in row] for row in actions[0]]
    for step in actions:
        means = [[m + (a - m) / WINDOW for m, a in zip(*rows, strict=True)] for rows in zip(means, step, strict=True)]
    last = [m for row in means for m in row]
    return sum(abs(a) > SATURATED for a in flat) / len(flat), sum(abs(m) > FROZEN for m in last) / len(last)


def test_the_measures_are_those_of_a_loop():
    """One environment frozen at both ends, one bang-bang, one near an end, one anywhere."""
    gen, actions = torch.Generator().manual_seed(0), []
    for t in range(4 * WINDOW):
        swing = 1.0 if t % 20 < 10 else -1.0
        rows = [[0.99, -0.99], [swing, -swing], [0.94, 0.5], (2 * torch.rand(2, generator=gen) - 1).tolist()]
        actions.append(rows)
    meter = Saturation(4, 2, CPU)
    for step in actions:
        meter(torch.tensor(step))
    saturated, frozen = oracle(actions)
    got = reported(meter)
    assert got == {"policy/saturated": pytest.approx(saturated, abs=1e-5), "policy/frozen": frozen}
    assert frozen == 3 / 8  # the bang-bang one counts for nothing
    assert 0.5 < saturated < 0.6
    meter(torch.zeros(4, 2))
    assert reported(meter) == {"policy/saturated": 0.0, "policy/frozen": 3 / 8}  # the mean continues
    meter.reset()
    assert reported(meter) == {"policy/saturated": 0.0, "policy/frozen": 0.0}


def test_environments_that_did_not_act_do_not_count():
    meter, late = Saturation(4, 2, CPU), torch.tensor([True, True, False, False])
    action = torch.tensor([[1.0, 1.0], [0.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    for _ in range(3 * WINDOW):
        meter(action, late)
    assert not meter.mean[2:].any()
    assert reported(meter) == {"policy/saturated": pytest.approx(0.75), "policy/frozen": 3 / 8}


def test_numbers_that_are_not_finite_leave_no_trace():
    meter = Saturation(1, 2, CPU)
    meter(torch.tensor([[math.nan, math.inf]]))
    assert meter.mean.isfinite().all()
    assert reported(meter)["policy/saturated"] == 0


def test_groups_and_replicas_add_up():
    gen = torch.Generator().manual_seed(1)
    steps = torch.linspace(0.8, 0.99, 12).view(6, 2) + 0.02 * torch.randn(5 * WINDOW, 6, 2, generator=gen)
    whole, first, second, halves = (Saturation(n, 2, CPU) for n in (6, 3, 3, 6))
    for step in steps:
        whole(step)
        first(step[:3]), second(step[3:])
        for columns in (slice(0, 3), slice(3, 6)):
            halves.part(columns)(step[columns])
    want = reported(whole)
    assert 0 < want["policy/frozen"] < 1
    for got in (reported(first, second), reported(halves)):
        assert got == {k: pytest.approx(v, abs=1e-5) for k, v in want.items()}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_run_measures_what_its_policy_gave_before_noise(monkeypatch, groups):
    seen, act = [], NoisyActor.act

    def spy(self, obs, gen):
        act(self, obs, gen)
        seen.append((self.squashed.clone(), self.action.clone()))

    monkeypatch.setattr(NoisyActor, "act", spy)
    parts = start(small_config(graphs="off", placement={"groups": groups}), Inline())
    parts.drain()
    seen.clear()
    for name, weight in parts.collector.actor.policy.named_parameters():
        if name.endswith("bias"):
            weight.data.fill_(1.2)  # some actions beyond, some not
    for _ in range(3):
        parts.collector.run(10)
    share = sum((a.abs() > SATURATED).double().mean() for a, _ in seen) / len(seen)
    assert len(seen) == 30 * groups
    assert 0.05 < share < 0.95
    assert any(not torch.equal(*pair) for pair in seen)
    assert parts.drain()["policy/saturated"].item() == pytest.approx(share.item(), abs=1e-5)


def test_policies_without_a_tanh_have_no_such_measures():
    plain = ticks(start(config_of({}), Inline()), 1).drain()
    squashed = ticks(start(config_of({"algo": {"squash": True}}), Inline()), 1).drain()
    assert "policy/saturated" not in plain
    assert 0 < squashed["policy/saturated"] < 1
