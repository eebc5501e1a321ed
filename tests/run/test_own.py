"""Runs that this user started here need no ``--trust``; those of anybody else do, whatever their directory says."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from run_files import words

import pql
from pql.cli.main import main
from pql.config.compose import compose
from pql.errors import PqlWarning
from pql.run.resume import resume_config
from pql.run.store import own
from pql.run.store.run_dir import command, create_run_dir

FOREIGN = ("task=env", "task.name=pql.envs.classic:Pendulum")
MORE = "budget.env_steps=640"


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "pql" / "runs"


def refused(capsys, *line):
    assert main([*map(str, line)]) == 2
    return capsys.readouterr().err


def test_an_own_run_needs_no_trust_and_its_copy_does(state, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    assert main(["train", *words(run, *FOREIGN)]) == 0
    assert "--trust" not in capsys.readouterr().out  # in the commands that it proposes
    assert [oct(path.stat().st_mode & 0o777) for path in (state, *state.iterdir())] == ["0o700", "0o600"]
    assert pql.evaluate(run, 2, 2)["episodes"] == 2
    assert main(["resume", str(run), MORE]) == 0
    shutil.copytree(run, tmp_path / "copy")
    shutil.copytree(tmp_path / "state", tmp_path / "copy" / "state")  # what a directory holds proves nothing
    for verb in (("eval",), ("resume",)):
        assert "repeat the command with --trust" in refused(capsys, *verb, tmp_path / "copy")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # modules are searched here
    assert "repeat the command with --trust" in refused(capsys, "resume", run, MORE)
    assert main(["resume", str(run), "budget.env_steps=800", "--trust"]) == 0
    assert "repeat the command with --trust" in refused(capsys, "resume", run, "budget.env_steps=900")


def test_links_and_uploads_of_an_own_run_are_not_followed_either(state, tmp_path, capsys):
    config = compose(words(tmp_path / "up", *FOREIGN, "logger=wandb", "logger.mode=online"))
    create_run_dir(tmp_path / "up", config, [])
    own.record(tmp_path / "up", config)
    with pytest.warns(PqlWarning, match="wandb stays offline"):
        assert resume_config(tmp_path / "up", []).logger.mode == "offline"
    run = tmp_path / "run"
    assert main(["train", *words(run, *FOREIGN)]) == 0
    (run / "evaluations").symlink_to(tmp_path / "elsewhere")
    capsys.readouterr()
    assert "a run directory without links to elsewhere" in refused(capsys, "resume", run, MORE)
    assert "a run directory without links to elsewhere" in refused(capsys, "eval", run)


def test_a_record_is_of_settings_place_machine_user_and_interpreter(state, tmp_path, monkeypatch):
    run, python = tmp_path / "run", tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    config = compose(words(run, *FOREIGN, "task.process.python=python"))
    own.record(run, config)
    assert own.started_here(run, config)
    assert own.started_here(tmp_path / "elsewhere" / ".." / "run", config)
    changed = [
        replace(config, task=replace(config.task, name="other:Pendulum")),
        replace(config, task=replace(config.task, kwargs={"stagger": True})),
        replace(config, task=replace(config.task, process=replace(config.task.process, python="python3"))),
        compose(words(run, *FOREIGN, "task.process.python=python", "algo.policy.net=plain_nets:Plain")),
    ]
    assert [own.started_here(run, other) for other in changed] == [False] * 4
    assert own.started_here(run, replace(config, num_envs=4))  # names no code
    assert not own.started_here(tmp_path / "run2", config)
    for what, value in (("platform.node", lambda: "other"), ("os.getuid", lambda: 1), ("os.getcwd", lambda: "/")):
        with monkeypatch.context() as patch:
            patch.setattr(f"pql.run.store.own.{what}", value)
            assert not own.started_here(run, config), what
    with monkeypatch.context() as patch:
        patch.setenv("PATH", os.environ["PATH"].partition(os.pathsep)[2])  # another program of this name
        assert not own.started_here(run, config)
    assert own.started_here(run, config)


@pytest.mark.parametrize("change", ["writable folder", "writable record", "link", "owner"])
def test_records_that_others_may_write_do_not_count(state, tmp_path, monkeypatch, change):
    config = compose(words(tmp_path / "run", *FOREIGN))
    own.record(tmp_path / "run", config)
    (record,) = state.iterdir()
    assert own.started_here(tmp_path / "run", config)
    if change == "owner":
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    elif change == "link":
        record.rename(state / "moved")
        record.symlink_to(state / "moved")
    else:
        (state if "folder" in change else record).chmod(0o777)
    assert not own.started_here(tmp_path / "run", config)


def test_a_state_directory_that_cannot_be_written_costs_only_the_flag(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    run = tmp_path / "run"
    assert main(["train", *words(run, *FOREIGN)]) == 0
    assert f"pql resume {run} budget.env_steps=640 --trust" in capsys.readouterr().out
    assert "repeat the command with --trust" in refused(capsys, "resume", run, MORE)


def test_the_state_directory_is_the_users_and_old_records_go(state, tmp_path, monkeypatch):
    assert own.folder() == state
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which the specification rules out
    assert own.folder() == Path.home() / ".local" / "state" / "pql" / "runs"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(own, "MOST", 2)
    configs = [compose(words(tmp_path / name, *FOREIGN)) for name in "abc"]
    for i, config in enumerate(configs):
        own.record(tmp_path / "abc"[i], config)
        record = state / own.record_name(tmp_path / "abc"[i], config)
        os.utime(record, (i, i))
    own.record(tmp_path / "d", configs[0])
    assert [own.started_here(tmp_path / name, configs[0]) for name in "abcd"] == [False, False, True, True]
    own.record(tmp_path / "e", compose(words(tmp_path / "e")))  # names no code: no record
    assert len([*state.iterdir()]) == 2
    assert command("resume", tmp_path / "e", compose(words(tmp_path / "e"))) == f"pql resume {tmp_path / 'e'}"
