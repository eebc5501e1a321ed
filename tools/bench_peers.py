"""Our PPO and PQL against rsl_rl's and Stable-Baselines3's algorithms, by the same clock on the same cores.

Every (contender, task, seed) is one process; they run one after the other, each with all cores, for the same training
time on the same batched MuJoCo environments. Then the deterministic policy plays 16 episodes on environments of its
own, scored by this library's evaluation code; that takes no training time. A finished run is appended to a JSON-lines
file and skipped next time, so the benchmark may be interrupted and resumed; one made with other settings or another
budget is run again (one made with older code is not: begin a new file). The order (seeds, tasks, contenders) lets a
slow hour hit all alike. ``_peers.py`` holds the settings and where they come from.

The committed table (90 runs of 240 s, six and a half hours with what surrounds them; extras mujoco and peers):

    python tools/bench_peers.py --runs docs/results/json/peers-runs.jsonl --json docs/results/json/peers.json

``--contenders ... sb3:sac sb3:td3`` adds Stable-Baselines3's off-policy algorithms. ``--table`` prints what the file
holds and runs nothing. The exit status is 1 where a run failed or a contender could not be set up; the rest still runs.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bench
import numpy as np
from _peers import CONTENDERS, DEFAULT, Settings

import pql
from pql.errors import ConfigError
from pql.evaluate import run_episodes

Run = dict[str, Any]
EPISODES, DRAWS = 16, 20_000
PATIENCE = 600.0  # seconds for start-up and evaluation, before a run counts as hung


# -- runs ----------------------------------------------------------------------------------------------------------


def measure(name: str, task: str, seed: int, seconds: float, settings: Settings, episodes: int) -> Run:
    """Train one contender and evaluate it."""
    trained = CONTENDERS[name].train(task, seed, seconds, settings)
    env = pql.make_env(task, num_envs=episodes)
    result = run_episodes(env, trained.policy, seed=1_000_000 + seed)
    env.close()
    return {
        "contender": name, "task": task, "seed": seed, "budget": seconds, "settings": digest(settings),
        "return_mean": result.mean, "return_iqm": result.iqm, "returns": result.returns, "seconds": trained.seconds,
        "env_steps": trained.env_steps, "machine": _bench.machine(),
    }  # fmt: skip


def measure_apart(name: str, task: str, seed: int, args: argparse.Namespace) -> Run:
    """The same in a process of its own, which is ended, with what it started, when it hangs or this one is interrupted.

    Raises:
        RuntimeError: it failed, with the last line of what it said; or it hung.
    """
    command = [sys.executable, __file__, "--one", name, task, str(seed), "--seconds", str(args.seconds)]
    command += ["--episodes", str(args.episodes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=2 * args.seconds + PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no end after {error.timeout:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.returncode:
        raise RuntimeError((err.strip() or "no message").splitlines()[-1])
    return json.loads(out.splitlines()[-1])


def digest(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def plan(args: argparse.Namespace) -> tuple[list[tuple[str, str, int, Settings]], int]:
    """(contender, task, seed, settings) in the order they run, and how many pairs cannot be set up (each is named)."""
    known: dict[tuple[str, str], Settings] = {}
    for name, task in itertools.product(args.contenders, args.tasks):
        try:
            known[name, task] = CONTENDERS[name].settings(task)
        except ConfigError as error:
            print(f"left out: {name} on {task}: {error}", file=sys.stderr)
    order = itertools.product(args.seeds, args.tasks, args.contenders)
    runs = [(name, task, seed, known[name, task]) for seed, task, name in order if (name, task) in known]
    return runs, len(args.contenders) * len(args.tasks) - len(known)


def stored(path: Path | None) -> list[Run]:
    """The finished runs of a file; a line cut off by an interruption is passed over."""
    runs = []
    for line in path.read_text().splitlines() if path and path.exists() else ():
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a damaged line is passed over", file=sys.stderr)
    return runs


def collect(args: argparse.Namespace) -> tuple[list[Run], int]:
    """All wanted runs, those of the file included, and how many failed or could not be set up."""
    path = Path(args.runs) if args.runs else None
    done = {(r["contender"], r["task"], r["seed"], r["budget"], r["settings"]): r for r in stored(path)}
    runs: list[Run] = []
    wanted, failed = plan(args)
    for i, (name, task, seed, settings) in enumerate(wanted):
        key = (name, task, seed, args.seconds, digest(settings))
        if key not in done:
            if args.table:
                continue
            try:
                if args.smoke:
                    done[key] = measure(name, task, seed, args.seconds, settings, args.episodes)
                else:
                    done[key] = measure_apart(name, task, seed, args)
            except Exception as error:
                print(f"failed: {name} on {task}, seed {seed}: {error}", file=sys.stderr)
                failed += 1
                continue
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps(done[key]) + "\n")
            say(f"[{i + 1}/{len(wanted)}]", done[key])
        runs.append(done[key])
    return runs, failed


def say(head: str, run: Run) -> None:
    steps, took = run["env_steps"], run["seconds"]
    print(f"{head} {run['contender']} {run['task']} seed {run['seed']}: return {run['return_mean']:,.0f}, "
          f"{steps:,} steps in {took:.1f} s", flush=True)  # fmt: skip


# -- statistics ----------------------------------------------------------------------------------------------------


def iqm(values: Sequence[float]) -> float:
    """Mean of the middle half, quarters weighted where the count does not divide (Agarwal et al. 2021)."""
    ordered, n = np.sort(np.asarray(values, float)), len(values)
    # Each value stands for [i/n, (i+1)/n] of the distribution; its weight is the part that lies in [1/4, 3/4].
    edges = np.arange(n + 1) / n
    weight = np.clip(edges[1:], 0.25, 0.75) - np.clip(edges[:-1], 0.25, 0.75)
    return float((ordered * weight).sum() / weight.sum())


def by_task(runs: list[Run], name: str) -> dict[str, np.ndarray]:
    """task -> mean returns of ``name``, one a seed."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["contender"] == name:
            found.setdefault(run["task"], []).append(run["return_mean"])
    return {task: np.asarray(values) for task, values in found.items()}


def lead(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """(ours - theirs) / |theirs| of the means over seeds, averaged over the tasks that both have.

    Returns:
        (estimate, lower, upper): the ends of its 95 % percentile bootstrap interval. Tasks are strata; within each the
        seeds of either side are drawn again, apart, with replacement.
    """
    rng = np.random.default_rng(seed)
    tasks = [t for t in ours if t in theirs]

    def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a.mean(-1) - b.mean(-1)) / np.abs(b.mean(-1))

    def redrawn(values: np.ndarray) -> np.ndarray:
        return values[rng.integers(len(values), size=(DRAWS, len(values)))]

    estimate = np.mean([relative(ours[t], theirs[t]) for t in tasks])
    draws = np.mean([relative(redrawn(ours[t]), redrawn(theirs[t])) for t in tasks], axis=0)
    lower, upper = np.percentile(draws, (2.5, 97.5))
    return float(estimate), float(lower), float(upper)


# -- report --------------------------------------------------------------------------------------------------------


def row(name: str, value: float, unit: str, runs: int) -> dict[str, Any]:
    return {"name": name, "value": float(value), "unit": unit, "baseline": None, "ratio": None, "runs": runs,
            "machine": _bench.machine()}  # fmt: skip


def rows_of(runs: list[Run]) -> list[dict[str, Any]]:
    """Rows in the benchmarks' common form: per task and contender, then our leads over all tasks and each."""
    names = [n for n in CONTENDERS if any(r["contender"] == n for r in runs)]
    returns = {name: by_task(runs, name) for name in names}
    rows = []
    for task in dict.fromkeys(r["task"] for r in runs):
        for name in (n for n in names if task in returns[n]):
            values = returns[name][task]
            for what, number in (("median", np.median(values)), ("mean", values.mean()), ("IQM", iqm(values))):
                rows.append(row(f"{task}: {name}, {what}", number, "return", len(values)))
    for mine in (n for n in names if n.startswith("pql:")):
        for peer in (n for n in names if n != mine and not (n == "pql:pql" or n.startswith(mine))):
            common = [t for t in returns[mine] if t in returns[peer]]
            for label, tasks in (("all tasks", common), *((t, [t]) for t in common)):
                ours = {t: returns[mine][t] for t in tasks}
                if not ours:
                    continue
                estimate, lower, upper = lead(ours, returns[peer])
                count = sum(len(v) for v in ours.values())
                for what, number in (("lead", estimate), ("lower 95 %", lower), ("upper 95 %", upper)):
                    rows.append(row(f"{mine} over {peer}, {label}: {what}", number, "(ours-theirs)/theirs", count))
    return rows


def tables(rows: list[dict[str, Any]]) -> str:
    """The rows as two Markdown tables, for a page of results."""
    lines = ["| task | contender | median | mean | IQM | seeds |", "|---|---|---|---|---|---|"]
    found = {r["name"]: r for r in rows}
    for name, r in found.items():
        if name.endswith(", median"):
            task, _, who = name.removesuffix(", median").partition(": ")
            numbers = [found[f"{task}: {who}, {what}"]["value"] for what in ("median", "mean", "IQM")]
            lines.append(f"| {task} | {who} | " + " | ".join(f"{v:,.0f}" for v in numbers) + f" | {r['runs']} |")
    lines += ["", "| ours over theirs | tasks | (ours - theirs) / theirs | 95 % interval |", "|---|---|---|---|"]
    for name, r in found.items():
        if name.endswith(": lead"):
            stem = name.removesuffix(": lead")
            pair, _, tasks = stem.partition(", ")
            low, high = (found[f"{stem}: {end} 95 %"]["value"] for end in ("lower", "upper"))
            lines.append(f"| {pair} | {tasks} | {r['value']:+.1%} | {low:+.1%} to {high:+.1%} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="training time of every run")
    parser.add_argument("--tasks", nargs="+", default=["halfcheetah", "hopper", "walker2d"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT), choices=list(CONTENDERS))
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of an evaluation")
    parser.add_argument("--runs", metavar="PATH", help="JSON-lines file of finished runs: resumed from, appended to")
    parser.add_argument("--table", action="store_true", help="of the finished runs; nothing is run")
    parser.add_argument("--smoke", action="store_true", help="tiny and in this process, to test the script itself")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "TASK", "SEED"), help="one run, printed as JSON")
    args = parser.parse_args(argv)
    if args.one:
        name, task, seed = args.one
        settings = CONTENDERS[name].settings(task)
        print(json.dumps(measure(name, task, int(seed), args.seconds, settings, args.episodes)))
        return 0
    if args.smoke:
        args.tasks, args.seeds, args.seconds, args.episodes = ["pendulum"], [1], 0.2, 2
    runs, failed = collect(args)
    if runs:
        rows = rows_of(runs)
        print(tables(rows))
        _bench.report(rows, args.json)
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
