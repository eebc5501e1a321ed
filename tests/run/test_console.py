"""Console output of a run: first its plan, then its progress, at least every ten seconds."""

import io
import itertools
import re
import subprocess
import sys
import threading
import types

import pytest
from rich.console import Console as RichConsole
from run_files import WORDS, words

from pql.cli.main import main
from pql.config import BudgetConfig, Config, TaskConfig
from pql.config.compose import compose
from pql.contract.registry import register
from pql.envs.toy import Counter
from pql.run.log.console import WIDTH, Console, budget_words, opening
from pql.run.log.displays import COLUMNS, EVERY, Lines, Notebook, Panel, RunProgress, make_face
from pql.run.session import Session

ROW = {
    "time/seconds": 50.0,
    "steps/env": 20_000,
    "updates/v": 2_400,
    "updates/p": 1_200,
    "ratio/v_per_step": 8.0,
    "ratio/p_per_v": 0.5,
    "lag/policy_ticks": 1,
    "throughput/env_steps_per_s": 4_321.0,
    "throughput/updates_per_s": 765.0,
    "busy/collector": 0.25,
    "busy/v": 0.5,
    "busy/p": 0.125,
    "train/return_mean": -123.45,
    "memory/host_gib": 1.25,
}
EVAL = {"time/seconds": 40.0, "steps/env": 16_000.0, "eval/return_mean": 77.7, "eval/return_iqm": 70.0}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(budget=None, clock=None, width=400):
    """A table and the progress it shows; and the text, as a function."""
    out = io.StringIO()
    progress = RunProgress("pql on x", budget or {}, clock or Clock())
    return Lines(progress, RichConsole(file=out, width=width)), progress, lambda: out.getvalue().splitlines()


# -- the first lines ------------------------------------------------------------------------------------------------


def test_the_first_lines_say_what_will_be_done(tmp_path):
    config = compose([*WORDS, "budget.seconds=240", "seed=3"])
    assert opening(config, tmp_path).splitlines() == [
        "pql on pendulum: 16 environments on cpu, seed 3",
        "budget: 240 s from the first env step on or 320 env steps; plus building before, saving after",
        f"run: {tmp_path}",
    ]
    several = Config(
        task=TaskConfig(id="A-very/" + "long" * 20), device="cuda:1", budget=BudgetConfig(9e8, 10**15, 1e6)
    )
    assert max(map(len, opening(several, None).splitlines())) <= WIDTH
    assert "environments on cuda:1, seed 0" in opening(several, None).replace("\n", " ")


def test_the_budget_in_words():
    assert (
        budget_words(BudgetConfig(env_steps=5_000_000, target_return=-2.5)) == "5,000,000 env steps or a return of -2.5"
    )


LOADING = """
import builtins, sys
known = builtins.__import__

def refuse(name, *more, **words):
    if name.partition(".")[0] == "torch":
        raise SystemExit(77)
    return known(name, *more, **words)

builtins.__import__ = refuse
from pql.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_they_are_there_before_torch_is(tmp_path, device):
    """A run whose import of torch ends it has said all."""
    command = [sys.executable, "-c", LOADING, "train", *words(tmp_path / "run"), f"device={device}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 77, done.stderr
    first = done.stdout.splitlines()
    assert first[0] == "pql on pendulum: 16 environments on cpu, seed 0"
    assert first[1:] == ["budget: 320 env steps", f"run: {tmp_path / 'run'}"]
    assert not (tmp_path / "run").exists()


# -- plain lines ----------------------------------------------------------------------------------------------------


def test_a_table_where_nobody_looks():
    clock = Clock()
    face, progress, text = lines({"env_steps": 80_000.0}, clock)
    console = Console("", {})  # for the text that write() makes from rows
    console.face, console.progress = face, progress
    console.write(ROW)
    clock.now = 3.0
    console.write({**ROW, "time/seconds": 55.0})  # soon after the last: not reported
    console.write(EVAL)
    clock.now = 3.0 + EVERY
    console.write({**ROW, "time/seconds": 65.0})
    console.close()
    head, *table = text()
    assert head.split()[-1] == "busiest"
    assert re.split(r"  +", table[0].strip()) == ["0:50", "2:30", "20,000", "4,321", "2,400", "-123.5", "v 50%"]
    assert len(table) == 3
    assert table[1].split()[0] == "0:55"  # not back to when the evaluation was asked for
    assert "77.7" in table[1]
    assert table[2].split()[0] == "1:05"


def test_lines_are_at_most_100_columns_and_the_header_comes_every_20():
    big = dict.fromkeys(ROW, 1e15) | dict.fromkeys(("busy/collector", "busy/v", "busy/p"), 1.0)
    big |= {"time/seconds": 9e6, "train/return_mean": -1e30, "eval/return_mean": 123_456.7}
    clock = Clock()
    face, progress, text = lines({"seconds": 1e9}, clock)
    progress.latest = big
    progress.phase = "building the evaluation's environments"
    for i in range(45):
        clock.now = 10.0 * i
        face.show(True)
        face.beat()
    assert max(map(len, text())) <= WIDTH
    assert sum(w for _, w in COLUMNS) + 2 * (len(COLUMNS) - 1) <= WIDTH
    heads = [i for i, line in enumerate(text()) if line.split()[:2] == ["time", "left"]]
    assert heads == [0, 21, 42]
    assert "\x1b" not in "".join(text())


@pytest.mark.parametrize("phase", [None, "warm-up"])
@pytest.mark.parametrize("every", [None, 2, 7, 25])
def test_nothing_is_silent_for_ten_seconds(phase, every):
    """Whatever is being done, with rows now and then or never."""
    clock = Clock()
    face, progress, text = lines({"seconds": 300.0}, clock)
    progress.phase, progress.since = phase, 0.0
    progress.detail = lambda: f"{clock.now:.0f} of 200 steps"
    progress.latest = {} if phase else dict(ROW)
    heard = [0.0]
    for second in range(1, 121):
        before = len(text())
        clock.now = float(second)
        if every and second % every == 0:
            progress.latest = {**ROW, "time/seconds": clock.now}
            face.show(False)
        face.beat()
        if len(text()) > before:
            heard.append(clock.now)
    assert max(b - a for a, b in itertools.pairwise(heard)) < 10
    if phase and every is None:
        assert text()[0] == "  warm-up: 9 of 200 steps, 9 s"


def test_a_phase_that_stays_where_it_is_says_so_once_a_minute():
    """So each body that is compiled for long has a line, and one of seconds has none."""
    clock = Clock()
    face, progress, text = lines({}, clock)
    progress.phase, progress.since = "compiling", 0.0
    ends = {"acting (1 of 3)": 40, "the updates of worker v (2 of 3)": 43, "the updates of worker p (3 of 3)": 125}
    progress.detail = lambda: next(body for body, end in ends.items() if clock.now < end)
    for second in range(1, 120):
        clock.now = float(second)
        face.beat()
    assert text() == [
        "  compiling: acting (1 of 3), 9 s",
        "  compiling: the updates of worker v (2 of 3), 40 s",
        "  compiling: the updates of worker p (3 of 3), 49 s",
        "  compiling: the updates of worker p (3 of 3), 109 s",
    ]


def test_what_is_said_is_not_taken_for_markup():
    out = io.StringIO()
    console = Console("", {}, console=RichConsole(file=out))
    console.say("hidden=[64,64] [bold]x[/bold] :smile:")
    console.close()
    assert out.getvalue() == "hidden=[64,64] [bold]x[/bold] :smile:\n"


def test_a_closed_pipe_does_not_end_a_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = Console("", {}, console=RichConsole(file=Gone()))
    console.say("nobody reads this")
    console.write(ROW)
    console.close()


@pytest.mark.parametrize(
    ("budget", "left", "share"),
    [
        ({"seconds": 60.0}, 10.0, 50 / 60),
        ({"env_steps": 40_000.0}, 50.0, 0.5),
        ({"seconds": 60.0, "env_steps": 40_000.0}, 10.0, 50 / 60),
        ({"seconds": 5.0}, 0.0, 1.0),
        ({"target_return": 5.0}, None, None),
    ],
)
def test_the_time_left_is_that_of_the_budget_that_ends_first(budget, left, share):
    progress = RunProgress("", budget)
    progress.latest = dict(ROW)
    assert progress.left() == left
    assert progress.share() == share
    progress.now = lambda: {"time/seconds": 55.0, "steps/env": 22_000.0}  # since the last row
    assert progress.row["time/seconds"] == 55.0
    if left == 50.0:
        assert (progress.left(), progress.share()) == (45.0, 0.55)


# -- a terminal -----------------------------------------------------------------------------------------------------


def test_a_panel_on_a_terminal():
    out = io.StringIO()
    console = Console("pql on x", {"seconds": 240.0}, console=RichConsole(file=out, force_terminal=True, width=120))
    assert isinstance(console.face, Panel)
    with console.doing("warm-up", lambda: "3 of 9 steps"):
        console.face.beat()
    console.write(ROW)
    console.write(EVAL)
    console.close()
    text = plain(out.getvalue())
    for part in (
        "pql on x",
        "20,000  (4,321/s)",
        "v 2,400, p 1,200  (765/s)",
        "v/step 8, p/v 0.5, lag 1",
        "21%",
        "3:10 left",
        "train -123.5, eval 77.7",
        "50 s",
        "1.25 GiB",
        "collector 25%, v 50%, p 12%",
        "warm-up: 3 of 9 steps",
        "━━",
    ):
        assert part in text, part
    assert "\x1b[?25h" in out.getvalue()  # the cursor is back


def test_the_lag_of_replicas_is_told_in_its_place():
    row = {**{k: v for k, v in ROW.items() if k != "lag/policy_ticks"}, "lag/policy_mean": 0.954, "lag/policy_max": 3}
    out = io.StringIO()
    console = Console("", {}, console=RichConsole(file=out, force_terminal=True, width=120))
    console.write(row)
    console.close()
    assert "p/v 0.5, lag 0.954" in plain(out.getvalue())


def test_a_terminal_without_a_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    progress = RunProgress("", {})
    assert isinstance(make_face(progress, RichConsole(file=io.StringIO(), force_terminal=True)), Lines)


# -- a notebook -----------------------------------------------------------------------------------------------------


@pytest.fixture
def notebook(monkeypatch):
    """IPython's kernel, as far as a run sees it; returns what each display was given, in order."""
    shown: list[list[str]] = []

    class Handle:
        def __init__(self, place):
            self.place = place

        def update(self, data, raw=False):
            assert raw
            shown[self.place].append(data["text/plain"])

    def display(data, raw=False, display_id=None):
        assert raw
        assert display_id is True
        shown.append([data["text/plain"]])
        return Handle(len(shown) - 1)

    shell = types.SimpleNamespace(kernel=object())
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    displays = types.ModuleType("IPython.display")
    displays.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return types.SimpleNamespace(shown=shown, shell=shell)


def test_one_line_that_is_updated_in_a_notebook(notebook, capsys):
    console = Console("pql on x", {"seconds": 100.0})
    assert isinstance(console.face, Notebook)
    console.say("pql on x: 16 environments")
    with console.doing("warm-up", lambda: "3 of 9 steps"):
        console.face.beat()
    console.write(ROW)
    console.write(EVAL)
    console.close()
    (line,) = notebook.shown  # one place
    assert line[0] == "warm-up: 3 of 9 steps"
    assert line[1].startswith("50% | time 0:50 | left 0:50 | env steps 20,000 | steps/s 4,321 | updates 2,400")
    assert "eval 77.7" in line[-1]
    assert capsys.readouterr().out == "pql on x: 16 environments\n"


def test_ipython_in_a_terminal_is_no_notebook(notebook):
    notebook.shell.kernel = None
    assert isinstance(make_face(RunProgress("", {}), None), Lines | Panel)


# -- in a run -------------------------------------------------------------------------------------------------------


def test_a_run_shows_its_phases(tmp_path, threads_left):
    """Of the console of a run: what it says while environments are stepped, and while the run is saved."""
    out, seen = io.StringIO(), []
    console = Console("", {}, console=RichConsole(file=out), clock=Clock())

    class Watched(Counter):
        def prepare(self):
            if not seen:  # the evaluation's is prepared later
                seen.append(console.progress.doing())

        def preparation(self):
            return "module 1 of 2"

        def step(self, action):
            seen.append(console.progress.doing() if console.progress.phase else "training")
            return super().step(action)

    register("watched", lambda num_envs, device: Watched(num_envs, device, episode_length=100, terminate_every=0))
    config = compose(words(tmp_path, "task=env", "task.name=watched", "eval.final=true"))
    session = Session(config, console=console)
    assert seen == ["compiling: module 1 of 2", *(f"warm-up: {16 * i} of 128 random env steps" for i in range(8))]
    assert console.progress.phase is None
    saved = session.archive.save
    session.archive.save = lambda *what: (seen.append(console.progress.doing()), saved(*what))[1]  # type: ignore
    session.train()
    rest = seen[9:]
    assert rest[:12] == ["training"] * 12
    assert rest[12] == "saving"
    assert rest[13:14] + rest[-1:] == ["evaluation: 0 of 2 episodes"] * 2
    assert threads_left() == []
    assert not console._thread.is_alive()


def test_an_evaluation_shows_how_far_it_is(tmp_path, monkeypatch, threads_left):
    seen, faces = [], []

    class Watched(Counter):
        def step(self, action):
            if faces:
                seen.append(faces[-1].progress.doing())
            return super().step(action)

    register("watched", lambda num_envs, device: Watched(num_envs, device, episode_length=3, terminate_every=0))
    assert main(["train", *words(tmp_path, "task=env", "task.name=watched")]) == 0
    plain_face = make_face
    monkeypatch.setattr("pql.run.log.console.make_face", lambda *what: faces.append(plain_face(*what)) or faces[-1])
    monkeypatch.setattr("pql.run.episodes.CHECK_EVERY", 1)
    assert main(["eval", str(tmp_path), "num_envs=2", "episodes=4"]) == 0
    assert [text.partition(",")[0] for text in seen] == [f"evaluation: {n} of 4 episodes" for n in (0, 0, 0, 2, 2, 2)]
    assert not threads_left()


def test_a_resumed_run_that_had_ended_says_so(tmp_path, capsys):
    assert main(["train", *words(tmp_path, "eval.final=true")]) == 0
    first = capsys.readouterr().out
    assert "the tick is bounded by" in first
    assert main(["resume", str(tmp_path)]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[0] == f"resumes {tmp_path}"
    assert again.splitlines()[1:3] == first.splitlines()[:2]
    assert "bounded" not in again
    assert "(-/s)" not in again
    assert "nothing was learned in this sitting: the budget of the run was already used up" in again


def test_a_quiet_run_has_no_console(tmp_path, capsys):
    before = threading.active_count()
    session = Session(compose(words(tmp_path)), quiet=True)
    assert session.console is None
    session.train()
    assert capsys.readouterr().out == ""
    assert threading.active_count() <= before
