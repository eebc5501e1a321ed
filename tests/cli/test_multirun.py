"""``pql train -m``: planned runs, repeating the command, and the processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
from run_files import WORDS, points, rows

from pql.cli import jobs, multirun
from pql.cli.jobs import Runner
from pql.cli.main import main
from pql.cli.sweep_values import Space, parse_space
from pql.errors import ConfigError
from pql.run.store import run_dir as rundir

SHORT = [w for w in WORDS if not w.startswith("task=")]


# -- words that stand for several values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "space"),
    [
        ("seed=1,2,3", Space("1,2,3", ("1", "2", "3"))),
        ("seed=range(1,4)", Space("range(1,4)", ("1", "2", "3"), 1, 3, 1, integer=True)),
        ("algo.gamma=range(0.8,1,0.1)", Space("range(0.8,1,0.1)", ("0.8", "0.9"), 0.8, 0.9, 0.1)),
        ("algo=choice(pql,sac)", Space("choice(pql,sac)", ("pql", "sac"))),
        ("algo.critic.hidden=[64,64],[32]", Space("[64,64],[32]", ("[64,64]", "[32]"))),
        ("algo.policy.grad_clip=null,0.5", Space("null,0.5", ("null", "0.5"))),
        ("task.id='A B',ALE/Pong-v5", Space("'A B',ALE/Pong-v5", ("A B", "ALE/Pong-v5"))),
        ("algo=glob(pql*, exclude=pql_sac)", Space("glob(pql*, exclude=pql_sac)", ("pql", "pql2", "pql_d"))),
        ("algo.critic.lr=interval(1e-4,1e-2)", Space("interval(1e-4,1e-2)", (), 1e-4, 1e-2)),
        ("algo.n_step=int(interval(1,5))", Space("int(interval(1,5))", (), 1, 5, integer=True)),
        ("algo.gamma=tag(log,interval(0.9,1))", Space("tag(log,interval(0.9,1))", (), 0.9, 1, log=True)),
    ],
)
def test_spaces(word, space):
    key, found = parse_space(word)
    assert key == word.partition("=")[0]
    assert found == space


@pytest.mark.parametrize("word", ["seed=1", "run_dir='a,b'", "task.id=odd)name(", "algo.critic.hidden=[64,64]"])
def test_single_values_stay_as_they_are_written(word):
    assert parse_space(word) == tuple(word.split("=", 1))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seed=1,1", "seed=1,1: expected values that differ"),
        ("seed=range(3,3)", r"seed=range\(3,3\): expected at least one value"),
        ("seed=glob(*)", r"seed=glob\(\*\): expected glob only for algo, task"),
        ("algo.gamma=interval(1,0)", "expected an interval from a smaller to a larger number$"),
        ("algo.gamma=tag(log,interval(0,1))", "to a larger number, both above 0"),
        ("algo.gamma=tag(lg,interval(0,1))", "expected no tag but an interval's log, not lg"),
        ("seed=tag(log,range(1,9))", "expected no tag but an interval's log, not log"),
        ("seed=", "seed=: expected a value"),
    ],
)
def test_spaces_that_cannot_be(word, message):
    with pytest.raises(ConfigError, match=message):
        parse_space(word)


# -- the plan -------------------------------------------------------------------------------------------------------


def test_a_run_for_every_combination_with_a_place_of_its_own():
    words = ("algo=pql,sac", "task=lqr", "algo.critic.hidden=[8],[8,8]", "seed=range(1,3)", "scale=cpu")
    folder, found = multirun.plan(words)
    assert str(folder) == "runs/multirun"
    assert [job.name for job in found] == [
        f"lqr-{algo}-algo.critic.hidden={hidden}-seed{seed}"
        for algo in ("pql", "sac")
        for hidden in ("8", "8_8")
        for seed in (1, 2)
    ]
    assert found[-1].words == ("algo=sac", "task=lqr", "algo.critic.hidden=[8,8]", "seed=2", "scale=cpu")
    config = found[-1].config
    assert (config.algo.name, config.algo.critic.hidden, config.seed) == ("sac", [8, 8], 2)


def test_presets_of_one_simulator_are_different_runs(tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "short.yaml").write_text("like: pendulum\nkwargs: {max_episode_steps: 50}\n")
    _, found = multirun.plan((f"presets={tmp_path}", "task=pendulum,short", "device=cpu"))
    assert [job.run_dir.name for job in found] == ["pendulum-pql2-seed0", "short-pql2-seed0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo=pql,sacc"], "(did you mean sac?)"),
        (["seed=1,2", "algo.gamm=0.9"], "algo.gamm=0.9: expected a known setting (did you mean algo.gamma?)"),
        (["algo.gamma=0.9,2"], "algo.gamma=2.0: expected a number from 0 up to 1"),
        (["algo.gamma=interval(0.9,1)"], "expected values that can be counted; intervals are for pql sweep"),
        (["run_dir=x", "seed=1,2"], "run_dir=x: expected multirun_dir=FOLDER with -m"),
        (["algo.gamma=0.5,0.50"], "expected values that differ"),
        (["algo=pql,sac", "algo.name=mine"], "-m=halfcheetah-mine-seed0: expected different combinations"),
    ],
)
def test_a_mistake_shows_before_anything_starts(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", "device=cpu", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, said.err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])


def test_without_m_several_values_are_refused_with_a_hint(capsys):
    for word in ("seed=1,2", "algo=pql,sac"):
        assert main(["train", word]) == 2
        assert capsys.readouterr().err.endswith("(pql train -m takes several)\n")


# -- running missing runs, in this process --------------------------------------------------------------------------


class Here(Runner):
    """Runs the commands in this process, and remembers them. Those for a run in ``broken`` fail."""

    commands: ClassVar[list[list[str]]] = []
    broken: tuple[str, ...] = ()

    def run(self, words, *_, **__):
        run_dir = Path(next(w for w in words if "/" in w).removeprefix("run_dir="))
        self.commands.append([words[0], run_dir.name])
        return 1 if run_dir.name in self.broken else main(list(words))


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(Here, "commands", [])
    monkeypatch.setattr(Here, "broken", ())
    monkeypatch.setattr(multirun, "Runner", Here)
    return Here


def command(folder: Path, *more: str) -> list[str]:
    return ["train", "-m", *SHORT, "task=pendulum", "algo=pql,sac", "seed=1,2", f"multirun_dir={folder}", *more]


NAMES = ["pendulum-pql-seed1", "pendulum-pql-seed2", "pendulum-sac-seed1", "pendulum-sac-seed2"]


def states(said: str) -> dict[str, str]:
    """run -> state, of the table at the end."""
    lines = [line for line in said.splitlines() if line.startswith("pendulum-")]
    return {line.split("  ")[0]: [cell for cell in line.split("  ") if cell][1].strip() for line in lines}


def test_the_same_command_does_what_is_missing(here, tmp_path, capsys):
    here.broken = ("pendulum-pql-seed2",)
    assert main(command(tmp_path)) == 1  # one fails, the others are made
    said = capsys.readouterr().out
    assert here.commands == [["train", name] for name in NAMES]
    assert states(said) == dict(zip(NAMES, ["finished", "failed (status 1)", "finished", "finished"], strict=True))
    assert "1 of 4 runs failed" in said

    here.broken = ()
    here.commands.clear()
    stopped, lost, never, done = (tmp_path / name for name in (NAMES[2], NAMES[3], NAMES[1], NAMES[0]))
    for folder in (stopped, lost):  # as after kill -9: with and without a resume point
        (folder / "summary.json").unlink()
    shutil.rmtree(points(lost)[0])
    (stopped / "wandb" / "logs").mkdir(parents=True)
    (stopped / "wandb" / "logs" / "debug-core.log").symlink_to(tmp_path)  # as wandb makes one
    before = json.loads((done / "summary.json").read_text())
    assert not never.exists()

    assert main(command(tmp_path)) == 0
    said = capsys.readouterr().out
    assert here.commands == [["train", NAMES[1]], ["resume", NAMES[2]], ["train", NAMES[3]]]
    assert "[1/4] pendulum-pql-seed1: finished before" in said
    assert states(said) == dict(zip(NAMES, ["finished before", "finished", "finished", "finished"], strict=True))
    assert f"all 4 runs are finished: {tmp_path}" in said
    assert json.loads((done / "summary.json").read_text()) == before
    assert [p.name.startswith(NAMES[3]) for p in (tmp_path / ".lost").iterdir()] == [True]
    assert all(rundir.state(tmp_path / name) == "finished" for name in NAMES)
    assert {p.parent for p in tmp_path.rglob("metrics.jsonl")} == {tmp_path / name for name in NAMES}

    here.commands.clear()
    assert main(command(tmp_path)) == 0
    assert here.commands == []


def test_a_run_made_with_other_settings_is_named_and_nothing_is_touched(here, tmp_path, capsys):
    assert main(command(tmp_path, "seed=1", "algo=pql")) == 0
    here.commands.clear()
    capsys.readouterr()
    assert main(command(tmp_path, "algo.gamma=0.9")) == 2
    assert capsys.readouterr().err == (
        f"pql: algo.gamma=0.9: expected 0.99, as in {tmp_path / NAMES[0]}; other settings need another multirun_dir\n"
    )
    assert here.commands == []


def test_ctrl_c_starts_nothing_more(here, tmp_path, capsys, monkeypatch):
    def press(self, words, *_, **__):
        self.commands.append(words[0])
        self.asked = True
        return 130

    monkeypatch.setattr(Here, "run", press)
    assert main(command(tmp_path)) == 130
    said = capsys.readouterr().out
    assert here.commands == ["train"]
    assert states(said) == dict(zip(NAMES, ["interrupted", "missing", "missing", "missing"], strict=True))


def test_a_summary_of_an_earlier_sitting_is_not_the_end(tmp_path):
    """A finished run that is resumed for longer and killed is unfinished."""
    assert main(["train", *WORDS, f"run_dir={tmp_path}"]) == 0
    assert rundir.state(tmp_path) == "finished"
    from pql.run.resume import resume_config
    from pql.run.session import Session

    session = Session(resume_config(tmp_path, ["budget.env_steps=640"]), resume=True, quiet=True)
    session.closing.close()  # as if it had been killed here
    assert rundir.state(tmp_path) == "interrupted"
    assert main(["resume", str(tmp_path)]) == 0
    assert rundir.state(tmp_path) == "finished"
    assert rundir.read_summary(tmp_path)["env_steps"] == 640


# -- processes ------------------------------------------------------------------------------------------------------

# In place of pql: marks that it is running, then waits; it records a signal, and ends at the second one.
STAND_IN = """
import os, signal, sys, time
path, status = sys.argv[1], int(sys.argv[2])
seen = []
def handle(number, frame):
    seen.append(number)
    open(path + ".seen", "w").write(" ".join(map(str, seen)))
    if len(seen) == 2 or status >= 0:
        os._exit(status if status >= 0 else 130)
for s in (signal.SIGINT, signal.SIGTERM):
    signal.signal(s, handle)
print("under way", flush=True)
open(path, "w").write(str(os.getpid()))
if status != 7:
    time.sleep(20)
os._exit(status)
"""
PROGRAM = (sys.executable, "-S", "-c", STAND_IN)


def wait_for(path: Path) -> str:
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, path
        time.sleep(0.01)
    return path.read_text()


def test_a_process_has_its_status_and_its_log(tmp_path):
    before = signal.getsignal(signal.SIGINT)  # a shell without job control has it ignored
    with Runner(tmp_path / "new" / "folder", "dir", PROGRAM) as runner:
        assert runner.run([str(tmp_path / "a"), "7"], log=tmp_path / "log") == 7
        assert not runner.asked
    assert (tmp_path / "log").read_text() == "under way\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_has_done_enough_is_told_to_end(tmp_path):
    mark = tmp_path / "a"
    with Runner(tmp_path, "dir", PROGRAM) as runner:
        assert runner.run([str(mark), "130"], enough=mark.exists, every=0.02) == 130
        assert not runner.asked  # it was not the user
    assert (tmp_path / "a.seen").read_text() == str(int(signal.SIGTERM))


def test_one_runner_at_a_time_in_a_folder(tmp_path):
    with Runner(tmp_path, "multirun_dir"), pytest.raises(ConfigError, match=r"multirun_dir=.*no other command uses"):
        Runner(tmp_path, "multirun_dir").__enter__()
    with Runner(tmp_path, "multirun_dir"):
        pass


def parent(tmp_path: Path, status: int) -> "tuple[subprocess.Popen[bytes], Path, int]":
    """A process with a runner whose process is under way: (it, the other's mark, the other's pid)."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(jobs.__file__).parents[2])!r})\n"
        "from pathlib import Path; from pql.cli.jobs import Runner\n"
        f"with Runner(Path({str(tmp_path)!r}), 'dir', {PROGRAM!r}) as runner:\n"
        f"    sys.exit(runner.run([{str(tmp_path / 'child')!r}, '{status}']) * runner.asked)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    return process, tmp_path / "child", int(wait_for(tmp_path / "child"))


@pytest.mark.fault(8, 9, 10)
def test_signals_are_passed_on_once_each_and_with_the_parent_goes_the_process(tmp_path):
    process, mark, pid = parent(tmp_path, -1)
    try:
        process.send_signal(signal.SIGINT)
        assert wait_for(mark.with_name("child.seen")) == "2"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert mark.with_name("child.seen").read_text() == "2 2"
    finally:
        process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.fault(10, count=50)
@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_killed_parent_leaves_no_process(tmp_path):
    process, mark, pid = parent(tmp_path, 130)
    process.kill()
    process.wait()
    assert wait_for(mark.with_name("child.seen")) == str(int(signal.SIGTERM))  # it saves and ends
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.fault(8)
def test_ctrl_c_of_a_real_command_saves_and_the_next_one_goes_on(here, tmp_path, capsys):
    """The whole way: two processes, a signal, the exit status, and the run resumed from where it was saved."""
    long = ["algo=pql", "seed=1", "budget.env_steps=8000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pql", *command(tmp_path, *long)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(tmp_path / NAMES[0] / "metrics.jsonl")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "interrupted, saved: not evaluated" in said
    assert states(said) == {NAMES[0]: "interrupted"}
    steps = rows(tmp_path / NAMES[0])[-1]["steps/env"]
    assert 128 < steps < 8_000
    assert main(command(tmp_path, *long)) == 0
    assert here.commands == [["resume", NAMES[0]]]
    assert f"resumed at tick {steps // 16 - 8:,}, {steps:,} env steps" in capsys.readouterr().out
    assert rundir.read_summary(tmp_path / NAMES[0])["env_steps"] == 8_000


# ``pql``, with an environment whose third step crashes in native code.
