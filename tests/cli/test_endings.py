"""How commands end: exit status, last line, and what is kept. The table of docs/troubleshooting.md, case by case."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from run_files import points, words

from pql.__main__ import main as program
from pql.cli import jobs, multirun, sweep
from pql.cli.main import main
from pql.contract.registry import register
from pql.engine import deadlines
from pql.engine.deadlines import Limit
from pql.envs.toy import Counter
from pql.run import evaluation

FULL = OSError(28, "No space left on device")
RELEASE = threading.Event()


class Faulty(Counter):
    """With 16 environments, as in training, ``fault`` is called with the step ``at``, and may replace it."""

    at, fault = 12, staticmethod(lambda step: None)

    def __init__(self, num_envs, device):
        super().__init__(num_envs, device)
        self.steps = 0

    def step(self, action):
        self.steps += 1
        step = super().step(action)
        due = self.steps == Faulty.at and self.spec.num_envs == 16
        return (Faulty.fault(step) if due else None) or step


register("faulty_endings", Faulty)
FAULTY = ("task=env", "task.name=faulty_endings")


def boom(*_: Any, **__: Any) -> None:
    raise ValueError("boom\nand more of it")


def full(*_: Any, **__: Any) -> None:
    raise FULL


def press(*_: Any, **__: Any) -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


def end(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)


def hang(*_: Any, **__: Any) -> None:
    time.sleep(1000)


def interrupted(*_: Any, **__: Any) -> None:
    press()
    hang()


@dataclass
class Case:
    """``words`` of a command, with RUN for a finished run and OUT for a new path; ``fault``: (place, what it does)."""

    words: str
    status: int
    last: str  # pattern of the last line: of the output if the status is 0, else of the errors
    fault: tuple[str, Callable[..., Any]] | None = None
    output: bool = False  # the last line is that of the output in any case


def step(what: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    return "step", what


EVAL, WRITE = "pql.run.evaluation.run_episodes", "pathlib.Path.write_text"
KEPT = r"; to continue: pql resume OUT$"
SAYS = "; the lines above say where$"
CASES = {
    "train": Case("train", 0, r"^next: pql eval OUT$|^ +pql resume OUT .*$"),
    "train: a wrong setting": Case("train seed=x", 2, r"^pql: seed=x: expected a whole number"),
    "train: an unknown setting": Case("train alg=pql", 2, r"^pql: alg=pql: expected .*did you mean"),
    "train: a directory with a run": Case("train run_dir=RUN", 2, r"^pql: run_dir=RUN: expected "),
    "train: the simulator fails": Case(
        "train faulty", 1, r"^pql: worker collector failed: ValueError: boom; nothing had been saved$", step(boom)
    ),
    "train: the simulator fails after a save": Case(
        "train faulty checkpoint.every_seconds=1e-9",
        1,
        r"^pql: worker collector failed: ValueError: boom; to continue: pql resume OUT$",
        step(boom),
    ),
    "train: the simulator hangs": Case(
        "train faulty placement.watchdog_seconds=1",
        1,
        r"^pql: worker [\w, ]*collector[\w, ]* has not finished its tick in 1 s \(placement.watchdog_s",
        step(lambda step: RELEASE.wait(60) and None),
    ),
    "train: Ctrl-C": Case("train faulty", 130, r"^next: pql eval OUT|^ +pql resume OUT", step(press), output=True),
    "train: SIGTERM": Case("train faulty", 130, r"^next: pql eval OUT|^ +pql resume OUT", step(end), output=True),
    "train: the disk is full": Case(
        "train",
        1,
        r"^pql: the run has come to its end, but not all of it could be kept in OUT: checkpoint last \(\[Errno 28\] "
        r"No space left on device\); checkpoint tick-\d+ \(.*\); nothing had been saved$",
        ("pql.data.tensorfile.write", full),
    ),
    "train: the summary cannot be written": Case(
        "train",
        1,
        r"^pql: the run has come .* kept in OUT: summary.json \(\[Errno 28\] No space left on device\)" + KEPT,
        ("pql.run.store.run_dir.write_summary", full),
    ),
    "train: a fault of the program": Case(
        "train", 1, "^pql: train failed: ValueError: boom" + SAYS[:-1] + KEPT, ("pql.run.session.Session._finish", boom)
    ),
    "train: Ctrl-C while it loads": Case("train", 130, "^pql: interrupted$", ("pql.cli.main.parser", interrupted)),
    "resume": Case("resume RUN", 0, r"^(next| +).*pql resume RUN"),
    "resume: no run": Case("resume OUT", 2, r"^pql: .*OUT: expected "),
    "resume: another setting": Case("resume RUN seed=7", 2, r"^pql: seed=7: expected "),
    "eval": Case("eval RUN episodes=2", 0, r"^written: RUN/evaluations/.*json$"),
    "eval: no run": Case("eval OUT", 2, r"^pql: .*OUT: expected "),
    "eval: the simulator fails": Case("eval RUN", 1, "^pql: eval failed: ValueError: boom" + SAYS, (EVAL, boom)),
    "eval: the simulator hangs": Case(
        "eval RUN", 1, r"^pql: the evaluation has made no progress for 0.2 s \(placement.start_seconds\)$", (EVAL, hang)
    ),
    "eval: Ctrl-C": Case("eval RUN", 130, "^pql: interrupted$", (EVAL, interrupted)),
    "eval: a file that cannot be written": Case("eval RUN out=/proc/x", 2, "^pql: out=/proc/x: expected a file that "),
    "eval: the disk is full": Case(
        "eval RUN episodes=2 out=OUT",
        1,
        r"^pql: the evaluation above was not written: \[Errno 28\] No space left on device; make room, or choose",
        (WRITE, full),
    ),
    "eval: a run that cannot be written to": Case(
        "eval RUN episodes=2", 0, r"^policy: RUN/checkpoints/last", (WRITE, full)
    ),
    "export: an unknown format": Case("export RUN formats=gif", 2, "^pql: formats=gif: expected one or more of"),
    "export: the disk is full": Case(
        "export RUN formats=pt2 out=OUT",
        1,
        r"^pql: export failed: OSError: \[Errno 28\] No space left on device; make room or choose another place$",
        ("pql.run.export.writer.write_export", full),
    ),
    "report: no run": Case("report OUT", 2, "^pql: "),
    "report: the disk is full": Case(
        "report RUN out=OUT",
        1,
        r"^pql: report failed: OSError: \[Errno 28\] No space left on device; make room or choose another place$",
        ("pql.reports.page.sections", full),
    ),
    "compare: no runs": Case("compare x=seconds", 2, "^pql: run=null: expected run directories$"),
    "compare: Ctrl-C": Case(
        "compare RUN out=OUT", 130, "^pql: interrupted$", ("pql.reports.numbers.analyse", interrupted)
    ),
    "play: Ctrl-C": Case("play RUN out=OUT.mp4", 130, "^pql: interrupted$", ("pql.run.play.Stage.run", interrupted)),
    "play: the disk is full": Case(
        "play RUN out=OUT.mp4", 1, r"^pql: play failed: OSError: \[Errno 28\]", ("pql.run.play.Stage.run", full)
    ),
    "play: an unknown ending": Case("play RUN out=OUT", 2, "^pql: out=OUT: expected a file name that ends in .mp4$"),
    "watch: Ctrl-C": Case("watch RUN port=0", 130, "^pql: interrupted$", ("webbrowser.open", interrupted)),
    "watch: no folder": Case("watch OUT", 2, "^pql: run=OUT: expected a run directory"),
    "doctor": Case("doctor --env pendulum --steps 8 --num-envs 2", 0, "."),
    "doctor: an unknown name": Case("doctor --env pendulun", 2, "^pql: .*did you mean pendulum"),
    "doctor: a simulator that breaks a rule": Case(
        "doctor --env faulty_endings --steps 20 --num-envs 16",
        1,
        r"^pql: faulty_endings breaks rules of the contract: .* \(docs/simulators.md\)$",
        step(lambda step: step._replace(reward=step.reward.double())),
    ),
    "push: a hub that cannot be reached": Case(
        "push RUN me/walker",
        2,
        r"^pql: (repo=me/walker: expected a repository that |command=pull or push: expected the pack)",
    ),
    "pull: a wrong name": Case("pull walker", 2, "^pql: repo=walker: expected OWNER/NAME$"),
    "list": Case("list algos", 0, "."),
    "an unknown command": Case("lost", 2, "^pql: command=lost: expected one of .*did you mean list"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("endings") / "run"
    assert main(["train", *words(path)]) == 0
    return path


@pytest.mark.parametrize("name", CASES)
def test_a_command_ends_as_the_table_says(name, finished, tmp_path, monkeypatch, capfd, ctrl_c):
    case, out = CASES[name], tmp_path / "out"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(deadlines, "LOOK", 0.02)
    monkeypatch.setattr(evaluation, "start_limit", lambda place: Limit(0.2, "placement.start_seconds"))
    monkeypatch.setattr(Faulty, "fault", staticmethod(lambda step: None))
    command, *rest = case.words.replace("RUN", str(finished)).replace("OUT", str(out)).split()
    if command == "train":
        more = [*FAULTY] if "faulty" in rest else []
        rest = [*words(out), *more, *(w for w in rest if w != "faulty")]
    if case.words.startswith("watch RUN"):
        rest.append("open=true")
    if case.fault:
        place, what = case.fault
        if place == "step":
            monkeypatch.setattr(Faulty, "fault", staticmethod(what))
        else:
            monkeypatch.setattr(place, what)
    monkeypatch.setattr(deadlines, "WORKER", 0.05)
    RELEASE.clear()
    capfd.readouterr()
    began = time.monotonic()
    status = main([command, *rest])
    RELEASE.set()
    spent, said = time.monotonic() - began, capfd.readouterr()
    lines = (said.out if case.status == 0 or case.output else said.err).splitlines()
    last = lines[-1].replace(str(finished), "RUN").replace(str(out), "OUT")
    assert re.search(case.last, last), last
    assert status == case.status, said.err
    if case.fault == step(boom):
        assert "test_endings.py" in said.err  # where it happened
    if status == 130:
        assert spent < 30  # far below the sleep
    if status == 0 and command == "train":
        assert (out / "summary.json").exists()
        assert len(points(out)) == 1


# -- several runs -----------------------------------------------------------------------------------------------------

MANY = {
    "all are done": ([0, 0], 0, r"^all 2 runs are finished: OUT$"),
    "one fails": ([1, 0], 1, r"^1 of 2 runs failed: give the same command again to try them once more$"),
    "one crashes": ([0, -6], 1, r"^1 of 2 runs failed: give the same command again to try them once more$"),
    "Ctrl-C": ([130], 130, r"^interrupted: give the same command again to continue$"),
}


class Ending(jobs.Runner):
    """Its runs end with ``statuses``, one after the other."""

    statuses: ClassVar[list[int]] = []

    def run(self, *_: Any, **__: Any) -> int:
        status = Ending.statuses.pop(0)
        self.asked = self.asked or status == jobs.INTERRUPTED
        return status


@pytest.mark.parametrize("name", MANY)
def test_a_multirun_ends_as_its_runs_do(name, tmp_path, monkeypatch, capfd):
    statuses, status, last = MANY[name]
    monkeypatch.setattr(multirun, "Runner", Ending)
    monkeypatch.setattr(Ending, "statuses", [*statuses])
    assert main(["train", "-m", "task=pendulum", "algo=pql", "seed=1,2", f"multirun_dir={tmp_path}"]) == status
    said = capfd.readouterr().out
    assert re.search(last, said.splitlines()[-1].replace(str(tmp_path), "OUT"))
    assert ("failed (ended by SIGABRT)" in said) == (-6 in statuses)


@pytest.mark.parametrize(
    ("statuses", "status", "last"),
    [
        ([1, 1], 1, "^none finished: the reasons are in trials.csv, each run's output in "),
        ([130], 130, "^interrupted: give the same command again to continue$"),
    ],
)
def test_a_sweep_ends_as_its_trials_do(statuses, status, last, tmp_path, monkeypatch, capfd):
    pytest.importorskip("optuna")
    monkeypatch.setattr(sweep, "Runner", Ending)
    monkeypatch.setattr(Ending, "statuses", [*statuses])
    words = ["task=pendulum", "algo=pql", "algo.critic.lr=interval(1e-4,1e-2)", "trials=2", "budget.seconds=1"]
    assert main(["sweep", *words, f"sweep_dir={tmp_path}"]) == status
    assert re.search(last, capfd.readouterr().out.splitlines()[-1])


# -- a reader that leaves ---------------------------------------------------------------------------------------------


def leave(*_: Any, **__: Any) -> None:
    raise BrokenPipeError


@pytest.mark.parametrize(
    ("words", "status"), [(["list", "tasks"], 0), (["train", "-m", "seed=1,2"], 1), (["sweep"], 1)]
)
def test_a_reader_that_leaves_ends_a_listing_but_is_an_error_of_runs_left_undone(words, status, monkeypatch, capfd):
    monkeypatch.setattr("pql.cli.main.parser", leave)
    monkeypatch.setattr(sys, "argv", ["pql", *words])
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert program() == status
    told = "pql: the output was closed before all runs were done: give the same command again\n"
    assert capfd.readouterr().err == told * status


def test_a_status_is_kept_if_the_reader_leaves_after_it(monkeypatch):
    monkeypatch.setattr("pql.cli.main.main", lambda: 1)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(flush=leave, fileno=lambda: 1))
    assert program() == 1


def test_an_evaluation_is_written_before_it_is_printed(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("pql.cli.commands.print_evaluation", leave)
    with pytest.raises(BrokenPipeError):
        main(["eval", str(finished), "episodes=2", f"out={tmp_path / 'x.json'}"])
    assert json.loads((tmp_path / "x.json").read_text())["episodes"] == 2


def test_the_documentation_lists_every_status():
    text = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    table = text.partition("## How a command ends\n")[2]
    listed = {int(one) for one in re.findall(r"^\| (\d+) \|", table, re.M)}
    assert listed == {0, 1, 2, 130, 143}
    assert {case.status for case in CASES.values()} == listed - {143}
