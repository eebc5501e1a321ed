"""Pass rates of the suite's learning tests over seeds: ``python tools/pass_rates.py --seeds 20 --json rates.json``.

Every test that trains to a goal uses the fixture ``learns`` (``tests/gates.py``) and passes when one of three seeds
reaches it. This runs each of them with one seed at a time and prints, per test, the number of seeds that reach the
goal and the spread of their results. At least nine seeds of ten should reach a goal. ``--portable`` disables the
processor's vector instructions, which changes the order of float additions as another processor would.

Results are stored after every seed; a second call continues with the seeds that are missing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
ENOUGH = 0.9  # share of the seeds; three seeds then all fail once in a thousand times


def run_seed(seed: int, portable: bool, processes: int, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run the learning tests with one seed; return test -> passed or not, seconds, result and goal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "learning", f"--junitxml={report}", "-n", str(processes)]
        env = {**os.environ, "PQL_LEARNING_SEED": str(seed), **(PORTABLE if portable else {})}
        subprocess.run([*command, *words], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=False)
        return read_report(report)


def read_report(path: Path) -> dict[str, dict[str, Any]]:
    """Read the results from a JUnit report; a skipped test has none."""
    results = {}
    for case in ET.parse(path).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        notes = {p.get("name"): p.get("value") for p in case.iter("property")}
        reached, _, goal = (notes.get("learned") or "nan of nan").partition(" of ")
        results[f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}"] = {
            "passed": case.find("failure") is None and case.find("error") is None,
            "seconds": float(case.get("time") or 0),
            "reached": float(reached),
            "goal": float(goal),
        }
    return results


def table(runs: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return one line per test, from the results of all seeds."""
    cases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for results in runs.values():
        for name, result in results.items():
            cases[name].append(result)
    lines = [f"{'passed':>8}  {'goal':>8}  {'least':>8}  {'median':>8}  {'seconds':>7}  test"]
    for name, rows in sorted(cases.items()):
        passed, reached = sum(r["passed"] for r in rows), [r["reached"] for r in rows]
        mark = "" if passed >= ENOUGH * len(rows) else "  <- too few"
        lines.append(
            f"{passed:>4} /{len(rows):>2}  {rows[0]['goal']:8.4g}  {min(reached):8.4g}  "
            f"{statistics.median(reached):8.4g}  {statistics.median(r['seconds'] for r in rows):7.1f}  {name}{mark}"
        )
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Return 1 if a test passes with too few seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--portable", action="store_true", help="without the processor's vector instructions")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file in which results are kept between calls")
    parser.add_argument("pytest", nargs="*", help="files, or options of pytest after --")
    args = parser.parse_args(words)
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    if args.json and args.json.exists():
        runs = json.loads(args.json.read_text())
    for seed in range(args.seeds):
        key = f"{seed}{' portable' if args.portable else ''}"
        if key not in runs:
            runs[key] = run_seed(seed, args.portable, args.processes, args.pytest)
            print(f"seed {key}: {sum(r['passed'] for r in runs[key].values())} of {len(runs[key])} pass", flush=True)
            if args.json:
                args.json.write_text(json.dumps(runs, indent=1) + "\n")
    kept = {k: v for k, v in runs.items() if k.endswith("portable") == args.portable}
    lines = table(kept)
    print("\n".join(lines))
    return int(any(line.endswith("too few") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
