"""``pql sweep``: searches settings with Optuna. The same command again goes on; ``trials`` counts all of them.

A trial is one run per seed, each in a process of its own; its value is the mean of their final evaluations. Of the
first seed's run, the evaluations on the way are compared with those of earlier trials, and a poor one is ended early.
"""

import csv
import dataclasses
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pql import rundir
from pql.compose import compose, hint_of, parse_override
from pql.config import Config, leaves
from pql.errors import ConfigError, nearest
from pql.jobs import INTERRUPTED, PROGRAM, Runner, next_command
from pql.space import Space, parse_space

SAMPLERS = ("tpe", "random")
OBJECTIVES = ("return_mean", "return_iqm")
AXES = ("seconds", "env_steps", "none")
BUCKETS = 20  # of the budget: evaluations of two trials are compared where they fall into the same one
PATIENCE = 5  # no trial is ended before this bucket, nor before this many trials have finished


@dataclass(frozen=True)
class Settings:
    """What ``pql sweep`` takes besides a run's settings."""

    trials: int = 20  # in all, earlier sittings included
    seeds: tuple[int, ...] = (0,)  # a run of each, one after the other
    sampler: str = "tpe"  # tpe | random
    objective: str = "return_mean"  # return_mean | return_iqm of the final evaluation
    prune: str = ""  # seconds | env_steps | none: what evaluations on the way are compared by; empty: the budget's
    sweep_seed: int = 0  # of the sampler
    sweep_dir: str = ""  # empty: runs/sweep-<task>-<algo>


NAMES = tuple(f.name for f in dataclasses.fields(Settings))


@dataclass(frozen=True)
class Plan:
    """A checked sweep: its settings, and a run's words, the searched ones as spaces."""

    settings: Settings
    words: dict[str, str | Space]
    folder: Path

    @property
    def spaces(self) -> dict[str, Space]:
        return {k: v for k, v in self.words.items() if isinstance(v, Space)}

    def chosen(self, params: dict[str, Any]) -> list[str]:
        """A run's words, with ``params`` for the searched ones."""
        return [f"{k}={show_param(params[k]) if isinstance(v, Space) else v}" for k, v in self.words.items()]

    def asked(self) -> dict[str, str]:
        """All that has to be the same when the sweep goes on."""
        own = {k: str(v) for k, v in dataclasses.asdict(self.settings).items() if k not in ("trials", "sweep_dir")}
        return own | {k: v.text if isinstance(v, Space) else v for k, v in self.words.items()}


def main(words: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Run trials until there are enough. Returns the exit status: 0, 1 where none finished, 130 where Ctrl-C came.

    Raises:
        ConfigError: before anything starts: a wrong setting, or a sweep that was begun with others.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        what = f"the package {error.name!r}, which is not installed: pip install 'pql[sweep]'"
        raise ConfigError("command", "sweep", what) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    plan = make_plan(words)
    with Runner(plan.folder, "sweep_dir", program) as runner:
        study = open_study(plan)
        while (trial := next_trial(study, plan)) is not None:
            run_trial(plan, study, trial, runner)
            write_trials(plan, study)
            if runner.asked:
                print("interrupted: give the same command again to go on")
                return INTERRUPTED
            print(describe(study), flush=True)
        return conclude(plan, study)


# -- the command ----------------------------------------------------------------------------------------------------


def make_plan(words: Sequence[str]) -> Plan:
    """Raises ``ConfigError`` for what is wrong with the command, or with a run at either end of the spaces."""
    own: dict[str, Any] = {}
    run: dict[str, str | Space] = {}
    for word in words:
        key, value = parse_space(word)
        if key in ("seed", "run_dir"):
            raise ConfigError(key, getattr(value, "text", value), {"seed": "seeds=1,2", "run_dir": "sweep_dir=..."}[key])
        if key in NAMES:
            own[key] = own_setting(key, value)
        else:
            run[key] = fit(key, value) if isinstance(value, Space) else value
    settings = Settings(**own)
    if not any(isinstance(v, Space) for v in run.values()):
        raise ConfigError("sweep", " ".join(words), "a setting to search, such as algo.critic.lr=interval(1e-4,1e-2)")
    if isinstance(run.get("task"), Space):
        raise ConfigError("task", run["task"].text, "one task: returns of two cannot be compared")  # type: ignore[union-attr]
    run.setdefault("checkpoint.replay", "false")  # resume points of all trials would fill the disk
    plan = Plan(settings, run, Path())
    low, high = (compose(plan.chosen({k: end(s, i) for k, s in plan.spaces.items()})) for i in (0, -1))
    if not low.eval.final:
        raise ConfigError("eval.final", False, "true: a trial's value is that of its final evaluation")
    folder = settings.sweep_dir or f"runs/sweep-{low.task.name}-{low.algo.name}"
    return Plan(dataclasses.replace(settings, prune=axis(settings, low)), run, Path(folder).expanduser())


def own_setting(key: str, value: str | Space) -> Any:
    """One of the sweep's own settings, checked."""
    if key == "seeds":
        texts = value.values if isinstance(value, Space) else (value,)
        if not texts or not all(t.isdecimal() for t in texts):
            raise ConfigError(key, getattr(value, "text", value), "whole numbers, at least 0, such as 1,2")
        return tuple(int(t) for t in texts)
    if isinstance(value, Space):
        raise ConfigError(key, value.text, "a single value")
    if key in ("trials", "sweep_seed"):
        least = 1 if key == "trials" else 0
        if not value.isdecimal() or int(value) < least:
            raise ConfigError(key, value, f"a whole number, at least {least}")
        return int(value)
    allowed = {"sampler": SAMPLERS, "objective": OBJECTIVES, "prune": AXES}.get(key)
    if allowed and value not in allowed:
        raise ConfigError(key, value, f"one of {', '.join(allowed)}{nearest(value, allowed)}")
    return parse_override(key, value).value() if key == "sweep_dir" and value[0] in "'\"" else value


def fit(key: str, space: Space) -> Space:
    """A space of numbers in the type of its setting: whole ones where the setting is a whole number."""
    known = dict(leaves(Config()))
    if space.low is None or space.high is None or key not in known or hint_of(key) not in (int, int | None):
        return space
    if not (float(space.low).is_integer() and float(space.high).is_integer() and (space.step or 1) % 1 == 0):
        raise ConfigError(key, space.text, "whole numbers")
    return dataclasses.replace(space, low=int(space.low), high=int(space.high), whole=True)


def end(space: Space, which: int) -> Any:
    """The first (0) or last (-1) value of a space."""
    return space.values[which] if space.values else (space.low, space.high)[which]


def axis(settings: Settings, config: Config) -> str:
    """What evaluations are compared by: as asked, or as the budget is counted."""
    budget = dataclasses.asdict(config.budget)
    counted = [k for k in AXES[:2] if budget[k] is not None]
    if not counted:
        raise ConfigError("budget", None, "budget.seconds or budget.env_steps: trials of one length can be compared")
    if settings.prune not in (*counted, "none", ""):
        raise ConfigError("prune", settings.prune, f"one of {', '.join([*counted, 'none'])}, as the budget is counted")
    if config.eval.every_seconds is None:
        if settings.prune not in ("none", ""):
            raise ConfigError("prune", settings.prune, "none: eval.every_seconds is null")
        return "none"
    return settings.prune or counted[0]


def show_param(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


# -- Optuna ---------------------------------------------------------------------------------------------------------


def open_study(plan: Plan) -> Any:
    """The study in the sweep's folder, new or as it was left.

    Raises:
        ConfigError: it was begun with other settings.
    """
    import optuna

    pruner = optuna.pruners.MedianPruner(n_startup_trials=PATIENCE, n_warmup_steps=PATIENCE)
    study = optuna.create_study(
        storage=f"sqlite:///{(plan.folder / 'study.db').resolve()}", study_name="sweep", load_if_exists=True,
        direction="maximize", pruner=optuna.pruners.NopPruner() if plan.settings.prune == "none" else pruner,
    )  # fmt: skip
    asked, before = plan.asked(), study.user_attrs.get("asked")
    if before is None:
        study.set_user_attr("asked", asked)
    elif asked != before:
        key = next(k for k in [*asked, *before] if asked.get(k) != before.get(k))
        what = f"{before.get(key, 'nothing')}, as this sweep began; for another, another sweep_dir than {plan.folder}"
        raise ConfigError(key, asked.get(key, "nothing"), what)
    return study


def next_trial(study: Any, plan: Plan) -> Any:
    """A trial that was interrupted, else a new one; None where there are enough."""
    import optuna

    trials = study.get_trials(deepcopy=False)
    left = next((t for t in trials if not t.state.is_finished()), None)
    if left is None and len(trials) >= plan.settings.trials:
        return None
    number = len(trials) if left is None else left.number
    # Seeded by the trial: a sweep that was interrupted draws what it would have drawn without.
    seed = plan.settings.sweep_seed * 1_000_003 + number
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study.sampler = samplers[plan.settings.sampler](seed=seed)
    return study.ask() if left is None else optuna.trial.Trial(study, left._trial_id)


def suggest(trial: Any, key: str, space: Space) -> Any:
    """The trial's value of a setting; of a trial that goes on, the one it had."""
    if space.low is None:
        return trial.suggest_categorical(key, space.values)
    step = {} if space.step is None else {"step": int(space.step) if space.whole else space.step}
    of_type = trial.suggest_int if space.whole else trial.suggest_float
    return of_type(key, space.low, space.high, log=space.log, **step)


# -- a trial --------------------------------------------------------------------------------------------------------


def run_trial(plan: Plan, study: Any, trial: Any, runner: Runner) -> None:
    """Run it to its end, and tell the study. After Ctrl-C it stays unfinished."""
    from optuna.trial import TrialState

    params = {key: suggest(trial, key, space) for key, space in plan.spaces.items()}
    words = plan.chosen(params)
    folder = plan.folder / f"trial-{trial.number:03d}"
    print(f"trial {trial.number}: {' '.join(f'{k}={show_param(v)}' for k, v in params.items())}", flush=True)
    values, seconds = [], 0.0
    try:
        config = compose(words)
        for seed in plan.settings.seeds:
            first = plan.settings.prune != "none" and seed == plan.settings.seeds[0]
            watch = Watch(trial, folder / f"seed{seed}", plan.settings.prune, config) if first else None
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
    """Says in a line why."""


def run_seed(
    runner: Runner, run_dir: Path, words: list[str], watch: Callable[[], bool] | None
) -> dict[str, Any] | None:
    """The summary of one run of a trial; None where it was ended early.

    Raises:
        TrialFailedError: the run failed, or has no finite return.
    """
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
    if runner.asked or (isinstance(watch, Watch) and watch.over and status == INTERRUPTED):
        return None
    raise TrialFailedError(f"status {status}: {last_line(log)}")


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


class Watch:
    """Tells the trial of its run's evaluations as they come, and whether to go on.

    Attributes:
        over: the pruner has had enough of it.
    """

    def __init__(self, trial: Any, run_dir: Path, axis: str, config: Config):
        self.trial, self.path = trial, run_dir / "metrics.jsonl"
        self.key = {"seconds": "time/seconds", "env_steps": "steps/env"}[axis]
        self.budget = float(getattr(config.budget, axis))
        self.told: set[int] = set(trial.storage.get_trial(trial._trial_id).intermediate_values)
        self.over = False

    def __call__(self) -> bool:
        for row in evaluations(self.path):
            bucket = min(BUCKETS, int(BUCKETS * row[self.key] / self.budget))
            if bucket not in self.told:
                self.told.add(bucket)
                self.trial.report(row["eval/return_mean"], bucket)
                self.over = self.over or self.trial.should_prune()
        return self.over


def evaluations(path: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl that hold an evaluation; one being written at this moment is left for the next time."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if '"eval/return_mean"' in line and line.endswith("}\n")]


# -- what came of it ------------------------------------------------------------------------------------------------


def trial_rows(study: Any) -> list[dict[str, Any]]:
    """Number, state, value, what each seed returned, seconds, why it failed, and the settings, of every trial."""
    return [
        {
            "trial": t.number, "state": t.state.name.lower(), "value": t.value if t.state.name == "COMPLETE" else None,
            "returns": t.user_attrs.get("returns", []), "seconds": t.user_attrs.get("seconds"),
            "why": t.user_attrs.get("why"), "params": t.params,
        }
        for t in study.get_trials(deepcopy=False)
    ]  # fmt: skip


def write_trials(plan: Plan, study: Any) -> None:
    """trials.json and trials.csv, with a column for every searched setting."""
    rows = trial_rows(study)
    _replace(plan.folder / "trials.json", lambda file: json.dump(rows, file, indent=1))

    def write(file: Any) -> None:
        table = csv.writer(file)
        table.writerow(["trial", "state", "value", "seconds", *plan.spaces, "why"])
        for row in rows:
            params = (row["params"].get(k) for k in plan.spaces)
            table.writerow([row["trial"], row["state"], row["value"], row["seconds"], *params, row["why"]])

    _replace(plan.folder / "trials.csv", write)


def _replace(path: Path, write: Callable[[Any], None]) -> None:
    aside = path.with_name(f".{path.name}")
    with aside.open("w", newline="") as file:
        write(file)
    os.replace(aside, path)


def describe(study: Any) -> str:
    """A line on the last trial."""
    rows = trial_rows(study)
    row = next(r for r in reversed(rows) if r["state"] != "running")
    done = [r for r in rows if r["state"] == "complete"]
    best = max(done, key=lambda r: r["value"], default=None)
    told = {"complete": f"{row['value'] or 0:,.1f}", "fail": f"failed: {row['why']}"}.get(row["state"], "pruned")
    return f"trial {row['trial']}: {told}" + (f" (best {best['value']:,.1f}: trial {best['trial']})" if best else "")


def conclude(plan: Plan, study: Any) -> int:
    """Print the best trial as a command."""
    rows = trial_rows(study)
    counts = Counter(row["state"] for row in rows)
    print(f"{len(rows)} trials: {counts['complete']} finished, {counts['pruned']} pruned, {counts['fail']} failed")
    print(f"all of them: {plan.folder / 'trials.csv'}")
    done = [row for row in rows if row["state"] == "complete"]
    if not done:
        print("none finished: the reasons are in trials.csv, each run's output in trial-*/seed*.log")
        return 1
    best = max(done, key=lambda row: row["value"])
    words = [w for w in plan.chosen(best["params"]) if not w.startswith("checkpoint.replay=")]
    seeds = ",".join(str(s) for s in plan.settings.seeds)
    command = ["pql", "train", *(["-m"] if "," in seeds else []), *words, f"seed={seeds}"]
    print(f"best: trial {best['trial']}, {plan.settings.objective} {best['value']:,.1f}")
    print(shlex.join(command))
    return 0
