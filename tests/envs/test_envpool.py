"""The EnvPool adapter, with EnvPool itself if it is installed (``pip install 'pql-rl[bench]'``)."""

import numpy as np
import pytest
import torch

from pql.contract.conformance import check_env
from pql.contract.env import Discrete, ObsSpec, make_env
from pql.errors import ConfigError

pytest.importorskip("envpool")


def make(id, num_envs=4, **kwargs):
    return make_env("envpool", num_envs, id=id, threads=1, kwargs=kwargs)


@pytest.mark.parametrize(("id", "limit"), [("Pendulum-v1", 20), ("CartPole-v1", 30), ("HalfCheetah-v5", 15)])
def test_its_tasks_conform(id, limit, conforms):
    env = make(id, max_episode_steps=limit)
    untested = conforms(env, 50)
    env.close()
    discrete = {"action_range"} if isinstance(env.spec.action, Discrete) else set()
    assert untested == {"final_obs_kept", "stack", "state_dict", "groups", "capturable", "describe"} | discrete
    assert env.spec.max_episode_steps == limit


def test_pixels_stay_bytes():
    env = make("Pong-v5", 2)
    obs = env.reset(0)
    step = env.step(torch.zeros(2, dtype=torch.int64))
    env.close()
    assert obs["policy"].dtype == step.obs["policy"].dtype == torch.uint8
    assert env.spec.obs["policy"].shape == (4, 84, 84)


def test_actions_reach_the_bounds():
    """Pendulum's torque is within +-2, and pays -0.001 torque^2 at once."""
    env = make("Pendulum-v1")
    rewards = []
    for push in (-7.0, 0.0, 0.5, 1.0):
        env.reset(1)
        rewards.append(env.step(torch.full((4, 1), push)).reward)
    env.close()
    torque = torch.tensor([-2.0, 0.0, 1.0, 2.0])
    expected = rewards[1] - 0.001 * torque[:, None].square()
    torch.testing.assert_close(torch.stack(rewards), expected, atol=1e-5, rtol=0)
    assert np.unique(rewards[1].numpy()).size == 4


def test_seeds_are_obeyed_and_mistakes_named():
    env = make("Pendulum-v1")
    one, two, other = (env.reset(seed)["policy"] for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not torch.equal(env.reset()["policy"], other)
    env.close()
    with pytest.raises(ConfigError, match=r"id=Pendulum-v7: expected one of EnvPool's .* \(did you mean Pendulum-v\d"):
        make("Pendulum-v7")
    with pytest.raises(ConfigError, match=r"kwargs=.*speed.*: expected keywords that Pendulum-v1 takes"):
        make("Pendulum-v1", speed=3)


def test_football_conforms():
    """Google Research Football: the super mini map, [72, 96, 4] bytes, channels last as its papers have it."""
    env = make("gfootball/academy_empty_goal_close-v1", 1, max_episode_steps=12)
    report = check_env(env, 30)
    env.close()
    assert report.ok, report
    assert env.spec.max_episode_steps == 13
    assert {r.name for r in report.results if r.ok} >= {"time_limit", "filler", "determinism"}
    assert env.spec.obs["policy"] == ObsSpec((72, 96, 4), torch.uint8)
    assert env.spec.action == Discrete(19)


def test_neighbouring_seeds_share_no_environment():
    """EnvPool seeds environment i with seed + i, so that all but one would be the same."""
    env = make("Pendulum-v1")
    starts = {tuple(row) for seed in range(3) for row in env.reset(seed)["policy"].tolist()}
    env.close()
    assert len(starts) == 12
