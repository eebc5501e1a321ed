"""A run whose directory is deleted or not writable: it reports the cause and ends with exit status 1."""

import errno
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from run_files import points, resume, rows, run, words

from pql.cli.main import main
from pql.data import tensorfile
from pql.engine.schedule import Concurrent
from pql.errors import PqlWarning, RunError
from pql.run.evaluator import Evaluations
from pql.run.policy import load_policy
from pql.run.store import run_dir as rundir
from pql.run.store.claim import LOCK, claim, holder
from pql.run.store.run_dir import read_summary

NUMBERS = {errno.EROFS: "read-only", errno.ENOSPC: "full"}


def everything(path):
    shutil.rmtree(path)


def content(path):
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def visible(path):
    """As ``rm -rf path/*``, which leaves the lock."""
    for entry in path.glob("[!.]*"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def all_but_points(path):
    """As an ``rm -rf path`` that ends because the saver has just written there."""
    for entry in path.iterdir():
        if entry.name != "checkpoints":
            entry.unlink()


@pytest.mark.fault(33, form="deleted", count=10)
@pytest.mark.parametrize("saves", [False, True], ids=["", "saver"])
@pytest.mark.parametrize("delete", [everything, content, visible, all_but_points])
def test_a_run_directory_deleted_in_mid_run_is_made_anew_with_the_policy(tmp_path, delete, saves, trial):
    """At different times of the run, also where the saver writes before the deletion is noticed."""
    folder, seen = tmp_path / "run", []

    def cut(session, row):
        seen.append(row["steps/env"])
        if len(seen) == 1 + trial % 3:
            delete(folder)
            if saves:
                session.archive.save(session.parts, session._counters(), background=True)
                session.archive.settle()

    lost = "metrics and checkpoints from before .* env steps"
    with (
        pytest.warns(PqlWarning, match=f"{folder} was deleted while the run was at work: recreated, without {lost}"),
        pytest.raises(RunError, match=f"(?m)could be kept in {folder}: {lost} .the run directory was deleted.$"),
    ):
        run(*words(folder, "budget.env_steps=2400", "logger.every_seconds=0.01"), callbacks=[cut])
    assert load_policy(folder)(torch.zeros(2, 3)).shape == (2, 1)
    assert {"config.yaml", "env.json", "git.json", "overrides.yaml", "summary.json"} <= {
        p.name for p in folder.iterdir()
    }
    kept = [row["steps/env"] for row in rows(folder)]
    assert kept[-1] == read_summary(folder)["env_steps"] == 2400
    assert kept == seen[-len(kept) :]
    assert holder(folder) is None
    assert resume(folder, "budget.env_steps=2480").env_steps == 2480


@pytest.mark.fault(33, count=10)
def test_a_run_that_saves_all_the_time_survives_rm(tmp_path, trial):
    """Whenever ``rm -rf`` is at work: it may end with an error, as files appear while it deletes."""
    folder, seen = tmp_path / "run", []

    def cut(session, row):
        seen.append(row["steps/env"])
        if len(seen) == 1 + trial % 5:
            deleting = subprocess.Popen(["rm", "-rf", str(folder)], stderr=subprocess.DEVNULL)
            if trial % 2 == 0:
                deleting.wait()

    often = ("checkpoint.every_seconds=0.01", "logger.every_seconds=0.01")
    with pytest.warns(PqlWarning, match="was deleted"), pytest.raises(RunError, match="the run directory was deleted"):
        run(*words(folder, "budget.env_steps=2400", *often), callbacks=[cut])
    assert load_policy(folder)(torch.zeros(2, 3)).shape == (2, 1)
    assert resume(folder, "budget.env_steps=2480").env_steps == 2480


@pytest.mark.fault(33)
def test_a_deletion_is_noticed_at_the_next_row_and_saved_at_once(tmp_path):
    folder, found = tmp_path / "run", []

    def watch(session, row):
        if not found:
            shutil.rmtree(folder)
            found.append(row["steps/env"])
        elif session.archive.missing:
            session.archive.settle()
            found.append((load_policy(folder) is not None, [p.name for p in points(folder)]))
            session.stop = True

    with pytest.warns(PqlWarning, match="was deleted"), pytest.raises(RunError):
        run(*words(folder, "budget.env_steps=240000", "logger.every_seconds=0.01"), callbacks=[watch])
    assert found[1][0]
    assert len(found[1][1]) == 1


@pytest.mark.fault(33)
def test_the_policy_is_kept_where_the_directory_went_during_the_final_evaluation(tmp_path, monkeypatch):
    folder, real = tmp_path / "run", Evaluations.final

    def evaluate(evaluations):
        result = real(evaluations)
        shutil.rmtree(folder)
        return result

    monkeypatch.setattr(Evaluations, "final", evaluate)
    with pytest.warns(PqlWarning, match="was deleted"), pytest.raises(RunError, match="the run directory was deleted"):
        run(*words(folder))
    assert load_policy(folder)(torch.zeros(2, 3)).shape == (2, 1)
    assert read_summary(folder)["env_steps"] == 320


@pytest.mark.fault(32, 33)
def test_a_directory_that_another_run_has_taken_is_left_alone(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    run(*words(other))

    def swap(session, row):
        if not (folder / "theirs").exists():
            shutil.rmtree(folder)
            other.rename(folder)
            (folder / "theirs").write_text("")

    with pytest.raises(RunError, match=r"was deleted while the run was at work .*expected a new folder"):
        run(*words(folder, "budget.env_steps=240000", "logger.every_seconds=0.01"), callbacks=[swap])
    assert read_summary(folder)["env_steps"] == 320
    assert len(points(folder)) == 1


@pytest.mark.fault(32, 33)
def test_a_run_whose_lock_is_deleted_locks_its_directory_again(tmp_path):
    folder, holders = tmp_path / "run", []

    def cut(session, row):
        holders.append(holder(folder))
        if len(holders) == 1:
            (folder / LOCK).unlink()
        session.stop = len(holders) > 2

    run(*words(folder, "budget.env_steps=240000", "logger.every_seconds=0.01"), callbacks=[cut])
    assert all(str(one).startswith(f"process {os.getpid()} on ") for one in (holders[0], holders[2]))
    assert holder(folder) is None
    assert len(points(folder)) == 1


@pytest.mark.fault(32, 33)
def test_a_run_ends_where_another_process_has_locked_its_directory(tmp_path):
    """Its lock was deleted, so that the other one could."""
    folder, others = tmp_path / "run", []

    def cut(session, row):
        if not others:
            (folder / LOCK).unlink()
            others.append(claim(folder))

    with pytest.raises(RunError, match=r"lost its lock while the run was at work .*no other run writes to"):
        run(*words(folder, "budget.env_steps=240000", "logger.every_seconds=0.01"), callbacks=[cut])
    assert str(holder(folder)).startswith(f"process {os.getpid()} on ")
    others[0].close()


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("last", "checkpoint last ([Errno 28] No space left on device)"),
        ("tick-000000000012", "checkpoint tick-000000000012 ([Errno 28] No space left on device)"),
        ("best", "checkpoint best ([Errno 28] No space left on device)"),
        ("replay.safetensors", "replay.safetensors ([Errno 28] No space left on device)"),
        ("summary.json", "summary.json ([Errno 28] No space left on device)"),
    ],
)
def test_the_exit_status_is_1_where_something_could_not_be_kept(tmp_path, monkeypatch, capsys, broken, said):
    def full(real):
        def write(path, *rest):
            if broken in str(path):
                raise OSError(28, "No space left on device")
            return real(path, *rest)

        return write

    monkeypatch.setattr(tensorfile, "write", full(tensorfile.write))
    monkeypatch.setattr(rundir, "_write_json", full(rundir._write_json))
    with pytest.warns(PqlWarning, match="not written.*No space left") as told:
        assert main(["train", *words(tmp_path / "run", "eval.final=true", "replay.save=true")]) == 1
    assert len(told) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    line = f"pql: the run has come to its end, but not all of it could be kept in {tmp_path / 'run'}: {said}"
    assert len(errors) == 1
    assert errors[0].partition("; ")[0] == line
    assert errors[0].partition("; ")[2].startswith(("to continue: pql resume ", "its last policy is kept: pql eval "))


@pytest.mark.fault(33, form=lambda given: NUMBERS[given["number"]], count=20)
@pytest.mark.parametrize("number", NUMBERS, ids=NUMBERS.get)
def test_a_directory_that_takes_nothing_more_until_the_end(tmp_path, monkeypatch, capsys, number, trial):
    """From a random moment on nothing can be written there: one warning, the run goes on, and ends with status 1."""
    folder, rng, closed = tmp_path / "run", random.Random(trial), []

    def refusing(real):
        def write(path, *rest, **options):
            if closed and Path(path).is_relative_to(folder):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **options)

        return write

    for module, name in ((tensorfile, "write"), (rundir, "_write_json"), (os, "replace"), (os, "mkdir")):
        monkeypatch.setattr(module, name, refusing(getattr(module, name)))
    after, ticks, tick = rng.randrange(20), [], Concurrent.tick

    def counted(schedule):
        if len(ticks) == after:
            closed.append(True)
        ticks.append(True)
        tick(schedule)

    monkeypatch.setattr(Concurrent, "tick", counted)
    with pytest.warns(PqlWarning, match=rf"not written.*Errno {number}"):
        assert main(["train", *words(folder, "budget.env_steps=560", "checkpoint.every_seconds=0.05")]) == 1
    assert len(ticks) > after
    begun = f"pql: the run has come to its end, but not all of it could be kept in {folder}: checkpoint "
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith(begun))
    assert f"[Errno {number}]" in line
    closed.clear()
    if points(folder):  # saved before
        assert resume(folder, "budget.env_steps=640").env_steps == 640
