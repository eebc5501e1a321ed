"""``--cfg``, ``--help algo=NAME``, ``--dry-run`` and ``--presets`` of ``pql train``."""

import re

import pytest

from pql.cli.main import main
from pql.config import leaves
from pql.config.compose import compose
from tools import pages

ALGOS = ("pql", "sac", "dqn", "r2d2", "ppo", "impala", "pqn", "reppo")


def printed(capsys, *words):
    """The lines that ``pql train`` prints with these words."""
    assert main(["train", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_whole_configuration_is_printed_with_sources(capsys):
    words = ["task=anymal", "algo=pql", "device=cpu", "algo.gamma=0.9", "task.kwargs.a=1"]
    lines = printed(capsys, *words, "--cfg")
    found = dict(re.fullmatch(r"(\S+?)=.*?  # (.*)", line).groups() for line in lines)
    assert found.keys() == dict(leaves(compose(words))).keys()
    assert found["algo.gamma"] == "command line"
    assert found["task.kwargs"] == "command line"
    assert found["algo.n_step"] == "cfg/tuned/anymal/pql.yaml"
    assert found["algo.batch_size"] == "cfg/tuned/anymal/pql.yaml: scales.cpu"
    assert found["algo.critic.hidden"] == "cfg/tuned/cpu/pql.yaml"
    assert found["task.name"] == "cfg/task/anymal.yaml"
    assert found["algo.normalize_obs"] == "schema"
    assert found["algo.critic.v_max"] == "schema; not read without algo.critic.atoms"


def test_hydras_word_prints_the_same(capsys):
    words = ["task=pendulum", "device=cpu", "--cfg"]
    assert printed(capsys, *words, "job") == printed(capsys, *words)
    assert main(["train", "task=pendulum", "device=cpu", "job", "--cfg"]) == 2  # no word of its own


def test_what_is_printed_makes_the_same_run(capsys):
    lines = printed(capsys, "task=cartpole", "algo=dqn", "device=cpu", "--cfg")
    given = [line.partition("  #")[0].strip() for line in lines]
    again = [w for w in given if not w.startswith(("task.kwargs={", "task.remote={", "algo.name", "algo.family"))]
    config = compose(["task=cartpole", "algo=dqn", "device=cpu"])
    read = [w for w, line in zip(given, lines, strict=True) if "not read" not in line]
    assert compose(["task=cartpole", "algo=dqn", *(w for w in again if w in read)]) == config


@pytest.mark.parametrize("algo", ALGOS)
def test_help_lists_what_an_algorithm_reads(capsys, algo):
    lines = printed(capsys, "--help", f"algo={algo}", "device=cpu")
    names = [line.split()[0] for line in lines if line.startswith(("algo.", "replay."))]
    config = compose([f"algo={algo}", "device=cpu", *(["task=catch"] if algo in ("dqn", "r2d2", "pqn") else [])])
    read = ("algo.",) if config.algo.data == "rollout" else ("algo.", "replay.")
    assert names == [name for name, _ in leaves(config) if name.startswith(read)]
    (gamma,) = (line for line in lines if line.startswith("algo.gamma "))
    assert gamma.split(maxsplit=2)[2].startswith("from 0 up to 1")
    assert gamma.endswith("Discount factor.")


def test_help_alone_shows_the_command(capsys):
    lines = printed(capsys, "--help")
    assert lines[0].startswith("usage: pql train")
    assert any("--dry-run" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "row", "tick"),
    [
        (["task=pendulum", "algo=pql", "budget.env_steps=1e5"], "v_per_step=2, p_per_v=0.5", "4 env steps"),
        (["task=cartpole", "algo=ppo"], "v_per_step=0.625, p_per_v=1", "128 env steps"),
    ],
)
def test_a_dry_run_prints_its_cost_and_writes_nothing(capsys, tmp_path, monkeypatch, words, row, tick):
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, "--dry-run", "device=cpu", "num_envs=4", *words)
    assert f"ratios        {row}" in lines
    assert any(line.startswith("a tick") and tick in line for line in lines)
    assert re.search(r"(take about [\d,]+ s|make about [\d,]+ env steps) at this rate", lines[-1])
    assert re.search(r"parameters    \w+ [1-9]", "\n".join(lines))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_presets_by_option(capsys, tmp_path):
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text("like: pql\ngamma: 0.5\n")
    for words in (["--presets", str(tmp_path)], [f"--presets={tmp_path}"], [f"presets={tmp_path}"]):
        lines = printed(capsys, "algo=mine", "device=cpu", *words, "--cfg")
        gamma = next(line.split() for line in lines if line.startswith("algo.gamma"))
        assert gamma[:3] == ["algo.gamma=0.5", "#", str(tmp_path / "algo" / "mine.yaml")]


def test_the_reference_of_settings_is_up_to_date():
    assert (pages.DOCS / "settings.md").read_text() == pages.settings_page(), "python tools/pages.py writes it"
