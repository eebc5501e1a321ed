"""``gymnasium.make("pql/...")``: single environments of every shipped task."""

from dataclasses import replace

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env  # noqa: E402

import pql  # noqa: E402
import pql.wrap.gymnasium_ids as ids  # noqa: E402
from pql.config.compose import compose  # noqa: E402
from pql.config.layers import Presets  # noqa: E402
from pql.contract.env import Discrete  # noqa: E402
from pql.envs.catch import Catch  # noqa: E402
from pql.errors import ConfigError  # noqa: E402
from pql.wrap.single import SingleEnv  # noqa: E402

# Presets for simulators of other packages, a task's own name or another machine: nothing to build by an id of ours.
ADAPTERS = {
    "env",
    "envpool",
    "football",
    "gymnasium",
    "isaacgym",
    "isaaclab",
    "maniskill",
    "mjlab",
    "playground",
    "remote",
}
# The others share the classes of these.
EACH_KIND = {
    "HalfCheetah",
    "Ant",
    "IsaacHumanoid",
    "Go1Velocity",
    "BallBalancePixels",
    "FrankaCubeStack",
    "ShadowHandOpenAI",
    "AllegroHand",
    "Pendulum",
    "Catch",
    "TMaze",
    "Pong",
    "Counter",
}


def make(name: str, **kwargs):
    try:
        return gymnasium.make(ids.env_id(name), **{**({"game": "breakout"} if name == "Atari" else {}), **kwargs})
    except ConfigError as error:  # its robot or simulator is not installed
        pytest.skip(str(error))


class FromTwo(Catch):
    """Catch, whose simulator would count its actions from 2."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, device)
        self.spec, self.taken = replace(self.spec, action=Discrete(3, start=2)), []

    def step(self, action):
        self.taken += action.tolist()
        return super().step(action)


def test_a_single_environment_has_the_simulators_discrete_actions():
    env = SingleEnv(compose(["task=env", f"task.name={__name__}:FromTwo", "device=cpu"]))
    assert env.action_space == gymnasium.spaces.Discrete(3, start=2)
    env.reset(seed=0)
    for action in (2, 4, 3):
        env.step(np.int64(action))
    assert env.env.taken == [0, 2, 1]


def test_every_shipped_task_has_an_id():
    assert set(ids.TASKS.values()) == set(Presets().names("task")) - ADAPTERS


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [n if n in EACH_KIND else pytest.param(n, marks=pytest.mark.slow) for n in ids.TASKS])
def test_the_checks_of_gymnasium_and_stable_baselines_pass(name, scratch):
    env = make(name)
    check_env(env.unwrapped, skip_render_check=True)
    pytest.importorskip("stable_baselines3.common.env_checker").check_env(env.unwrapped)
    env.close()


def test_episodes_are_those_of_the_environment_it_holds():
    env, rows = ids.make("pendulum", max_episode_steps=7), pql.make_env("pendulum", 1, max_episode_steps=7)
    obs, want, ends = env.reset(seed=3)[0], rows.reset(3)["policy"], 0
    for t in range(40):
        assert np.array_equal(obs, want[0].numpy())
        action = np.float32([np.sin(t)])
        obs, reward, terminated, truncated, _ = env.step(action)
        step = rows.step(torch.from_numpy(action)[None])
        assert (reward, terminated) == (float(step.reward), False)
        assert truncated == bool(step.truncated)
        if truncated:
            assert np.array_equal(obs, step.final_obs["policy"][0].numpy())  # the episode's last, not the next one's
            obs, ends = env.reset()[0], ends + 1
        want = step.obs["policy"]
    assert ends == 40 // 7


def test_a_reset_in_the_middle_of_an_episode_begins_a_new_one():
    env = gymnasium.make("pql/Counter-v0")
    assert env.reset(seed=0)[0].tolist() == [0, 0]  # episode, step
    assert env.step(env.action_space.sample())[0].tolist() == [0, 1]
    assert env.reset()[0].tolist() == [1, 0]


def test_policies_see_their_own_group_and_critics_groups_are_in_info(scratch):
    env = make("ShadowHandOpenAI")
    obs, info = env.reset(seed=0)
    assert obs.shape == env.observation_space.shape == (42,)
    assert info["critic"].shape == (211,)
    assert env.step(np.zeros(20, np.float32))[4]["critic"].shape == (211,)


def test_pictures_come_where_they_are_asked_for():
    env = gymnasium.make("pql.wrap.gymnasium_ids:pql/Pendulum-v0", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (480, 640, 3)
    assert env.metadata["render_fps"] == 20
    silent = gymnasium.make("pql/Pendulum-v0")
    silent.reset(seed=0)
    assert silent.unwrapped.render() is None
    with pytest.raises(ConfigError, match="render_mode=human: expected rgb_array"):
        gymnasium.make("pql/Pendulum-v0", render_mode="human")


def test_keywords_are_the_tasks_and_others_are_refused():
    with pytest.raises(ConfigError, match=r"max_step=3: expected one of the keywords .*did you mean"):
        gymnasium.make("pql/Pendulum-v0", max_step=3)
    with pytest.raises(ConfigError, match="options="):
        gymnasium.make("pql/Pendulum-v0").reset(options={"x": 1})
