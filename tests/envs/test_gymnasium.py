"""The gymnasium adapter on a deterministic environment in which every off-by-one error shows."""

import json

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402
from gymnasium.vector.utils import batch_space  # noqa: E402

import pql  # noqa: E402
from pql.config.compose import compose  # noqa: E402
from pql.config.trust import check_task  # noqa: E402
from pql.contract.conformance import check_env  # noqa: E402
from pql.contract.env import Box, Discrete, MultiDiscrete, ObsSpec, adapted, make_env  # noqa: E402
from pql.contract.optional import PartialReset, supports  # noqa: E402
from pql.envs.adapters.gymnasium import GymnasiumVec  # noqa: E402
from pql.envs.adapters.gymnasium_copies import gymnasium_sim  # noqa: E402
from pql.envs.adapters.gymnasium_host import copy_seeds, simulator_action  # noqa: E402
from pql.errors import ConfigError, RunError  # noqa: E402
from pql.remote.env import spec_of  # noqa: E402
from pql.remote.process.far_build import describe_simulator  # noqa: E402
from pql.remote.protocol import Layout, ProtocolError, check_facts, unpack  # noqa: E402


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
    kinds = [{"autoreset": mode, "vectorization": vectorization} for mode in ("same_step", "next_step")]
    assert [check_env(GymnasiumVec(2, id="PqlProbe-v0", **kind), 30).failed for kind in kinds] == [[], []]
    one, other = (history(GymnasiumVec(2, id="PqlProbe-v0", **kind), 30) for kind in kinds)
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert len(a) == 30
        assert 20 <= len(b) < 30
        assert a[: len(b)] == b
        ends = [(row[0][1], row[4][2], row[2], row[3]) for row in a if row[2] or row[3]]
        # (episode, last step, terminated, truncated): both flags at step 5 of episode 2, where terminated wins
        assert ends[:3] == [(0, 3, True, False), (1, 4, True, False), (2, 5, True, False)]
        assert ends[3] == (3, 5, False, True)
        assert all(row[4][0] == np.float32(copy_seeds(10, 2)[i]) for row in a)
        assert all(row[4][1] == row[0][1] for row in a)  # the final observation is the episode's own


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
    assert simulator_action(env.sim.envs.single_action_space, np.array([0, 2])).tolist() == [-1, 1]
    sim = gymnasium_sim(2, id="PqlOther-v0", kwargs={"action": spaces.Discrete(3, start=-1)})
    facts = check_facts(describe_simulator(sim.spec))  # as a remote actor sends them
    assert spec_of(facts, 2, torch.device("cpu"), 1).action == Discrete(3, start=-1)


@pytest.mark.parametrize(
    ("space", "spec", "given", "taken"),
    [
        (spaces.MultiDiscrete([3, 2], start=[-1, 4]), MultiDiscrete((3, 2), (-1, 4)), [[2, 0]], [[1, 4]]),
        (spaces.MultiDiscrete([[3, 2], [4, 5]]), MultiDiscrete((3, 2, 4, 5)), [[0, 1, 2, 3]], [[[0, 1], [2, 3]]]),
        (spaces.MultiBinary((3, 1)), MultiDiscrete((2, 2, 2)), [[1, 0, 1]], [[[1], [0], [1]]]),
    ],
)
def test_several_discrete_actions_have_the_shape_and_the_start_of_their_space(space, spec, given, taken):
    env = GymnasiumVec(1, id="PqlOther-v0", kwargs={"action": space, "max_episode_steps": 4})
    assert env.spec.action == spec
    action = simulator_action(space, np.array(given))
    assert action.tolist() == taken
    assert space.contains(action[0])
    assert check_env(env, 20).failed in ([], ["determinism"])  # its observations are drawn from the space
    sim = gymnasium_sim(1, id="PqlOther-v0", kwargs={"action": space})
    facts = check_facts(json.loads(json.dumps(describe_simulator(sim.spec))))
    assert spec_of(facts, 1, torch.device("cpu"), 1).action == spec
    layout, sent = Layout(facts), np.array(given)
    assert np.array_equal(layout.read_action(unpack(layout.pack_action(1, 1, sent)).body), sent)
    for wrong in ({"nvec": []}, {"nvec": [2, 0]}, {"nvec": 3}, {"nvec": [2], "start": [0, 0]}):
        with pytest.raises(ProtocolError, match="action is missing or wrong"):
            check_facts(facts | {"action": wrong})


def test_neighbouring_seeds_share_no_copy():
    """With seed + i, the copies 1 ... N - 1 of a seed would be those of its neighbour."""
    for make in (GymnasiumVec, gymnasium_sim):
        env = make(16, id="PqlProbe-v0")
        shown = [set(np.asarray(env.reset(seed)["policy"])[:, 0].tolist()) for seed in range(5)]
        assert len(set.union(*shown)) == 80
        assert shown[3] == set(np.asarray(env.reset(3)["policy"])[:, 0].tolist())
        env.close()


# -- vector environments of the user ---------------------------------------------------------------------------------


class Many(gymnasium.vector.VectorEnv):
    """obs = [seed, episode, step] of copies whose episodes last 3, 4, 5, ... rows; they end by a failure, or by a limit
    in every third one. Its arrays are reused."""

    def __init__(self, num_envs, mode=AutoresetMode.NEXT_STEP, max_episode_steps=None, final=True, copies=None):
        num_envs = copies or num_envs
        self.num_envs, self.metadata, self.final = num_envs, {"autoreset_mode": mode}, final
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.single_action_space = spaces.Box(0.0, 4.0, (1,))
        self.observation_space, self.action_space = (
            batch_space(s, num_envs) for s in (self.single_observation_space, self.single_action_space)
        )
        self.obs, self.ended = np.zeros((num_envs, 3)), np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):
        self.obs[:, 0] = seed + np.arange(self.num_envs) if seed is not None else self.obs[:, 0]
        self.obs[:, 1:], self.ended[:] = 0, False
        return self.obs, {}

    def step(self, action):
        same, filler = self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP, self.ended.copy()
        self.obs[filler] += (0, 1, 0)
        self.obs[filler, 2] = 0
        self.obs[~filler, 2] += 1
        over = ~filler & (self.obs[:, 2] >= 3 + self.obs[:, 1] % 3 + np.arange(self.num_envs) % 2)
        limit = over & (self.obs[:, 1] % 3 == 2)
        reward, info = np.where(filler, 0.0, self.obs[:, 2] + action[:, 0]), {}
        self.ended = over & (not same)
        if same and over.any():
            if self.final:
                info = {"final_obs": self.obs.copy(), "_final_obs": over}
            self.obs[over] += (0, 1, 0)
            self.obs[over, 2] = 0
        return self.obs, reward, over & ~limit, limit, info


gymnasium.register("PqlMany-v0", vector_entry_point=Many, max_episode_steps=9)


def story(env, steps=40):
    """The valid rows of each copy. Actions follow from the observation."""
    obs = env.reset(4)["policy"]
    rows = [[] for _ in range(env.spec.num_envs)]
    for _ in range(steps):
        step = env.step(obs[:, 2:] / 9)
        for i in np.flatnonzero(step.valid):
            row = (obs[i], step.reward[i], step.terminated[i], step.truncated[i], step.final_obs["policy"][i])
            rows[i].append([f.tolist() for f in row])
        obs = step.obs["policy"]
    return rows


def test_the_vector_environment_of_an_id_conforms_in_both_modes():
    nexts, sames = (
        make_env("gymnasium", 3, **many(kwargs={"mode": mode}))
        for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    )
    assert (nexts.spec.autoreset, sames.spec.autoreset) == ("next_step", "same_step")
    assert nexts.spec.max_episode_steps == 9
    assert nexts.spec.action == Box(1, (0.0,), (4.0,))
    assert not supports(nexts, PartialReset)  # its reset may know no mask
    for env in (nexts, sames):
        assert check_env(env, 60).ok, check_env(env, 60)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_vector_environment_is_taken_as_an_object(mode, tmp_path):
    assert check_env(Many(3, mode), 60).ok
    ours = adapted(Many(3, mode))
    rows, other_rows = story(ours), story(adapted(Many(3)))
    for a, b in zip(rows, other_rows, strict=True):
        ends = [(row[0][1], row[4][2], row[2], row[3]) for row in a if row[2] or row[3]]
        assert [end[2:] for end in ends[:3]] == [(True, False), (True, False), (False, True)]
        assert all(row[4][1] == row[0][1] for row in a)  # the final observation is the episode's own
        count = min(len(a), len(b))
        assert count >= 30
        assert a[:count] == b[:count]
    summary = pql.train(
        "algo=ppo", "scale=cpu", "budget.env_steps=200", "eval.final=false", f"run_dir={tmp_path}/run",
        env=Many(4, mode), quiet=True,
    )  # fmt: skip
    assert summary.env_steps >= 200
    remote = gymnasium_sim(3, id="PqlMany-v0", vectorization="vector_entry_point", kwargs={"mode": mode})
    assert remote.spec.autoreset == ours.spec.autoreset
    assert np.array_equal(remote.reset(4)["policy"].astype(np.float32), ours.reset(4)["policy"].numpy())


@pytest.mark.parametrize("remote", [False, True])
def test_lost_final_observations_of_a_vector_environment_are_marked(remote):
    options = many(kwargs={"mode": AutoresetMode.SAME_STEP, "final": False})
    env = (gymnasium_sim if remote else GymnasiumVec)(2, **options)
    env.reset(0)
    action = np.zeros((2, 1), np.float32) if remote else torch.zeros(2, 1)
    rows = [(step.first.tolist(), step.final_ok.tolist()) for step in (env.step(action) for _ in range(4))]
    assert rows[1:] == [
        ([False, False], [True, True]),
        ([True, False], [False, True]),
        ([False, True], [True, False]),
    ]


def test_an_unsupported_autoreset_mode_is_named():
    with pytest.raises(ConfigError, match=r"^env=Many: .*not DISABLED"):
        adapted(Many(2, AutoresetMode.DISABLED))


def test_gymnasiums_own_vector_classes_keep_partial_resets_as_objects():
    env = adapted(gymnasium.make_vec("PqlProbe-v0", 3, "sync"))
    assert env.spec.max_episode_steps == 6
    env.reset(1)
    env.step(torch.zeros(3, 2))
    assert env.reset_where(torch.tensor([True, False, True]))["policy"][:, 2].tolist() == [0, 1, 0]


# -- first answers that break the specification ------------------------------------------------------------------------


def plain(**changes):
    """Answers of three rows, with changes; ``drop``: elements left out at the end."""
    obs, rows, none = np.zeros((3, 2), np.float32), np.zeros(3), np.zeros(3, bool)
    return {
        "first": obs,
        "obs": obs,
        "reward": rows,
        "terminated": none,
        "truncated": none,
        "drop": 0,
    } | changes


class Wrong(gymnasium.vector.VectorEnv):
    """Answers with the arrays of ``plain``."""

    single_observation_space = observation_space = spaces.Box(-1, 1, (2,))
    single_action_space = action_space = spaces.Box(-1, 1, (1,))

    def __init__(self, num_envs, **changes):
        self.num_envs, self.answer = num_envs, plain(**changes)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, *, seed=None, options=None):
        return self.answer["first"], {}

    def step(self, action):
        given = (*(self.answer[k] for k in ("obs", "reward", "terminated", "truncated")), {})
        return given[: 5 - self.answer["drop"]]


class WrongOne(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (1,))

    def __init__(self, **changes):
        one = {"first": np.zeros(2, np.float32), "obs": np.zeros(2, np.float32)}
        self.answer = one | {"reward": 0.0, "terminated": False, "truncated": False, "drop": 0} | changes

    reset, step = Wrong.reset, Wrong.step


gymnasium.register("PqlWrong-v0", WrongOne, vector_entry_point=Wrong, disable_env_checker=True, max_episode_steps=9)
gymnasium.register("PqlWrongSeen-v0", WrongOne, max_episode_steps=9)  # by gymnasium's own checker

OWN, SHAPE = "vector_entry_point", "what its spec says, but {} has shape {}, expected {}"
WRONG = [
    (OWN, {"reward": np.zeros((3, 1))}, "step", SHAPE.format("reward", [3, 1], [3])),
    (OWN, {"reward": 1.0}, "step", SHAPE.format("reward", [], [3])),
    (OWN, {"terminated": np.zeros((3, 1), bool)}, "step", SHAPE.format("terminated", [3, 1], [3])),
    (OWN, {"terminated": False}, "step", SHAPE.format("terminated", [], [3])),
    (OWN, {"truncated": [False]}, "step", SHAPE.format("truncated", [1], [3])),
    (OWN, {"obs": np.zeros((3, 4))}, "step", SHAPE.format("obs[policy]", [3, 4], [3, 2])),
    (OWN, {"obs": np.zeros(2)}, "step", SHAPE.format("obs[policy]", [2], [3, 2])),
    (OWN, {"obs": np.zeros((1, 2))}, "step", SHAPE.format("obs[policy]", [1, 2], [3, 2])),
    (OWN, {"first": np.zeros((1, 2))}, "reset", SHAPE.format("obs[policy]", [1, 2], [3, 2])),
    (
        OWN,
        {"obs": {"a": np.zeros((3, 2))}},
        "step",
        "what its spec says, but obs has groups ['a'], expected",
    ),
    (OWN, {"drop": 1}, "step", "(obs, reward, terminated, truncated, info), not a tuple of 4"),
    ("sync", {"reward": [0.0]}, "step", SHAPE.format("reward", [1], [])),
    ("async", {"reward": [0.0]}, "step", SHAPE.format("reward", [1], [])),
    ("sync", {"terminated": np.zeros(1, bool)}, "step", SHAPE.format("terminated", [1], [])),
    ("sync", {"first": np.zeros(1)}, "reset", SHAPE.format("obs[policy]", [1], [2])),
    ("sync", {"obs": np.zeros(4)}, "step", SHAPE.format("obs[policy]", [4], [2])),
    ("sync", {"drop": 1}, "step", "(obs, reward, terminated, truncated, info), but: ValueError: not enough values"),
]


@pytest.mark.parametrize("make", [GymnasiumVec, gymnasium_sim])
@pytest.mark.parametrize(("vectorization", "changes", "method", "wanted"), WRONG)
def test_a_first_answer_of_another_shape_is_named(make, vectorization, changes, method, wanted):
    env = make(3, id="PqlWrong-v0", vectorization=vectorization, kwargs=changes)
    action = torch.zeros(3, 1) if make is GymnasiumVec else np.zeros((3, 1), np.float32)
    if method == "step":
        env.reset(0)
    with pytest.raises(ConfigError) as seen:
        env.reset(0) if method == "reset" else env.step(action)
    assert str(seen.value).startswith(f"task=PqlWrong-v0: expected {method}() to return {wanted}")
    assert str(seen.value).endswith(": pql doctor --env NAME tests it")
    env.close()


def test_a_first_answer_that_gymnasiums_checker_refuses_is_named():
    env = GymnasiumVec(2, id="PqlWrongSeen-v0", kwargs={"drop": 2}, autoreset="same_step")
    env.reset(0)
    with pytest.raises(ConfigError, match=r"^task=PqlWrongSeen-v0: expected step\(\) to return \(obs, reward, .*but: "):
        env.step(torch.zeros(2, 1))


def test_faults_of_an_environments_own_code_are_left_as_they_are():
    def step(self, action):
        return (*(value for value, _ in [(1,)]), action)

    env = GymnasiumVec(2, id="PqlWrong-v0")
    env.reset(0)
    for copy in env.sim.envs.envs:
        copy.unwrapped.step = step.__get__(copy.unwrapped)
    with pytest.raises(ValueError, match="unpack"):
        env.step(torch.zeros(2, 1))


def test_only_the_first_answers_are_checked():
    env = GymnasiumVec(2, id="PqlWrong-v0")
    env.reset(0)
    env.step(torch.zeros(2, 1))
    copy = env.sim.envs.envs[0]
    assert copy.step == copy.env.step
    assert copy.reset == copy.env.reset


# -- wrappers ---------------------------------------------------------------------------------------------------------


class Goal(gymnasium.Env):
    """Reach a goal on a line, as gymnasium-robotics has it: a Dict of three boxes."""

    observation_space = spaces.Dict(
        {k: spaces.Box(-9, 9, (n,)) for k, n in (("observation", 3), ("achieved_goal", 1), ("desired_goal", 1))}
    )
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = 0.0, float(self.np_random.uniform(1, 2))
        return self.seen(), {}

    def seen(self):
        shown = {"observation": [self.place] * 3, "achieved_goal": [self.place], "desired_goal": [self.goal]}
        return {k: np.array(v, np.float32) for k, v in shown.items()}

    def step(self, action):
        self.place += float(action[0])
        return self.seen(), -abs(self.place - self.goal), False, False, {}


class Twice(gymnasium.ObservationWrapper):
    """Multiplies observations."""

    def __init__(self, env, factor=2):
        super().__init__(env)
        self.factor = factor

    def observation(self, observation):
        return self.factor * observation


gymnasium.register("PqlGoal-v0", Goal, max_episode_steps=5)


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_wrappers_are_applied_from_the_inside_out(autoreset):
    own = {"name": f"{__name__}:Twice", "factor": 3}
    env = make_env("gymnasium", 2, id="PqlGoal-v0", wrappers=["FlattenObservation", own], autoreset=autoreset)
    assert env.spec.obs == {"policy": ObsSpec((5,))}
    goal = env.reset(0)["policy"][:, 1]  # sorted by name: achieved, desired, observation
    step = env.step(torch.full((2, 1), 0.5))
    assert step.obs["policy"].tolist() == [[1.5, g, 1.5, 1.5, 1.5] for g in goal.tolist()]
    for _ in range(4):
        step = env.step(torch.full((2, 1), 0.5))
    assert step.truncated.all()
    assert step.final_obs["policy"][:, 0].tolist() == [7.5, 7.5]
    sim = gymnasium_sim(2, id="PqlGoal-v0", wrappers=["FlattenObservation", own])
    assert np.allclose(sim.reset(0)["policy"][:, 1], goal)


def test_wrappers_make_arrays_of_discrete_observations_and_set_the_limit():
    limit = {"name": "TimeLimit", "max_episode_steps": 3}
    env = GymnasiumVec(2, **other(obs=spaces.Discrete(4)), wrappers=["FlattenObservation", limit])
    assert (env.spec.obs, env.spec.max_episode_steps) == ({"policy": ObsSpec((4,))}, 3)
    assert env.reset(0)["policy"].sum(1).tolist() == [1, 1]
    env = GymnasiumVec(2, id="PqlMany-v0", vectorization="vector_entry_point", wrappers=[f"{__name__}:Bare"])
    assert isinstance(env.sim.envs, Bare)


class Bare(gymnasium.vector.VectorWrapper):
    """Does nothing."""


def test_a_wrapper_of_a_foreign_run_needs_trust():
    words = ["task=gymnasium", "task.id=Pendulum-v1"]
    check_task(compose([*words, "task.kwargs.wrappers=[FlattenObservation,{name:TimeLimit,max_episode_steps:5}]"]), "x")
    for own in ("[mine:Wrap]", "[{name:'mine:Wrap'}]"):
        with pytest.raises(ConfigError, match=r"^task.kwargs.wrappers.*=mine:Wrap: .*--trust"):
            check_task(compose([*words, f"task.kwargs.wrappers={own}"]), "x")


def many(**kwargs):
    return {"id": "PqlMany-v0", "vectorization": "vector_entry_point", **kwargs}


def other(**kwargs):
    return {"id": "PqlOther-v0", "kwargs": kwargs}


class Mission(spaces.Space):
    """A space of a package's own, which gymnasium cannot flatten."""


def mission(**parts):
    return other(obs=spaces.Dict({"mission": Mission(), **parts}))


CHOSEN = (
    r' "task.kwargs.wrappers=\[{name:FilterObservation,filter_keys:\[image,way\]},FlattenObservation\]" makes one array'
)
REFUSED = [
    (mission(way=spaces.Discrete(4), image=spaces.Box(0, 9, (2,))), r"^observation_space=Dict.*" + CHOSEN),
    (mission(), r"^observation_space=Dict.*; task.kwargs.wrappers=\[module:Wrapper\] of your own can convert it$"),
    ({**mission(), "wrappers": ["FlattenObservation"]}, r"^wrappers=FlattenObservation: .*\(NotImplementedError"),
    ({"id": "highway-v0"}, r"^id=highway-v0: .* id; with the module that registers it: MODULE:highway-v0$"),
    ({"id": "gym_x/PushT-v0"}, r"^id=gym_x/PushT-v0: .*that registers it: gym_x:gym_x/PushT-v0$"),
    ({"id": "gymnasium:Pendulm-v1"}, r"^id=gymnasium:Pendulm-v1: .* id \(did you mean Pendulum-v1\?\)$"),
    (other(action=spaces.Tuple([spaces.Discrete(2)])), r"^action_space=Tuple.* MultiDiscrete or MultiBinary; task"),
    (other(action=spaces.Box(-np.inf, 1, (2,))), r"^action_space=Box\(-inf, 1"),
    (other(action=spaces.Box(0, 3, (2,), np.int64)), r"^action_space=Box\(0, 3, \(2,\), int64"),
    (other(obs=spaces.Discrete(4)), r"^observation_space=Discrete\(4\).* task.kwargs.wrappers=\[FlattenObservation\]"),
    (other(obs=spaces.Tuple([spaces.Box(0, 9, (2,))])), r"^observation_space=Tuple.*wrappers=\[FlattenObservation\]"),
    (other(obs=spaces.Dict({"state": spaces.Box(0, 1, (2,))})), r"^observation_space=Dict\('state'.*'policy'"),
    (other(colour="red"), r"^kwargs=.*colour"),
    ({"id": "Pendulm-v1"}, r"^id=Pendulm-v1: .*did you mean Pendulum-v1\?"),
    ({"id": "Pendulum-v99"}, r"^id=Pendulum-v99: .*Pendulum-v1"),
    ({"autoreset": "disabled"}, r"^autoreset=disabled: expected next_step or same_step"),
    ({"vectorization": "ray"}, r"^vectorization=ray: expected sync or async or vector_entry_point"),
    ({"id": "PqlMany-v0"}, r"^vectorization=sync: expected vector_entry_point: PqlMany-v0 has no entry_point$"),
    (many(id="Pendulum-v1"), r"^vectorization=vector_entry_point: expected sync or async: Pendulum-v1 has no vector_e"),
    (many(kwargs={"mode": None}), r"^vectorization=PqlMany-v0: .*autoreset_mode.* SAME_STEP, not none$"),
    (many(kwargs={"mode": AutoresetMode.DISABLED}), r"^vectorization=PqlMany-v0: .* SAME_STEP, not DISABLED$"),
    (many(autoreset="same_step"), r"^autoreset=same_step: expected null or next_step, as PqlMany-v0 has"),
    (many(kwargs={"colour": "red"}), r"^kwargs=.*colour"),
    ({"wrappers": ["FlatenObservation"]}, r"^wrappers=FlatenObservation: .*did you mean FlattenObservation\?"),
    ({"wrappers": ["RecordVideo"]}, r"^wrappers=RecordVideo: expected module:attribute, or one of "),
    ({"wrappers": ["NormalizeObservation"]}, r"^wrappers=NormalizeObservation: .*: algo.normalize_obs=true does this$"),
    (many(wrappers=[{"name": "NormalizeReward"}]), r"^wrappers=NormalizeReward: .*: algo.normalize_reward=true d"),
    ({"wrappers": ["gymnasium.wrappers:NormalizeReward"]}, r"^wrappers=gym.*:NormalizeReward: .*normalize_reward"),
    (many(num_envs=8, kwargs={"copies": 6}), r"^num_envs=8: expected 6: PqlMany-v0 makes 6 environments$"),
    ({"wrappers": ["no_such_module:Wrap"]}, r"^wrappers=no_such_module:Wrap: .*No module named"),
    ({"wrappers": "FlattenObservation"}, r"^wrappers=FlattenObservation: expected a list of names"),
    ({"wrappers": [{"stack_size": 4}]}, r"^wrappers=.*stack_size.*: expected a list of names, or of mappings"),
    ({"wrappers": [{"name": "TimeLimit", "steps": 4}]}, r"^wrappers=TimeLimit: expected a wrapper that takes.*steps"),
    ({"num_envs": 0}, r"^num_envs=0"),
    ({"autorest": "same_step"}, r"^autorest=same_step: .*did you mean autoreset\?"),
]


@pytest.mark.parametrize(("kwargs", "message"), REFUSED)
def test_refusals_name_the_setting_and_the_space(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make_env("gymnasium", **{"num_envs": 2, "id": "Pendulum-v1", **kwargs})


class Faulty(Other):
    """Its packages do not fit."""

    def __init__(self, error):
        raise error("shapes differ")


gymnasium.register("PqlFaulty-v0", Faulty)
gymnasium.register("PqlFaultyAlone-v0", lambda: Faulty(TypeError))


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
@pytest.mark.parametrize(("id", "kwargs"), [("PqlFaulty-v0", {"error": AssertionError}), ("PqlFaultyAlone-v0", None)])
def test_a_fault_of_the_environment_names_it_and_another_python(vectorization, id, kwargs, monkeypatch):
    monkeypatch.setattr(gymnasium.spec(id), "vector_entry_point", lambda num_envs, **kw: gymnasium.spec(id).make(**kw))
    with pytest.raises(RunError, match=f"^{id} could not be made: .*Error: shapes differ.*task.process.python") as seen:
        GymnasiumVec(2, id=id, kwargs=kwargs, vectorization=vectorization)
    assert seen.value.__cause__ is not None  # whose stack the command line prints


class Restless(Other):
    """Draws from a generator that ``reset(seed)`` does not seed."""

    def reset(self, *, seed=None, options=None):
        return np.random.default_rng().random(2, np.float32), {}


gymnasium.register("PqlRestless-v0", Restless, max_episode_steps=3)
gymnasium.register("PqlRestlessSaid-v0", Restless, max_episode_steps=3, nondeterministic=True)


def test_an_environment_that_cannot_repeat_itself_is_declared():
    report = check_env(GymnasiumVec(2, id="PqlRestless-v0"), 8)
    assert report.failed == ["determinism"]
    assert "deterministic=False in its EnvSpec (task=gymnasium: task.kwargs.deterministic=false)" in str(report)
    for declared in ({"id": "PqlRestless-v0", "deterministic": False}, {"id": "PqlRestlessSaid-v0"}):
        assert check_env(GymnasiumVec(2, **declared), 8).ok
        assert gymnasium_sim(2, **declared).spec.deterministic is False
    assert GymnasiumVec(2, id="PqlProbe-v0").spec.deterministic
    assert not adapted(gymnasium.make_vec("PqlRestlessSaid-v0", 2)).spec.deterministic
