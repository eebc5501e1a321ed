"""Every Python block of README, docs and examples is executed: here, or by a test that names its page."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from breaking import breaking  # noqa: F401  (registers the simulator)
from run_files import run, words
from test_blocks import BLOCKS, ROOT

import pql
from pql.errors import RunError

QUICK = ["budget.seconds=null", "algo.batch_size=16", "eval.num_envs=2", "device=cpu"]


def block(page, mark, *shorter):
    """The code of a block, with the texts of ``shorter`` replaced: (old, new), ..."""
    (code,) = (b.text for b in BLOCKS if b.page == page and b.language == "python" and mark in b.text)
    for old, new in shorter:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return compile(code, page, "exec")


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_test_executes_the_python_blocks_of_every_page():
    """Each of these tests names the page whose blocks it takes."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    pages = {Path(one.page).stem for one in BLOCKS if one.language == "python"}
    assert len(pages) > 12
    assert [page for page in pages if not re.search(rf"[\"/]{page}(\.md)?\"", tests)] == []


def test_the_symmetry_of_the_guide_is_that_of_the_task():
    names = [f"{leg}_{part}_joint" for leg in ("FR", "FL", "RR", "RL") for part in ("hip", "thigh", "calf")]
    scope = {"JOINT_NAMES": names}
    exec(block("docs/guides/robot_kit.md", "by_names", ('spec = EnvSpec(..., info={"symmetry": symmetry})', "")), scope)
    task = pytest.importorskip("pql.envs.mujoco.unitree")
    assert scope["symmetry"] == task.Go1.symmetry()


def test_a_method_that_draws():
    scope = {"np": np}
    exec(block("docs/play.md", "def render"), scope)

    class Drawn:
        images = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
        render = scope["render"]

    assert Drawn().render(0).shape == (2, 4, 3)


def test_the_loop_of_a_policy_that_reads_the_last_action():
    more = ["task=tmaze", "task.kwargs.length=3", "algo=r2d2", "num_envs=4", "algo.warmup_steps=16"]
    sizes = [
        "algo.warmup_steps=16",
        "algo.lstm=8",
        "algo.critic.hidden=[8]",
        "algo.burn_in=3",
        "algo.length=8",
        "algo.period=4",
    ]
    pql.train(*QUICK, *more, *sizes, "replay.capacity=960", "budget.env_steps=80", "run_dir=runs/x", quiet=True)
    scope = {"pql": pql}
    exec(block("docs/dqn.md", "LastAction", ("while True:", "for _ in range(60):")), scope)
    assert scope["step"].obs["last"].shape == (4, 4)  # three actions and the reward
    assert scope["obs"] is scope["step"].obs


def test_episodes_that_follow_their_command(monkeypatch, capsys):
    """25 of 64 environments have errors below 0.25; what comes after an episode's end does not count."""
    row, steps = torch.arange(64), itertools.count()

    def step(action):
        t = next(steps)
        linear = torch.where(t <= row % 3, row / 100, 9.0)  # episodes of one to three steps
        log = {"linear_error": linear, "angular_error": torch.full((64,), 0.1)}
        never = torch.zeros(64, dtype=torch.bool)
        return SimpleNamespace(obs={"policy": action}, log=log, terminated=t >= row % 3, truncated=never)

    env = SimpleNamespace(reset=lambda seed: {"policy": torch.zeros(64, 1)}, step=step)
    monkeypatch.setattr(pql, "make_env", lambda name, num_envs: env)
    monkeypatch.setattr(pql, "load_policy", lambda run: lambda obs: obs)
    exec(block("docs/results/tasks.md", "linear_error"), {})
    assert capsys.readouterr().out == "tensor(0.3906)\n"


def test_transitions_for_prefilling():
    pytest.importorskip("mujoco")
    exec(block("docs/replay.md", "save_file"), {"__name__": "example"})


def test_two_simulators_in_two_groups():
    scope = {"__name__": "drift"}
    exec(block("docs/start/own-simulator.md", "class Drift"), scope)
    small = f'"budget.env_steps=2560", "algo.warmup_steps=32", {", ".join(map(repr, QUICK))}, quiet=True'
    code = block("docs/guides/performance.md", "Grouped", ('"budget.seconds=30"', small))
    exec(code, here := {"pql": pql, "MySimulator": scope["Drift"]})
    assert (here["env"].spec.num_envs, here["env"].spec.groups) == (64, 2)
    assert [*Path("runs").glob("*/summary.json")] != []


def test_the_replay_of_a_failure(capsys):
    with pytest.raises(RunError, match="what led to it"):
        run(*words("runs/x", "task=env", "task.name=breaking", "task.kwargs.at=3", "seed=1"))
    (dump,) = Path("runs/x/dumps").iterdir()
    exec(block("docs/simulators.md", "flight_recorder", ("steps-000000123456", dump.name)), {})
    *before, last = [{*re.findall("True|False", text)} for text in capsys.readouterr().out.split("tensor(")[1:]]
    assert before == [{"True"}] * 3
    assert last == {"False"}


def test_a_vector_environment_of_gymnasium():
    pytest.importorskip("gymnasium")
    small = '"budget.env_steps=256", "budget.seconds=null", "device=cpu", "algo.horizon=8", quiet=True'
    exec(block("docs/simulators.md", "make_vec", ('"budget.seconds=30"', small)), {"__name__": "example"})
    assert [*Path("runs").glob("*/summary.json")] != []


def test_an_environment_of_gymnasiums_registry():
    pytest.importorskip("mujoco")
    pytest.importorskip("gymnasium")
    exec(block("docs/wrappers.md", "gymnasium_ids"), {"__name__": "example"})
