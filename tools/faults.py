"""Runs the fault matrix at its full counts and writes docs/results/faults.md.

    make faults                 all rows, at most 90 minutes; continues where it stopped
    make faults ROWS=12,20-24   some rows
    make faults FRESH=1         from the beginning

Each row is shown by tests marked ``fault`` (``pytest -m fault --collect-only`` lists them); the rows are in
``tests/support/fault_rows.py``. Outcomes are appended to build/faults.jsonl; tests that passed are not repeated until
the file is deleted. The exit status is 1 if a test failed.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bench

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from fault_rows import ROWS, stored  # noqa: E402

NOTES: dict[int, str] = {
    19: "each run makes 6,000 ticks, in one to five minutes; [long runs](long-runs.md) has slopes of memory.",
}
"""What a row's count does not say, or why a row is below it."""

HEAD = """# Fault matrix

What must happen when something fails, and how often it was shown to happen. `make faults` runs the matrix and writes
this table ({date}, {machine}; commit {commit}). *Tried* counts injected faults, *survived* those with the required
outcome; (*) marks a row below its count. The time is that of the slowest test, which may inject several. The matrix
has tests for GPUs, which were skipped: **nothing here was measured on a GPU**.

| row | fault | required outcome | count | tried | survived | slowest test, s |
|---|---|---|---|---|---|---|
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="such as 1,2,5-9; all by default")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no test after this time")
    parser.add_argument("--processes", type=int, default=2, help="tests at a time")
    parser.add_argument("--log", default="build/faults.jsonl", help="outcomes; what passed is not repeated")
    parser.add_argument("--fresh", action="store_true", help="forget earlier outcomes")
    parser.add_argument("--table", action="store_true", help="print the table of the outcomes; run nothing")
    parser.add_argument("--page", help="also write the page to this file")
    args = parser.parse_args(argv)
    log = Path(args.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        log.unlink(missing_ok=True)
    if not args.table:
        # "tests" and "=": pytest learns these options from tests/conftest.py, and would take their values for paths
        command = [
            sys.executable,
            "-m",
            "pytest",
            "tests",
            "-m",
            "fault",
            "--faults",
            f"--fault-rows={args.rows}",
            "-q",
        ]
        command += [f"--fault-log={log}", f"--fault-minutes={args.minutes}", "-n", str(args.processes)]
        subprocess.run([*command, "--no-header", "--tb=line"], cwd=ROOT, check=False)
    runs = latest(stored(str(log)))
    table = rows(runs)
    print("\n".join(table))
    if args.page:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        head = HEAD.format(date=time.strftime("%Y-%m-%d"), machine=_bench.machine(), commit=git.stdout.strip())
        Path(args.page).write_text(head + "\n".join(table[2:]) + "\n" + notes())
    failed = [run for run in runs if run["outcome"] == "failed"]
    for run in failed:
        print(f"failed: {run['test']}", file=sys.stderr)
    return 1 if failed else 0


def latest(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last outcome of each test."""
    return [*{run["test"]: run for run in runs}.values()]


def rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table's lines, with its head."""
    out = HEAD.splitlines()[-2:]
    for number, row in ROWS.items():
        own = [run for run in runs if number in run["rows"] and run["outcome"] != "skipped"]
        tried = sum(run["cases"] for run in own)
        survived = sum(run["cases"] for run in own if run["outcome"] == "passed")
        worst = max((run["seconds"] for run in own), default=0.0)
        mark = "" if survived == tried and tried >= row.count else " (*)"
        counts = (f"{row.count:,}", f"{tried:,}{mark}", f"{survived:,}", f"{worst:.1f}")
        cells = (str(number), row.fault, row.outcome, *counts)
        out.append(f"| {' | '.join(cells)} |")
    return out


def notes() -> str:
    """Return the notes on single rows."""
    lines = [f"* **Row {number}**: {why}" for number, why in sorted(NOTES.items())]
    return "\n".join(["", *lines, ""]) if lines else ""


if __name__ == "__main__":
    sys.exit(main())
