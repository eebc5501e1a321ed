"""Demonstrations of a policy: the file has exactly what happened, and replay.demos reads it."""

import pytest
import torch
from conftest import start
from run_files import run as run_words

from pql.cli.main import main
from pql.collect.prefill import transitions_of
from pql.config.compose import compose
from pql.contract.env import ObsSpec, make_env
from pql.data.transitions import File, read_transitions, save_rows
from pql.envs.toy import Counter
from pql.run.episodes import EpisodeRules, run_episodes
from pql.run.policy import load_policy
from pql.run.record import TapedEnv, rows_of_episodes

SPECS = {"policy": ObsSpec((2,))}
SMALL = ["task=pendulum", "algo=sac", "device=cpu", "num_envs=4", "placement.executor=inline", "eval.final=false"]


def recorded(folder, env, max_steps=None):
    """The first episode of every environment, written and read."""
    tape = TapedEnv(env, 0.0, 0)
    zeros = torch.zeros(env.spec.num_envs, 2)
    result = run_episodes(tape, lambda obs: zeros, 0, EpisodeRules(env.spec.num_envs, max_steps=max_steps))
    lengths = {i: int(length) for i, length in enumerate(result.lengths)}
    save_rows(rows_of_episodes(tape.first_episodes(lengths)), folder / "demos.safetensors")
    return read_transitions(File("replay.demos", folder / "demos.safetensors", SPECS, SPECS), zeros), result


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("final_obs", ["always", "on_done", "never"])
def test_every_transition_of_the_first_episodes_is_in_the_file(tmp_path, autoreset, final_obs):
    env = Counter(6, autoreset=autoreset, final_obs=final_obs, episode_length=5, restart_every=4)
    data, result = recorded(tmp_path, env)
    found = transitions_of(data, SPECS)
    at = 0
    for i in map(torch.tensor, range(6)):
        zero = torch.tensor(0)
        restarted, ends = bool(env.restarts(i, zero)), bool(env.terminates(i, zero))
        length = 2 if restarted else int(env.length_of(i, zero))
        assert result.lengths[i] == length
        # a restart and a time limit without a final observation: what followed the last row is not known
        usable = length - (restarted or (final_obs == "never" and not ends))
        for step in range(usable):
            last = step == length - 1
            assert found.columns["reward"][at] == env.reward_of(i, zero, torch.tensor(step))
            assert found.frames["policy"][found.obs["policy"][at]].tolist() == [[0.0, step]]
            assert (bool(found.terminated[at]), bool(found.cut[at])) == (last and ends, last and not ends)
            if bool(found.followed[at]):
                assert found.frames["policy"][found.next_obs["policy"][at]].tolist() == [[0.0, step + 1]]
            assert bool(found.followed[at]) == (not last or final_obs != "never")
            at += 1
    assert at == len(found.cut)


def test_an_episode_that_is_cut_bootstraps_from_the_next_observation(tmp_path):
    found = transitions_of(recorded(tmp_path, Counter(2, episode_length=7, terminate_every=0), max_steps=3)[0], SPECS)
    assert found.cut.tolist() == [False, False, True] * 2
    assert found.frames["policy"][found.next_obs["policy"][2]].tolist() == [[0.0, 3.0]]
    assert not found.terminated.any()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "run"
    run_words(*SMALL, "algo.warmup_steps=4", "algo.batch_size=8", "budget.seconds=null", "budget.env_steps=40",
              f"run_dir={folder}")  # fmt: skip
    return folder


def test_the_command_writes_what_the_policy_does_and_a_run_reads_it(policy, tmp_path, capsys):
    file = tmp_path / "demos.safetensors"
    assert main(["record", str(policy), f"out={file}", "num_envs=2", "episodes=3", "seed=5"]) == 0
    said = capsys.readouterr().out
    assert "600 transitions of 3 episodes (3 played)" in said
    assert f"replay.demos={file}" in said
    actor, env = load_policy(policy), make_env("pendulum", 2)
    specs, action = env.spec.obs, torch.zeros(2, 1)
    data = transitions_of(read_transitions(File("replay.demos", file, specs, specs), action), specs)
    total = []
    for seed, count in ((5, 2), (6, 1)):  # a reset for each round
        obs, rows = env.reset(seed), []
        for _ in range(200):
            action = actor(obs)
            step = env.step(action)
            rows.append((obs["policy"], action, step.reward, step.final_obs["policy"]))
            obs = step.obs
        total += [[torch.stack([row[k][i] for row in rows]) for k in range(4)] for i in range(count)]
    shown, action, reward, after = (torch.cat([one[k] for one in total]) for k in range(4))
    assert data.frames["policy"][data.obs["policy"][:, 0]].equal(shown)
    assert data.frames["policy"][data.next_obs["policy"][:, 0]].equal(after)
    assert data.columns["action"].equal(action)
    assert data.columns["reward"].equal(reward)
    assert data.cut.nonzero().flatten().tolist() == [199, 399, 599]
    parts = start(compose([*SMALL, f"replay.demos={file}", "algo.warmup_steps=4"]))
    assert int(parts.collector.normalizer.moments["policy"].count) == 600 + 4 + 16
    parts.close_envs()


def test_only_episodes_with_the_return_are_kept_until_there_are_enough(policy, tmp_path, capsys):
    file = tmp_path / "demos.safetensors"
    assert main(["record", str(policy), f"out={file}", "num_envs=4", "episodes=4", "noise=0.3"]) == 0
    returns = read_returns(file)
    least = sorted(returns)[2] - 0.01  # sums of another order
    capsys.readouterr()
    words = ["num_envs=4", "episodes=4", "noise=0.3", f"min_return={least}"]
    assert main(["record", str(policy), f"out={file}", *words]) == 0
    kept = read_returns(file)
    assert len(kept) == 4
    assert min(kept) >= least
    assert kept[:2] == [one for one in returns if one >= least]
    assert "(4 played)" not in capsys.readouterr().out


def test_steps_are_at_least_those_asked_for_in_whole_episodes(policy, tmp_path, capsys):
    assert main(["record", str(policy), f"out={tmp_path / 'a.safetensors'}", "num_envs=2", "steps=401"]) == 0
    assert "800 transitions of 4 episodes" in capsys.readouterr().out


def read_returns(file):
    specs = make_env("pendulum", 1).spec.obs
    data = read_transitions(File("replay.demos", file, specs, specs), torch.zeros(1, 1))
    return data["reward"][:, 0].view(-1, 201).sum(1).tolist()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "out=null: expected a file for the transitions"),
        (["out=demos.h5"], "expected a file name that ends in .safetensors"),
        (["out=a.safetensors", "steps=4", "episodes=2"], "episodes or steps, not both"),
        (["out=a.safetensors", "noise=-1"], "noise=-1.0: expected a number from 0 up to 10"),
        (["out=a.safetensors", "noize=1"], "noise"),
        (["out=a.safetensors", "success_only=true"], "pendulum logs angle, speed, torque"),
        (["out=a.safetensors", "epsilon=0.5"], "actions of pendulum are continuous"),
        (["out=a.safetensors", "min_return=1"], "of 200 episodes none is kept; the best return is -"),
    ],
)
def test_refusals(policy, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.chdir(tmp_path)
    assert main(["record", str(policy), "num_envs=200", *more]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
