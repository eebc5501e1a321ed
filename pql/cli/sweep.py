"""``pql sweep``: search for settings with Optuna. Repeating the command continues it; ``trials`` is the total number.

A trial is one run per seed, each in a separate process; its value is the mean of their final evaluations. Intermediate
evaluations of the first seed's run are compared with those of earlier trials, and a poor trial is ended early.
"""

import csv
import importlib
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pql.cli.jobs import INTERRUPTED, PROGRAM, Runner, how_ended, next_command
from pql.cli.sweep_plan import OBJECTIVES, Plan, chosen_values, make_plan, show_param
from pql.cli.sweep_values import Space
from pql.config import Config
from pql.config.compose import compose
from pql.errors import ConfigError
from pql.run.store import run_dir as rundir

BUCKETS = 20  # parts of the budget; evaluations of two trials are compared within the same bucket
PATIENCE = 5  # the median ends no trial before this bucket, nor before this many trials have finished
RUNG, KEPT = 2, 3  # asha: of the trials at buckets 2, 6 and 18, one in three goes on


def sweep_command(words: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Run trials until there are enough. Returns the exit status: 0, 1 if none finished, 130 after Ctrl-C. Raises
    ``ConfigError``: before the first trial: a wrong setting, or an existing sweep with other settings."""
    import_extra("optuna", "sweep")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    plan = make_plan(words)
    with Runner(plan.folder, "sweep_dir", program) as runner:
        study = open_study(plan)
        while (trial := next_trial(study, plan)) is not None:
            run_trial(plan, study, trial, runner)
            write_trials(plan, trial_rows(study))
            if runner.asked:
                print("interrupted: give the same command again to continue")
                return INTERRUPTED
            print(describe_trial(study), flush=True)
        return conclude(plan, study)


def import_extra(module: str, extra: str) -> None:
    """Import a module of an optional dependency. Raises ``ConfigError``: it is not installed; says how to."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"the package {error.name!r}, which is not installed: pip install 'pql-rl[{extra}]'"
        raise ConfigError("command", "sweep", what) from error


# -- Optuna ---------------------------------------------------------------------------------------------------------


def open_study(plan: Plan) -> Any:
    """Open the study in the sweep's folder, new or existing. Raises ``ConfigError``: it was created with other
    settings."""
    import optuna

    pruner: Any = optuna.pruners.MedianPruner(n_startup_trials=PATIENCE, n_warmup_steps=PATIENCE)
    if plan.settings.pruner == "asha":
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=RUNG, reduction_factor=KEPT)
    study = optuna.create_study(
        storage=f"sqlite:///{(plan.folder / 'study.db').resolve()}",
        study_name="sweep",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.NopPruner() if plan.settings.prune == "none" else pruner,
    )
    study.set_user_attr("asked", check_asked(plan, study.user_attrs.get("asked")))
    return study


def check_asked(plan: Plan, before: dict[str, str] | None) -> dict[str, str]:
    """Return what the command asks for. Raises ``ConfigError``: the sweep was begun with something else, ``before``."""
    asked = plan.asked()
    if before is not None and asked != before:
        key = next(k for k in [*asked, *before] if asked.get(k) != before.get(k))
        what = (
            f"{before.get(key, 'nothing')}, as in this sweep; other settings need a sweep_dir other than {plan.folder}"
        )
        raise ConfigError(key, asked.get(key, "nothing"), what)
    return asked


def next_trial(study: Any, plan: Plan) -> Any:
    """Return an interrupted trial, else a new one; None if there are enough."""
    import optuna

    trials = study.get_trials(deepcopy=False)
    left = next((t for t in trials if not t.state.is_finished()), None)
    if left is None and len(trials) >= plan.settings.trials:
        return None
    number = len(trials) if left is None else left.number
    # Seeded by the trial, so that an interrupted sweep makes the same draws as an uninterrupted one.
    seed = plan.settings.sweep_seed * 1_000_003 + number
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study.sampler = samplers[plan.settings.sampler](seed=seed)
    return study.ask() if left is None else optuna.trial.Trial(study, left._trial_id)


def suggest(trial: Any, key: str, space: Space) -> Any:
    """Return the trial's value of a setting; a resumed trial keeps its value."""
    if space.low is None:
        return trial.suggest_categorical(key, space.values)
    step = {} if space.step is None else {"step": int(space.step) if space.integer else space.step}
    of_type = trial.suggest_int if space.integer else trial.suggest_float
    return of_type(key, space.low, space.high, log=space.log, **step)


# -- a trial --------------------------------------------------------------------------------------------------------


def run_trial(plan: Plan, study: Any, trial: Any, runner: Runner) -> None:
    """Run a trial to its end and report it to the study. After Ctrl-C it remains unfinished."""
    from optuna.trial import TrialState

    params = {key: suggest(trial, key, space) for key, space in plan.spaces.items()}
    words = chosen_values(plan.words, params)
    folder = plan.folder / f"trial-{trial.number:03d}"
    print(f"trial {trial.number}: {' '.join(f'{k}={show_param(v)}' for k, v in params.items())}", flush=True)
    values, seconds = [], 0.0
    try:
        config = compose(words)
        for seed in plan.settings.seeds:
            first = plan.settings.prune != "none" and seed == plan.settings.seeds[0]
            watch = TrialWatch(trial, folder / f"seed{seed}", plan.settings.prune, config) if first else None
            summary = run_seed(runner, folder / f"seed{seed}", [*words, f"seed={seed}"], watch)
            if summary is None:
                if runner.asked:
                    return
                study.tell(trial, state=TrialState.PRUNED)
                return
            values.append(summary[plan.settings.objective])
            seconds += summary["seconds"]
            trial.set_user_attr("returns", values)
            trial.set_user_attr("seconds", seconds)
        study.tell(trial, math.fsum(values) / len(values))
    except (ConfigError, TrialFailedError) as error:
        trial.set_user_attr("why", str(error))
        study.tell(trial, state=TrialState.FAIL)


class TrialFailedError(Exception):
    """A trial failed; the message is one line."""


def run_seed(
    runner: Runner, run_dir: Path, words: list[str], watch: Callable[[], bool] | None
) -> dict[str, Any] | None:
    """Run one seed of a trial. Returns its summary, or None if it was pruned. Raises ``TrialFailedError``: the run
    failed, or has no finite return."""
    run_dir.parent.mkdir(exist_ok=True)
    log = run_dir.with_suffix(".log")
    command = next_command(run_dir, words)
    status = 0 if command is None else runner.run(command, log=log, enough=watch)
    if watch and rundir.state(run_dir) == "finished":
        watch()  # the last evaluations
    summary = rundir.read_summary(run_dir)
    if status == 0 and summary is not None:
        if not all(math.isfinite(summary[k] if summary[k] is not None else math.nan) for k in OBJECTIVES):
            raise TrialFailedError("no finite return in its final evaluation")
        return summary
    if runner.asked or (isinstance(watch, TrialWatch) and watch.over and status == INTERRUPTED):
        return None
    why = last_words(log) if status >= 0 else f"stacks of its threads, if written, are in {log}"
    raise TrialFailedError(f"{how_ended(status)}: {why}")


def last_words(log: Path) -> str:
    """Return the last line that a run has printed."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


class TrialWatch:
    """Reports a run's evaluations to its trial as they appear, and checks whether to prune it.

    Attributes:
        over: True once the pruner ended the trial.
    """

    def __init__(self, trial: Any, run_dir: Path, axis: str, config: Config):
        self.trial, self.path = trial, run_dir / "metrics.jsonl"
        self.key = {"seconds": "time/seconds", "env_steps": "steps/env"}[axis]
        self.budget = float(getattr(config.budget, axis))
        self.reported: set[int] = set(trial.storage.get_trial(trial._trial_id).intermediate_values)
        self.over = False

    def __call__(self) -> bool:
        for row in evaluations(self.path):
            bucket = min(BUCKETS, int(BUCKETS * row[self.key] / self.budget))
            if bucket not in self.reported:
                self.reported.add(bucket)
                self.trial.report(row["eval/return_mean"], bucket)
                self.over = self.over or self.trial.should_prune()
        return self.over


def evaluations(path: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl with an evaluation, except a row that is still being written."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if '"eval/return_mean"' in line and line.endswith("}\n")]


# -- results --------------------------------------------------------------------------------------------------------


def trial_rows(study: Any) -> list[dict[str, Any]]:
    """Return number, state, value, return of each seed, seconds, reason of failure and settings of every trial."""
    return [
        {
            "trial": t.number,
            "state": t.state.name.lower(),
            "value": t.value if t.state.name == "COMPLETE" else None,
            "returns": t.user_attrs.get("returns", []),
            "seconds": t.user_attrs.get("seconds"),
            "why": t.user_attrs.get("why"),
            "params": t.params,
        }
        for t in study.get_trials(deepcopy=False)
    ]


def write_trials(plan: Plan, rows: list[dict[str, Any]]) -> None:
    """Write trials.json and trials.csv, with a column for every searched setting."""
    replace_file(plan.folder / "trials.json", lambda file: json.dump(rows, file, indent=1))

    def write(file: Any) -> None:
        table = csv.writer(file)
        table.writerow(["trial", "state", "value", "seconds", *plan.spaces, "why"])
        for row in rows:
            params = (row["params"].get(k) for k in plan.spaces)
            table.writerow([row["trial"], row["state"], row["value"], row["seconds"], *params, row["why"]])

    replace_file(plan.folder / "trials.csv", write)


def replace_file(path: Path, write: Callable[[Any], None]) -> None:
    """Replace a file at once by what ``write(file)`` writes."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("w", newline="") as file:
        write(file)
    os.replace(temporary, path)


def describe_trial(study: Any) -> str:
    """Describe the last trial in one line."""
    rows = trial_rows(study)
    row = next(r for r in reversed(rows) if r["state"] != "running")
    done = [r for r in rows if r["state"] == "complete"]
    best = max(done, key=lambda r: r["value"], default=None)
    outcome = {"complete": f"{row['value'] or 0:,.1f}", "fail": f"failed: {row['why']}"}.get(row["state"], "pruned")
    return f"trial {row['trial']}: {outcome}" + (f" (best {best['value']:,.1f}: trial {best['trial']})" if best else "")


def conclude(plan: Plan, study: Any) -> int:
    """Print the best trial as a command. Returns the exit status."""
    rows = trial_rows(study)
    counts = Counter(row["state"] for row in rows)
    print(f"{len(rows)} trials: {counts['complete']} finished, {counts['pruned']} pruned, {counts['fail']} failed")
    print(f"all trials: {plan.folder / 'trials.csv'}")
    done = [row for row in rows if row["state"] == "complete"]
    if not done:
        print("none finished: the reasons are in trials.csv, each run's output in trial-*/seed*.log")
        return 1
    best = max(done, key=lambda row: row["value"])
    words = [w for w in chosen_values(plan.words, best["params"]) if not w.startswith("checkpoint.replay=")]
    seeds = ",".join(str(s) for s in plan.settings.seeds)
    command = ["pql", "train", *(["-m"] if "," in seeds else []), *words, f"seed={seeds}"]
    print(f"best: trial {best['trial']}, {plan.settings.objective} {best['value']:,.1f}")
    print(shlex.join(command))
    return 0
