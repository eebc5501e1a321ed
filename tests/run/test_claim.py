"""One writer per run directory: names of the same second, locks, and remains of a process that died."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from run_files import points, resume, rows, run, words

from pql.cli.jobs import Runner, next_command
from pql.cli.main import main
from pql.config.compose import compose
from pql.errors import ConfigError, PqlWarning
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import claim
from pql.run.store import run_dir as rundir

HERE = f"process {os.getpid()} on "


def racing(start, count=4):
    """Call ``start`` in ``count`` threads at once; return the claims, and the errors of the others."""
    barrier, claims, errors = threading.Barrier(count), [], []

    def enter():
        barrier.wait()
        try:
            claims.append(start())
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=enter) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return claims, errors


@pytest.mark.fault(32, cases=(2, 50))
def test_of_runs_that_start_together_in_one_directory_one_holds_it(tmp_path, cases):
    for i in range(cases):
        path = tmp_path / "runs" / str(i)
        claims, errors = racing(lambda path=path: claim.claim(path))
        assert len(claims) == 1
        assert len(errors) == 3
        for error in errors:
            assert error.startswith(f"run_dir={path}: expected a folder that no other run writes to: {HERE}")
            assert "\n" not in error
        claims[0].close()
        assert not path.exists() or not list(path.iterdir())  # another than its holder may have made it


@pytest.mark.fault(32, cases=(2, 50))
def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path, cases):
    for i in range(cases):
        stem = tmp_path / "runs" / f"pendulum-{i}"
        claims, errors = racing(lambda stem=stem: claim.claim_new(stem))
        assert not errors
        assert sorted(c.path.name for c in claims) == [stem.name, *(f"{stem.name}-{k}" for k in (2, 3, 4))]
        for one in claims:
            one.close()


def test_a_session_holds_its_directory_until_it_ends(tmp_path, capsys):
    run(*words(tmp_path / "run"))
    assert not (tmp_path / "run" / claim.LOCK).exists()
    first = Session(resume_config(tmp_path / "run", ["budget.env_steps=640"]), resume=True, quiet=True)
    assert str(claim.holder(tmp_path / "run")).startswith(HERE)
    with pytest.raises(ConfigError, match=f"expected a folder that no other run writes to: {HERE}"):
        resume(tmp_path / "run", "budget.env_steps=640")
    assert main(["resume", str(tmp_path / "run"), "budget.env_steps=640"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ConfigError, match="no other run writes to"):
        Session(compose(words(tmp_path / "run")), quiet=True)
    assert first.train().env_steps == 640
    assert claim.holder(tmp_path / "run") is None
    assert resume(tmp_path / "run", "budget.env_steps=800").env_steps == 800


def test_a_refused_start_leaves_no_directory_behind_but_one_that_was_there(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(ConfigError):
            run(*words(folder, "init_from=/nowhere"))
        assert list(tmp_path.iterdir()) == []


def test_automatic_names_are_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    stem = "runs/pendulum-pql-s0-20260101-000000"
    config = compose([*words(tmp_path), "run_dir=null"])
    with rundir.claim_directory(config) as one, rundir.claim_directory(config) as two:
        assert [str(c.path) for c in (one, two)] == [stem, f"{stem}-2"]
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(32)
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    script = (
        "import sys, time, pathlib; from pql.run.store.claim import claim; one = claim(pathlib.Path(sys.argv[1])); "
    )
    script += "print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {holder.pid} on "):
        claim.claim(tmp_path / "run")
    holder.kill()
    holder.communicate()
    assert claim.holder(tmp_path / "run") is None
    claim.claim(tmp_path / "run").close()


@pytest.mark.fault(32)
def test_what_a_process_has_forked_does_not_hold_its_directory(tmp_path):
    one = claim.claim(tmp_path / "run")
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        time.sleep(0.05)  # the child closes its copy first thing
        one._file.close()  # as the kernel does when this process dies
        claim.claim(tmp_path / "run").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_warned_of_and_used(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(PqlWarning, match="cannot be locked .No locks available.: a second run could write to it"):
        assert run(*words(tmp_path)).env_steps == 320
    assert claim.holder(tmp_path) is None


@pytest.mark.fault(32)
def test_several_runs_by_one_command_leave_a_run_alone_that_is_at_work(tmp_path):
    session = Session(compose(words(tmp_path / "run")), quiet=True)
    assert next_command(tmp_path / "run", ()) == ["resume", str(tmp_path / "run")]  # which is refused, by name
    session.closing.close()
    assert next_command(tmp_path / "run", ("seed=1",)) == ["train", "seed=1", f"run_dir={tmp_path / 'run'}"]


HOSTILE = {
    "a link": lambda lock, other: lock.symlink_to(other),
    "a link to nothing": lambda lock, other: lock.symlink_to(other.with_name("nothing")),
    "a pipe": lambda lock, other: os.mkfifo(lock),
    "a folder": lambda lock, other: lock.mkdir(),
}


@pytest.mark.fault(31)
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_lock_that_is_no_file_is_refused_at_once_and_not_followed(tmp_path, make):
    """A run directory may be somebody else's, with a link to a file of the user, or a pipe that nobody writes to."""
    other, folder = tmp_path / "mine", tmp_path / "run"
    other.write_text("mine")
    folder.mkdir()
    make(folder / claim.LOCK, other)
    assert claim.holder(folder) is None
    with pytest.raises(ConfigError, match=r"run_dir=.*expected a folder that can be written .*\.lock"):
        claim.claim(folder)
    with pytest.raises(ConfigError, match=r"sweep_dir=.*expected a folder that can be written .*\.lock"):
        Runner(folder, "sweep_dir").__enter__()
    assert {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()} == {"mine": "mine"}


@pytest.mark.fault(33)
@pytest.mark.parametrize("made_again", [False, True])
def test_a_claim_knows_its_directory_however_inodes_are_given(tmp_path, made_again):
    with claim.claim(tmp_path / "run") as one:
        assert one.there()
        (tmp_path / "run" / "config.yaml").write_text("")
        (tmp_path / "run" / claim.LOCK).unlink()
        assert one.there()
        shutil.rmtree(tmp_path / "run")
        if made_again:  # many file systems give the inode of a deleted directory to the next one
            (tmp_path / "run").mkdir()
        assert not one.there()
        one.renew()
        assert one.there()
        assert claim.holder(tmp_path / "run").startswith(HERE)


def test_a_claim_that_nobody_closes_keeps_neither_files_open_nor_the_lock(tmp_path, monkeypatch):
    opened, real, close = [], os.open, os.close
    monkeypatch.setattr(os, "open", lambda *args: (opened.append(real(*args)), opened[-1])[1])
    monkeypatch.setattr(os, "close", lambda handle: (opened.remove(handle), close(handle))[1])
    lost = claim.claim(tmp_path)
    folder = lost._folder
    assert folder in opened
    del lost
    assert folder not in opened
    assert claim.holder(tmp_path) is None


# -- the real thing -------------------------------------------------------------------------------------------------


def check_one_runs(*commands: list[str]) -> None:
    """Start several ``pql`` commands at once: one is refused by name; the other goes on until Ctrl-C, and saves."""
    pipe = subprocess.PIPE
    both = [subprocess.Popen([sys.executable, "-m", "pql", *c], stdout=pipe, stderr=pipe, text=True) for c in commands]
    try:
        until = time.monotonic() + 120
        while all(process.poll() is None for process in both) and time.monotonic() < until:
            time.sleep(0.02)
        refused, other = sorted(both, key=lambda process: process.poll() is None)
        error = refused.communicate(timeout=10)[1]
        assert refused.returncode == 2, error
        assert error.count("\n") == 1
        assert f"no other run writes to: process {other.pid} on " in error or "expected a new folder" in error
        time.sleep(0.2)  # a second one that fails a little later, too
        assert other.poll() is None
        other.send_signal(signal.SIGINT)
        assert "Traceback" not in other.communicate(timeout=60)[1]
        assert other.returncode in (0, 130)
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.fault(32, count=5)
@pytest.mark.parametrize("kinds", [("train", "train"), ("resume", "resume"), ("train", "resume")])
def test_of_two_commands_in_one_directory_one_is_refused(tmp_path, kinds):
    """In processes that start together; each run has no end of its own."""
    endless = ("budget.env_steps=null", "budget.seconds=600", "checkpoint.every_seconds=1")
    if "resume" in kinds:
        run(*words(tmp_path))
    before = len(rows(tmp_path)) if "resume" in kinds else 0
    line = {"train": ["train", *words(tmp_path, *endless)], "resume": ["resume", str(tmp_path), *endless]}
    # Where a run is already, another may not begin: of train and resume, resume goes on.
    check_one_runs(*(line[kind] for kind in kinds))
    steps = [row["steps/env"] for row in rows(tmp_path)[before:] if "updates/v" in row]
    assert steps == sorted(set(steps))
    assert claim.holder(tmp_path) is None
    assert points(tmp_path)
