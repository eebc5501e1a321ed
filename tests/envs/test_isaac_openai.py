"""The Shadow Hand in OpenAI's form: slow targets, pushes, episode ends, observations of policy and critic."""

import pytest
import torch
from torch import Tensor

# ruff: noqa: E402
mujoco = pytest.importorskip("mujoco")  # first: the imports below need it

from mujoco_runs import build, needs, random_actions

from pql.envs.mujoco.env import MujocoVec
from pql.envs.mujoco.isaac.measure import product
from pql.envs.mujoco.isaac.shadow_openai import DECAY, ShadowHandOpenAI

NAME = "shadow_hand_openai"
pytestmark = [
    pytest.mark.usefixtures("scratch"),
    needs("shadow_hand"),
]
DOUBLE = torch.float64


def task_of(env: MujocoVec) -> ShadowHandOpenAI:
    assert isinstance(env.task, ShadowHandOpenAI)
    return env.task


def place_cube(env: MujocoVec, turned: list[float]) -> None:
    """Cubes into their place, at rest, turned so far from their goals."""
    task, n = task_of(env), env.spec.num_envs
    angle = torch.tensor(turned, dtype=DOUBLE)[:, None] / 2
    turn = torch.cat((angle.cos(), angle.sin(), torch.zeros(n, 2)), 1)
    qpos = env.engine.fields["qpos"].clone()
    qpos[:, 24:] = torch.cat((task.goal_place.expand(n, 3), product(turn, env._memory["goal"])), 1)
    everyone = env.engine.rows(torch.ones(n, dtype=torch.bool))
    env.engine.reset(everyone, qpos, torch.zeros_like(env.engine.fields["qvel"]))


def remember(env: MujocoVec, **values: list[float]) -> None:
    env._memory = {**env._memory, **{name: torch.tensor(value, dtype=DOUBLE) for name, value in values.items()}}


def test_targets_are_moving_averages_of_what_was_asked_for() -> None:
    env = build(NAME, 2)
    env.reset(seed=0)
    qpos, model = env.engine.fields["qpos"], env.model
    low, high = torch.tensor(model.actuator_ctrlrange[:20]).unbind(1)
    target = qpos[:, torch.tensor(model.actuator_trnid[:20, 0]).long()].clone()  # begins where the hand is
    for action in random_actions(env, 5):
        step = env.step(action)
        target = 0.3 * (low + (action.double() + 1) / 2 * (high - low)) + 0.7 * target
        torch.testing.assert_close(env.engine.fields["ctrl"][:, :20], target)
        torch.testing.assert_close(step.obs["policy"][:, 22:], action, atol=1e-5, rtol=0)
        cost = -0.0002 * action.square().sum(1)
        torch.testing.assert_close(step.log["action_cost"], cost, atol=1e-6, rtol=1e-5)


def test_each_term_of_the_reward_and_each_end() -> None:
    # a success within .4, one step before time runs out; no success, the same; a fall; a fall then; the 50th success
    env = build(NAME, 5)
    env.reset(seed=0)
    place_cube(env, [0.35, 0.45, 2.0, 2.0, 0.1])
    qpos = env.engine.fields["qpos"].clone()
    qpos[2:4, 24:27] += torch.tensor([0.0, -0.3, 0.0])
    env.engine.reset(env.engine.rows(torch.ones(5, dtype=torch.bool)), qpos, torch.zeros(5, env.model.nv))
    remember(env, idle=[158.0, 158.0, 3.0, 158.0, 7.0], count=[3.0, 3.0, 3.0, 3.0, 49.0])
    step = env.step(torch.zeros(5, 20))
    assert step.log["bonus"].tolist() == [250, 0, 0, 0, 250]
    assert step.log["fall"].tolist() == [0, 0, -50, -50, 0]
    assert step.log["late"].tolist() == [0, -25, 0, -25, 0]
    assert step.terminated.tolist() == [False, False, True, True, True]
    assert step.truncated.tolist() == [False, True, False, False, False]
    parts = ("distance", "rotation", "action_cost", "bonus", "fall", "late")
    torch.testing.assert_close(sum(step.log[name] for name in parts), step.reward)
    torch.testing.assert_close(step.log["rotation"][:2], 1 / torch.tensor([0.45, 0.55]), atol=0.05, rtol=0)
    assert env._memory["idle"].tolist() == [0, 0, 0, 0, 0]
    assert env._memory["count"].tolist() == [4, 0, 0, 0, 0]


def test_pushes_come_by_chance_and_fade() -> None:
    env = build(NAME, 400)
    env.reset(seed=0)
    chance = env._memory["chance"].log()  # log-uniform between .001 and .1
    low, high = torch.tensor([0.001, 0.1], dtype=DOUBLE).log()
    assert (chance.min() >= low, chance.max() <= high) == (True, True)
    assert chance.mean() == pytest.approx(float(low + high) / 2, abs=0.2)
    task = task_of(env)
    remember(env, chance=[[1.0]] * 400)
    first = task.evolve(env.engine.fields, env._memory, env._draw)["push"]
    mass = env.model.body("object").mass[0]
    assert first.std() == pytest.approx(mass, rel=0.1)
    assert first.mean().abs() < 0.1 * mass
    remember(env, chance=[[0.0]] * 400)
    env._memory = {**env._memory, "push": first}
    faded = task.evolve(env.engine.fields, env._memory, env._draw)["push"]
    torch.testing.assert_close(faded, first * DECAY)
    assert pytest.approx(0.9979, abs=1e-4) == DECAY


def test_a_push_acts_along_the_blocks_axes_and_is_no_part_of_the_robots_gain() -> None:
    env = build(NAME, 2, randomize={"gain": [0.5, 0.5]})
    env.reset(seed=0)
    qpos = env.engine.fields["qpos"].clone()
    qpos[:, 24:27] = torch.tensor([0.0, -0.39, 3.0], dtype=DOUBLE)  # in the air
    qpos[:, 27:] = torch.tensor([0.5**0.5, 0.0, 0.0, 0.5**0.5], dtype=DOUBLE)  # its x is the world's y
    env.engine.reset(env.engine.rows(torch.ones(2, dtype=torch.bool)), qpos, torch.zeros(2, env.model.nv))
    remember(env, push=[[0.3, 0.0, 0.0], [0.0, 0.0, 0.0]], chance=[[0.0], [0.0]])
    env.engine.step(env.task.control(torch.zeros(2, 20, dtype=DOUBLE), env.engine.fields, env._memory), 12)
    velocity = env.engine.fields["qvel"][:, 24:27]
    gained = (velocity[0] - velocity[1]) * env.model.body("object").mass[0]
    torch.testing.assert_close(gained, torch.tensor([0.0, 0.1 * env.task.dt, 0.0], dtype=DOUBLE), atol=1e-6, rtol=1e-3)
    assert env._randomizer is not None
    assert env._randomizer.factors["gain"].tolist() == [[0.5] * 20 + [1.0] * 3] * 2


def hidden(seen: dict[str, Tensor], noise: float) -> Tensor:
    """By how much the policy's view departs from the critic's, in units of the noise."""
    return (seen["policy"][:, 15:18] - seen["critic"][:, 72:75]) / noise


def test_the_preset_randomises_and_the_critic_sees_the_truth() -> None:
    from pql.config.compose import compose
    from pql.run.environment import build_env

    env = build_env(compose(["device=cpu", f"task={NAME}", "num_envs=300"]))
    off = hidden(env.reset(0), 0.002)
    assert off.std() == pytest.approx(1.0, abs=0.1)
    env.close()
