"""V-trace: published numbers, the paper's sum over synthetic histories, and the on-policy case."""

import random

import pytest
import torch
from histories import Column
from oracles import vtrace as oracle
from test_rollout import KINDS, make_rollout, read, record, value_of

from pql.config import VtraceConfig
from pql.data.returns import ValuedRows, gae, lambda_returns, valued_rows, vtrace

HORIZON, GAMMA = 9, 0.9


def test_the_reference_numbers():
    """Five rows, one environment: log rho = -2.5 .. 1.5, r = V = 0 .. 4, bootstrap 1, caps 3.7, 1 and 2.2."""
    row = torch.arange(5.0).unsqueeze(1)
    following = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0]).unsqueeze(1)
    one = torch.ones(5, 1)
    out = vtrace(row - 2.5, ValuedRows(row, 0.9 * one, row, following, one, one), VtraceConfig(3.7, 1.0, 2.2))
    expected = [0.200182, 2.709682, 8.513628, 11.932397, 7.33]
    assert out.target.flatten().tolist() == pytest.approx(expected, abs=2e-6)
    # log rho = .5 is below the cap of 2.2, 1.5 is not
    advantage = (out.advantage * out.weight).flatten().tolist()
    assert advantage == pytest.approx([0.200182, 1.709682, 6.513628, 10.876614, 1.98], abs=2e-6)


def arguments(rollout):
    segment, values = read(rollout)
    return segment, valued_rows(segment, GAMMA, values)


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize(
    ("lam", "weights"), [(1.0, VtraceConfig()), (0.8, VtraceConfig(2.0, 1.3, 3.0)), (0.0, VtraceConfig())]
)
def test_targets_and_advantages_are_the_papers_sum(next_step, lam, weights):
    """With terminations, time limits valued at their true final observation, lost ones, filler rows, lost lives."""
    n, rng = 24, random.Random(f"{next_step}{lam}")
    rollout, _ = make_rollout(n, HORIZON, next_step)
    gen = torch.Generator().manual_seed(1)
    seen = {"masked": 0, "final": 0, "terminated": 0, "plain": 0}
    sims = [Column(i, next_step) for i in range(n)]
    for _ in range(2):
        events = record(rollout, sims, HORIZON, rng)
        log_ratio = torch.randn(HORIZON, n, generator=gen)
        _, rows = arguments(rollout)
        out = vtrace(log_ratio, rows, weights, lam)
        for i, column in enumerate(events):
            scaled = [e._replace(reward=0.5 * e.reward) for e in column]
            ratios = log_ratio[:, i].exp().tolist()
            for t, e in enumerate(column):
                want = oracle(scaled, ratios, t, value_of, GAMMA, lam, weights.rho_bar, weights.c_bar)
                if want is None:
                    assert out.advantage[t, i] == 0
                    assert out.target[t, i] == rows.value[t, i]
                else:
                    assert out.target[t, i].item() == pytest.approx(want[0], abs=5e-5)
                    assert out.advantage[t, i].item() == pytest.approx(want[1], abs=5e-5)
                    assert out.weight[t, i].item() == pytest.approx(min(weights.pg_rho_bar, ratios[t]), rel=1e-5)
                cut = e.truncated and not e.terminated
                seen["masked" if want is None else "final" if cut else "terminated" if e.terminated else "plain"] += 1
    assert min(seen.values()) > 10, seen


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_on_policy_targets_are_lambda_returns(lam):
    """With lambda = 1: n-step returns up to the end. With ``pg_lam`` the advantage is GAE's."""
    rollout, _ = make_rollout(24, HORIZON, next_step=True)
    record(rollout, [Column(i, True) for i in range(24)], HORIZON, random.Random(3), KINDS)
    segment, rows = arguments(rollout)
    out = vtrace(torch.zeros(HORIZON, 24), rows, VtraceConfig(), lam, pg_lam=lam)
    torch.testing.assert_close(out.target, lambda_returns(rows, lam))
    torch.testing.assert_close(out.advantage, gae(rows, lam))
    assert (out.weight == 1).all()
    assert 0 < segment.mask.mean() < 1


def test_ratios_beyond_every_bound_stay_finite():
    log_ratio = torch.tensor([[200.0], [-200.0], [float("inf")]])
    one = torch.ones(3, 1)
    out = vtrace(log_ratio, ValuedRows(one, 0.9 * one, one, one, one, one), VtraceConfig())
    assert all(t.isfinite().all() for t in out)
    assert out.weight.flatten().tolist() == [1, 0, 1]
