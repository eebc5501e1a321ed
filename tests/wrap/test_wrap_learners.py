"""Stable-Baselines3 and rsl_rl through their wrappers: data, learning targets, and that they learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from wrapped import Groups, N, score  # noqa: E402

import pql  # noqa: E402
from pql.envs.adapters.gymnasium import GymnasiumVec  # noqa: E402
from pql.envs.adapters.gymnasium_host import copy_seeds  # noqa: E402
from pql.envs.toy import LQR, Counter  # noqa: E402
from pql.errors import ConfigError  # noqa: E402

IDLE_PENDULUM = -598.4  # without torque


# -- Stable-Baselines3 ---------------------------------------------------------------------------------------------


def test_sb3_sees_what_its_own_vector_environment_shows():
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    theirs = vec_env.DummyVecEnv([lambda: gymnasium.make("PqlClock-v0")] * 3)
    ours = pql.wrap.sb3(GymnasiumVec(3, id="PqlClock-v0", autoreset="next_step"))
    assert (theirs.observation_space, theirs.action_space) == (ours.observation_space, ours.action_space)
    theirs._seeds = copy_seeds(4, 3)
    ours.seed(4)
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


def test_sb3_trains(learns):
    learns(train_sb3, -250)
    assert pytest.approx(score("pendulum", lambda obs: torch.zeros(len(obs), 1)), abs=0.1) == IDLE_PENDULUM


def train_sb3(seed):
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.vec_env import VecNormalize

    env = pql.wrap.sb3(pql.make_env("pendulum", num_envs=128, max_episode_steps=100, stagger=True))
    model = sb3.PPO(
        "MlpPolicy",
        VecNormalize(env, norm_obs=False, gamma=0.9),
        n_steps=16,
        batch_size=256,
        n_epochs=5,
        gamma=0.9,
        learning_rate=3e-3,
        seed=seed,
        policy_kwargs={"net_arch": [32, 32]},
    )
    model.learn(128 * 16 * 20)
    return score("pendulum", lambda obs: torch.from_numpy(model.predict(obs.numpy(), deterministic=True)[0]))


# -- rsl_rl --------------------------------------------------------------------------------------------------------


def runner(env, steps, gamma=0.9, normalize=True, seed=0):
    """rsl_rl's runner with small networks."""
    runners = pytest.importorskip("rsl_rl.runners")
    torch.manual_seed(seed)
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


def test_rsl_rl_sees_values_of_whole_episodes_where_these_end():
    pytest.importorskip("rsl_rl")
    raw = Counter(2, episode_length=3, terminate_every=0)
    raw.spec, step = replace(raw.spec, log={"rows": "sum", "level": "episode"}), raw.step

    def logging(action):
        row = step(action)
        level = torch.where(row.first, torch.tensor([4.0, 6.0]), 0.0)
        return row._replace(log={"rows": row.log["rows"], "level": level})

    raw.step = logging
    wrapped = pql.wrap.rsl_rl(raw)
    logs = [wrapped.step(torch.zeros(2, 2))[3]["log"] for _ in range(3)]
    assert [*map(sorted, logs)] == [["step/rows"], ["step/rows"], ["episode/level", "step/rows"]]
    assert logs[2]["episode/level"] == 5


def test_rsl_rl_trains_and_leaves_the_environment_usable(learns):
    learns(train_rsl_rl, -300)


def train_rsl_rl(seed):
    pytest.importorskip("rsl_rl")
    env = pql.wrap.rsl_rl(pql.make_env("pendulum", num_envs=128, max_episode_steps=100), seed=1 + seed)
    learner = runner(env, steps=16, seed=seed)
    learner.learn(40, init_at_random_ep_len=True)
    policy = learner.get_inference_policy("cpu")
    reached = score("pendulum", lambda obs: policy({"policy": obs}))
    env.env.reset(3)  # its tensors must not have become inference tensors
    assert env.env.step(torch.zeros(128, 1)).reward.isfinite().all()
    assert not env.get_observations()["policy"].is_inference()
    return reached


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
