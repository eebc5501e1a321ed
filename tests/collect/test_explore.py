"""Exploration noise: scales, run lengths, restoring."""

from itertools import pairwise

import pytest
import torch
from oracles import chi_square_fits, zeta_pmf

from pql.collect.exploration import REPEAT_MAX, Exploration
from pql.config.groups import ExploreConfig

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noises(explore, steps, gen, action=None):
    """[steps, N, A] of what is added to ``action`` (default: zero)."""
    action = torch.zeros_like(explore.noise) if action is None else action
    return torch.stack([explore(action, gen) - action for _ in range(steps)])


def test_mixed_noise_is_a_fixed_ladder():
    explore = Exploration(ExploreConfig("mixed", 0.05, 0.8), 6, 2, CPU)
    want = [0.05 + 0.75 * i / 5 for i in range(6)]
    assert explore.sigma.squeeze(1).tolist() == pytest.approx(want, abs=1e-7)
    # Far enough from the clamp the noise has that scale: 0.05 .. 0.2.
    explore = Exploration(ExploreConfig("mixed", 0.05, 0.2), 6, 2, CPU)
    for _ in range(3):
        explore.observe(torch.ones(6, dtype=torch.bool))  # episodes do not change it
        noise = noises(explore, 2000, generator())
        want = torch.linspace(0.05, 0.2, 6)
        torch.testing.assert_close(noise.std((0, 2)), want, rtol=0.06, atol=0)
        assert noise.mean((0, 2)).abs().max() < 0.02


@pytest.mark.parametrize("num_envs", [1, 5])
def test_fixed_noise_has_one_scale(num_envs):
    explore = Exploration(ExploreConfig("fixed", 0.1, 0.9), num_envs, 3, CPU)
    assert explore.sigma.tolist() == [[pytest.approx(0.1)]] * num_envs
    noise = noises(explore, 3000, generator())
    torch.testing.assert_close(noise.std((0, 2)), torch.full((num_envs,), 0.1), rtol=0.05, atol=0)
    # Independent from step to step and between action dimensions.
    assert (noise[1:] * noise[:-1]).mean().abs() < 0.1 * 0.01
    assert (noise[..., 0] * noise[..., 1]).mean().abs() < 0.1 * 0.01


def test_redrawn_noise_changes_scale_only_where_an_episode_begins():
    explore, gen = Exploration(ExploreConfig("redrawn", 0.1, 0.4), 500, 1, CPU), generator()
    action = torch.zeros(500, 1)
    explore(action, gen)
    first = explore.sigma.clone()
    assert 0.1 <= first.min() < 0.11
    assert 0.39 < first.max() <= 0.4
    assert first.mean().item() == pytest.approx(0.25, abs=5 * 0.3 / 12**0.5 / 500**0.5)
    assert chi_square_fits(((first - 0.1) / 0.03).long().clamp(max=9).flatten().bincount().tolist(), [50] * 10)
    explore.observe(torch.zeros(500, dtype=torch.bool))
    for _ in range(3):
        explore(action, gen)
        assert torch.equal(explore.sigma, first)
    begins = torch.arange(500) % 3 == 0
    explore.observe(begins)
    explore(action, gen)
    assert torch.equal((explore.sigma != first).squeeze(1), begins)
    assert explore.sigma.min() >= 0.1
    assert explore.sigma.max() <= 0.4


def test_a_redraw_that_no_action_has_used_yet_is_not_forgotten():
    """The warm-up observes steps and draws no noise: every sigma is still to be drawn when it ends."""
    explore, gen = Exploration(ExploreConfig("redrawn", 0.1, 0.4), 500, 1, CPU), generator()
    for _ in range(4):
        explore.observe(torch.zeros(500, dtype=torch.bool))
    explore(torch.zeros(500, 1), gen)
    assert explore.sigma.mean().item() == pytest.approx(0.25, abs=5 * 0.3 / 12**0.5 / 500**0.5)
    drawn = explore.sigma.clone()
    begins = torch.arange(500) % 2 == 0
    explore.observe(begins)
    explore.observe(~begins & (torch.arange(500) < 100))  # two steps, and an action after both
    explore(torch.zeros(500, 1), gen)
    assert torch.equal((explore.sigma != drawn).squeeze(1), begins | (torch.arange(500) < 100))


def test_repeated_noise_runs_follow_zeta_2():
    explore, num_envs, steps = Exploration(ExploreConfig("fixed", 0.1, 0.1, repeat=True), 50, 2, CPU), 50, 1500
    noise = noises(explore, steps, generator())
    counts = [0] * REPEAT_MAX
    for i in range(num_envs):
        changed = (noise[1:, i] != noise[:-1, i]).any(-1)
        starts = [0, *(torch.nonzero(changed).squeeze(1) + 1).tolist()]
        for one, two in pairwise(starts):  # the last run is cut off by the end
            counts[two - one - 1] += 1
    assert REPEAT_MAX == 16
    pmf = zeta_pmf(2, 16)
    assert sum(counts) > 20_000
    assert chi_square_fits(counts, [p * sum(counts) for p in pmf])
    assert counts[15] > 0


def test_a_stochastic_policys_noise_is_held_as_long():
    """With kind=none the policy's own noise is held; with another kind, or without repeat, it is new in every step."""
    explore, gen = Exploration(ExploreConfig("none", repeat=True), 50, 2, CPU), generator()
    like = torch.zeros(50, 2)
    noise = torch.stack([explore.policy_noise(like, gen).clone() for _ in range(1500)])
    changed = (noise[1:] != noise[:-1]).any(-1)
    mean_length = sum(k**-1 for k in range(1, 17)) / sum(k**-2 for k in range(1, 17))  # of k, P(k) ~ k^-2
    assert changed.float().mean().item() == pytest.approx(1 / mean_length, rel=0.03)
    assert noise.std().item() == pytest.approx(1.0, rel=0.02)
    for config in (ExploreConfig("none"), ExploreConfig("mixed", 0.1, 0.4, repeat=True)):
        explore, gen = Exploration(config, 50, 2, CPU), generator()
        first, second = explore.policy_noise(like, gen).clone(), explore.policy_noise(like, gen)
        assert (first != second).all()


def test_scaled_noise_is_that_of_the_policy_times_a_ladder_of_factors():
    """Environment 0 acts without noise; no noise is added to the sampled action, and no number drawn for that."""
    explore, gen = Exploration(ExploreConfig("scaled", 0.0, 1.5), 7, 2, CPU), generator()
    like, want = torch.zeros(7, 2), torch.arange(7).unsqueeze(1) / 4
    torch.testing.assert_close(explore.policy_noise(like, gen), want * torch.randn(7, 2, generator=generator()))
    noise = torch.stack([explore.policy_noise(like, gen) for _ in range(4000)])
    torch.testing.assert_close(noise.std((0, 2)), want.squeeze(1), rtol=0.04, atol=1e-12)
    for one in (explore, Exploration(ExploreConfig("none", 0.5, 0.5), 7, 2, CPU)):
        before = gen.get_state()
        assert torch.equal(one(torch.full((7, 2), 3.0), gen), torch.full((7, 2), 3.0))
        assert torch.equal(gen.get_state(), before)


def test_scaled_noise_is_held_before_it_is_scaled():
    held, free = (Exploration(ExploreConfig(kind, 0.5, 1.0, repeat=True), 6, 2, CPU) for kind in ("scaled", "none"))
    one, two, like = generator(), generator(), torch.zeros(6, 2)
    factors = torch.linspace(0.5, 1.0, 6).unsqueeze(1)
    for _ in range(50):
        torch.testing.assert_close(held.policy_noise(like, one), factors * free.policy_noise(like, two))


def test_noise_is_clamped_to_the_action_range_and_changes_no_input():
    explore, action = Exploration(ExploreConfig("fixed", 5.0, 5.0), 100, 3, CPU), torch.zeros(100, 3)
    out = explore(action, generator())
    assert not action.any()
    assert (out.min(), out.max()) == (-1, 1)
    assert (out.abs() == 1).float().mean() > 0.7


def test_part_of_scaled_noise_has_the_factors_of_its_environments():
    explore = Exploration(ExploreConfig("scaled", 0.0, 1.0), 9, 2, CPU)
    noise = explore.part(slice(6, 9)).policy_noise(torch.zeros(3, 2), generator())
    torch.testing.assert_close(noise, torch.randn(3, 2, generator=generator()) * torch.tensor([[0.75], [0.875], [1.0]]))


@pytest.mark.parametrize("kind", ["mixed", "redrawn"])
def test_state_restores_in_place_and_continues_bit_for_bit(kind):
    one, two = (Exploration(ExploreConfig(kind, 0.1, 0.4, repeat=True), 6, 2, CPU) for _ in range(2))
    gen = generator()
    noises(one, 7, gen)
    one.observe(torch.arange(6) % 2 == 0)
    noises(two, 3, generator(9))
    addresses = [t.data_ptr() for t in two.state_dict().values()]
    two.load_state_dict({k: t.clone() for k, t in one.state_dict().items()})
    assert [t.data_ptr() for t in two.state_dict().values()] == addresses
    again = generator()
    again.set_state(gen.get_state())
    assert torch.equal(noises(one, 20, gen), noises(two, 20, again))
