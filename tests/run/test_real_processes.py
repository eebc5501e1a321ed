"""Signals to a whole run, and its death in native code: exit status, output, and that the run can be resumed.

Every trial is a real process, forked from one that has the library.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from fault_rows import SIGNALS
from real_runs import begin
from run_files import points, resume, words

from pql.run.store import checkpoint
from pql.run.store.run_dir import read_summary

LONG = ("task=env", "task.name=crashing", "budget.env_steps=1000000", "checkpoint.every_seconds=0.02")
NEVER = 10**9
ENDS = 10.0  # seconds; of the row


class Runs:
    """Starts runs in a folder, and ends what is left of them."""

    def __init__(self, folder):
        self.folder, self.log, self.left = folder / "run", folder / "log", []
        self.mark = f"task.kwargs.mark={self.folder}.mark"
        # A path is accepted if it is given again.
        self.again = (self.mark, "checkpoint.every_seconds=null", "budget.seconds=null")

    def __call__(self, at: int = NEVER, how: str = "hang", *more: str, permitted: bool = False) -> BaseProcess:
        made = words(self.folder, *LONG, f"task.kwargs.at={at}", f"task.kwargs.how={how}", self.mark, *more)
        self.left.append(begin(["train", *made], self.log, permitted))
        return self.left[-1]

    def wait_for(self, condition, process: BaseProcess | None = None, seconds: float = 60.0) -> None:
        """Wait while ``process``, if there is one, is alive."""
        end = time.monotonic() + seconds
        while not condition():
            assert process is None or process.is_alive(), self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.005)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def resumes(self) -> None:
        """The newest resume point is intact, and the run goes on from it."""
        facts = checkpoint.newest_checkpoint(self.folder / "checkpoints")[1]
        steps = 16 * (max(facts["counters"]["steps"], 8) + 4)
        assert resume(self.folder, *self.again, f"budget.env_steps={steps}").env_steps == steps


@pytest.fixture
def runs(tmp_path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    for process in made.left:
        process.kill()
        process.join()


@pytest.mark.fault(count=50)
@SIGNALS
def test_a_signal_at_any_moment_saves_and_ends_the_run(runs, number, trial):
    """While it is built, warms up, trains or saves, which it does all the time."""
    process = runs()
    runs.wait_for(runs.folder.exists, process)
    time.sleep(random.Random(trial).uniform(0, 0.6))
    begun = time.monotonic()
    os.kill(process.pid, number)
    process.join(ENDS)
    assert process.exitcode == 130, runs.said()
    assert time.monotonic() - begun < ENDS
    assert "pql: stopping after this tick and saving; Ctrl-C again to leave at once" in runs.said()
    assert "Traceback" not in runs.said()
    facts = checkpoint.newest_checkpoint(runs.folder / "checkpoints")[1]
    summary = read_summary(runs.folder)
    assert (summary["env_steps"], summary["return_mean"]) == (16 * facts["counters"]["steps"], None)
    assert "interrupted, saved: not evaluated" in runs.said()
    if trial % 10 == 0:
        runs.resumes()


@pytest.mark.fault(8, form="twice", count=50)
def test_a_second_ctrl_c_leaves_at_once_from_a_tick_that_does_not_end(runs, trial):
    process = runs(8 + 1 + trial % 20, "hang", "placement.watchdog_seconds=100")
    runs.wait_for(runs.folder.exists, process)
    time.sleep(random.Random(trial).uniform(0.3, 0.6))
    os.kill(process.pid, signal.SIGINT)
    runs.wait_for(lambda: "stopping after this tick" in runs.said(), process)
    os.kill(process.pid, signal.SIGINT)
    process.join(2)
    assert process.exitcode == 130, runs.said()


@pytest.mark.fault(29, count=7)
@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("how", "number"),
    [("read", 11), pytest.param("abort", 6, marks=pytest.mark.slow), pytest.param("thread", 6, marks=pytest.mark.slow)],
)
def test_a_crash_in_native_code_shows_the_stacks_of_all_threads_and_the_run_resumes(runs, how, number, trial):
    process = runs(100 + 3 * trial, how)  # after some resume points
    runs.wait_for(Path(f"{runs.folder}.mark").exists, process, 200)
    process.join(ENDS)
    assert process.exitcode == -number, runs.said()
    cause = ("Aborted", "Segmentation fault")[how == "read"]
    who = "a thread of a library" if how == "thread" else "worker collector"
    last = f"pql: {who} crashed: {cause}; its stack is above; continue with: pql resume {runs.folder} --trust\n"
    runs.wait_for(lambda: runs.said().endswith(last), seconds=5)
    said = runs.said()
    assert f"Fatal Python error: {cause}\n" in said
    assert "Current thread 0x" in said
    assert " in step\n" in said or how == "thread"
    assert "env_slice.py" in said  # the collector's frames
    assert said.count("hread 0x") >= 4  # main thread, collector, v, p
    assert points(runs.folder)
    printed = last.split("pql resume ")[1].split()  # the simulator's path is trusted
    resumed = begin(["resume", *printed, "budget.env_steps=2000", *runs.again[1:]], runs.log)
    runs.left.append(resumed)
    resumed.join(60)
    assert resumed.exitcode == 0, runs.said()


@contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small disk in memory; skip the test where that is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs permission to mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


SHORTER = ("budget.env_steps=null", "budget.seconds=4", "checkpoint.every_seconds=0.2")


@pytest.mark.fault(33, form="full", count=5)
@pytest.mark.fault(13)
def test_a_disk_that_is_full_to_the_end_is_told_and_the_status_is_1(tmp_path, runs, trial):
    """A real disk, filled by another program while the run trains; afterwards the run goes on from what was kept."""
    with disk(tmp_path / "disk", 8) as place:
        runs.folder = place / "run"
        process = runs(NEVER, "hang", *SHORTER)
        runs.wait_for(lambda: points(runs.folder), process)
        time.sleep(random.Random(trial).uniform(0, 0.3))
        ballast = place / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:  # no space left
            while file.write(bytes(4096)):
                pass
        process.join(60)
        assert process.exitcode == 1, runs.said()
        assert "No space left on device" in runs.said()
        assert "but not all of it could be kept in" in runs.said().splitlines()[-1]
        ballast.unlink()
        runs.resumes()


@pytest.mark.fault(33, form="read-only", count=5)
def test_a_directory_made_read_only_is_told_and_the_status_is_1(runs, trial):
    process = runs(NEVER, "hang", *SHORTER, permitted=True)
    runs.wait_for(lambda: points(runs.folder), process)
    time.sleep(random.Random(trial).uniform(0, 0.3))
    folders = [runs.folder, *(path for path in runs.folder.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    process.join(60)
    for folder in folders:
        if folder.exists():
            folder.chmod(0o755)
    assert process.exitcode == 1, runs.said()
    assert "Permission denied" in runs.said()
    assert "but not all of it could be kept in" in runs.said().splitlines()[-1]
    runs.resumes()


def simulators(process: BaseProcess) -> list[Path]:
    """Return the directories in /proc of a run's simulators in processes of their own."""
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [Path("/proc", number) for number in (task.read_text().split() if task.exists() else ())]
    return [path for path in found if b"far.py" in command_of(path)]


def command_of(path: Path) -> bytes:
    """Return the command line of a process; empty once it has ended, also before its parent has noticed."""
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.fault(5, count=20)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the simulator's process in Linux's /proc")
def test_a_crash_of_the_simulators_own_process_is_the_last_line(runs, trial):
    at = 1 + (100 + 9 * trial) % 180  # the first eight steps are made before the workers start
    own = f"task.process.python={sys.executable}"
    far = ("task=env", "task.name=far_sims:Walk", own, "task.kwargs.fault=abort", f"task.kwargs.at={at}")
    process = begin(["train", *words(runs.folder, *far, *LONG[2:])], runs.log)
    runs.left.append(process)
    alive: list[Path] = []
    runs.wait_for(lambda: alive.extend(simulators(process)) or alive, process, 200)
    while command_of(alive[0]) and process.is_alive():  # until it crashes
        time.sleep(0.01)
    process.join(ENDS)
    assert process.exitcode == 1, runs.said()
    saved = points(runs.folder)
    assert saved or at <= 60
    who = "worker collector failed: " if at > 8 else ""
    kept = f"to continue: pql resume {re.escape(str(runs.folder))} --trust" if saved else "nothing had been saved"
    last = rf"pql: {who}the simulator's process \d+ \(.*\) was ended by SIGABRT; {kept}"
    assert re.fullmatch(last, runs.said().splitlines()[-1]), runs.said()
    if saved:
        done = checkpoint.newest_checkpoint(runs.folder / "checkpoints")[1]["counters"]["steps"]
        more = (*far[1:3], "checkpoint.every_seconds=null", f"budget.env_steps={16 * (done + 4)}")
        assert resume(runs.folder, *more).env_steps == 16 * (done + 4)
