"""Off-policy contenders of the benchmark: each library's replay of an environment with known rows; settings; training.

``Counter`` returns [episode, step] as observations, so each stored transition says what it should be.
"""

import pytest
import torch

from pql.config.compose import compose
from pql.envs.toy import Counter

N, LENGTH, EVERY, STEPS = 6, 4, 3, 12


def counter():
    return Counter(N, episode_length=LENGTH, terminate_every=EVERY)


def row_of(i, episode, step):
    """(reward, terminated, truncated) where environment i acts at ``step``, as Counter's docstring says."""
    reward = i % 8 + 10.0 * (episode % 8) + step / 8
    terminated = (i + episode) % EVERY == 0 and step + 1 == 1 + (2 * i + 3 * episode) % LENGTH
    return reward, terminated, step + 1 == LENGTH and not terminated


def history(i):
    """(episode, step) of environment i's rows."""
    found, episode, step = [], 0, 0
    while len(found) < STEPS:
        found.append((episode, step))
        _, terminated, truncated = row_of(i, episode, step)
        episode, step = (episode + 1, 0) if terminated or truncated else (episode, step + 1)
    return found


def check_replay(read, time_limit=lambda episode, step: [episode, step + 1], scale=1.0):
    """Check a library's stored rows: ``read(t, i)`` -> (obs, next_obs, reward, done), which is False at time limits.

    ``time_limit(episode, step)`` is the next observation there. Where an episode terminated no library reads it.
    """
    ends = {True: 0, False: 0}
    for i in range(N):
        for t, (episode, step) in enumerate(history(i)):
            reward, terminated, truncated = row_of(i, episode, step)
            ends[terminated] += terminated or truncated
            obs, following, stored, done = read(t, i)
            assert obs.tolist() == [episode, step]
            assert float(stored) == pytest.approx(scale * reward)
            assert bool(done) == terminated
            if not terminated:
                expected = time_limit(episode, step) if truncated else [episode, step + 1]
                assert following.tolist() == pytest.approx(expected, abs=1e-3)  # VecNormalize rounds it
    assert min(ends.values()) > 3


# -- adapters ------------------------------------------------------------------------------------------------------


def test_the_environments_of_rl_games_and_skrl_by_hand(tool):
    rl_games, skrl = tool("peers.rl_games_sac").RlGamesEnv(counter(), 0), tool("peers.skrl_sac").SkrlEnv(counter(), 0)
    assert rl_games.info["action_space"].low.tolist() == [-1, -1]
    assert (skrl.num_envs, skrl.observation_space.shape, skrl.action_space.shape) == (N, (2,), (2,))
    obs, other = rl_games.reset(), skrl.reset()[0]
    for t in range(STEPS):
        after, rewards, dones, infos = rl_games.step(torch.rand(N, 2))
        following, paid, *ends, told = skrl.step(torch.rand(N, 2))
        assert {x.shape for x in (paid, *ends)} == {(N, 1)}
        for i in range(N):
            episode, step = history(i)[t]
            reward, terminated, truncated = row_of(i, episode, step)
            assert obs[i].tolist() == other[i].tolist() == [episode, step]
            assert (rewards[i], dones[i], infos["time_outs"][i]) == (reward, terminated or truncated, truncated)
            assert [x[i].item() for x in (paid, *ends)] == [reward, terminated, truncated]
            expected = [episode + 1, 0] if terminated or truncated else [episode, step + 1]
            assert after[i].tolist() == following[i].tolist() == expected
            assert told["final_obs"][i].tolist() == [episode, step + 1]
        obs, other = after, following


# -- the libraries' replay -----------------------------------------------------------------------------------------


def test_stable_baselines3_stores_the_true_rows(tool):
    pytest.importorskip("stable_baselines3")
    peers = tool("peers.contenders")
    for name in ("sb3:td3", "sb3:sac-ours"):
        settings = peers.contender(name).settings("pendulum")
        settings["model"] |= {"learning_starts": 10**6, "buffer_size": N * STEPS}
        model, _ = peers.sb3_model(counter(), 1, settings)
        model.learn(N * STEPS)
        stored = model.replay_buffer  # SAC of ours normalises what it samples, not what it stores

        def read(t, i, stored=stored):
            done = stored.dones[t, i] * (1 - stored.timeouts[t, i])
            return stored.observations[t, i], stored.next_observations[t, i], stored.rewards[t, i], done

        check_replay(read)


def test_rl_games_stores_the_true_rows_and_at_time_limits_the_observation_before(tool, tmp_path):
    pytest.importorskip("rl_games")
    module, settings = tool("peers.rl_games_sac"), tool("peers.settings").theirs("rl_games:sac", "pendulum")
    settings["config"] |= {"num_actors": N, "num_warmup_frames": 10**6, "max_frames": N * STEPS}
    settings["config"] |= {"replay_buffer_size": N * STEPS, "reward_shaper": {"scale_value": 0.5}}
    agent, act = module.rl_games_agent(counter(), 1, settings, str(tmp_path))
    agent.train()
    stored = agent.replay_buffer

    def read(t, i):
        k = t * N + i
        return stored.obses[k], stored.next_obses[k], stored.rewards[k], stored.dones[k]

    check_replay(read, lambda episode, step: [episode, step], scale=0.5)
    assert act({"policy": torch.zeros(3, 2)}).shape == (3, 2)


def test_skrl_stores_the_true_rows(tool):
    pytest.importorskip("skrl")
    module, courses = tool("peers.skrl_sac"), tool("peers.course")
    settings = tool("peers.settings").theirs("skrl:sac", "pendulum") | {"reward_scale": 0.5}
    settings["agent"] |= {"random_timesteps": 10**6, "learning_starts": 10**6}
    settings["memory"]["memory_size"] = STEPS + 1
    trainer, act = module.skrl_trainer(counter(), 1, settings, courses.Course(courses.Budget(0, N * STEPS)))
    with pytest.raises(courses.Over):
        trainer.train()
    stored = trainer.agents.memory.tensors

    def read(t, i):
        return tuple(stored[k][t, i] for k in ("observations", "next_observations", "rewards", "terminated"))

    check_replay(read, scale=0.5)
    actions = stored["actions"][:STEPS]  # [T, N, A]
    assert len(actions.flatten().unique()) == actions.numel()  # no draw is repeated
    assert 0.9 < actions.abs().max() <= 1
    assert act({"policy": torch.zeros(3, 2)}).shape == (3, 2)


# -- settings ------------------------------------------------------------------------------------------------------


def test_our_sizes_in_their_names(tool):
    found, task = tool("peers.settings"), "halfcheetah"
    sac, td3 = (compose([f"task={task}", f"algo={name}", "device=cpu"]) for name in ("sac", "td3"))
    n, warm = sac.num_envs, sac.algo.warmup_steps
    rl_games, skrl = found.rl_games_sac(sac), found.skrl_sac(sac)
    for ratio in (sac.algo.v_per_step, td3.algo.v_per_step, 1 / sac.algo.p_per_v, 1 / td3.algo.p_per_v):
        assert ratio == round(ratio)  # theirs are integers
    named = ((sac, found.sb3_sac), (sac, found.sbx_sac), (td3, found.sb3_td3))
    for config, theirs in ((config, convert(config)) for config, convert in named):
        assert theirs["num_envs"] == config.num_envs
        assert theirs["model"]["gradient_steps"] == config.algo.v_per_step
        assert theirs["model"]["learning_starts"] == config.algo.warmup_steps * config.num_envs
        assert theirs["model"]["batch_size"] == config.algo.batch_size
        assert theirs["model"]["tau"] == config.algo.critic.tau
        assert theirs["policy"]["net_arch"] == {"pi": config.algo.policy.hidden, "qf": config.algo.critic.hidden}
    assert found.sb3_td3(td3)["model"]["policy_delay"] == 1 / td3.algo.p_per_v
    assert found.sb3_td3(td3)["noise"] == td3.algo.explore.high
    config = rl_games["config"]
    assert (config["num_actors"], config["num_warmup_frames"]) == (skrl["num_envs"], warm * n) == (n, warm * n)
    assert rl_games["units"] == skrl["units"]["critic"] == sac.algo.critic.hidden
    assert config["batch_size"] == skrl["agent"]["batch_size"] == sac.algo.batch_size
    assert config["num_updates_per_step"] == skrl["agent"]["gradient_steps"] == sac.algo.v_per_step
    assert config["policy_frequency"] == 1 / sac.algo.p_per_v
    assert config["reward_shaper"]["scale_value"] == skrl["reward_scale"] == sac.task.reward_scale == 0.1
    assert skrl["agent"]["learning_rate"] == [sac.algo.policy.lr, sac.algo.critic.lr, sac.algo.alpha_lr]
    assert skrl["memory"]["memory_size"] * n == sac.replay.capacity


def test_their_own_settings_update_once_per_transition(tool):
    theirs = tool("peers.settings").THEIRS
    for settings in (theirs["sb3:sac"], theirs["sb3:td3"], theirs["sbx:sac"]):
        assert settings["model"]["gradient_steps"] == settings["num_envs"] == 32
    config = theirs["rl_games:sac"]["config"]
    assert config["num_updates_per_step"] == config["num_actors"] == 32


# -- training ------------------------------------------------------------------------------------------------------

TRAINS = {  # contender -> (package, updates after 40 steps of each environment, of which 20 are random)
    "sb3:sac-ours": ("stable_baselines3", 38),  # the last step's updates come after the budget's end
    "rl_games:sac-ours": ("rl_games", 42),  # it counts steps from 1
    "skrl:sac-ours": ("skrl", 40),
}


@pytest.mark.parametrize("name", TRAINS)
def test_a_run_counts_its_steps_and_updates_and_depends_on_its_seed_alone(tool, name):
    package, updates = TRAINS[name]
    pytest.importorskip(package)
    peers, courses = tool("peers.contenders"), tool("peers.course")

    def trained(points, seed=1):
        def evaluate(act):
            return {"action": act({"policy": torch.linspace(-1, 1, 12).reshape(4, 3)}).tolist()}

        settings = peers.contender(name).settings("pendulum")
        shorten(settings)
        course = courses.Course(courses.Budget(0, 40 * 8), points, evaluate)
        peers.contender(name).train("pendulum", seed, course, settings)
        return course.curve

    def shorten(settings):
        if "rl_games" in name:
            settings["config"] |= {"num_actors": 8, "num_warmup_frames": 20 * 8, "num_updates_per_step": 2}
            return
        settings["num_envs"] = 8
        if "skrl" in name:
            settings["agent"] |= {"random_timesteps": 20, "learning_starts": 20, "gradient_steps": 2}
        else:
            settings["model"] |= {"learning_starts": 20 * 8, "gradient_steps": 2}

    curve = trained(points=4)
    assert [point["env_steps"] for point in curve] == [80, 160, 240, 320]
    assert curve[-1]["updates"] == updates
    assert [point["updates"] > 0 for point in curve[:3]] == [False, "rl_games" in name, True]
    assert curve[2]["action"] != curve[3]["action"]
    again = trained(points=1)
    assert {**again[-1], "seconds": 0} == {**curve[-1], "seconds": 0}  # evaluations on the way change nothing
    assert trained(points=1, seed=2)[-1]["action"] != curve[-1]["action"]
