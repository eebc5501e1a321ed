"""Our algorithms against those of other libraries, for equal time on the same cores, or for equal env steps.

Every (contender, task, seed) is one process; processes run one after the other, each with all cores, for the same
training time (``--seconds``) or the same number of env steps (``--steps``) on the same batched environments. With
``--by-steps``, for machines with other load, the time is converted to env steps first: short runs of every contender on
every task, in turn (``--rate-runs``), give its median rate, and a run makes the env steps of its time at that rate.
Its result then depends only on the seed and the number of steps, so only the short runs need an idle machine. (skrl's
own sampling slows down as its replay fills; it then gets more steps than its time allows.)

The deterministic policy is evaluated with this library's code, at the end and, with ``--points``, at equal parts of the
budget: 16 episodes on separate environments, the same for all contenders, outside the training time. The tables by
seconds and by env steps interpolate linearly between evaluations.

A finished run is appended to a JSON-lines file (``--runs``) and skipped next time. A run with other settings, another
budget or other points is repeated, but not one of older code: begin a new file for that. Several processes may share
the file once the rates are known, each with its own ``--tasks`` and ``--seeds``.

Contenders are those of ``contenders.py``, groups of them (on-policy, the default, and off-policy), and ``pql:PRESET``
for any of our presets, also with other settings: ``"pql:pql2 algo.v_per_step=32"``. rl_games, skrl and sbx have an
environment of their own (``make peers``); ``--python`` names its interpreter. The exit status is 1 if a run failed or a
contender could not be set up; the others still run.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pql
from pql.errors import ConfigError
from pql.run.episodes import run_episodes
from tools.bench import common
from tools.peers.contenders import CONTENDERS, GROUPS, contender
from tools.peers.course import Act, Budget, Course, Point
from tools.peers.picture import draw
from tools.peers.report import curve_tables, rows_of, tables
from tools.peers.settings import Settings

Run = dict[str, Any]
FACTS = ("kind", "contender", "task", "seed", "budget", "budget_steps", "points", "settings")
EPISODES = 16
PATIENCE = 600.0  # seconds for start-up and an evaluation, before a run counts as hung
RATE_RUNS, RATE_SECONDS, RATE_EPISODES = 3, 15.0, 1  # short runs per contender and task
RATE_POINTS = 3  # of short runs, twice as long, where runs have points: the last third gives the rate


class Job(NamedTuple):
    """One training run and its evaluation: a ``run`` of the table, or a short one for a contender's ``rate``."""

    contender: str
    task: str
    seed: int
    settings: Settings
    budget: Budget
    kind: str = "run"
    points: int = 1

    def facts(self) -> Run:
        """Return the fields that identify the run in the file."""
        budget = (self.budget.seconds, self.budget.env_steps)
        facts = (self.kind, self.contender, self.task, self.seed, *budget, self.points, digest(self.settings))
        return dict(zip(FACTS, facts, strict=True))

    def key(self) -> tuple[Any, ...]:
        return tuple(self.facts().values())


def measure(job: Job, episodes: int) -> Run:
    """Train one contender and evaluate it."""
    env, entry = pql.make_env(job.task, num_envs=episodes), contender(job.contender)

    def evaluate(act: Act) -> Point:
        result = run_episodes(env, act, seed=1_000_000 + job.seed)
        return {"return_mean": result.mean, "return_iqm": result.iqm, "returns": result.returns}

    course = Course(job.budget, job.points, evaluate)
    entry.train(job.task, job.seed, course, job.settings)
    env.close()
    return {
        **job.facts(),
        **course.curve[-1],
        "curve": course.curve,
        "package": f"{entry.package} {version(entry.package)}",
        "machine": common.machine(),
    }


def version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return pql.__version__  # this library, not installed


def measure_apart(job: Job, episodes: int, python: str = sys.executable) -> Run:
    """Run the job in a separate process; end it and its children if it hangs or this process is interrupted.

    Args:
        python: the interpreter.
    Raises:
        RuntimeError: the process failed (with its last line of output) or hung.
    """
    command = [python, __file__, "--one", job.contender, job.task, str(job.seed), "--kind", job.kind]
    command += ["--seconds", str(job.budget.seconds), "--episodes", str(episodes), "--points", str(job.points)]
    limit: float | None = 2 * job.budget.seconds + job.points * PATIENCE
    if job.budget.env_steps is not None:
        command += ["--steps", str(job.budget.env_steps)]
        # the machine may be busy, and of equal env steps the time is unknown
        limit = 10 * job.budget.seconds + job.points * PATIENCE if job.budget.seconds else None
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=limit)
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
            known[name, task] = contender(name).settings(task)
        except ConfigError as error:
            print(f"left out: {name} on {task}: {error}", file=sys.stderr)
    order = itertools.product(args.seeds, args.tasks, args.contenders)
    budget = Budget(args.seconds if args.steps is None else 0.0, args.steps)
    jobs = [
        Job(name, task, seed, known[name, task], budget, points=args.points)
        for seed, task, name in order
        if (name, task) in known
    ]
    return jobs, len(args.contenders) * len(args.tasks) - len(known)


def collect(args: argparse.Namespace) -> tuple[list[Run], int]:
    """Return all requested runs, including the file's, and the number that failed or could not be set up."""
    book = Book(Path(args.runs) if args.runs else None, args)
    wanted, failed = plan(args)
    rates = rates_of(book, wanted) if args.by_steps else {}
    jobs = [in_steps(j, rates[j[:2]]) for j in wanted if j[:2] in rates] if args.by_steps else wanted
    failed += len(wanted) - len(jobs)
    runs: list[Run] = []
    for i, job in enumerate(jobs):
        run, new = book.get(job, args.episodes)
        if run is not None:
            runs.append({**run, **rates[job[:2]].facts()} if args.by_steps else run)
            if new:
                say(f"[{i + 1}/{len(jobs)}]", run)
        elif not args.table:
            failed += 1
    return runs, failed


class Rate(NamedTuple):
    """Speed of a short run: its ``clock``, (env steps, seconds) from 0 on, and then ``slope`` env steps per second."""

    clock: tuple[tuple[int, float], ...]
    slope: float

    def steps(self, seconds: float) -> int:
        """Return the env steps that the contender would make in ``seconds``."""
        env_steps, last = self.clock[-1]
        return max(1, round(env_steps + self.slope * (seconds - last)))

    def facts(self) -> Run:
        return {"rate": self.slope, "clock": self.clock}


def rate_of(run: Run) -> Rate:
    """Return the speed of a short run: of its last part if it has several, after random steps and compilation."""
    curve = run.get("curve", ())
    if len(curve) < 2:
        return Rate(((0, 0.0),), run["env_steps"] / run["seconds"])
    clock = [(0, 0.0), *((point["env_steps"], point["seconds"]) for point in curve)]
    (before, early), (end, late) = clock[-2:]
    return Rate(tuple(clock), (end - before) / (late - early))


def rates_of(book: "Book", jobs: Sequence[Job]) -> dict[tuple[str, str], Rate]:
    """Return (contender, task) -> the median rate of ``--rate-runs`` short runs, made in turn.

    A pair whose short runs failed is left out. With ``--table``, those that the file has count.
    """
    pairs = {(j.contender, j.task): j for j in jobs}
    rates: dict[tuple[str, str], list[Rate]] = {pair: [] for pair in pairs}
    for turn, (pair, job) in itertools.product(range(book.rate_runs), pairs.items()):
        budget = Budget(book.rate_seconds * (2 if job.points > 1 else 1))
        short = job._replace(kind="rate", seed=turn, budget=budget, points=RATE_POINTS if job.points > 1 else 1)
        run, _ = book.get(short, RATE_EPISODES)
        if run is not None:
            rates[pair].append(rate_of(run))
    found = {}
    for pair, all_rates in rates.items():
        if len(all_rates) == book.rate_runs or (all_rates and book.only_stored):
            ordered = sorted(all_rates, key=lambda rate: rate.steps(pairs[pair].budget.seconds))
            found[pair] = ordered[len(ordered) // 2]
            print(f"{pair[0]} {pair[1]}: {found[pair].slope:,.0f} env steps/s")
    return found


def in_steps(job: Job, rate: Rate) -> Job:
    """Return the job with its time as env steps."""
    return job._replace(budget=Budget(job.budget.seconds, rate.steps(job.budget.seconds)))


class Book:
    """Finished runs, and the file that stores them."""

    def __init__(self, path: Path | None, args: argparse.Namespace):
        self.path, self.only_stored = path, args.table
        self.measure = measure if args.smoke else partial(measure_apart, python=args.python)
        self.rate_seconds, self.rate_runs = args.seconds if args.smoke else RATE_SECONDS, args.rate_runs
        self.runs = {tuple({"points": 1, **run}[k] for k in FACTS): run for run in common.json_lines(path)}

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
        f"{steps:,} steps and {run.get('updates', 0):,} updates in {took:.1f} s",
        flush=True,
    )


def named(words: Sequence[str]) -> list[str]:
    """Return contenders by name, groups resolved, each once.

    Raises:
        SystemExit: a name that is neither.
    """
    names = list(dict.fromkeys(name for word in words for name in GROUPS.get(word, (word,))))
    for name in names:
        if name not in CONTENDERS and not name.startswith("pql:"):
            known = ", ".join((*GROUPS, *CONTENDERS, "pql:PRESET"))
            raise SystemExit(f"--contenders {name}: {known} are allowed")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="training time of every run")
    parser.add_argument("--by-steps", action="store_true", help="measure rates first, then train for that many steps")
    parser.add_argument("--rate-runs", type=int, default=RATE_RUNS, help="short runs per contender and task")
    parser.add_argument("--tasks", nargs="+", default=["halfcheetah", "hopper", "walker2d"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--contenders", nargs="+", default=["on-policy"], help="names, or on-policy or off-policy")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="episodes of an evaluation")
    parser.add_argument("--points", type=int, default=1, help="evaluations of a run, at equal parts of its budget")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the runs: that of make peers")
    parser.add_argument("--runs", metavar="PATH", help="JSON-lines file of finished runs: resumed from, appended to")
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs; run nothing")
    parser.add_argument("--pictures", metavar="DIR", help="with --points: curves by seconds and env steps (matplotlib)")
    parser.add_argument("--steps", type=int, help="env steps of every run, instead of --seconds")
    parser.add_argument("--kind", default="run", help="of a run, with --one")
    parser.add_argument("--one", nargs=3, metavar=("CONTENDER", "TASK", "SEED"), help="one run, printed as JSON")
    args = parser.parse_args(argv)
    if args.one:
        name, task, seed = args.one
        budget, settings = Budget(args.seconds, args.steps), contender(name).settings(task)
        job = Job(name, task, int(seed), settings, budget, args.kind, args.points)
        print(json.dumps(measure(job, args.episodes)))
        return 0
    args.contenders = named(args.contenders)
    if args.smoke:
        args.tasks, args.seeds, args.seconds, args.episodes = ["pendulum"], [1], 0.2, 2
    runs, failed = collect(args)
    if runs:
        rows = rows_of(runs)
        print(tables(rows))
        if args.points > 1:
            print(f"\n{curve_tables(runs)}\n")
            if args.pictures:
                for axis in ("seconds", "env_steps"):
                    draw(runs, axis, Path(args.pictures) / f"{axis}.png")
        common.report(rows, args.json)
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
