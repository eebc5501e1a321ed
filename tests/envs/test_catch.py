"""Catch, the pixel task of the learning tests: known returns, and one frame is not enough to play it."""

import pytest
import torch

from pql.envs.catch import Catch


def mean_return(env, act):
    """Of the first episode of every environment."""
    env.reset(0)
    total = torch.zeros(env.spec.num_envs)
    for _ in range(env.size - 1):
        step = env.step(act())
        total += step.reward
    assert step.terminated.all()
    return total.mean().item()


def test_the_best_return_is_1_and_random_actions_are_far_from_it():
    env, gen = Catch(20_000), torch.Generator().manual_seed(1)
    assert mean_return(env, env.optimal_action) == 1.0
    assert mean_return(env, lambda: torch.randint(3, (20_000,), generator=gen)) == pytest.approx(-0.73, abs=0.02)


def test_the_newest_frame_alone_does_not_show_where_the_ball_goes():
    env = Catch(20_000)

    def chase_what_is_seen():
        frame = env.observe(env._state)[:, -1]
        ball = frame[:, :-1].flatten(1).long().argmax(1) % env.size
        return (ball - frame[:, -1].long().argmax(1)).sign() + 1

    assert mean_return(env, chase_what_is_seen) < -0.4


def test_frames_show_a_ball_that_is_mirrored_at_the_walls():
    """The same episodes played with a column and a sign; each observation is two frames of them."""
    env, gen = Catch(500), torch.Generator().manual_seed(2)
    env.reset(3)
    size, far = env.size, env.size - 1
    balls = []
    for phase, drift in env._state[:, :2].tolist():
        back = phase >= far
        balls.append([int(2 * far - phase if back else phase), (-1 if back else 1) * int(drift)])
    paddles, frames, bounced = [size // 2] * 500, [torch.zeros(500, size, size), None], 0
    for row in range(size):
        new = torch.zeros(500, size, size)
        for i, (x, _) in enumerate(balls):
            new[i, row, x] = new[i, far, paddles[i]] = 255
        frames = [frames[1] if row else frames[0], new]
        if row < far:
            assert torch.equal(env.observe(env._state).float(), torch.stack(frames, 1))
            action = torch.randint(3, (500,), generator=gen)
            step = env.step(action)
            for i, ball in enumerate(balls):
                if not 0 <= ball[0] + ball[1] <= far:
                    ball[1], bounced = -ball[1], bounced + 1
                ball[0] += ball[1]
                paddles[i] = min(max(paddles[i] + int(action[i]) - 1, 0), far)
    assert torch.equal(step.final_obs["policy"].float(), torch.stack(frames, 1))
    caught = torch.tensor([ball[0] == paddle for ball, paddle in zip(balls, paddles, strict=True)])
    assert torch.equal(step.reward, 2 * caught.float() - 1)
    assert torch.equal(step.log["success"], caught.float())
    assert bounced > 100


def test_a_picture_shows_ball_and_paddle():
    pytest.importorskip("PIL")
    env = Catch(3)
    env.reset(0)
    assert env.render(0, 80, 90).shape == (90, 80, 3)
    env._state[1, 3] = 0
    assert (env.render(1, 80, 90) != env.render(0, 80, 90)).any()
