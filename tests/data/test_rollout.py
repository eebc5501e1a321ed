"""Rollouts and returns: every row of synthetic histories against slow oracles; minibatches cover all rows once."""

import random
from dataclasses import replace

import pytest
import torch
from histories import CPU, SPECS, Column, picture, stack
from oracles import gae as gae_oracle
from oracles import known_end, lambda_return

from pql.contract.env import Box, Discrete, EnvSpec
from pql.contract.registry import find_factory
from pql.data.normalize import Normalizer
from pql.data.returns import backward_scan, gae, lambda_returns, valued_rows
from pql.data.rollout import PolicyOutput, Rollout, minibatches, permutations, rollout_bytes, rollout_final_rows

KINDS = ("go", "go", "go", "terminate", "truncate", "lose", "forget", "life", "cut", "restart", "stall")


def make_rollout(num_envs, horizon, next_step=False, normalize=False, carry=0):
    mode = "next_step" if next_step else "same_step"
    spec = EnvSpec("made up", num_envs, SPECS, Box(1), CPU, max_episode_steps=50, autoreset=mode)
    norm = Normalizer(SPECS, num_envs, CPU, normalize, reward_scale=0.5)
    return Rollout(spec, norm, horizon, 2, CPU, carry), norm


def record(rollout, sims, rows, rng, kinds=KINDS):
    """Fill a segment. Returns every column's events."""
    rollout.open(picture([s.now for s in sims]), None)
    events = [[] for _ in sims]
    for t in range(rows):
        new = [s.event(rng.choice(kinds), t % 64 / 8) for s in sims]
        for column, event in zip(events, new, strict=True):
            column.append(event)
        action, step = stack(new)
        rollout.insert(PolicyOutput(action, torch.cat((action, -action), 1), torch.arange(len(sims)) + 100 * t), step)
    return events


def value_of(number):
    """Any function of an observation."""
    return (number * 37 % 101) / 50 - 1


def read(rollout):
    """The segment, and the values of all its observations."""
    segment = rollout.segment()
    return segment, value_of(segment.obs["policy"][..., 0].double()).float()


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_advantages_and_returns_are_the_definitions(next_step, lam):
    horizon, n, gamma, rng = 11, 40, 0.9, random.Random(f"{next_step}{lam}")
    rollout, _ = make_rollout(n, horizon, next_step)
    sims = [Column(i, next_step) for i in range(n)]
    seen = {"masked": 0, "lost": 0, "final": 0, "terminated": 0, "plain": 0}
    for _ in range(2):  # the second segment starts in the middle of episodes, on storage that was used
        events = record(rollout, sims, horizon, rng)
        segment, values = read(rollout)
        rows = valued_rows(segment, gamma, values)
        advantage, returns = gae(rows, lam), lambda_returns(rows, lam)
        lost = 0
        for i, column in enumerate(events):
            for t, e in enumerate(column):
                scaled = [x._replace(reward=0.5 * x.reward) for x in column]
                a, g = (f(scaled, t, value_of, gamma, lam) for f in (gae_oracle, lambda_return))
                assert segment.mask[t, i] == float(a is not None) == float(known_end(column, t))
                gone = e.valid and e.truncated and not e.terminated and a is None
                lost += gone
                if a is None:
                    assert advantage[t, i] == 0
                else:
                    assert advantage[t, i].item() == pytest.approx(a, abs=2e-5)
                    assert returns[t, i].item() == pytest.approx(g, abs=2e-5)
                kind = "lost" if gone else "masked" if a is None else "terminated" if e.terminated else "plain"
                seen["final" if a is not None and e.truncated and not e.terminated else kind] += 1
                assert segment.obs["policy"][t, i, 0] == e.obs
                assert segment.action[t, i].item() == pytest.approx(e.action)
                assert segment.params[t, i].tolist() == pytest.approx([e.action, -e.action])
                assert bool(segment.first[t, i]) == e.first
                assert segment.version[t, i] == 100 * t + i
        assert int(segment.lost) == lost
        assert segment.obs["policy"][horizon, :, 0].tolist() == [s.now for s in sims]
    assert min(seen.values()) > 20, seen


def test_a_scan_is_its_recursion():
    delta, decay = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[0.5], [0.25], [9.0]])
    assert backward_scan(delta, decay).tolist() == [[1 + 0.5 * 3], [2 + 0.25 * 4], [4]]


def test_a_segment_has_no_copy_of_final_observations_that_its_rows_have():
    assert [make_rollout(2, 16, next_step)[0].finals for next_step in (False, True)] == [16, 0]


@pytest.mark.parametrize(("limit", "room"), [(None, 16), (1000, 2), (5, 5), (1, 16)])
def test_room_for_final_observations_of_a_simulator_that_truncates_at_its_limit(limit, room):
    info = {"truncates_at_limit": True}
    spec = EnvSpec("x", 2, SPECS, Box(1), CPU, max_episode_steps=limit, info=info)
    assert rollout_final_rows(16, spec) == room
    assert rollout_final_rows(16, replace(spec, info={})) == 16
    assert rollout_final_rows(16, replace(spec, final_obs="never")) == 0
    for task in ("halfcheetah", "cartpole", "shadow_hand_openai"):  # the last one has a limit of its own
        assert find_factory(task).describe(2, CPU).info["truncates_at_limit"] == (task != "shadow_hand_openai")


def test_more_truncations_than_there_is_room_for_are_counted():
    """They are never bootstrapped from another observation."""
    spec = EnvSpec("x", 30, SPECS, Box(1), CPU, max_episode_steps=11, info={"truncates_at_limit": True})
    rollout = Rollout(spec, Normalizer(SPECS, 30, CPU, False), 11, 2, CPU)
    events = record(rollout, [Column(i, False) for i in range(30)], 11, random.Random(2))
    segment, lost = rollout.segment(), 0
    assert rollout.finals == 2
    for i, column in enumerate(events):
        ends = [t for t, e in enumerate(column) if e.valid and e.truncated and not e.terminated]
        kept = [t for t in ends if column[t].first and column[t].final_ok][:2]
        for t in ends:
            known = t in kept or (column[t].final_ok and not column[t].first)
            assert segment.mask[t, i] == float(known)
            lost += not known
            if known:
                assert segment.obs["policy"][segment.successor[t, i], i, 0] == column[t].final
    assert int(segment.lost) == lost > 20


@pytest.mark.parametrize("saved", [3, 9])
def test_a_segment_of_an_older_release_is_taken(saved):
    """It had room for fewer final observations, or for some with next-step autoreset."""
    rollout, _ = make_rollout(2, 4, next_step=saved == 9)
    store, old = rollout.obs["policy"], torch.arange(2.0 * (4 + 1 + saved + 1)).repeat_interleave(2).view(-1, 2)
    rollout.restore(store, old)
    rows = min(len(store), len(old))
    assert torch.equal(store[:rows], old[:rows])
    assert not store[rows:].any()


@pytest.mark.parametrize("action", [Box(3), Discrete(4)])
def test_bytes_are_those_allocated(action):
    spec = EnvSpec("x", 5, SPECS, action, CPU, max_episode_steps=7)
    rollout = Rollout(spec, Normalizer(SPECS, 5, CPU), 16, 6, CPU)
    stored = [
        *rollout.obs.values(),
        rollout.action,
        rollout.params,
        rollout.reward,
        rollout.flags,
        rollout.final,
        rollout.version,
    ]
    size = sum(t.numel() * t.itemsize for t in (*stored, rollout.final_row))
    assert rollout_bytes(spec, 16, 6) == pytest.approx(size, rel=0.05)


def test_every_epoch_cuts_all_rows_once_in_an_order_of_its_own():
    gen = torch.Generator().manual_seed(0)
    rows = {"x": torch.arange(24), "y": torch.arange(24) * 10.0}
    parts = list(minibatches(rows, 3, 4, 0, gen))
    assert len(parts) == 12
    assert all(p["x"].shape == (6,) and torch.equal(p["y"], p["x"] * 10.0) for p in parts)
    epochs = [torch.cat([p["x"] for p in parts[i : i + 4]]) for i in (0, 4, 8)]
    assert all(e.sort().values.tolist() == list(range(24)) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_minibatches_of_environments_keep_their_rows_together():
    rows = {"x": torch.arange(12).view(3, 4), "carry": torch.arange(4).view(1, 4)}
    parts = list(minibatches(rows, 1, 2, 1, torch.Generator().manual_seed(0)))
    for p in parts:
        assert torch.equal(p["x"], p["carry"] + torch.tensor([[0], [4], [8]]))
    assert sorted(torch.cat([p["carry"] for p in parts], 1)[0].tolist()) == [0, 1, 2, 3]


def test_permutations_are_uniform():
    orders = permutations(6000, 3, torch.Generator().manual_seed(1), CPU)
    counts = torch.unique(orders, dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert (counts - 1000).abs().max() < 150  # five standard deviations
