"""Curves of runs: stores the evaluations of run directories as JSON, and draws those of JSON files.

    python tools/curves.py store runs/* --json pql2-curves.json --rates halfcheetah=5033 walker2d=4528
    python tools/curves.py draw PQL2=pql2-curves.json "earlier settings=pql2-900s.json" --pictures DIR

Runs on a shared machine are compared by env steps; ``--rates`` are the env steps per second of an idle machine, by
task. Pictures have a panel per task and a line per file: over env steps, and over seconds at these rates (those of the
first file). A line is the median over seeds, as far as all of them have come, with their range.

A run is stored as its task, seed, changed settings, critic updates, commit and curve. Rows of a curve are the env steps
and the mean return, then the values of ``--also``, such as ``eval/success``. Other entries of the JSON file, such as a
note, are kept.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from _peers_picture import draw

KEPT = ("algo=", "algo.", "num_envs=", "task.kwargs.")  # words of a command that change what is learned


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
    return {
        "task": config["task"]["name"],
        "seed": config["seed"],
        "overrides": " ".join(word for word in words if word.startswith(KEPT)),
        "commit": commit[:7],
        "critic_updates": max(int(line.get("updates/v", 0)) for line in lines),
        "curve": [
            [int(row["steps/env"]), round(row["eval/return_mean"], 2), *(round(row[name], 3) for name in also)]
            for row in rows
        ],
    }


def store(folders: Sequence[Path], file: Path, rates: Mapping[str, float], also: Sequence[str]) -> None:
    """Write the runs to ``file``, ordered by task and seed; other entries of the file remain."""
    data = json.loads(file.read_text()) if file.exists() else {}
    runs = sorted((read(folder, also) for folder in folders), key=lambda run: (run["task"], run["seed"]))
    data = {**data, **({"rates": dict(rates)} if rates else {}), "runs": runs}
    file.write_text(json.dumps(data) + "\n")


def series(name: str, data: Mapping[str, Any], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the runs of a file as ``draw`` expects them; without a rate of the task a run is left out."""
    return [
        {
            "task": run["task"],
            "contender": name,
            "curve": [
                {"env_steps": steps, "seconds": steps / rates[run["task"]], "return_mean": value}
                for steps, value, *_ in run["curve"]
            ],
        }
        for run in data["runs"]
        if run["task"] in rates
    ]


def pair(word: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{word}: NAME=VALUE is expected")
    return name, value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("store", help="run directories to JSON")
    one.add_argument("runs", nargs="+", type=Path)
    one.add_argument("--json", type=Path, required=True)
    one.add_argument("--rates", nargs="+", type=pair, default=[], metavar="TASK=RATE")
    one.add_argument("--also", nargs="+", default=[], metavar="METRIC")
    two = commands.add_parser("draw", help="JSON files to pictures")
    two.add_argument("files", nargs="+", type=pair, metavar="NAME=FILE")
    two.add_argument("--pictures", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.command == "store":
        store(args.runs, args.json, {task: float(rate) for task, rate in args.rates}, args.also)
        return
    files = [(name, json.loads(Path(file).read_text())) for name, file in args.files]
    rates = files[0][1].get("rates")
    if not rates:
        raise SystemExit(f"{args.files[0][1]}: no rates: store it with --rates")
    runs = [run for name, data in files for run in series(name, data, rates)]
    for axis in ("env_steps", "seconds"):
        draw(runs, axis, args.pictures / f"{axis}.png")


if __name__ == "__main__":
    main()
