"""The wrappers, against raw steps of the same environment, the libraries' own environments, and what they learn."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pql
from pql.env import Box, Discrete
from pql.envs.classic import BallBalance
from pql.envs.gymnasium import GymnasiumVec
from pql.envs.toy import LQR, Counter
from pql.errors import ConfigError
from pql.evaluate import run_episodes

gymnasium = pytest.importorskip("gymnasium")
N = 5

from gymnasium import spaces  # noqa: E402
from gymnasium.utils.env_checker import data_equivalence  # noqa: E402
from gymnasium.utils.env_match import check_environments_match  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402


class Clock(gymnasium.Env):
    """obs = [seed, episode, step, action], all exact in float32. Episodes last 2, 3, 4, 5 rows in turn; the limit of 5
    truncates the last kind, the others terminate."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def __init__(self):
        self.seed, self.episode = 0, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed, self.episode = seed, -1
        self.episode, self.now = self.episode + 1, 0
        return np.array([self.seed, self.episode, 0, 0], np.float32), {}

    def step(self, action):
        self.now += 1
        obs = np.array([self.seed, self.episode, self.now, action[0]], np.float32)
        return (
            obs,
            self.now + round(8 * float(action[0])) / 16,
            self.now == 2 + self.episode % 4 and self.now < 5,
            False,
            {},
        )


gymnasium.register("PqlClock-v0", Clock, max_episode_steps=5, disable_env_checker=True)


# -- one form for what the three wrappers say ----------------------------------------------------------------------


def as_rsl_rl(env, actions, seed=3):
    pytest.importorskip("rsl_rl")
    wrapped = pql.wrap.rsl_rl(env, seed)
    yield wrapped.get_observations()["policy"]
    for action in actions:
        obs, reward, done, extras = wrapped.step(action)
        assert torch.equal(wrapped.get_observations()["policy"], obs["policy"])
        final = extras["final_obs"]["policy"]
        yield obs["policy"], reward, done, extras["time_outs"], final, extras["final_lost"]


def as_sb3(env, actions, seed=3):
    pytest.importorskip("stable_baselines3")
    wrapped = pql.wrap.sb3(env)
    wrapped.seed(seed)
    yield torch.from_numpy(wrapped.reset())
    for action in actions:
        obs, reward, done, infos = wrapped.step(action.numpy())
        assert all(("terminal_observation" in info) == d for info, d in zip(infos, done, strict=True))
        final = np.stack([info.get("terminal_observation", obs[i]) for i, info in enumerate(infos)])
        time_out = np.array([info["TimeLimit.truncated"] for info in infos])
        lost = np.array([info.get("final_lost", False) for info in infos])
        yield tuple(map(torch.from_numpy, (obs, reward, done, time_out, final, lost)))


def as_gymnasium(env, actions, seed=3):
    wrapped = pql.wrap.gymnasium(env)
    assert wrapped.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    yield torch.from_numpy(wrapped.reset(seed=seed)[0])
    for action in actions:
        obs, reward, terminated, truncated, infos = wrapped.step(action.numpy())
        done, final, lost = terminated | truncated, obs.copy(), np.zeros(len(obs), bool)
        assert ("final_obs" in infos) == done.any()
        if done.any():
            assert (infos["_final_obs"] == done).all()
            assert [row is None for row in infos["final_obs"]] == (~done).tolist()
            final[done] = np.stack(list(infos["final_obs"][done]))
            lost = infos["final_info"].get("final_lost", lost)
        yield tuple(map(torch.from_numpy, (obs, reward.astype(np.float32), done, truncated, final, lost)))


SAYS = {"rsl_rl": as_rsl_rl, "sb3": as_sb3, "gymnasium": as_gymnasium}
everywhere = pytest.mark.parametrize("library", SAYS)


def draws(count, size, scale=1.0):
    gen = torch.Generator().manual_seed(0)
    return [(torch.rand(N, size, generator=gen) * 2 - 1) * scale for _ in range(count)]


ENVS = {
    "pendulum": (lambda: pql.make_env("pendulum", num_envs=N, max_episode_steps=7), 1),
    "staggered": (lambda: BallBalance(N, stagger=True, max_episode_steps=9), 3),
    "counter": (lambda: Counter(N), 2),
    "lost": (lambda: Counter(N, final_obs="never"), 2),
    "restarts": (lambda: Counter(N, restart_every=2), 2),
}


@everywhere
@pytest.mark.parametrize("name", ENVS)
def test_same_state_and_action_give_the_same_row_and_the_true_final_observation(name, library):
    make, size = ENVS[name]
    raw, actions = make(), draws(40, size)
    obs = raw.reset(3)["policy"]
    said = SAYS[library](make(), actions)
    assert torch.equal(next(said), obs)
    ends = lost_rows = 0
    for action, (new, reward, done, time_out, final, lost) in zip(actions, said, strict=True):
        step = raw.step(action)
        assert torch.equal(new, step.obs["policy"])
        assert torch.equal(reward, step.reward)
        assert torch.equal(done, step.first)  # same-step: all that begins an episode ended one
        assert torch.equal(time_out, step.first & ~step.terminated)
        assert torch.equal(lost, step.first & ~step.final_ok)
        known, gone = done & ~lost, lost
        assert torch.equal(final[known], step.final_obs["policy"][known])
        assert torch.equal(final[gone], obs[gone])  # the observation acted in stands in
        obs, ends, lost_rows = new, ends + int(known.sum()), lost_rows + int(gone.sum())
    assert (lost_rows > 5) == (name in ("lost", "restarts"))
    assert (ends > 5) == (name != "lost")


@pytest.mark.parametrize("library", ["rsl_rl", "sb3"])
@pytest.mark.parametrize("kwargs", [{}, {"final_obs": "never"}, {"restart_every": 3}])
def test_next_step_autoreset_tells_the_same_story_without_filler_rows(kwargs, library):
    actions = draws(60, 2)
    one, other = (
        list(SAYS[library](Counter(N, autoreset=mode, **kwargs), actions)) for mode in ("same_step", "next_step")
    )
    assert torch.equal(one[0], other[0])
    for a, b in zip(one[1:], other[1:], strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


@everywhere
def test_actions_are_clamped_copies(library):
    wild = draws(20, 1, scale=3.0)
    kept = [a.clone() for a in wild]
    make = ENVS["pendulum"][0]
    one, other = (list(SAYS[library](make(), a)) for a in (wild, [a.clamp(-1, 1) for a in wild]))
    assert all(torch.equal(x, y) for a, b in zip(one[1:], other[1:], strict=True) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(wild, kept, strict=True))


@everywhere
def test_what_was_returned_is_not_rewritten(library):
    said = SAYS[library](Counter(N), draws(9, 2))
    rows = [next(said), next(said)]
    copies = [rows[0].clone(), *(t.clone() for t in rows[1])]
    list(said)
    assert all(torch.equal(a, b) for a, b in zip([rows[0], *rows[1]], copies, strict=True))


# -- gymnasium -----------------------------------------------------------------------------------------------------

MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


def both(mode, num_envs):
    """gymnasium's own vector environment, and the same through pql and back."""
    theirs = gymnasium.make_vec("PqlClock-v0", num_envs, "sync", {"autoreset_mode": MODES[mode]})
    return theirs, pql.wrap.gymnasium(GymnasiumVec(num_envs, id="PqlClock-v0", autoreset=mode))


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


class Groups(Counter):
    """Counter with a second group, image-like, and discrete actions."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        from dataclasses import replace

        extra = {"critic": pql.ObsSpec((2, 3), torch.uint8)}
        self.spec = replace(self.spec, obs={**self.spec.obs, **extra}, action=Discrete(4))

    def _more(self, obs):
        return obs | {"critic": obs["policy"].to(torch.uint8)[:, :, None].expand(-1, -1, 3).contiguous()}

    def reset(self, seed=None):
        return self._more(super().reset(seed))

    def step(self, action):
        assert action.shape == (N,)
        assert action.dtype == torch.int64
        step = super().step(action)
        return step._replace(obs=self._more(step.obs), final_obs=self._more(step.final_obs))


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


def score(task, act):
    """Mean return of ``act(obs [N, D])`` over 100 steps, on evaluation environments."""
    env = pql.make_env(task, num_envs=64, max_episode_steps=100)
    return run_episodes(env, lambda obs: act(obs["policy"]), seed=9).mean


IDLE_PENDULUM = -598.4  # without torque


# -- Stable-Baselines3 ---------------------------------------------------------------------------------------------


def test_sb3_sees_what_its_own_vector_environment_shows():
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    theirs = vec_env.DummyVecEnv([lambda: gymnasium.make("PqlClock-v0")] * 3)
    ours = pql.wrap.sb3(GymnasiumVec(3, id="PqlClock-v0", autoreset="next_step"))
    assert (theirs.observation_space, theirs.action_space) == (ours.observation_space, ours.action_space)
    theirs.seed(4), ours.seed(4)
    assert (theirs.reset() == ours.reset()).all()
    theirs.action_space.seed(0)
    time_limits = 0
    for _ in range(40):
        action = np.stack([theirs.action_space.sample() for _ in range(3)])
        a, b = theirs.step(action), ours.step(action)
        for x, y in zip(a[:3], b[:3], strict=True):
            assert (x.dtype, x.tolist()) == (y.dtype, y.tolist())
        for x, y in zip(a[3], b[3], strict=True):
            if "terminal_observation" in x:
                assert x.pop("terminal_observation").tolist() == y.pop("terminal_observation").tolist()
            assert x == y
            time_limits += x["TimeLimit.truncated"]
    assert time_limits >= 3


def test_sb3s_conventions_of_a_vector_environment():
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    env = pql.wrap.sb3(Counter(N, episode_length=3))
    assert isinstance(env, vec_env.VecEnv)
    assert env.render_mode is None
    assert env.unwrapped is env
    assert env.get_attr("terminate_every", [0, 2]) == [3, 3]
    assert env.env_is_wrapped(gymnasium.Wrapper) == [False] * N
    assert env.has_attr("spec")
    assert not env.has_attr("colour")
    env.set_attr("terminate_every", 0)
    assert env.env_method("length_of", torch.tensor(1), torch.tensor(0)) == [3] * N
    for call in (lambda: env.set_attr("terminate_every", 1, [0]), lambda: env.env_method("close", indices=[0])):
        with pytest.raises(ConfigError, match=r"indices=\[0\]"):
            call()
    env.set_options({"mass": 2})
    with pytest.raises(ConfigError, match=r"^options=.*mass"):
        env.reset()
    env.set_options()
    stack = vec_env.VecNormalize(vec_env.VecMonitor(env))
    stack.reset()
    for _ in range(3):
        _, _, done, infos = stack.step(np.zeros((N, 2), np.float32))
    assert done.all()
    assert [info["episode"]["l"] for info in infos] == [3] * N
    assert infos[0]["rows"] == 1.0  # the log terms of the row
    want = sum(float(env.env.reward_of(torch.tensor(4), torch.tensor(0), torch.tensor(s))) for s in range(3))
    assert infos[4]["episode"]["r"] == pytest.approx(want)


def test_sb3_gives_policies_the_policy_group_only():
    pytest.importorskip("stable_baselines3")
    env = pql.wrap.sb3(Groups(N))
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert env.action_space == spaces.Discrete(4)
    assert env.reset().tolist() == [[0, 0]] * N
    assert env.step(np.arange(N) % 4)[0].shape == (N, 2)


def test_sb3_ppo_bootstraps_from_the_true_final_observation():
    sb3 = pytest.importorskip("stable_baselines3")
    env, gamma = Counter(N, episode_length=4), 0.5
    model = sb3.PPO("MlpPolicy", pql.wrap.sb3(env), n_steps=9, batch_size=N * 9, n_epochs=1, gamma=gamma, seed=0)
    _, callback = model._setup_learn(1)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 9)
    raw = Counter(N, episode_length=4)
    obs, limits = raw.reset(0)["policy"], 0
    for t in range(9):
        assert model.rollout_buffer.observations[t].tolist() == obs.tolist()
        step = raw.step(torch.zeros(N, 2))
        value = model.policy.predict_values(step.final_obs["policy"])[:, 0].detach()
        want = step.reward + torch.where(step.truncated, gamma * value, 0)
        assert torch.allclose(torch.from_numpy(model.rollout_buffer.rewards[t]), want, atol=1e-6)
        obs, limits = step.obs["policy"], limits + int(step.truncated.sum())
    assert limits >= N


def test_sb3_sac_stores_the_true_successor():
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.SAC("MlpPolicy", pql.wrap.sb3(Counter(N)), buffer_size=1000, learning_starts=10**6, seed=0)
    model.learn(N * 15)
    raw, buffer = Counter(N), model.replay_buffer
    raw.reset(0)
    for t in range(15):
        step = raw.step(torch.zeros(N, 2))
        assert buffer.next_observations[t].tolist() == step.final_obs["policy"].tolist()
        assert buffer.dones[t].astype(bool).tolist() == step.first.tolist()
        assert buffer.timeouts[t].astype(bool).tolist() == step.truncated.tolist()


def test_sb3_trains():
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.vec_env import VecNormalize

    env = pql.wrap.sb3(pql.make_env("pendulum", num_envs=128, max_episode_steps=100, stagger=True))
    model = sb3.PPO(
        "MlpPolicy", VecNormalize(env, norm_obs=False, gamma=0.9), n_steps=16, batch_size=256, n_epochs=5, gamma=0.9,
        learning_rate=3e-3, seed=0, policy_kwargs={"net_arch": [32, 32]},
    )  # fmt: skip
    model.learn(128 * 16 * 20)
    returns = score("pendulum", lambda obs: torch.from_numpy(model.predict(obs.numpy(), deterministic=True)[0]))
    assert returns > -250
    assert pytest.approx(score("pendulum", lambda obs: torch.zeros(len(obs), 1)), abs=0.1) == IDLE_PENDULUM


# -- rsl_rl --------------------------------------------------------------------------------------------------------


def runner(env, steps, gamma=0.9, normalize=True):
    """rsl_rl's runner with small networks."""
    runners = pytest.importorskip("rsl_rl.runners")
    torch.manual_seed(0)
    model = {"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "elu", "obs_normalization": normalize}
    noise = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "log"}
    config = {
        "num_steps_per_env": steps,
        "save_interval": 10**6,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "gamma": gamma, "entropy_coef": 0.0, "use_clipped_value_loss": False},
        "actor": {**model, "distribution_cfg": noise},
        "critic": model,
    }
    return runners.OnPolicyRunner(env, config, log_dir=None, device="cpu")


def test_rsl_rl_adds_its_own_bootstrap_at_time_limits():
    pytest.importorskip("rsl_rl")
    wrapped = pql.wrap.rsl_rl(Counter(N, episode_length=4))
    alg = runner(wrapped, steps=9, gamma=0.5, normalize=False).alg
    raw = Counter(N, episode_length=4)
    obs, limits = raw.reset(0)["policy"], 0
    with torch.inference_mode():
        seen = wrapped.get_observations()
        for t in range(9):
            seen, reward, done, extras = wrapped.step(alg.act(seen))
            alg.process_env_step(seen, reward, done, extras)
            step = raw.step(torch.zeros(N, 2))
            want = step.reward + torch.where(step.truncated, 0.5 * alg.storage.values[t, :, 0], 0)
            assert torch.allclose(alg.storage.rewards[t, :, 0], want)
            assert torch.equal(alg.storage.dones[t, :, 0].bool(), step.first)
            assert torch.equal(alg.storage.observations["policy"][t], obs)
            assert extras["log"]["step/rows"] == 1
            obs, limits = step.obs["policy"], limits + int(step.truncated.sum())
    assert limits >= N


def test_rsl_rl_trains_and_leaves_the_environment_usable():
    pytest.importorskip("rsl_rl")
    env = pql.wrap.rsl_rl(pql.make_env("pendulum", num_envs=128, max_episode_steps=100), seed=1)
    learner = runner(env, steps=16)
    learner.learn(40, init_at_random_ep_len=True)
    policy = learner.get_inference_policy("cpu")
    assert score("pendulum", lambda obs: policy({"policy": obs})) > -300
    env.env.reset(3)  # its tensors must not have become inference tensors
    assert env.env.step(torch.zeros(128, 1)).reward.isfinite().all()
    assert not env.get_observations()["policy"].is_inference()


def test_rsl_rl_random_first_lengths_end_episodes_early_once():
    pytest.importorskip("rsl_rl")
    limit = 10
    env = pql.wrap.rsl_rl(LQR(4, max_episode_steps=limit), seed=1)
    assert env.max_episode_length == limit
    env.episode_length_buf = torch.tensor([0, 3, 9, 5])
    lengths, age = [[] for _ in range(4)], [0] * 4
    for _ in range(2 * limit + 1):
        _, _, done, extras = env.step(torch.zeros(4, 2))
        assert torch.equal(done, extras["time_outs"])
        age = [a + 1 for a in age]
        for i in done.nonzero()[:, 0].tolist():
            lengths[i].append(age[i])
            age[i] = 0
        assert env.episode_length_buf[done].eq(0).all()
    assert lengths == [[10, 10], [7, 10], [1, 10, 10], [5, 10]]


# -- refusals ------------------------------------------------------------------------------------------------------


class Fixed:
    """An environment that cannot restart single environments."""

    def __init__(self, **change):
        from dataclasses import replace

        self._env = Counter(2, autoreset="next_step")
        self.spec = replace(self._env.spec, **change)
        self.reset, self.step, self.close = self._env.reset, self._env.step, self._env.close


def lives():
    env = Counter(2, autoreset="next_step")
    env.spec.info["lost_life"] = True
    return env


REFUSED = [
    ("rsl_rl", lambda: Fixed(), r"^env.spec.autoreset=next_step: expected same_step"),
    ("sb3", lambda: Fixed(), r"^env.spec.autoreset=next_step: expected same_step"),
    ("sb3", lives, r"^env.spec.autoreset=next_step"),
    ("gymnasium", lives, r"^env.spec.info\[lost_life\]"),
    ("gymnasium", lambda: Counter(2, autoreset="next_step", restart_every=3), r"^env.spec.info\[restarts\]"),
    ("rsl_rl", lambda: Groups(2), r"^env.spec.action=Discrete"),
]


@pytest.mark.parametrize(("library", "make", "message"), REFUSED)
def test_what_cannot_be_translated_is_refused(library, make, message):
    if library != "gymnasium":
        pytest.importorskip({"sb3": "stable_baselines3"}.get(library, library))
    with pytest.raises(ConfigError, match=message):
        getattr(pql.wrap, library)(make())


def test_resets_that_cannot_be_done_are_refused():
    env = pql.wrap.gymnasium(Counter(2))
    for options in ({"mass": 1}, {"reset_mask": np.ones(3, bool)}, {"reset_mask": np.ones(2)}):
        with pytest.raises(ConfigError, match=r"^options=.*reset_mask alone, an array of 2 bool"):
            env.reset(options=options)
    mask = {"reset_mask": np.ones(2, bool)}
    with pytest.raises(ConfigError, match=r"^options\.reset_mask"):
        env.reset(seed=1, options=mask)
    with pytest.raises(ConfigError, match=r"^options\.reset_mask"):
        pql.wrap.gymnasium(Fixed()).reset(options=mask)
    pytest.importorskip("rsl_rl")
    fixed = pql.wrap.rsl_rl(Fixed(autoreset="same_step", action=Box(2)))
    with pytest.raises(ConfigError, match=r"^episode_length_buf.*init_at_random_ep_len=False"):
        fixed.episode_length_buf = torch.zeros(2)


@pytest.mark.parametrize(
    ("library", "module", "package"),
    [("rsl_rl", "rsl_rl.env", "rsl-rl-lib"), ("sb3", "stable_baselines3.common.vec_env", "stable-baselines3"),
     ("gymnasium", "gymnasium", "gymnasium")],
)  # fmt: skip
def test_a_missing_library_is_one_line_with_the_command(library, module, package, monkeypatch):
    for name in [m for m in sys.modules if m.startswith("pql.wrap.to_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    extra = "gymnasium" if library == "gymnasium" else "peers"
    with pytest.raises(ConfigError, match=rf"^pql\.wrap\.{library}={package}: .*pip install 'pql\[{extra}\]'$"):
        getattr(pql.wrap, library)(Counter(2))


# -- restarting single environments --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: LQR(4), lambda: Counter(4), lambda: GymnasiumVec(4, id="PqlClock-v0")])
def test_reset_where_restarts_only_the_masked(make):
    env = make()
    env.reset(0)
    action = torch.ones(4, env.spec.action.size)
    before = env.step(action).obs["policy"]
    mask = torch.tensor([True, False, False, True])
    same = env.reset_where(torch.zeros(4, dtype=torch.bool))["policy"]
    assert torch.equal(same, before)
    after = env.reset_where(mask)["policy"]
    assert torch.equal(after[~mask], before[~mask])
    assert (after[mask] != before[mask]).any(1).all()
    limits = [int(env.step(action).truncated.logical_or(torch.zeros(4, dtype=torch.bool)).sum()) for _ in range(50)]
    if isinstance(env, LQR):  # the clock of the masked starts again: they end one step later
        assert limits[48:] == [2, 2]


# -- the documentation ---------------------------------------------------------------------------------------------

SMALLER = {  # the examples as printed, but for their size
    "rsl_rl": [("num_envs=256", "num_envs=8"), ("learn(100,", "learn(2,")],
    "sb3": [("num_envs=64", "num_envs=8"), ("500_000", "1024"), ("verbose=1", "verbose=0")],
    "gymnasium": [("range(20)", "range(2)"), ("num_envs=64)", "num_envs=64, max_episode_steps=20)")],
}


@everywhere
def test_the_documented_examples_run(library, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mujoco")
    pytest.importorskip({"sb3": "stable_baselines3"}.get(library, library))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs/wrappers.md").read_text(), re.S)
    (code,) = [b for b in blocks if f"pql.wrap.{library}(" in b]
    assert len(code.strip().splitlines()) <= 16
    for old, new in SMALLER[library]:
        assert old in code
        code = code.replace(old, new)
    exec(code, {})
    left = {"rsl_rl": "runs/rsl_rl/model_1.pt", "sb3": "halfcheetah_statistics.pkl", "gymnasium": "."}[library]
    assert (tmp_path / left).exists()
