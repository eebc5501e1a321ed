"""The README's Python examples run as printed, and its commands exist."""

import re
from pathlib import Path

import pytest

import pql
from pql.cli.main import COMMANDS
from pql.config.layers import Presets

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_the_example_simulator_passes_the_conformance_test_and_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = next(b for b in BLOCKS if "class Drift" in b)
    simulator, usage = code.split("print(pql.check_env", 1)
    scope: dict = {}
    exec(simulator, scope)
    report = pql.check_env(scope["Drift"](64, "cpu"), steps=250)
    assert report.ok, str(report)
    assert "pql.train(" in usage
    # 12 steps of learning are enough to see it run; that it learns is another test's business
    small = [
        "budget.seconds=null",
        "budget.env_steps=2816",
        "algo.warmup_steps=32",
        "algo.batch_size=64",
        "algo.critic.hidden=[16]",
    ]
    run = pql.train("algo=pql", *small, env=scope["Drift"](64, "cpu"), quiet=True)
    assert run.env_steps == 2816
    assert run.episodes == 64


def test_the_three_calls_work(tmp_path):
    pytest.importorskip("mujoco")
    env = pql.make_env("halfcheetah", num_envs=2)
    small = [
        "num_envs=4",
        "budget.seconds=null",
        "budget.env_steps=200",
        "algo.warmup_steps=16",
        "algo.batch_size=16",
        "eval.num_envs=1",
    ]
    run = pql.train("task=halfcheetah", "algo=pql", *small, f"run_dir={tmp_path / 'run'}", quiet=True)
    policy = pql.load_policy(run.run_dir)
    action = policy(env.reset(0)["policy"])
    assert action.shape == (2, 6)
    assert float(action.abs().max()) <= 1


def test_every_preset_and_command_is_documented():
    algorithms, tasks = ((ROOT / "docs" / page).read_text() for page in ("algorithms.md", "tasks/README.md"))
    for algo in Presets().names("algo"):
        assert f"`{algo}`" in algorithms
    for task in Presets().names("task"):
        assert re.search(rf"`[^`]*\b{task}\b", tasks), task
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for command in COMMANDS:
        assert f"\n## pql {command}\n" in commands


def test_the_contracts_names_are_at_hand():
    for name in ("EnvSpec", "ObsSpec", "Box", "Discrete", "Step"):
        assert getattr(pql, name).__name__ == name
