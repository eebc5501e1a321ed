"""RUN/console.log: the lines of a run; bounded, never a reason to wait or to fail."""

import os
import threading
import time

import pytest
from run_files import words

import pql
from pql.cli.main import main
from pql.engine import deadlines
from pql.errors import PqlWarning
from pql.run.log.console import Console
from pql.run.log.console_log import CONSOLE_LOG, ConsoleLog


def written(log):
    log.flush()
    return log.path.read_text().splitlines()


def test_a_run_writes_what_it_prints(tmp_path, capsys):
    assert main(["train", *words(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out.splitlines()
    found = (tmp_path / "run" / CONSOLE_LOG).read_text().splitlines()
    assert found[0] == "pql on pendulum: 16 environments on cpu, seed 0"
    assert found[-1] == f"next: pql eval {tmp_path / 'run'}" or found[-1].lstrip().startswith("pql resume")
    said = [line for line in printed if not line.startswith("  ")]  # without progress, whose times differ
    assert [line for line in said if line not in found] == []
    assert any(line.split()[:3] == ["time", "left", "env"] for line in found)
    size = len(found)
    assert main(["resume", str(tmp_path / "run"), "budget.env_steps=640"]) == 0
    again = (tmp_path / "run" / CONSOLE_LOG).read_text().splitlines()
    assert again[:size] == found
    assert again[size].startswith("pql on pendulum")


def test_a_quiet_run_writes_none(tmp_path):
    pql.train(*words(tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run" / CONSOLE_LOG).exists()


def test_warnings_and_the_error_that_ends_a_run_are_in_it(tmp_path, capsys):
    def fail(session, row):
        session.warn("something is odd")
        raise RuntimeError("it broke\nfor a reason")

    with pytest.raises(RuntimeError, match="it broke"), pytest.warns(PqlWarning, match="something is odd"):
        pql.train(*words(tmp_path / "run"), callbacks=fail)
    found = (tmp_path / "run" / CONSOLE_LOG).read_text().splitlines()
    assert "warning: something is odd" in found
    assert found[-2:] == ["error: RuntimeError: it broke", "nothing had been saved"]


def test_it_is_bounded(tmp_path):
    log = ConsoleLog(tmp_path / CONSOLE_LOG, limit=1000)
    for i in range(100):
        log.print(f"line {i:>14}")  # 20 bytes
        log.flush()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["console.log", "console.log.1"]
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert max(sizes) <= 1000
    assert sum(sizes) > 1000
    assert written(log)[-1] == "line             99"


def folder(path):
    path.mkdir()


def link(path):
    path.with_name("secret").write_text("kept")
    path.symlink_to(path.with_name("secret"))


def absent(path):
    path.parent.rmdir()


@pytest.mark.parametrize("hinder", [folder, link, os.mkfifo, absent])
def test_a_file_that_cannot_be_written_is_left_out(tmp_path, hinder):
    path = tmp_path / "run" / CONSOLE_LOG
    path.parent.mkdir()
    hinder(path)
    console = Console("pql on x", {})
    console.say("plan")
    console.record(path)
    console.say("a line")
    console.close()
    assert console.log._thread is None
    if hinder is link:
        assert path.with_name("secret").read_text() == "kept"
    if hinder is absent:  # and then the directory is created again
        path.parent.mkdir()
        console.say("another")
        assert written(console.log) == ["another"]


def test_a_disk_that_hangs_costs_no_time_and_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(deadlines, "CONSOLE", 0.1)
    log, free = ConsoleLog(tmp_path / CONSOLE_LOG), threading.Event()
    append = log._append
    monkeypatch.setattr(log, "_append", lambda data: free.wait(30) and append(data))
    start = time.monotonic()
    for i in range(5000):
        log.print(str(i))
    log.flush()
    assert time.monotonic() - start < 5
    assert len(log._texts) <= 1000
    free.set()
    deadlines.CONSOLE = 10.0
    assert written(log)[-1] == "4999"


def test_without_threads_lines_wait_for_the_next(tmp_path, monkeypatch):
    log = ConsoleLog(tmp_path / CONSOLE_LOG)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        log.print("first")
    assert not log.path.exists()
    log.print("second")
    assert written(log) == ["first", "second"]
