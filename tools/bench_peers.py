"""Our PPO and PQL against rsl_rl's and Stable-Baselines3's algorithms, for equal time on the same cores.

Every (contender, task, seed) is one process; processes run one after the other, each with all cores, for the same
training time on the same batched MuJoCo environments. With ``--by-steps``, for machines with other load, the time is
converted to env steps first: three short runs of every contender on every task, in turn, give its median rate, and a
run makes the env steps of its training time at that rate. Its result then depends only on the seed and the number of
steps, so only the short runs need an idle machine. The deterministic policy is evaluated afterwards with this library's
code: 16 episodes on separate environments, outside the training time.

A finished run is appended to a JSON-lines file and skipped next time, so the benchmark can be interrupted and resumed.
A run with other settings or another budget is repeated (but not one of older code: begin a new file for that). The
order (seeds, tasks, contenders) spreads a slow hour over all contenders. ``_peers.py`` has the settings and their
sources.

Once the rates are known, several processes may share the file; give each its own ``--tasks`` and ``--seeds``.
The committed table (90 runs; extras mujoco and peers):

    python tools/bench_peers.py --by-steps --seconds 60 --runs docs/results/json/peers-runs.jsonl \\
        --json docs/results/json/peers.json

``--contenders ... sb3:sac sb3:td3`` adds Stable-Baselines3's off-policy algorithms. ``--table`` prints the
file's runs without running anything. The exit status is 1 if a run failed or a contender could not be set up; the
others still run.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _bench
import numpy as np
from _peers import CONTENDERS, DEFAULT, Budget, Settings

import pql
from pql.errors import ConfigError
from pql.run.evaluation import run_episodes

Run = dict[str, Any]
FACTS = ("kind", "contender", "task", "seed", "budget", "budget_steps", "settings")
EPISODES, DRAWS = 16, 20_000
PATIENCE = 600.0  # seconds for start-up and evaluation, before a run counts as hung
RATE_RUNS, RATE_SECONDS, RATE_EPISODES = 3, 15.0, 1  # short runs per contender and task


# -- runs ----------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One training run and its evaluation: a ``run`` of the table, or a short one for a contender's ``rate``."""

    contender: str
    task: str
    seed: int
    settings: Settings
    budget: Budget
    kind: str = "run"

    def facts(self) -> Run:
        """Return the fields that identify the run in the file."""
        budget = (self.budget.seconds, self.budget.env_steps)
        facts = (self.kind, self.contender, self.task, self.seed, *budget, digest(self.settings))
        return dict(zip(FACTS, facts, strict=True))

    def key(self) -> tuple[Any, ...]:
        return tuple(self.facts().values())


def measure(job: Job, episodes: int) -> Run:
    """Train one contender and evaluate it."""
    trained = CONTENDERS[job.contender].train(job.task, job.seed, job.budget, job.settings)
    env = pql.make_env(job.task, num_envs=episodes)
    result = run_episodes(env, trained.policy, seed=1_000_000 + job.seed)
    env.close()
    return {
        **job.facts(),
        "return_mean": result.mean,
        "return_iqm": result.iqm,
        "returns": result.returns,
        "seconds": trained.seconds,
        "env_steps": trained.env_steps,
        "machine": _bench.machine(),
    }


def measure_apart(job: Job, episodes: int) -> Run:
    """Run the job in a separate process; end it and its children if it hangs or this process is interrupted.

    Raises:
        RuntimeError: the process failed (with its last line of output) or hung.
    """
    command = [sys.executable, __file__, "--one", job.contender, job.task, str(job.seed), "--kind", job.kind]
    command += ["--seconds", str(job.budget.seconds), "--episodes", str(episodes)]
    limit = 2 * job.budget.seconds
    if job.budget.env_steps is not None:
        command += ["--steps", str(job.budget.env_steps)]
        limit *= 5  # the machine may be busy
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=limit + PATIENCE)
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


def plan(args: argparse.Namespace) -> tuple[list[Job], int]:
    """Return the runs in order, with time budgets, and the number of pairs that cannot be set up (each is printed)."""
    known: dict[tuple[str, str], Settings] = {}
    for name, task in itertools.product(args.contenders, args.tasks):
        try:
            known[name, task] = CONTENDERS[name].settings(task)
        except ConfigError as error:
            print(f"left out: {name} on {task}: {error}", file=sys.stderr)
    order = itertools.product(args.seeds, args.tasks, args.contenders)
    budget = Budget(args.seconds)
    jobs = [Job(name, task, seed, known[name, task], budget) for seed, task, name in order if (name, task) in known]
    return jobs, len(args.contenders) * len(args.tasks) - len(known)


def stored(path: Path | None) -> list[Run]:
    """Return the finished runs of a file; a line cut off by an interruption is skipped."""
    runs = []
    for line in path.read_text().splitlines() if path and path.exists() else ():
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a damaged line is skipped", file=sys.stderr)
    return runs


def collect(args: argparse.Namespace) -> tuple[list[Run], int]:
    """Return all requested runs, including the file's, and the number that failed or could not be set up."""
    book = Book(Path(args.runs) if args.runs else None, args)
    wanted, failed = plan(args)
    jobs = in_steps(book, wanted) if args.by_steps else wanted
    failed += len(wanted) - len(jobs)
    runs: list[Run] = []
    for i, job in enumerate(jobs):
        run, new = book.get(job, args.episodes)
        if run is not None:
            runs.append(run)
            if new:
                say(f"[{i + 1}/{len(jobs)}]", run)
        elif not args.table:
            failed += 1
    return runs, failed


def in_steps(book: "Book", jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with their time as env steps, at the median rate of ``RATE_RUNS`` short runs made in turn.

    Jobs of a contender whose short runs failed are left out.
    """
    pairs = {(j.contender, j.task): j for j in jobs}
    rates: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for turn, (pair, job) in itertools.product(range(RATE_RUNS), pairs.items()):
        short = job._replace(kind="rate", seed=turn, budget=Budget(book.rate_seconds))
        run, _ = book.get(short, RATE_EPISODES)
        if run is not None:
            rates[pair].append(run["env_steps"] / run["seconds"])
    found = {pair: statistics.median(r) for pair, r in rates.items() if len(r) == RATE_RUNS}
    for (name, task), rate in found.items():
        print(f"{name} {task}: {rate:,.0f} env steps/s")

    def steps(job: Job) -> int:
        return max(1, round(found[job.contender, job.task] * job.budget.seconds))

    return [j._replace(budget=Budget(j.budget.seconds, steps(j))) for j in jobs if (j.contender, j.task) in found]


class Book:
    """Finished runs, and the file that stores them."""

    def __init__(self, path: Path | None, args: argparse.Namespace):
        self.path, self.only_stored = path, args.table
        self.measure = measure if args.smoke else measure_apart
        self.rate_seconds = args.seconds if args.smoke else RATE_SECONDS
        self.runs = {tuple(run[k] for k in FACTS): run for run in stored(path)}

    def get(self, job: Job, episodes: int) -> tuple[Run | None, bool]:
        """Return the run and whether it had to be made (and stored); None if it failed."""
        if job.key() in self.runs or self.only_stored:
            return self.runs.get(job.key()), False
        try:
            run = self.measure(job, episodes)
        except Exception as error:
            print(f"failed: {job.contender} on {job.task}, seed {job.seed}: {error}", file=sys.stderr)
            return None, False
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(run) + "\n")
        self.runs[job.key()] = run
        return run, True


def say(head: str, run: Run) -> None:
    steps, took = run["env_steps"], run["seconds"]
    print(
        f"{head} {run['contender']} {run['task']} seed {run['seed']}: return {run['return_mean']:,.0f}, "
        f"{steps:,} steps in {took:.1f} s",
        flush=True,
    )


# -- statistics ----------------------------------------------------------------------------------------------------


def iqm(values: Sequence[float] | np.ndarray) -> float:
    """Return the mean of the middle half, with fractional weights at its ends (Agarwal et al. 2021)."""
    ordered, n = np.sort(np.asarray(values, float)), len(values)
    # Each value stands for [i/n, (i+1)/n] of the distribution; its weight is the part inside [1/4, 3/4].
    edges = np.arange(n + 1) / n
    weight = np.clip(edges[1:], 0.25, 0.75) - np.clip(edges[:-1], 0.25, 0.75)
    return float((ordered * weight).sum() / weight.sum())


def by_task(runs: list[Run], name: str) -> dict[str, np.ndarray]:
    """Return task -> mean returns of ``name``, one per seed."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["contender"] == name:
            found.setdefault(run["task"], []).append(run["return_mean"])
    return {task: np.asarray(values) for task, values in found.items()}


def lead(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], seed: int = 0) -> tuple[float, float, float]:
    """Return (ours - theirs) / |theirs| of the means over seeds, averaged over the tasks that both have.

    Returns:
        (estimate, lower, upper), with the ends of the 95 % percentile bootstrap interval. Tasks are strata; within each
        the seeds of the two contenders are resampled separately, with replacement.
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
    return {
        "name": name,
        "value": float(value),
        "unit": unit,
        "baseline": None,
        "ratio": None,
        "runs": runs,
        "machine": _bench.machine(),
    }


def rows_of(runs: list[Run]) -> list[dict[str, Any]]:
    """Return rows in the benchmarks' common form: per task and contender, then our leads over all tasks and each."""
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
    """Return the rows as two Markdown tables, for a page of results."""
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
    parser.add_argument("--by-steps", action="store_true", help="measure rates first, then train for that many steps")
    parser.add_argument("--tasks", nargs="+", default=["halfcheetah", "hopper", "walker2d"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT), choices=list(CONTENDERS))
    parser.add_argument("--episodes", type=int, default=EPISODES, help="episodes of an evaluation")
    parser.add_argument("--runs", metavar="PATH", help="JSON-lines file of finished runs: resumed from, appended to")
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs; run nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny and in this process, to test the script itself")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--steps", type=int, help="env steps of a run, with --one")
    parser.add_argument("--kind", default="run", help="of a run, with --one")
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "TASK", "SEED"), help="one run, printed as JSON")
    args = parser.parse_args(argv)
    if args.one:
        name, task, seed = args.one
        job = Job(name, task, int(seed), CONTENDERS[name].settings(task), Budget(args.seconds, args.steps), args.kind)
        print(json.dumps(measure(job, args.episodes)))
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
