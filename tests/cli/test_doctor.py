"""``pql doctor`` and shell completion."""

import importlib.util
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pql.cli import doctor
from pql.cli.completion import OWN, SCRIPTS, candidates
from pql.cli.main import main
from pql.cli.parser import COMMANDS
from pql.cli.tables import table
from pql.config.layers import Presets
from pql.contract import registry
from pql.envs.mujoco.robots import ROBOTS
from pql.envs.mujoco.robots import TASKS as TASK_ROBOTS
from pql.envs.toy import Counter
from pql.errors import ConfigError
from pql.reports.runs import AXES
from pql.run.export.writer import FORMATS


def test_a_table():
    rows = [["name", "n"], ["a", "10"], ["longer", "7"]]
    assert table(rows) == "name    n\na       10\nlonger  7"
    assert table(rows, right=(1,)) == "name     n\na       10\nlonger   7"


# -- doctor ---------------------------------------------------------------------------------------------------------


def test_the_doctor_knows_every_extra_and_its_packages():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    want = {k: {Requirement(r).name for r in v} for k, v in project["optional-dependencies"].items()}
    assert {k: set(packages) for k, (_, packages) in doctor.EXTRAS.items()} == want


def test_the_robots_packages_are_those_their_models_are_read_from():
    lines = (Path(__file__).parents[2] / "requirements" / "robots.txt").read_text().splitlines()
    wanted = {str(Requirement(line)) for line in lines if not line.startswith("#")}
    assert wanted == {str(Requirement(model.project)) for model in ROBOTS.values()}


def test_what_is_missing_or_too_old_is_named_with_the_command(monkeypatch, capsys):
    installed = {"mujoco": "3.16.0", "gymnasium": "1.4.0", "torch": "2.13.0"}

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    wanted = ['mujoco<5,>=3.17; extra == "mujoco"', 'gymnasium<2,>=1.1; extra == "gymnasium"', "torch>=2.10"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    rows = {line.split("  ")[0]: [cell.strip() for cell in line.split("  ") if cell] for line in said.splitlines()}
    assert rows["mujoco"][2:] == ["pip install 'pql-rl[mujoco]'", "mujoco 3.16.0 (needs <5,>=3.17), gymnasium 1.4.0"]
    assert rows["gymnasium"][2:] == ["ok", "gymnasium 1.4.0"]
    assert rows["sweep"][2:] == ["pip install 'pql-rl[sweep]'", "optuna missing"]
    assert "torch 2.13.0, numpy -" in said


def test_every_extra_is_held_to_its_own_versions(monkeypatch):
    wanted = ['mujoco<5,>=3.17; extra == "mujoco"', 'mujoco<5,>=4.0; extra == "warp"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.17.0")
    states = {row[0]: row[2:] for row in doctor.extras()}
    assert states["mujoco"] == ["ok", "mujoco 3.17.0, gymnasium 3.17.0"]
    assert states["warp"][0] == "pip install 'pql-rl[warp]'"
    assert "mujoco 3.17.0 (needs <5,>=4.0)" in states["warp"][1]


def test_simulators_that_cannot_be_had_do_not_stop_the_doctor(monkeypatch):
    def find(name):
        if name == "halfcheetah":
            raise ConfigError(
                "task", name, "the package 'mujoco', which is not installed: pip install 'pql-rl[mujoco]'"
            )
        if name == "theirs":
            raise OSError("libGL.so.1: cannot open\nshared object file")
        return Counter

    monkeypatch.setattr(registry, "find_factory", find)
    monkeypatch.setattr(registry, "env_names", lambda: ["halfcheetah", "lqr", "pendulum", "theirs"])
    presets = {"env": None, "halfcheetah": "halfcheetah", "pendulum": "pendulum"}
    monkeypatch.setattr(Presets, "names", lambda self, group: [*presets])
    monkeypatch.setattr(Presets, "setting", lambda self, group, name, key: presets[name])
    assert doctor.simulators()[1:] == [
        ["ok", "lqr, pendulum"],
        ["pip install 'pql-rl[mujoco]'", "halfcheetah"],
        ["OSError: libGL.so.1: cannot open", "theirs"],
    ]


def test_every_task_is_in_one_state(monkeypatch):
    """Also those whose preset has another name than its simulator, and those whose robot is missing."""
    pytest.importorskip("mujoco")
    monkeypatch.setattr(registry, "find_factory", lambda name: name)
    monkeypatch.setattr("pql.envs.mujoco.robots.importlib.util.find_spec", lambda name: None)
    states = {task: state for state, tasks in doctor.simulators()[1:] for task in tasks.split(", ")}
    assert set(states) >= {*Presets().names("task")} - {"env"}
    assert states["football"] == states["pong"] == states["halfcheetah"] == "ok"
    for task, robot in TASK_ROBOTS.items():
        assert states[task] == f"make robots, or pip install --no-deps '{ROBOTS[robot].project}'"
    assert sum(state != "ok" for state in states.values()) == len(TASK_ROBOTS)


def test_the_tasks_that_have_a_robot_of_somebody_else(monkeypatch):
    """By asking each for its model where no such package is there."""
    pytest.importorskip("mujoco")
    from pql.envs.mujoco import TASKS

    found, packages = importlib.util.find_spec, {model.package for model in ROBOTS.values()}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in packages else found(name))
    wanting = {}
    for name, maker in TASKS.items():
        try:
            maker.task.source()
        except ConfigError as error:
            wanting[name] = error.value
    assert wanting == TASK_ROBOTS


def test_the_command_for_a_robot_that_is_missing(monkeypatch, tmp_path):
    robots = pytest.importorskip("pql.envs.mujoco.robots")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_robots").mkdir()
    (tmp_path / "some_robots" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "some_robots" / "arm.xml").touch()
    models = {
        "arm": robots.Model("some_robots", "arm.xml", "some-robots>=1,<2"),
        "hand": robots.Model("no_robots", "hand.xml", "no-robots>=3"),
    }
    monkeypatch.setattr(robots, "ROBOTS", models)
    assert robots.model_file("arm") == tmp_path / "some_robots" / "arm.xml"
    with pytest.raises(ConfigError, match=r"task=hand: expected no_robots with hand.xml installed: make robots"):
        robots.model_file("hand")


# -- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("pql ", list(COMMANDS)),
        ("pql sw", ["sweep"]),
        ("pql train task=half", ["task=halfcheetah"]),
        ("pql train -m algo=pql,td", ["algo=pql,td3"]),
        ("pql train seed=1 algo.cri", ["algo.critic_memory=", "algo.critic."]),
        ("pql train algo.critic.l", ["algo.critic.layer_norm=", "algo.critic.lr=", "algo.critic.loss="]),
        ("pql train multi", ["multirun_dir="]),
        ("pql train replay.dtype=", ["replay.dtype=float32", "replay.dtype=float16", "replay.dtype=bfloat16"]),
        ("pql train checkpoint.replay=", ["checkpoint.replay=true", "checkpoint.replay=false"]),
        ("pql train device=c", ["device=cpu", "device=cuda"]),
        ("pql train num_envs=", []),
        ("pql train nonsense=", []),
        ("pql warm-up task=half", ["task=halfcheetah"]),
        ("pql warm-up num_e", ["num_envs="]),
        ("pql sweep trials", ["trials="]),
        ("pql sweep prune=env", ["prune=env_steps"]),
        ("pql resume ", []),  # a path
        ("pql resume runs/x algo", []),
        ("pql resume runs/x bud", ["budget."]),
        ("pql resume runs/x replay.", ["replay.demos=", "replay.save="]),
        ("pql eval runs/x s", ["seed="]),
        ("pql eval runs/x ep", ["episodes=", "epsilon="]),
        ("pql play runs/x w", ["width="]),
        ("pql play runs/x --", ["--live", "--browser", "--trust", "--verbose"]),
        ("pql eval runs/x --", ["--trust"]),
        ("pql train task=ant --", ["--multirun", "--cfg", "--dry-run", "--presets", "--verbose", "--help"]),
        ("pql export ", []),  # a path
        ("pql export runs/x formats=pt2,o", ["formats=pt2,onnx"]),
        ("pql export runs/x scale=", ["scale=true", "scale=false"]),
        ("pql train scale=g", ["scale=gpu"]),
        ("pql compare runs/a ", []),  # another run, perhaps
        ("pql compare runs/a thr", ["thresholds="]),
        ("pql report runs/a a", ["at="]),
        ("pql report runs/a x=", [f"x={axis}" for axis in ("seconds", "env_steps", "updates")]),
        ("pql list ", ["tasks", "algos", "games"]),
        ("pql doctor --env pend", ["pendulum"]),
        ("pql completion f", ["fish"]),
    ],
)
def test_what_the_last_word_may_become(line, want):
    assert candidates(line, COMMANDS) == want


def test_words_written_again_here_are_those_of_their_owners():
    assert OWN["x"] == AXES
    assert OWN["formats"] == FORMATS


def test_the_words_come_quickly():
    """At every Tab: so without torch and Hydra."""
    script = (
        "import sys; from pql.cli.main import main; main(['completion', '--words', 'pql train task=half'])\n"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "task=halfcheetah\n[]\n"


def test_in_bash(tmp_path):
    """The script as it is printed, with the words as bash breaks them: only what comes after the last = is offered."""
    pql = tmp_path / "pql"
    pql.write_text(f'#!/bin/sh\nexec {sys.executable} -m pql.cli.main "$@"\n')
    pql.chmod(0o755)
    script = f"""
eval "$({pql} completion bash)"
for COMP_LINE in "pql train task=half" "pql train -m algo=pql,td" "pql resume "; do
    COMP_POINT=${{#COMP_LINE}} COMP_WORDS=({pql}) COMPREPLY=()
    _pql
    echo "${{#COMPREPLY[@]}}:${{COMPREPLY[*]}}"
done
complete -p pql
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["1:halfcheetah", "1:pql,td3", "0:", "complete -o default -F _pql pql"]


def test_scripts_are_printed(capsys):
    for shell in SCRIPTS:
        assert main(["completion", shell]) == 0
        assert "completion --words" in capsys.readouterr().out
    assert main(["completion"]) == 2
    assert capsys.readouterr().err == "pql: command=completion: expected one of bash, zsh, fish\n"
