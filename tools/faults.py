"""Runs the fault matrix at its full counts and writes docs/results/quality.md.

    make faults                 all rows, at most 90 minutes; continues where it stopped
    make faults ROWS=12,20-24   some rows
    make faults FRESH=1         from the beginning

Each row is shown by tests marked ``fault`` (``pytest -m fault --collect-only`` lists them); the rows are in
``tests/support/fault_rows.py``. Outcomes are appended to build/faults.jsonl with the commit. A test that passed is not
repeated while the library and the tests are unchanged; the table takes the outcomes of each test that still exists with
its last sources, and names the commits. The exit status is 1 if a test failed, or a row that was asked for is below its
count.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import common

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from fault_rows import ROWS, Row, numbers, source, stored  # noqa: E402

NOTES: dict[int, str] = {
    6: "workers are threads of the test's process; the logger is its tracker's process, without which a run goes on.",
    11: "the stages are killed by the process that saves; kills at random moments of such a process are further tests.",
    19: "each run makes ticks for ten minutes; [long runs](#long-runs) has slopes of memory.",
    20: "the server of *middle* and *end* is a stand-in that speaks wandb's protocol, and goes away.",
    22: "pings are sent every 0.25 s instead of every 10 s.",
    24: "2,000 over real streams; the others are frames that the learner's own reader parses. Oversize messages, wrong "
    "versions and tokens are further tests.",
    28: "resumed after every tenth kill; every other time it is rank 0, which hosts the store.",
    30: "with shortened deadlines; of *first actor* it is the signal that is counted, of the others the deadline.",
    33: "read-only and full: 20 in one process, where calls of the operating system fail, and 5 real processes: on a "
    "disk of 8 MB in memory that another program fills, and in folders without the permission to write.",
}
"""What a row's count does not say, or why a row is below it."""

HEAD = """## Faults

What must happen when something fails, and how often it was shown to happen. `make faults` runs the matrix and writes
this section ({date}, {machine}). {effort}
*Tried* counts injected faults, *survived* those with the required outcome; in a row with several forms, both are
those of the form with the fewest. (*) marks a row below its count; a test that failed first and then passed with the
same sources counts twice. *Further tests* are not in the count. The time is that of the slowest test, which may
inject several faults; *commit* is the version that was tested (+: with changes).{gpu}

| row | fault | required outcome | count | tried | survived | further tests | slowest test, s | commit |
|---|---|---|---|---|---|---|---|---|
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="such as 1,2,5-9; all by default")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no test after this time")
    parser.add_argument("--processes", type=int, default=2, help="tests at a time")
    parser.add_argument("--log", default="build/faults.jsonl", help="outcomes; what passed is not repeated")
    parser.add_argument("--fresh", action="store_true", help="forget earlier outcomes")
    parser.add_argument("--table", action="store_true", help="print the table of the outcomes; run nothing")
    parser.add_argument("--page", help='also write the section "Faults" of this page')
    args = parser.parse_args(argv)
    log = Path(args.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        log.unlink(missing_ok=True)
    try:
        asked = numbers(args.rows) or {*ROWS}
    except (pytest.UsageError, ValueError):
        parser.error(f"--rows {args.rows}: expected numbers and ranges from 1 to {len(ROWS)}, such as 1,2,5-9")
    tests = collected()
    if not args.table:
        # "tests" and "=": pytest learns these options from tests/conftest.py, and would take their values for paths
        options = [f"--fault-rows={args.rows}", f"--fault-log={log}", f"--fault-minutes={args.minutes}"]
        run_pytest(*options, "-n", str(args.processes), "--no-header", "--tb=line")
    runs = latest(stored(str(log)), tests)
    table, forms = rows(runs), form_rows(runs)
    print("\n".join([*table, "", *forms]))
    if args.page:
        head = HEAD.format(date=time.strftime("%Y-%m-%d"), machine=common.machine(), effort=effort(runs), gpu=gpu())
        write(Path(args.page), head + "\n".join(table[2:]) + "\n" + notes())
    failed = [run for run in runs if run["outcome"] == "failed"]
    for run in failed:
        print(f"failed: {run['test']}", file=sys.stderr)
    short = [line for number in sorted(asked) for line in below(number, runs)]
    for line in short:
        print(line, file=sys.stderr)
    if other := {run["test"] for run in runs if run.get("source") != source()[1]}:
        print(f"{len(other)} tests were last run with other sources (see the commits in the table)", file=sys.stderr)
    return 1 if failed or short else 0


def write(page: Path, section: str) -> None:
    """Replace the section of a page that has ``section``'s first line as its title, or write a page of it alone."""
    title = section[: section.index("\n") + 1]
    before, _, old = (page.read_text() if page.is_file() else "").partition(title)
    page.write_text(before + section + old[old.find("\n## ") :] * ("\n## " in old))


def run_pytest(*options: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "tests", "-m", "fault", "--faults", *options]
    return subprocess.run(command, cwd=ROOT, check=False, text=True, **more)


def collected() -> set[str]:
    """Return the ids of the tests of the matrix.

    Raises:
        SystemExit: there are none, or some cannot be collected.
    """
    done = run_pytest("--collect-only", stdout=subprocess.PIPE)
    found = {line for line in done.stdout.splitlines() if "::" in line and line.startswith("tests/")}
    if done.returncode or not found:
        print(done.stdout[-2000:], file=sys.stderr)
        raise SystemExit(f"faults: pytest collected {len(found)} tests and ended with status {done.returncode}")
    return found


def latest(runs: Sequence[dict[str, Any]], tests: set[str]) -> list[dict[str, Any]]:
    """Return the outcomes of ``tests`` with the sources of their last ones: also failures before a success."""
    last = {run["test"]: run.get("source") for run in runs if run["test"] in tests}
    return [run for run in runs if run["test"] in last and run.get("source") == last[run["test"]]]


def of(number: int, runs: Sequence[dict[str, Any]], form: str | None) -> list[dict[str, Any]]:
    """Return the outcomes of a row's form; None: of its further tests. Skipped tests are left out."""
    return [run for run in runs if [number, form] in run.get("places", ()) and run["outcome"] != "skipped"]


def counted(runs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of faults that were tried, and that were survived."""
    return sum(run["cases"] for run in runs), sum(run["cases"] for run in runs if run["outcome"] == "passed")


def slowest(runs: Sequence[dict[str, Any]]) -> str:
    return f"{max((run['seconds'] for run in runs), default=0.0):.1f}"


def below(number: int, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each form of a row that is below its count."""
    row, out = ROWS[number], []
    for form in row.forms:
        survived = counted(of(number, runs, form))[1]
        if survived < row.count:
            out.append(f"row {number}{', ' * bool(form)}{form}: {survived:,} of {row.count:,}")
    return out


def rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table's lines, with its head."""
    out = HEAD.splitlines()[-2:]
    for number, row in ROWS.items():
        forms, more = [of(number, runs, form) for form in row.forms], of(number, runs, None)
        tried, survived = min(map(counted, forms), key=lambda counts: counts[1])
        own = [run for one in (*forms, more) for run in one]
        whole = all(run["outcome"] == "passed" for run in own) and not below(number, runs)
        further = f"{sum(run['outcome'] == 'passed' for run in more):,} of {len(more):,}" if more else ""
        commits = ", ".join(dict.fromkeys(run.get("commit", "") for run in own))
        counts = (asked(row), f"{tried:,}{'' if whole else ' (*)'}", f"{survived:,}", further, slowest(own), commits)
        out.append(f"| {number} | {row.fault} | {row.outcome} | {' | '.join(counts)} |")
    return out


def notes() -> str:
    """Return the notes on rows as a list."""
    return "".join(f"\n* **Row {number}**: {text}" for number, text in sorted(NOTES.items())) + "\n" * bool(NOTES)


def asked(row: Row) -> str:
    return f"{row.count:,}" if len(row.forms) == 1 else f"{row.count:,} of {len(row.forms)} forms each"


def form_rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of forms."""
    out = []
    for number, row in ROWS.items():
        for form in row.forms if len(row.forms) > 1 else ():
            own = of(number, runs, form)
            tried, survived = counted(own)
            mark = "" if survived == tried and survived >= row.count else " (*)"
            out.append(f"| {number} | {form} | {row.count:,} | {tried:,}{mark} | {survived:,} | {slowest(own)} |")
    return out


def effort(runs: Sequence[dict[str, Any]]) -> str:
    """Return a sentence about the time that the tests took, and the load of the machine meanwhile."""
    ran = [run for run in runs if run["outcome"] != "skipped"]
    minutes, loads = sum(run["seconds"] for run in ran) / 60, [run["load"] for run in ran if "load" in run]
    if not loads:
        return f"{len(ran):,} tests took {minutes:.0f} minutes."
    load = f"load average {statistics.median(loads):.1f} in the median, at most {max(loads):.1f}"
    return f"{len(ran):,} tests took {minutes:.0f} minutes in all, several at a time ({load})."


def gpu() -> str:
    """Return a sentence about the tests for GPUs where there is none."""
    skipped = " The matrix has tests for GPUs, which were skipped:\n**nothing here was measured on a GPU**."
    return "" if torch.cuda.is_available() else skipped


if __name__ == "__main__":
    sys.exit(main())
