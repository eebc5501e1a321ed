"""The T-maze: its known returns with and without memory."""

import pytest
import torch

from pql.envs.tmaze import TMaze


def play(env, act, steps):
    """Share of right turns, and mean length, of all episodes that ended by a turn within ``steps`` steps."""
    obs, right, turns = env.reset(0), 0.0, 0.0
    for _ in range(steps):
        step = env.step(act(obs["policy"]))
        obs, right, turns = step.obs, right + step.reward.sum(), turns + step.terminated.sum()
    return float(right / turns), steps * env.spec.num_envs / float(turns)


def test_who_remembers_the_sign_is_always_right_and_who_guesses_half_the_time():
    env, memory, gen = TMaze(500, length=4), torch.zeros(500), torch.Generator().manual_seed(1)

    def remember(obs):
        memory.copy_(torch.where(obs[:, 0] != 0, obs[:, 0], memory))
        return torch.where(obs[:, 1] > 0, torch.where(memory > 0, 1, 2), 0)

    def guess(obs):
        return torch.where(obs[:, 1] > 0, torch.randint(1, 3, (500,), generator=gen), 0)

    assert play(env, remember, 50) == (1.0, 5.0)
    share, _ = play(env, guess, 50)
    assert share == pytest.approx(0.5, abs=0.03)


def test_an_episode_step_by_step():
    env = TMaze(1, length=2)
    obs = env.reset(3)["policy"]
    sign = obs[0, 0].item()
    assert sign in (1, -1)
    right = 1 if sign > 0 else 2
    seen = []
    for action in (right, 0, 3 - right, 0, 0, right):  # turns in the corridor, forward at the junction: nothing
        step = env.step(torch.tensor([action]))
        seen.append((*step.final_obs["policy"][0].tolist(), step.reward.item(), step.terminated.item()))
    assert seen == [
        (sign, 0, 0, False),
        (0, 0, 0, False),
        (0, 0, 0, False),
        (0, 1, 0, False),
        (0, 1, 0, False),
        (0, 1, 1, True),
    ]
    assert step.log["success"].item() == 1
    assert step.obs["policy"][0, 0].abs() == 1


def test_who_stands_still_is_cut_off():
    env = TMaze(3, length=2)
    env.reset(0)
    for t in range(1, 13):
        step = env.step(torch.ones(3, dtype=torch.int64))
        assert step.truncated.tolist() == [t == 12] * 3
        assert not step.reward.any()


def test_a_picture_shows_where_it_is():
    pytest.importorskip("PIL")
    env = TMaze(2)
    env.reset(0)
    before = env.render(0, 120, 60)
    env.step(torch.zeros(2, dtype=torch.int64))
    assert before.shape == (60, 120, 3)
    assert (env.render(0, 120, 60) != before).any()
