"""Statistics of ``pql doctor --env`` in addition to the contract's rules, on an environment with known rows."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pql.cli.doctor_env import ValueRange, simulator_settings, visit
from pql.cli.main import main
from pql.config.compose import compose
from pql.contract.registry import register
from pql.envs.toy import FILLER_REWARD, Counter
from pql.errors import ConfigError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("pql.cli.doctor_env.SPEED_SECONDS", 0.01)
    monkeypatch.setattr("pql.contract.registry._registered", {})


class Flawed(Counter):
    """One NaN a row."""

    def step(self, action):
        step = super().step(action)
        return step._replace(reward=step.reward.index_fill(0, torch.tensor([1]), torch.nan))


def reported(env, steps):
    return dict(visit(env, steps))


def test_ends_and_lost_observations_are_counted():
    """Episodes of Counter without terminations have exactly 6 rows: in 20 steps three of each, with a filler between
    two where the next step resets."""
    same = reported(Counter(4, episode_length=6, terminate_every=0, final_obs="never"), 20)
    assert same["autoreset"].startswith("same step")
    assert same["episode ends"] == "0 terminated, 12 truncated in 80 rows; 0 filler rows in addition"
    assert same["final observations"] == "never; lost at 12 time limits, which are not bootstrapped from"
    after = reported(Counter(4, episode_length=6, terminate_every=0, autoreset="next_step"), 20)
    assert after["autoreset"].startswith("next step")
    assert after["episode ends"] == "0 terminated, 12 truncated in 72 rows; 8 filler rows in addition"
    assert after["final observations"].endswith("; lost at 0 time limits")
    assert (after["time limit"], after["host syncs a step"]) == ("6", "none to count: its tensors are on cpu")


def test_ranges_are_of_what_counts_and_nan_is_told():
    rows = reported(Counter(4, episode_length=6, terminate_every=0, autoreset="next_step"), 20)
    assert rows["obs policy"] == "0 to 6"
    low = float(rows["reward"].split()[0])
    assert low == 0 > FILLER_REWARD  # a filler row's reward is ignored
    assert reported(Flawed(4), 20)["reward"].endswith("; 20 NaN or infinite")
    nothing = ValueRange()
    nothing.add(torch.tensor([torch.inf]))
    assert str(nothing) == "nothing finite; 1 NaN or infinite"


def test_the_doctor_prints_both(capsys):
    register("flawed", Flawed)
    assert main(["doctor", "--env", "flawed", "--num-envs", "4"]) == 1
    said, ended = capsys.readouterr()
    assert ended.splitlines()[-1].startswith("pql: flawed breaks rules of the contract: finite")
    assert "FAIL finite" in said
    assert "NaN or infinite" in said
    assert main(["doctor", "--env", "counter", "--num-envs", "4"]) == 0
    rate = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("env-steps/s"))
    assert float(rate.split()[1].replace(",", "")) > 0


def test_a_long_check_says_how_long_it_takes_and_how_far_it_is(capsys, monkeypatch):
    register("slow", lambda num_envs, device: Counter(num_envs, episode_length=5))
    clock = iter(range(2, 100_000, 2))  # two seconds a step; the first one is not counted
    read = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr("pql.cli.doctor_env.time", read)
    assert main(["doctor", "--env", "slow", "--num-envs", "4", "--steps", "20"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if " s more" in line]
    assert said[0] == "the check makes 2 env steps/s: about 130 s more; --num-envs 2 or --steps 50 takes less"
    assert said[1] == "12 of 60 steps: about 105 s more"
    assert (len(said), said[-1]) == (9, "54 of 60 steps: about 12 s more")


def test_a_time_limit_that_was_not_reached_is_checked_with_a_short_one(capsys):
    def long(num_envs, device, settings=None, broken=False):
        limit = round(2 * (settings or {}).get("episode_length_s", 500.0))
        env = Counter(num_envs, episode_length=limit, terminate_every=0)
        info = {"dt": 0.5, "time_limit": "settings.episode_length_s"}
        env.spec = replace(env.spec, info=info, max_episode_steps=limit - broken)
        return env

    register("long", long)
    register("endless", lambda num_envs, device: Counter(num_envs, episode_length=900, terminate_every=0))
    given = ["--num-envs", "2", "--steps", "30"]
    assert main(["doctor", "--env", "long", *given, "settings.other=1"]) == 0
    said, beside = capsys.readouterr()
    word = "task.kwargs.settings.episode_length_s=10"
    assert f"the time limit of 1,000 steps was not reached: again with {word}\n" in beside
    assert f"  ok   time_limit       no episode continues after max_episode_steps rows (with {word})\n" in said
    assert f"  ok   final_obs_kept   final_obs is not the next episode's first observation (with {word})\n" in said
    assert main(["doctor", "--env", "long", *given, "broken=true"]) == 1  # a fault of the second check counts
    assert re.search(rf"FAIL time_limit .* \(with {word}\)", capsys.readouterr().out)
    assert main(["doctor", "--env", "endless", *given]) == 0
    assert "none of 900 rows was reached; --steps 905, or a shorter limit, tests it\n" in capsys.readouterr().out


def test_terminations_in_the_row_of_the_limit_are_told():
    """As from an adapter that gives the simulator's ``done`` for ``terminated``."""

    class Done(Counter):
        def step(self, action):
            step = super().step(action)
            return step._replace(terminated=step.terminated | step.truncated, truncated=step.truncated & False)

    for kwargs in ({}, {"autoreset": "next_step"}):
        rows = reported(Done(4, episode_length=6, terminate_every=0, **kwargs), 20)
        assert rows["time limit"].startswith("6; 12 terminations in its row")


def test_the_doctor_sees_what_a_run_would_build(monkeypatch, capsys):
    """A preset's own keywords, settings of the task in training's words, and the environment's keywords."""
    seen = {}

    def make(num_envs, device, **kwargs):
        seen.update(kwargs, num_envs=num_envs, device=str(device))
        return Counter(num_envs, episode_length=5)

    monkeypatch.setattr("pql.run.environment.find_factory", lambda name: make)
    monkeypatch.setattr(
        "pql.run.environment.make_env", lambda name, num_envs, device, **kwargs: make(num_envs, device, **kwargs)
    )
    words = ["task.model=fast", "task.kwargs.randomize.friction=[0.9,1.1]", "randomize.obs_delay=[1,2]", "stagger=true"]
    assert main(["doctor", "--env", "shadow_hand_openai", "--num-envs", "3", "device=cpu", *words]) == 0
    assert seen == {
        "num_envs": 3,
        "device": "cpu",
        "model": "fast",
        "stagger": True,
        "randomize": {
            "mass": [0.5, 1.5],
            "friction": [0.9, 1.1],
            "gain": [0.75, 1.5],
            "obs_noise": 0.002,
            "obs_delay": [1, 2],
        },
    }


def test_what_a_preset_names_can_be_named_again():
    config = compose(simulator_settings("pong", ["game=breakout", "noop_max=3"]))
    assert (config.task.name, config.task.game, config.task.kwargs["noop_max"]) == ("atari", "breakout", 3)
    assert compose(simulator_settings("gymnasium", ["id=Ant-v5"])).task.id == "Ant-v5"
    assert compose(simulator_settings("ant", ["model=fast"])).task.model == "fast"
    own = compose(simulator_settings("my_sim:MySim", ["id=3", "device=cpu"]))  # a keyword as any other
    assert (own.task.name, own.task.id, own.task.kwargs) == ("my_sim:MySim", None, {"id": 3})


@pytest.mark.parametrize("word", ["placement.groups=2", "algo.gamma=0.9", "replay.capacity=10"])
def test_what_makes_no_environment_is_refused(word):
    wanted = "expected device, task.* or a keyword of the environment: no run is made"
    with pytest.raises(ConfigError, match=re.escape(f"{word}: {wanted}")):
        simulator_settings("ant", [word])
