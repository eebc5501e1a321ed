"""The commands for Isaac Lab against stand-ins: what they ask of it, and what they train. Isaac Lab was not run."""

import sys
import types

import fake_isaaclab
import gymnasium
import pytest
from fake_isaaclab import Config, FakeLabEnv
from run_files import rows

from pql.envs.adapters.isaaclab import IsaacLabVec
from pql.lab import isaaclab

TASK = "Isaac-Fake-v0"
SMALL = ["algo=sac", "algo.warmup_steps=4", "algo.batch_size=16", "replay.capacity=512", "budget.env_steps=160"]
OFF = ["eval.every_seconds=null", "eval.final=false"]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the simulator was made with."""
    found = {}

    def make(**given):
        found.update(given)
        return IsaacLabVec(FakeLabEnv(Config(num_envs=given["num_envs"])), "Fake", given["action_bound"])

    monkeypatch.setattr(fake_isaaclab, "LAUNCHED", [True])
    monkeypatch.setattr(fake_isaaclab, "ALIVE", [])
    monkeypatch.setattr(isaaclab, "isaaclab", make)
    monkeypatch.chdir(tmp_path)
    kwargs = {"rsl_rl_cfg_entry_point": "m:Ppo", isaaclab.KEY: "agents:fake.yaml", "other": "agents:settings"}
    specs = {TASK: types.SimpleNamespace(kwargs=kwargs), "Isaac-Bare-v0": types.SimpleNamespace(kwargs={})}
    monkeypatch.setattr(gymnasium, "registry", specs)
    module = types.ModuleType("agents")
    module.__file__ = str(tmp_path / "agents.py")
    module.settings = lambda: {"algo": {"gamma": 0.9}, "seed": 5}
    monkeypatch.setitem(sys.modules, "agents", module)
    (tmp_path / "fake.yaml").write_text("algo: {gamma: 0.95}\nseed: 4\n")
    return found


def test_train_makes_the_task_and_a_run(asked, tmp_path, capsys):
    words = ["env.scene.num_envs=4", "env.episode_length_s=2.5", *SMALL, *OFF]
    argv = [
        "train",
        "--task",
        "Isaac-Fake",
        "--num_envs",
        "4",
        "--device",
        "cpu",
        "--run_name",
        "x",
        "--final_obs",
        *words,
    ]
    assert isaaclab.run_command(argv) == 0
    assert asked == {
        "num_envs": 4,
        "device": "cpu",
        "task": "Isaac-Fake",
        "action_bound": 1.0,
        "final_obs": True,
        "settings": {"scene": {"num_envs": 4}, "episode_length_s": 2.5},
        "random_lengths": True,
        "cameras": False,
        "presets": [],
    }
    (run,) = (tmp_path / "logs" / "pql" / TASK).iterdir()
    assert run.name.endswith("_x")
    assert rows(run)[-1]["steps/env"] == 160
    config = (run / "config.yaml").read_text()
    assert "gamma: 0.95" in config
    assert "\nseed: 4\n" in config
    assert fake_isaaclab.ALIVE == []
    capsys.readouterr()
    assert (
        isaaclab.run_command(["play", "--task", TASK, "--device", "cpu", "--checkpoint", str(run), "--steps", "10"])
        == 0
    )
    assert asked["num_envs"] == 16
    assert "10 steps of 16 environments: mean reward " in capsys.readouterr().out


def test_settings_of_an_agent_are_found(asked):
    assert isaaclab.agent_settings(TASK) == {"algo": {"gamma": 0.95}, "seed": 4}
    assert isaaclab.agent_settings(TASK, "other") == {"algo": {"gamma": 0.9}, "seed": 5}
    assert isaaclab.agent_settings("Isaac-Bare-v0") == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--task", "Isaac-Fkae"], "task=Isaac-Fkae: expected a registered task of Isaac Lab"),
        (["train", "--task", TASK, "--agent", "mine"], "--agent=mine: expected an entry of Isaac-Fake-v0: rsl_rl_cfg"),
        (["play", "--task", TASK], "--checkpoint=null: expected a run to play, and none to train"),
        (["train", "--task", TASK, "algo.gama=1"], "algo.gama=1: expected"),
    ],
)
def test_mistakes_are_named(asked, argv, message, capsys):
    assert isaaclab.run_command([*argv, "--device", "cpu", "--num_envs", "4"]) == 2
    assert message in capsys.readouterr().err
    assert fake_isaaclab.ALIVE == []


def test_the_callback_offers_pql_to_rsl_rls_command(asked, monkeypatch):
    utils = types.ModuleType("isaaclab_tasks.utils")
    algorithm = types.SimpleNamespace(class_name="PPO")
    utils.load_cfg_from_registry = lambda task, key: types.SimpleNamespace(task=task, key=key, algorithm=algorithm)
    monkeypatch.setitem(sys.modules, "isaaclab_tasks", types.ModuleType("isaaclab_tasks"))
    monkeypatch.setitem(sys.modules, "isaaclab_tasks.utils", utils)
    specs = gymnasium.registry
    del specs[TASK].kwargs[isaaclab.KEY]
    isaaclab.add_agents()
    made = specs[TASK].kwargs[isaaclab.KEY]()
    assert (made.task, made.key, made.algorithm.class_name) == (TASK, "rsl_rl_cfg_entry_point", "pql.lab:Learner")
    assert specs["Isaac-Bare-v0"].kwargs == {}
    specs[TASK].kwargs[isaaclab.KEY] = "mine"
    isaaclab.add_agents()
    assert specs[TASK].kwargs[isaaclab.KEY] == "mine"
