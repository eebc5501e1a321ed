"""``pql sweep --pbt``: population based training (Jaderberg et al. 2017, arXiv:1711.09846) with Ray Tune's scheduler.
Repeating the command continues it.

Members train to the next exchange as ordinary runs. Then the scheduler decides: the worst quarter continue from copies
of the best quarter's resume points, with perturbed settings. Only the scheduler's class is used, on stand-ins for Ray's
trials: no process of Ray is started, and a decision depends on nothing but scores and seed, so that an interrupted
population ends as an uninterrupted one.
"""

import json
import logging
import math
import random
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pql.cli.jobs import INTERRUPTED, PROGRAM, Runner, how_ended, next_command
from pql.cli.sweep import check_asked, import_extra, last_words, replace_file, write_trials
from pql.cli.sweep_plan import Plan, chosen_values, make_plan, show_param, until
from pql.errors import ConfigError
from pql.run.resume import counts_when_typed
from pql.run.store import run_dir as rundir

COPIED = ("checkpoints", "metrics.jsonl", "summary.json", "config.yaml", "overrides.yaml", "env.json", "git.json")
"""What a member takes over from another; trackers' files and videos remain its own."""
STATE = "population.json"


def population_command(words: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Train the population to the end of the budget. Returns the exit status: 0, 1 if every member failed, 130 after
    Ctrl-C. Raises ``ConfigError``: before the first run: a wrong setting, or a population with other settings."""
    import_extra("ray.tune", "pbt")
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    plan = make_plan(words, pbt=True)
    with Runner(plan.folder, "sweep_dir", program) as runner:
        state, rounds = open_state(plan), math.ceil(plan.budget / plan.settings.every)
        for number in range(len(state["rounds"]) + 1, rounds + 1):
            copy_members(plan, state)
            results, end = [], min(number * plan.settings.every, plan.budget)
            for member, params in enumerate(state["params"]):
                shown = " ".join(f"{key}={show_param(value)}" for key, value in params.items())
                print(f"round {number} of {rounds}, member {member}: {shown}", flush=True)
                results.append(train_member(plan, member, params, end, runner))
                if runner.asked:
                    print("interrupted: give the same command again to continue")
                    return INTERRUPTED
            end_round(plan, state, results, last=number == rounds)
    return end_population(plan, member_rows(state))


# -- the state ------------------------------------------------------------------------------------------------------


def open_state(plan: Plan) -> dict[str, Any]:
    """Return the state in the population's folder, new or existing: ``params``, the settings of each member in the next
    round; ``copies``, the members to be copied before it (``{member: parent}``); ``rounds``, what each has returned.
    Raises ``ConfigError``: it was begun with other settings, or the file cannot be read."""
    if not (plan.folder / STATE).exists():
        params = [one.config for one in decide(plan, 0, [{}] * plan.settings.population, [])]
        new = {"asked": check_asked(plan, None), "params": params, "copies": {}, "rounds": []}
        write_state(plan, new)
        return new
    state = rundir.read_mapping(plan.folder / STATE) or {}
    if not {"asked", "params", "copies", "rounds"} <= state.keys():
        raise ConfigError("sweep_dir", plan.folder, f"a folder whose {STATE} is intact, or a new one")
    check_asked(plan, state["asked"])
    return state


def write_state(plan: Plan, state: dict[str, Any]) -> None:
    replace_file(plan.folder / STATE, lambda file: json.dump(state, file, indent=1))


def member_dir(plan: Plan, member: int) -> Path:
    return plan.folder / f"member-{member}"


# -- a round --------------------------------------------------------------------------------------------------------


def train_member(plan: Plan, member: int, params: dict[str, Any], end: float, runner: Runner) -> dict[str, Any]:
    """Train one member until ``end``, unless it has got there. Returns ``value``, ``seconds`` and, if it failed,
    ``why``: it is then tried again in the next round, unless it is replaced."""
    run_dir, unit = member_dir(plan, member), plan.settings.prune
    budget = f"budget.{unit}={until(end, unit)}"
    words = [*chosen_values({k: v for k, v in plan.words.items() if k != f"budget.{unit}"}, params), budget]
    words.append(f"seed={plan.settings.seeds[0] + member}")
    status, log = 0, run_dir.with_suffix(".log")
    if not reached(run_dir, unit, end):
        command = next_command(run_dir, words)
        if command is None or command[0] == "resume":
            changed = [f"{key}={show_param(value)}" for key, value in params.items()]
            command = ["resume", str(run_dir), budget, *changed, *filter(counts_when_typed, words)]
        status = runner.run(command, log=log)
    summary = rundir.read_summary(run_dir) or {}
    result = {"value": None, "seconds": summary.get("seconds"), "why": "no finite return in its final evaluation"}
    if status != 0 or not reached(run_dir, unit, end):
        return result | {"why": f"{how_ended(status)}: {last_words(log)}"}
    value = summary.get(plan.settings.objective)
    return result if value is None or not math.isfinite(value) else result | {"value": value, "why": None}


def reached(run_dir: Path, unit: str, end: float) -> bool:
    """Return True if the run has trained until ``end`` and was evaluated."""
    summary = rundir.read_summary(run_dir)
    return summary is not None and not summary.get("interrupted") and summary[unit] >= end


def end_round(plan: Plan, state: dict[str, Any], results: list[dict[str, Any]], last: bool) -> None:
    """Store what a round has returned, and decide who continues from whom with which settings."""
    past, params = state["rounds"], state["params"]
    past.append([{**result, "params": params[i], "parent": i} for i, result in enumerate(results)])
    scores = [-math.inf if result["value"] is None else result["value"] for result in results]
    print("; ".join(f"member {i}: {r['why'] or format(r['value'], ',.1f')}" for i, r in enumerate(results)))
    if not last:
        for i, one in enumerate(decide(plan, len(past), params, scores)):
            if one.parent is not None and math.isfinite(scores[one.parent]):
                print(f"member {i} continues from member {one.parent}", flush=True)
                state["copies"][str(i)] = past[-1][i]["parent"] = one.parent
                params[i] = one.config
    write_trials(plan, member_rows(state))
    write_state(plan, state)


def copy_members(plan: Plan, state: dict[str, Any]) -> None:
    """Copy the runs that the last exchange decided on. Repeated after an interruption: no parent is itself replaced, or
    trains before all copies are made."""
    for member, parent in state["copies"].items():
        source, run_dir = member_dir(plan, parent), member_dir(plan, int(member))
        run_dir.mkdir(exist_ok=True)
        for name in COPIED:
            old, new = run_dir / name, source / name
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            if new.exists():
                (shutil.copytree if new.is_dir() else shutil.copyfile)(new, old)
    state["copies"] = {}
    write_state(plan, state)


# -- Ray Tune -------------------------------------------------------------------------------------------------------


class Trial(SimpleNamespace):
    """What Ray Tune's scheduler reads and changes of a trial: settings, and the checkpoint that it continues from."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, number: int, config: dict[str, Any]):
        self.trial_id = self.experiment_tag = f"member-{number}"
        self.config, self.checkpoint, self.status = config, (number,), "PAUSED"
        self.evaluated_params = dict[str, Any]()
        self.temporary_state, self.is_finished = SimpleNamespace(saving_to=None), lambda: False
        self.set_config, self.set_experiment_tag = partial(setattr, self, "config"), str
        kept = SimpleNamespace(num_to_keep=None)
        manager = SimpleNamespace(checkpoint_config=kept, _latest_checkpoint_result=None)
        self.run_metadata = SimpleNamespace(checkpoint_manager=manager)

    @property
    def parent(self) -> int | None:
        """Return the member whose checkpoint the scheduler has given to this one."""
        result = self.run_metadata.checkpoint_manager._latest_checkpoint_result
        return None if result is None else result.checkpoint[0]


def decide(plan: Plan, number: int, params: list[dict[str, Any]], scores: list[float]) -> list[Trial]:
    """Let the scheduler decide after round ``number``; without ``scores``, draw the first settings.

    Its defaults: the lowest quarter take over checkpoints and settings of the highest; each setting is drawn anew with
    probability 1/4, else multiplied by 0.8 or 1.2, and here kept within its range.
    """
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    spaces: dict[str, Any] = dict(plan.spaces)
    trials = [Trial(i, dict(one)) for i, one in enumerate(params)]
    population = SimpleNamespace(search_alg=None, get_trials=lambda: trials, get_live_trials=lambda: trials)
    scheduler = PopulationBasedTraining(
        time_attr="round",
        metric="score",
        mode="max",
        perturbation_interval=1,
        hyperparam_mutations={
            key: [*one.values] or (tune.loguniform if one.log else tune.uniform)(float(one.low), float(one.high))
            for key, one in spaces.items()
        },
        synch=True,
        log_config=False,
    )
    seed = plan.settings.sweep_seed * 1_000_003 + number
    random.seed(seed)  # Ray Tune draws from both
    np.random.seed(seed % 2**32)
    for one in trials:
        scheduler.on_trial_add(population, one)
    for one, score in zip(trials, scores, strict=False):
        scheduler.on_trial_result(population, one, {"round": 1, "score": score})
    for one in trials:
        for key, space in spaces.items():
            if not space.values:
                one.config[key] = float(min(max(one.config[key], space.low), space.high))
    return trials


# -- results --------------------------------------------------------------------------------------------------------


def member_rows(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the last results of every member as rows of a search, with the ``returns``, ``parents`` and settings
    (``schedule``) of all rounds. The parent of a round is the member that continues in its place."""
    rows = []
    for member, last in enumerate(state["rounds"][-1]):
        past = [one[member] for one in state["rounds"]]
        row = {"trial": member, "state": "fail" if last["why"] else "complete", **last}
        names = {"returns": "value", "parents": "parent", "schedule": "params"}
        rows.append(row | {name: [one[key] for one in past] for name, key in names.items()})
    return rows


def end_population(plan: Plan, rows: list[dict[str, Any]]) -> int:
    """Print the best member. Returns the exit status."""
    print(f"all rounds: {plan.folder / 'trials.json'}")
    done = [row for row in rows if row["value"] is not None]
    if not done:
        print("none finished: the reasons are in trials.csv, each run's output in member-*.log")
        return 1
    best = max(done, key=lambda row: row["value"])
    print(f"best: member {best['trial']}, {plan.settings.objective} {best['value']:,.1f}")
    print(f"pql eval {shlex.quote(str(member_dir(plan, best['trial'])))}")
    return 0
