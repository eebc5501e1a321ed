"""The gymnasium adapter on a deterministic environment in which every off-by-one error shows."""

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402

from pql.contract.conformance import check_env  # noqa: E402
from pql.contract.env import Box, Discrete, ObsSpec, make_env  # noqa: E402
from pql.envs.adapters.gymnasium import GymnasiumVec  # noqa: E402
from pql.errors import ConfigError  # noqa: E402
from pql.remote.actor.gymnasium import GymnasiumSim  # noqa: E402
from pql.remote.env import spec_of  # noqa: E402
from pql.remote.process.far_build import describe_simulator  # noqa: E402
from pql.remote.protocol import check_facts  # noqa: E402


class Probe(gymnasium.Env):
    """obs = [seed, episode, step, last action...], in one array that it reuses. Episodes last 3, 4, 5, 6, 3, ... rows:
    those of 6 end by the limit of 6, that of 5 with both flags set."""

    action_space = spaces.Box(np.array([-2.0, 0.0]), np.array([1.0, 10.0]), dtype=np.float64)
    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def __init__(self):
        self.obs, self.episode = np.zeros(5), -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.obs[0], self.episode = seed, -1
        self.episode += 1
        self.obs[1:] = (self.episode, 0, 0, 0)
        return self.obs, {}

    def step(self, action):
        self.obs[2:] = (self.obs[2] + 1, *action)
        last = self.obs[2] >= 3 + self.episode % 4
        return self.obs, float(self.obs[2] + action[1]), bool(last and self.episode % 4 < 3), self.obs[2] == 5, {}


class Other(gymnasium.Env):
    """Takes its spaces as keywords."""

    def __init__(self, obs=None, action=None):
        self.observation_space = obs or spaces.Box(-1, 1, (2,))
        self.action_space = action or spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


gymnasium.register("PqlProbe-v0", Probe, max_episode_steps=6, disable_env_checker=True)
gymnasium.register("PqlOther-v0", Other, disable_env_checker=True)


def history(env, steps, seed=10):
    """Per environment, its valid rows; the action depends on the observation alone, so modes can be compared."""
    obs = env.reset(seed)["policy"]
    rows = [[] for _ in range(env.spec.num_envs)]
    for _ in range(steps):
        step = env.step(torch.stack((obs[:, 2] / 10, obs[:, 1] / 10), 1))
        for i in range(env.spec.num_envs):
            if step.valid[i]:
                fields = (obs[i], step.reward[i], step.terminated[i], step.truncated[i], step.final_obs["policy"][i])
                rows[i].append([f.tolist() for f in fields])
        obs = step.obs["policy"]
    env.close()
    return rows


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_both_autoreset_modes_tell_the_same_story(vectorization):
    modes = ("same_step", "next_step")
    one, other = (
        history(GymnasiumVec(2, id="PqlProbe-v0", autoreset=mode, vectorization=vectorization), 30) for mode in modes
    )
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert len(a) == 30
        assert 20 <= len(b) < 30
        assert a[: len(b)] == b
        ends = [(row[0][1], row[4][2], row[2], row[3]) for row in a if row[2] or row[3]]
        # (episode, last step, terminated, truncated): both flags at step 5 of episode 2, where terminated wins
        assert ends[:3] == [(0, 3, True, False), (1, 4, True, False), (2, 5, True, False)]
        assert ends[3] == (3, 5, False, True)
        assert all(row[4][0] == 10 + i for row in a)  # copy i is seeded with seed + i
        assert all(row[4][1] == row[0][1] for row in a)  # the final observation is the episode's own


def test_filler_rows_carry_nothing():
    env = GymnasiumVec(1, id="PqlProbe-v0")
    env.reset(0)
    steps = [env.step(torch.zeros(1, 2)) for _ in range(5)]
    shown = [[bool(f) for f in (s.terminated, s.truncated, s.first, s.valid)] for s in steps]
    assert shown[1:] == [
        [False, False, False, True],
        [True, False, False, True],
        [False, False, True, False],
        [False, False, False, True],
    ]
    assert steps[2].obs["policy"][0, 1:3].tolist() == [0, 3]
    assert steps[3].obs["policy"][0, 1:3].tolist() == [1, 0]


def test_reset_in_the_middle_forgets_the_pending_filler():
    env = GymnasiumVec(1, id="PqlProbe-v0")
    env.reset(0)
    for _ in range(3):
        step = env.step(torch.zeros(1, 2))
    assert step.terminated.item()
    env.reset()
    assert env.step(torch.zeros(1, 2)).valid.item()


@pytest.mark.parametrize(
    ("action", "applied"),
    [([-1, -1], [-2, 0]), ([1, 1], [1, 10]), ([0, 0], [-0.5, 5]), ([0.5, -0.5], [0.25, 2.5]), ([-7, 7], [-2, 10])],
)
def test_actions_are_clamped_and_rescaled_to_the_bounds(action, applied):
    env = GymnasiumVec(1, id="PqlProbe-v0")
    env.reset(0)
    given = torch.tensor([action], dtype=torch.float32)
    step = env.step(given)
    assert step.obs["policy"][0, 3:].tolist() == applied
    assert step.reward.item() == 1 + applied[1]
    assert given.tolist() == [action]


def test_returned_tensors_are_copies():
    env = GymnasiumVec(2, id="PqlProbe-v0", autoreset="same_step")
    env.reset(0)
    one = env.step(torch.zeros(2, 2))
    env.step(torch.ones(2, 2))
    assert one.obs["policy"][:, 2:].tolist() == [[1, -0.5, 5]] * 2
    assert one.reward.tolist() == [6, 6]


def test_spec_reads_limit_and_spaces():
    spec = GymnasiumVec.describe(3, id="PqlProbe-v0")
    assert spec.max_episode_steps == 6
    assert spec.obs == {"policy": ObsSpec((5,))}  # float64 becomes float32
    assert spec.action == Box(2, (-2.0, 0.0), (1.0, 10.0))
    assert spec.autoreset == "next_step"
    assert GymnasiumVec.describe(3, id="PqlProbe-v0", kwargs={"max_episode_steps": 4}).max_episode_steps == 4
    assert GymnasiumVec.describe(3, id="PqlOther-v0").max_episode_steps is None
    env = GymnasiumVec(1, id="PqlProbe-v0", kwargs={"max_episode_steps": 2})
    env.reset(0)
    assert [env.step(torch.zeros(1, 2)).truncated.item() for _ in range(2)] == [False, True]


def test_dict_observations_become_groups_and_bytes_stay_bytes():
    space = spaces.Dict({"policy": spaces.Box(0, 255, (4, 3), np.uint8), "critic": spaces.Box(-1, 1, (2,))})
    env = GymnasiumVec(2, id="PqlOther-v0", kwargs={"obs": space, "max_episode_steps": 2}, autoreset="same_step")
    assert env.spec.obs == {"policy": ObsSpec((4, 3), torch.uint8), "critic": ObsSpec((2,))}
    env.reset(0)
    for _ in range(2):
        step = env.step(torch.zeros(2, 1))
    assert step.truncated.all()
    for obs in (step.obs, step.final_obs):
        assert obs["policy"].shape == (2, 4, 3)
        assert obs["policy"].dtype == torch.uint8
        assert obs["critic"].abs().max() <= 1
    assert (step.obs["critic"] != step.final_obs["critic"]).all()


def test_discrete_actions_begin_where_the_space_begins():
    env = GymnasiumVec(3, id="CartPole-v1", autoreset="same_step")
    assert env.spec.action == Discrete(2)
    assert check_env(env, 60).ok
    env = GymnasiumVec(2, id="PqlOther-v0", kwargs={"action": spaces.Discrete(3, start=-1)})
    assert env.spec.action == Discrete(3, start=-1)
    assert env._rescale(torch.tensor([0, 2])).tolist() == [-1, 1]
    sim = GymnasiumSim(2, id="PqlOther-v0", kwargs={"action": spaces.Discrete(3, start=-1)})
    facts = check_facts(describe_simulator(sim.spec))  # as a remote actor sends them
    assert spec_of(facts, 2, torch.device("cpu"), 1).action == Discrete(3, start=-1)


def other(**kwargs):
    return {"id": "PqlOther-v0", "kwargs": kwargs}


REFUSED = [
    (other(action=spaces.MultiDiscrete([2, 3])), r"^action_space=MultiDiscrete.* or Discrete$"),
    (other(action=spaces.Box(-np.inf, 1, (2,))), r"^action_space=Box\(-inf, 1"),
    (other(action=spaces.Box(0, 3, (2,), np.int64)), r"^action_space=Box\(0, 3, \(2,\), int64"),
    (other(obs=spaces.Discrete(4)), r"^observation_space=Discrete\(4\)"),
    (other(obs=spaces.Box(0, 9, (2,), np.int32)), r"^observation_space=Box\(0, 9, \(2,\), int32"),
    (other(obs=spaces.Dict({"state": spaces.Box(0, 1, (2,))})), r"^observation_space=Dict\('state'.*'policy'"),
    (other(colour="red"), r"^kwargs=.*colour"),
    ({"id": "Pendulm-v1"}, r"^id=Pendulm-v1: .*did you mean Pendulum-v1\?"),
    ({"id": "Pendulum-v99"}, r"^id=Pendulum-v99: .*Pendulum-v1"),
    ({"autoreset": "disabled"}, r"^autoreset=disabled: expected next_step or same_step"),
    ({"vectorization": "ray"}, r"^vectorization=ray: expected sync or async"),
    ({"num_envs": 0}, r"^num_envs=0"),
    ({"autorest": "same_step"}, r"^autorest=same_step: .*did you mean autoreset\?"),
]


@pytest.mark.parametrize(("kwargs", "message"), REFUSED)
def test_refusals_name_the_setting_and_the_space(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make_env("gymnasium", **{"num_envs": 2, "id": "Pendulum-v1", **kwargs})
