"""The last line of a crash in native code, and the process that prints it."""

import faulthandler
import subprocess
import sys

import pytest

from pql.engine import crash

DUMP = b"Fatal Python error: Aborted\n\nThread 0x00000000000000b0 (most recent call first):\n  ...\n\n"
CURRENT = b"Current thread 0x00007f00000000a0 (most recent call first):\n  ...\n"
END = "crashed: Aborted; its stack is above"
RUN = [b"\x01run runs/one\n", b"\x01command pql resume x --trust\n"]
FACTS = [
    b"\x01thread 7f00000000a0 worker v\n",
    b"\x01thread b0 worker p\n",
    b"\x01run runs/one\n",
    b"\x01command pql resume x --trust\n",
]


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("facts", "dump", "last"),
    [
        (FACTS, [DUMP, CURRENT], f"me: worker v {END}; continue with: pql resume x --trust"),
        (FACTS[1:2], [DUMP, CURRENT], f"me: a thread of a library {END}"),
        ([], [DUMP], f"me: a thread without Python code {END}"),
        (FACTS, [], None),
        ([*FACTS, b"\x01thread b0 \xff\n"], [b"\xff\n"], None),
    ],
)
def test_the_last_line_names_the_thread_that_crashed_and_the_run(capfdbinary, tmp_path, monkeypatch, facts, dump, last):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one" / "checkpoints" / "tick-000000000003").mkdir(parents=True)
    lines = b"".join([*facts, *dump]).splitlines(keepends=True)
    assert crash.last_line(lines, "me") == last
    assert capfdbinary.readouterr().err == b"".join(dump)  # as faulthandler wrote it


SCRIPT = """
import os, sys, threading
from pql.engine import crash

def work():
    crash.name_thread("worker two")
    os.abort()

crash.report_crashes("pql, rank 3")
crash.name_run("runs/one\\nline", "pql resume x\\ny")
if sys.argv[1] == "crash":
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.mark.fault(29)
def test_a_process_that_crashes_ends_with_the_line_and_another_silently(tmp_path):
    def run(how):
        command = [sys.executable, "-c", SCRIPT, how]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    crashed = run("crash")
    assert crashed.returncode == -6
    assert crashed.stderr.startswith("Fatal Python error: Aborted\n")
    assert " in work\n" in crashed.stderr
    line = "pql, rank 3: worker two crashed: Aborted; its stack is above; "
    assert crashed.stderr.splitlines()[-1] == f"{line}nothing had been saved"
    (tmp_path / "runs" / "one line" / "checkpoints" / "tick-000000000003").mkdir(parents=True)
    assert run("crash").stderr.splitlines()[-1] == f"{line}continue with: pql resume x y"
    ended = run("end")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_command_without_a_simulator_has_stacks_and_no_second_process():
    script = (
        "import faulthandler, subprocess; from pql.cli.main import main; subprocess.Popen = None; "
        "main(['list', 'algos']); print(faulthandler.is_enabled())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["True"], "")


def test_a_process_with_faulthandler_of_its_own_keeps_it(monkeypatch):
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: True)
    monkeypatch.setattr(subprocess, "Popen", None)
    before = crash._pipe
    crash.report_crashes("pql")
    assert crash._pipe is before
