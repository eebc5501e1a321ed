"""The fault matrix: rows, the mark ``fault``, and repetition of its tests. ``tools/faults.py`` writes the matrix.

A test of a row is marked ``@pytest.mark.fault(12, count=100)``: the suite runs it once, ``pytest --faults`` a hundred
times. The fixture ``trial`` is the number of the repetition, for seeds. A test that injects many faults in one call is
marked ``cases=(20, 10_000)``: the fixture ``cases`` is the first number in the suite, the second with ``--faults``.

A row with several forms must reach its count in each: ``fault(8, form="once", count=50)``. ``form="{how}"`` is the
value of the test's parameter ``how``, a function gets all parameters. Marks of a parameter are added to those of the
test; ``fault(count=50)`` only repeats. A mark with neither ``count``, ``cases`` nor ``form`` names a further test of a
row, which its count does not include (it does in a row whose count is 1).
"""

import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = ["cases", "pytest_addoption", "pytest_generate_tests", "trial"]  # hooks and fixtures, for conftest.py


class Row(NamedTuple):
    """A row of the matrix: the fault, what must happen, and how often it must be shown (on a CPU), for each form."""

    fault: str
    outcome: str
    count: int
    forms: tuple[str, ...] = ("",)


WORKERS = ("collector", "v", "p", "evaluator", "logger")
STAGES = ("model", "replay", "manifest", "rename", "rotation")
ALGORITHMS = (
    *("pql", "pql_d", "pql_sac", "td3", "sac", "flashsac", "dqn", "c51", "rainbow", "eps_rainbow", "apex", "btr"),
    *("r2d2", "pqn", "ppo", "impala", "appo", "reppo"),
)
LOADERS = (
    *("eval", "export", "resume", "report", "load_policy", "init_from"),
    *("exported file", "frame to the learner", "frame to an actor"),
)
PLACES = ("reset", "evaluator", "inline", "actor's simulator", "first actor", "report", "export")
ARTEFACTS = ("pickled member", "program", "module", "interpolation", "alias bomb", "million tensors", "deep manifest")

ROWS = {
    1: Row("NaN observation in one environment", "it restarts, its row is dropped and counted; others unchanged", 100),
    2: Row("infinite reward, NaN action", "as 1; no such value in the replay", 100),
    3: Row("every environment NaN", "the run stops with a record that can be replayed; the good checkpoint stays", 20),
    4: Row("NaN loss or gradient", "no update, counted; the run stops after several in a row", 50),
    5: Row("the simulator crashes", "the run ends within 10 s, the cause in the last line; resume works", 20),
    6: Row("a worker dies", "all end within 10 s with the first traceback; no process is left", 25, WORKERS),
    7: Row("a worker hangs", "it is named, with all stacks", 40),
    8: Row(
        "Ctrl-C once; twice", "a checkpoint within 10 s; the second ends the process within 2 s", 50, ("once", "twice")
    ),
    9: Row("SIGTERM", "as Ctrl-C once", 50),
    10: Row("the parent is killed", "children and shared memory are gone within 5 s", 50),
    11: Row("killed while saving", "the newest complete checkpoint loads; at most one interval is lost", 50, STAGES),
    12: Row("truncated file, flipped byte", "refused by its hash; the checkpoint before is used, with a warning", 100),
    13: Row("disk full", "training continues, the old checkpoint stays, a warning", 20),
    14: Row("resume", "2N ticks and N + N ticks give equal bits", 10, ALGORITHMS),
    15: Row("checkpoint of an older release", "migrated, or its version is named", 1),
    16: Row("malicious checkpoint or frame", "never executed", 20, LOADERS),
    17: Row("replay too large", "refused before the simulator starts, with bytes and the largest size that fits", 20),
    18: Row("out of memory during the run", "message with sizes, the checkpoint stays, exit", 20),
    19: Row("slow learner, slow simulator", "nothing grows; update ratios are exact", 3),
    20: Row(
        "wandb unreachable", "training goes on, offline data complete, ends in 15 s", 10, ("start", "middle", "end")
    ),
    21: Row("a remote actor is killed", "its partial trajectory is dropped, its slots are free within 2 s", 100),
    22: Row("a remote actor stops (half-open)", "noticed within 15 s, a replacement is admitted", 50),
    23: Row("the inference server is killed", "actors reconnect; no trajectory twice or torn", 50),
    24: Row("garbage, oversize, wrong version, bad token", "only that stream ends", 10_000),
    25: Row("stale or lost weights", "the lag is bounded and measured; all workers use the published weights", 20),
    26: Row("errors of graphs", "replay equals eager; noise differs and repeats after reseeding", 100),
    27: Row("races of streams and threads", "equal bits under random delays", 50),
    28: Row("a learner rank is killed", "the others exit within 60 s and the run resumes", 50),
    29: Row("native crash in this process", "stacks of all threads, the last line names the worker; resume works", 20),
    30: Row("a hang anywhere else", "named within its deadline; Ctrl-C ends within 2 s", 20, PLACES),
    31: Row("hostile files", "refused in one line, within 2 s and 200 MB; nothing executed or resolved", 20, ARTEFACTS),
    32: Row("two processes in one run directory", "exactly one runs", 50),
    33: Row(
        "the run directory is lost", "reported; status 1 if the policy is lost", 20, ("deleted", "read-only", "full")
    ),
    34: Row("config.yaml damaged", "the manifest's copy is used, with a warning", 200),
    35: Row("an admitted actor sends garbage of the largest size", "memory is back in 10 s; others undisturbed", 20),
    36: Row("the clock jumps", "nothing but time stamps changes", 10),
}


class Place(NamedTuple):
    """A row that a test belongs to, and the form of its fault; None: a further test, which no count includes."""

    row: int
    form: str | None


def places_of(item: pytest.Item) -> list[Place]:
    """Return the rows and forms that a test belongs to, each once.

    Raises:
        pytest.UsageError: the marks name no row, or a row or form that does not exist.
    """
    marks, given = [*item.iter_markers("fault")], dict(getattr(getattr(item, "callspec", None), "params", {}))
    everywhere = any({"count", "cases"} & {*mark.kwargs} for mark in marks if not mark.args)
    found: dict[int, str | None] = {}
    for mark in marks:
        asked = mark.kwargs.get("form")
        asked = asked(given) if callable(asked) else asked.format(**given) if asked else None
        repeated = everywhere or {"count", "cases"} & {*mark.kwargs}
        for number in mark.args:
            row = ROWS.get(number)
            if row is None or (asked is not None and asked not in row.forms):
                raise pytest.UsageError(f"{item.nodeid}: fault {number}, form {asked!r}: allowed are {allowed(row)}")
            plain = "" if row.forms == ("",) and (repeated or row.count == 1) else None
            form = plain if asked is None else asked
            found[number] = form if found.get(number) is None else found[number]
    if marks and not found:
        raise pytest.UsageError(f"{item.nodeid}: fault() names no row: rows 1 to {len(ROWS)} are allowed")
    return [Place(number, form) for number, form in sorted(found.items())]


def allowed(row: Row | None) -> str:
    return f"rows 1 to {len(ROWS)}" if row is None else f"the forms {', '.join(map(repr, row.forms))}"


SIGNALS = pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.fault(8, form="once")),
        pytest.param(signal.SIGTERM, marks=pytest.mark.fault(9)),
    ],
)
"""Parameters of a test in which one signal ends a run."""


def rows_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the rows that a test belongs to."""
    return tuple(place.row for place in places_of(item))


@functools.cache
def source() -> tuple[str, str]:
    """Return the commit, with a "+" if files differ from it, and a digest of the library and its tests."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return done.stdout.strip()

    top, names = git("rev-parse", "--show-toplevel"), ("pql", "tests", "pyproject.toml", "constraints.txt")
    paths = [str(Path(top) / name) for name in names]
    changed = git("status", "--porcelain", "--", *paths)
    texts = [git("rev-parse", *(f"HEAD:{name}" for name in names)), changed, git("diff", "HEAD", "--", *paths)]
    new = git("ls-files", "--others", "--exclude-standard", "--full-name", "--", *paths).splitlines()
    texts += [hashlib.sha256((Path(top) / name).read_bytes()).hexdigest() for name in new]
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + "+" * bool(changed), hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fault matrix")
    group.addoption("--faults", action="store_true", help="repeat tests of the fault matrix to their full counts")
    group.addoption("--fault-rows", default="", metavar="1,2,5-9", help="only tests of these rows")
    group.addoption(
        "--fault-log", metavar="FILE", help="append outcomes to FILE; skip what passed there with the same sources"
    )
    group.addoption("--fault-minutes", type=float, default=0.0, help="begin no test after this time")


def numbers(text: str) -> set[int]:
    """Return the rows of "1,2,5-9" or "1 2 5-9"."""
    found: set[int] = set()
    for part in re.split(r"[,\s]+", text.strip()) if text.strip() else ():
        low, _, high = part.partition("-")
        found |= {*range(int(low), int(high or low) + 1)}
    if not found <= ROWS.keys():
        raise pytest.UsageError(f"--fault-rows {text}: rows 1 to {len(ROWS)} are allowed")
    return found


@pytest.fixture
def trial(request: pytest.FixtureRequest) -> int:
    """Return the number of the repetition: 0 in the suite, 0, 1, ... with ``--faults``."""
    return getattr(request, "param", 0)


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> int:
    """Return how many faults a test injects in one call."""
    return cases_of(request.node)


def cases_of(item: pytest.Item) -> int:
    marks = [m.kwargs["cases"] for m in item.iter_markers("fault") if "cases" in m.kwargs]
    return (marks[0] if marks else (1, 1))[item.config.option.faults]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    counts = [m.kwargs["count"] for m in metafunc.definition.iter_markers("fault") if "count" in m.kwargs]
    if counts and metafunc.config.option.faults:
        if "trial" not in metafunc.fixturenames:
            metafunc.fixturenames.append("trial")
        metafunc.parametrize("trial", range(max(counts)), indirect=True, ids=lambda n: f"trial{n}")


def chosen(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items to run: with ``--fault-rows``, ``--fault-log`` or ``-m fault`` in the order of rows."""
    option = config.option
    rows = {item: rows_of(item) for item in items}
    for item in items:
        if rows[item]:
            # Plain tuples: a suite in several processes sends these properties with every report.
            places = [tuple(place) for place in places_of(item)]
            item.user_properties += [("fault places", places), ("fault cases", cases_of(item))]
    if not (option.fault_rows or option.fault_log or option.markexpr == "fault"):
        return items
    wanted = numbers(option.fault_rows) or {*ROWS}
    same = [run for run in stored(option.fault_log) if run.get("source") == source()[1]]
    done = {run["test"] for run in same if run["outcome"] == "passed"} - {
        run["test"] for run in {run["test"]: run for run in same}.values() if run["outcome"] == "failed"
    }
    kept = [item for item in items if wanted & {*rows[item]} and item.nodeid not in done]
    return sorted(kept, key=lambda item: min(wanted & {*rows[item]}))


def stored(path: str | None) -> list[dict[str, Any]]:
    """Return the outcomes in a log; a line cut off by an interruption is skipped."""
    runs = []
    for line in Path(path).read_text().splitlines() if path and Path(path).exists() else ():
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return runs


class Log:
    """Appends outcomes of fault tests to a file, and ends the session when its time is over."""

    def __init__(self, config: pytest.Config):
        self.path, self.session = config.option.fault_log, None
        self.end = time.monotonic() + 60 * config.option.fault_minutes if config.option.fault_minutes else None
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            row = {
                "places": properties.get("fault places", ()),
                "test": report.nodeid,
                "commit": source()[0],
                "source": source()[1],
                "load": round(os.getloadavg()[0], 2),
                "outcome": report.outcome,
                "cases": properties.get("fault cases", 1),
                "seconds": round(self.seconds[report.nodeid], 3),
                "why": str(getattr(report, "longrepr", ""))[-2000:] if report.failed else "",
            }
            with Path(self.path).open("a") as file:
                file.write(json.dumps(row) + "\n")
        if self.end is not None and time.monotonic() > self.end and self.session is not None:
            self.session.shouldstop = "the time for the fault matrix is over"


def begin(config: pytest.Config) -> None:
    """Start the log, in the process that has all reports."""
    if config.option.fault_log and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Log(config))


def listed(items: Sequence[pytest.Item]) -> Iterator[str]:
    """Return a line per row: its number, its fault and its tests."""
    names: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for item in items:
        for row, _ in places_of(item):
            names[row][item.nodeid.rpartition("::")[2].partition("[")[0]] += 1
    for row in sorted(names):
        tests = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in names[row].items())
        yield f"{row:2} {ROWS[row].fault}: {tests}"
