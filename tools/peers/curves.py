"""Curves of runs: stores the evaluations of run directories as JSON, and draws those of JSON files.

    python tools/peers/curves.py store runs/* --json pql2-curves.json --rates halfcheetah=5033 walker2d=4528
    python tools/peers/curves.py draw PQL2=pql2-curves.json "earlier settings=pql2-900s.json" --pictures DIR

Runs on a shared machine are compared by env steps; ``--rates`` are the env steps per second of an idle machine, by
task. Pictures have a panel per task and a line per file: over env steps, and over seconds at a file's rates (those of
the first file where it has none). A line is the median over seeds, as far as all of them have come, with their range.

A run is stored as its task, seed, changed settings, critic updates, commit (null for an installed package) and curve.
Rows of a curve are the env steps and the mean return, then the values of ``--also``, such as ``eval/success``. Other
entries of the JSON file, such as a note, are kept.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.peers.picture import draw

RUNS_OWN = ("task=", "task.name=", "seed=", "device=", "placement.", "budget.", "eval.", "checkpoint.", "logger")
LEFT_OUT = (*RUNS_OWN, "run_dir=")
"""Beginnings of the words of a command that do not change what is learned, or that the run's other entries state."""


def read(folder: Path, also: Sequence[str] = ()) -> dict[str, Any]:
    """Return a run as stored in the JSON file.

    Raises:
        SystemExit: no run directory, or a run without an evaluation.
    """
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        words = yaml.safe_load((folder / "overrides.yaml").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        commit = json.loads((folder / "git.json").read_text())["commit"]
    except FileNotFoundError as error:
        raise SystemExit(f"{folder}: no run: {error.filename} is missing") from None
    rows = [line for line in lines if line.get("eval/return_mean") is not None]
    if not rows:
        raise SystemExit(f"{folder}: a run without an evaluation")
    if unknown := [name for name in also if any(name not in row for row in rows)]:
        raise SystemExit(f"--also {unknown[0]}: {folder} lacks it; a metric of every evaluation is expected")
    curve = [
        [int(row["steps/env"]), round(row["eval/return_mean"], 2), *(round(row[name], 3) for name in also)]
        for row in rows
    ]
    overrides = " ".join(word for word in words if not word.startswith(LEFT_OUT))
    facts = {"task": config["task"]["name"], "seed": config["seed"], "overrides": overrides}
    updates = max(int(line.get("updates/v", 0)) for line in lines)
    return {**facts, "commit": commit and commit[:7], "critic_updates": updates, "curve": curve}


def store(folders: Sequence[Path], file: Path, rates: Mapping[str, float], also: Sequence[str]) -> None:
    """Write the runs to ``file``, ordered by task and seed; other entries of the file remain.

    Raises:
        SystemExit: a folder is not a run, or two runs are equal but for their curves.
    """
    data = json.loads(file.read_text()) if file.exists() else {}
    runs = sorted((read(folder, also) for folder in folders), key=lambda run: (run["task"], run["seed"]))
    named = [(run["task"], run["seed"], run["overrides"]) for run in runs]
    if twice := [one for one in named if named.count(one) > 1]:
        raise SystemExit(f"two runs of {' '.join(map(str, twice[0]))}: one of each task, seed and settings is expected")
    data = {**data, **({"rates": dict(rates)} if rates else {}), "runs": runs}
    file.write_text(json.dumps(data) + "\n")


def series(name: str, data: Mapping[str, Any], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the runs of a file as ``draw`` expects them.

    Raises:
        SystemExit: a task has no rate.
    """
    if missing := {run["task"] for run in data["runs"]} - {*rates}:
        raise SystemExit(f"{name}: no rate of {', '.join(sorted(missing))}: curves.py store ... --rates TASK=RATE")

    def point(task: str, steps: int, value: float, *_: float) -> dict[str, float]:
        return {"env_steps": steps, "seconds": steps / rates[task], "return_mean": value}

    return [
        {"task": run["task"], "contender": name, "curve": [point(run["task"], *row) for row in run["curve"]]}
        for run in data["runs"]
    ]


def pair(word: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{word}: NAME=VALUE is expected")
    return name, value


def rate(word: str) -> tuple[str, float]:
    task, value = pair(word)
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{word}: env steps per second above 0 are expected")
    return task, number


def load(file: str) -> dict[str, Any]:
    """Read a stored file.

    Raises:
        SystemExit: it cannot be read.
    """
    try:
        return dict(json.loads(Path(file).read_text()))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file}: a file of tools/peers/curves.py store is expected ({error})") from None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("store", help="run directories to JSON")
    one.add_argument("runs", nargs="+", type=Path)
    one.add_argument("--json", type=Path, required=True)
    one.add_argument("--rates", nargs="+", type=rate, default=[], metavar="TASK=RATE")
    one.add_argument("--also", nargs="+", default=[], metavar="METRIC")
    two = commands.add_parser("draw", help="JSON files to pictures")
    two.add_argument("files", nargs="+", type=pair, metavar="NAME=FILE")
    two.add_argument("--pictures", type=Path, required=True)
    two.add_argument("--seconds", default="", metavar="LABEL", help="what the seconds are, such as 'estimated seconds'")
    args = parser.parse_args(argv)
    if args.command == "store":
        store(args.runs, args.json, dict(args.rates), args.also)
        return
    files = [(name, load(file)) for name, file in args.files]
    rates = files[0][1].get("rates", {})
    runs = [run for name, data in files for run in series(name, data, data.get("rates") or rates)]
    for axis in ("env_steps", "seconds"):
        draw(runs, axis, args.pictures / f"{axis}.png", args.seconds if axis == "seconds" else "")


if __name__ == "__main__":
    main()
