"""``pql.wrap.gymnasium`` against gymnasium's vector environments, checks, wrappers; training code that uses it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.utils.env_checker import data_equivalence  # noqa: E402
from gymnasium.utils.env_match import check_environments_match  # noqa: E402
from gymnasium.vector import AutoresetMode, VectorWrapper  # noqa: E402
from wrapped import Groups, N, score  # noqa: E402

import pql  # noqa: E402
from pql.contract.env import Discrete, MultiDiscrete, ObsSpec  # noqa: E402
from pql.envs.adapters.gymnasium import GymnasiumVec  # noqa: E402
from pql.envs.adapters.gymnasium_host import copy_seeds  # noqa: E402
from pql.envs.toy import Counter  # noqa: E402
from pql.wrap.to_gymnasium import box  # noqa: E402

MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


class Seeded(VectorWrapper):
    """Gives the copies the seeds of ``task=gymnasium``."""

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=None if seed is None else copy_seeds(seed, self.num_envs), options=options)


def both(mode, num_envs):
    """gymnasium's own vector environment, and the same through pql and back."""
    theirs = gymnasium.make_vec("PqlClock-v0", num_envs, "sync", {"autoreset_mode": MODES[mode]})
    return Seeded(theirs), pql.wrap.gymnasium(GymnasiumVec(num_envs, id="PqlClock-v0", autoreset=mode))


@pytest.mark.parametrize("mode", MODES)
def test_there_and_back_equals_gymnasiums_own_vector_environment(mode):
    theirs, ours = both(mode, 3)
    for a in ("action_space", "observation_space", "single_action_space", "single_observation_space", "num_envs"):
        assert getattr(theirs, a) == getattr(ours, a)
    assert theirs.metadata["autoreset_mode"] is ours.metadata["autoreset_mode"]
    theirs.action_space.seed(1)
    assert data_equivalence(theirs.reset(seed=4), ours.reset(seed=4), exact=True)
    ends = 0
    for _ in range(40):
        action = theirs.action_space.sample()
        a, b = theirs.step(action), ours.step(action)
        assert data_equivalence(a, b, exact=True), (a, b)
        ends += int(a[3].sum())
    assert ends >= 3


@pytest.mark.parametrize("mode", MODES)
def test_gymnasiums_checks_of_environments_pass(mode):
    check_environments_match(*both(mode, 1), num_steps=30)
    from gymnasium.utils.performance import benchmark_vector_step

    assert benchmark_vector_step(both(mode, 3)[1], target_duration=0) > 0


@pytest.mark.parametrize("mode", MODES)
def test_gymnasiums_own_wrappers_read_the_ends(mode):
    from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

    theirs, ours = (DictInfoToList(RecordEpisodeStatistics(env)) for env in both(mode, 3))
    theirs.reset(seed=0), ours.reset(seed=0)
    seen = []
    for _ in range(30):
        infos = [env.step(np.zeros((3, 1), np.float32))[4] for env in (theirs, ours)]
        for a, b in zip(*infos, strict=True):
            assert a.keys() == b.keys()
            if "episode" in a:
                assert (a["episode"]["r"], a["episode"]["l"]) == (b["episode"]["r"], b["episode"]["l"])
                seen.append(int(b["episode"]["l"]))
    assert set(seen) == {2, 3, 4, 5}


def test_a_reset_mask_restarts_only_the_masked():
    theirs, ours = both("next_step", 3)
    theirs.reset(seed=0), ours.reset(seed=0)
    mask = np.array([False, True, False])
    for steps in (1, 2):  # the second mask forgets a filler row that was due
        for _ in range(steps):
            theirs.step(np.ones((3, 1), np.float32)), ours.step(np.ones((3, 1), np.float32))
        a, b = (env.reset(options={"reset_mask": mask}) for env in (theirs, ours))
        assert data_equivalence(a, b, exact=True)
    for _ in range(8):
        a, b = (env.step(np.ones((3, 1), np.float32)) for env in (theirs, ours))
        assert data_equivalence(a, b, exact=True)


def test_log_terms_are_masked_arrays_and_filler_rows_pay_nothing():
    env = pql.wrap.gymnasium(Counter(N, episode_length=3))
    env.reset(seed=0)
    for _ in range(9):
        *_, reward, terminated, truncated, infos = env.step(np.zeros((N, 2), np.float32))
        done = terminated | truncated
        assert reward.dtype == np.float64
        for part, mask in ((infos, ~done), (infos.get("final_info", {}), done)):
            assert ("rows" in part) == mask.any()
            if mask.any():
                assert (part["rows"] == mask).all()
                assert (part["_rows"] == mask).all()
    env = pql.wrap.gymnasium(Counter(N, autoreset="next_step", episode_length=3))
    env.reset(seed=0)
    fillers, ended = 0, np.zeros(N, bool)
    for _ in range(9):
        *_, reward, terminated, truncated, infos = env.step(np.zeros((N, 2), np.float32))
        assert (reward[ended] == 0).all()
        assert (infos["_rows"] == ~ended).all()
        fillers, ended = fillers + ended.sum(), terminated | truncated
    assert fillers > N


def test_groups_become_a_dict_and_discrete_actions_stay_discrete():
    env = pql.wrap.gymnasium(Groups(N))
    assert env.single_action_space == spaces.Discrete(4)
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert env.single_observation_space["critic"] == spaces.Box(0, 255, (2, 3), np.uint8)
    for _ in range(7):
        obs, _, _, truncated, infos = env.step(env.action_space.sample())
        assert env.observation_space.contains(obs)
    assert truncated.any()
    final = infos["final_obs"][truncated][0]
    assert env.single_observation_space.contains(final)
    assert final["policy"][1] == 7
    assert final["critic"][1].tolist() == [7, 7, 7]


@pytest.mark.parametrize("wrap", [pql.wrap.gymnasium, pql.wrap.sb3])
@pytest.mark.parametrize(
    ("make", "ours", "theirs", "actions"),
    [
        (Groups, Discrete(4, -2), lambda start: spaces.Discrete(4, start=start), [i % 4 for i in range(N)]),
        (Counter, MultiDiscrete((3, 2), (-1, 4)), lambda s: spaces.MultiDiscrete([3, 2], start=s), [[2, 0], [0, 1]]),
    ],
)
def test_discrete_actions_of_a_wrapper_begin_where_its_space_does(wrap, make, ours, theirs, actions):
    if wrap is pql.wrap.sb3:
        pytest.importorskip("stable_baselines3")
    env, taken = make(len(actions)), []
    env.spec = replace(env.spec, action=ours)
    step = env.step
    env.step = lambda action: taken.append(action.tolist()) or step(action)
    wrapped = wrap(env)
    wrapped.reset()
    start = np.array(ours.start) * (wrap is pql.wrap.gymnasium)
    assert getattr(wrapped, "single_action_space", wrapped.action_space) == theirs(start.tolist())
    wrapped.step(np.array(actions) + start)
    assert taken == [actions]


def test_whole_numbers_keep_their_type_and_range():
    ends = {"int16": (-(2**15), 2**15 - 1), "uint8": (0, 255), "bool": (0, 1), "float64": (-np.inf, np.inf)}
    for kind, (low, high) in ends.items():
        space = box(ObsSpec((2,), getattr(torch, kind)))
        assert space.dtype == (np.float32 if kind == "float64" else np.dtype(kind))
        assert (space.low.min(), space.high.max()) == (low, high)


def test_gymnasium_code_trains():
    """Cross-entropy search over linear feedback, written for gymnasium alone: 32 candidates in 8 environments each."""
    envs = pql.wrap.gymnasium(pql.make_env("ball_balance", num_envs=256, max_episode_steps=100))
    rng, mean, sigma, seen = np.random.default_rng(0), np.zeros((3, 4)), 1.0, [3, 4, 6, 7]  # the ball, seen from above
    for generation in range(8):
        gains = mean + sigma * rng.standard_normal((32, 3, 4))
        obs, _ = envs.reset(seed=generation)
        returns, alive = np.zeros(256), np.ones(256, bool)
        while alive.any():
            actions = np.einsum("kij,mkj->mki", gains, obs[:, seen].reshape(8, 32, 4)).reshape(256, 3)
            obs, reward, terminated, truncated, _ = envs.step(actions.astype(np.float32))
            returns += reward * alive
            alive &= ~(terminated | truncated)
        elite = gains[np.argsort(returns.reshape(8, 32).mean(0))[-6:]]
        mean, sigma = elite.mean(0), elite.std(0) + 0.1
    gain = torch.from_numpy(mean).float().T
    assert score("ball_balance", lambda obs: torch.zeros(len(obs), 3)) < 30
    assert score("ball_balance", lambda obs: obs[:, seen] @ gain) > 38
