"""``pql sweep --pbt``: population based training (Jaderberg et al. 2017, arXiv:1711.09846) with Ray Tune's scheduler.
Repeating the command continues it.

Members train to the next exchange, each as an ordinary run in its own process and directory. Then the scheduler
decides: the worst quarter continue from copies of the best quarter's resume points, with perturbed settings. Only the
scheduler's class is used, on stand-ins for Ray's trials: no process of Ray is started, and a round's decision depends
on nothing but its scores and the seed, so that an interrupted population ends as an uninterrupted one.
"""

import json
import logging
import math
import random
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pql.cli.jobs import INTERRUPTED, PROGRAM, Runner, how_ended, next_command
from pql.cli.sweep import check_asked, last_words, replace_file, write_trials
from pql.cli.sweep_plan import Plan, chosen_values, make_plan, show_param, until
from pql.cli.sweep_values import Space
from pql.errors import ConfigError
from pql.run.resume import counts_when_typed
from pql.run.store import run_dir as rundir

COPIED = ("checkpoints", "metrics.jsonl", "summary.json", "config.yaml", "overrides.yaml", "env.json", "git.json")
"""What a member takes over from another; trackers' files and videos remain its own."""
STATE = "population.json"


def population_command(words: Sequence[str], program: Sequence[str] = PROGRAM) -> int:
    """Train the population to the end of the budget. Returns the exit status: 0, 1 if every member failed, 130 after
    Ctrl-C. Raises ``ConfigError``: before the first run: a wrong setting, or a population with other settings."""
    try:
        import ray.tune  # noqa: F401
    except ModuleNotFoundError as error:
        what = f"the package {error.name!r}, which is not installed: pip install 'pql-rl[pbt]'"
        raise ConfigError("command", "sweep --pbt", what) from error
    logging.getLogger("ray.tune").setLevel(logging.WARNING)
    plan = make_plan(words, pbt=True)
    with Runner(plan.folder, "sweep_dir", program) as runner:
        state = open_state(plan)
        while len(state["rounds"]) < rounds(plan):
            copy_members(plan, state)
            results = train_round(plan, state, runner)
            if results is None:
                print("interrupted: give the same command again to continue")
                return INTERRUPTED
            end_round(plan, state, results)
        return end_population(plan, state)


# -- the state ------------------------------------------------------------------------------------------------------


def open_state(plan: Plan) -> dict[str, Any]:
    """Return the state in the population's folder, new or existing: ``params``, the settings of each member in the next
    round; ``copies``, the members to be copied before it (``{member: parent}``); ``rounds``, what each has returned.
    Raises ``ConfigError``: it was begun with other settings, or the file cannot be read."""
    path = plan.folder / STATE
    state: dict[str, Any]
    if not path.exists():
        params = [one.config for one in decide(plan, 0, [{} for _ in range(plan.settings.population)], [])]
        state = {"asked": check_asked(plan, None), "params": params, "copies": {}, "rounds": []}
        write_state(plan, state)
        return state
    state = rundir.read_mapping(path) or {}
    if not {"asked", "params", "copies", "rounds"} <= state.keys():
        raise ConfigError("sweep_dir", plan.folder, f"a folder whose {STATE} is intact, or a new one")
    check_asked(plan, state["asked"])
    return state


def write_state(plan: Plan, state: dict[str, Any]) -> None:
    replace_file(plan.folder / STATE, lambda file: json.dump(state, file, indent=1))


def rounds(plan: Plan) -> int:
    """Return the number of rounds: one more than exchanges."""
    return math.ceil(plan.budget / plan.settings.every)


def member_dir(plan: Plan, member: int) -> Path:
    return plan.folder / f"member-{member}"


# -- a round --------------------------------------------------------------------------------------------------------


def train_round(plan: Plan, state: dict[str, Any], runner: Runner) -> list[dict[str, Any]] | None:
    """Train every member to the next exchange. Returns ``value``, ``seconds`` and ``why`` of each; None after
    Ctrl-C."""
    number, results = len(state["rounds"]), []
    end = min((number + 1) * plan.settings.every, plan.budget)
    for member, params in enumerate(state["params"]):
        shown = " ".join(f"{k}={show_param(v)}" for k, v in params.items())
        print(f"round {number + 1} of {rounds(plan)}, member {member}: {shown}", flush=True)
        results.append(train_member(plan, member, params, end, runner))
        if runner.asked:
            return None
    return results


def train_member(plan: Plan, member: int, params: dict[str, Any], end: float, runner: Runner) -> dict[str, Any]:
    """Train one member until ``end``, unless it has got there. A failed one is tried again in the next round."""
    run_dir, unit = member_dir(plan, member), plan.settings.prune
    budget = f"budget.{unit}={until(end, unit)}"
    words = [w for w in chosen_values(plan.words, params) if not w.startswith(f"budget.{unit}=")]
    words += [budget, f"seed={plan.settings.seeds[0] + member}"]
    status, log = 0, run_dir.with_suffix(".log")
    if not reached(run_dir, unit, end):
        command = next_command(run_dir, words)
        if command is None or command[0] == "resume":
            changed = [f"{key}={show_param(value)}" for key, value in params.items()]
            command = ["resume", str(run_dir), budget, *changed, *filter(counts_when_typed, words)]
        status = runner.run(command, log=log)
    summary, why = rundir.read_summary(run_dir) or {}, None
    value = summary.get(plan.settings.objective)
    if status != 0 or not reached(run_dir, unit, end):
        why = f"{how_ended(status)}: {last_words(log)}"
    elif value is None or not math.isfinite(value):
        why = "no finite return in its final evaluation"
    return {"value": None if why else value, "seconds": summary.get("seconds"), "why": why}


def reached(run_dir: Path, unit: str, end: float) -> bool:
    """Return True if the run has trained until ``end`` and was evaluated."""
    summary = rundir.read_summary(run_dir)
    return summary is not None and not summary.get("interrupted") and summary[unit] >= end


def end_round(plan: Plan, state: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Store what a round has returned, and decide who continues from whom with which settings."""
    past, params = state["rounds"], state["params"]
    past.append([{**result, "params": params[i], "parent": i} for i, result in enumerate(results)])
    scores = [-math.inf if result["value"] is None else result["value"] for result in results]
    print("; ".join(f"member {i}: {r['why'] or format(r['value'], ',.1f')}" for i, r in enumerate(results)))
    if len(past) < rounds(plan):
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
    if state["copies"]:
        state["copies"] = {}
        write_state(plan, state)


# -- Ray Tune -------------------------------------------------------------------------------------------------------


class Trial:
    """What Ray Tune's scheduler reads and changes of a trial: settings, and the checkpoint that it continues from."""

    def __init__(self, number: int, config: dict[str, Any]):
        self.trial_id = self.experiment_tag = f"member-{number}"
        self.config, self.evaluated_params = config, dict[str, Any]()
        self.checkpoint = (number,)
        self.status = "PAUSED"
        self.temporary_state = SimpleNamespace(saving_to=None)
        kept = SimpleNamespace(num_to_keep=None)
        manager = SimpleNamespace(checkpoint_config=kept, _latest_checkpoint_result=None)
        self.run_metadata = SimpleNamespace(checkpoint_manager=manager)

    @property
    def parent(self) -> int | None:
        """Return the member whose checkpoint the scheduler has given to this one."""
        result = self.run_metadata.checkpoint_manager._latest_checkpoint_result
        return None if result is None else result.checkpoint[0]

    def is_finished(self) -> bool:
        return False

    def set_config(self, config: dict[str, Any]) -> None:
        self.config = config

    def set_experiment_tag(self, tag: str) -> None:
        self.experiment_tag = tag


def decide(plan: Plan, number: int, params: list[dict[str, Any]], scores: list[float]) -> list[Trial]:
    """Let the scheduler decide after round ``number``; without ``scores``, draw the first settings.

    Its defaults: the lowest quarter take over checkpoints and settings of the highest; each setting is drawn anew with
    probability 1/4, else multiplied by 0.8 or 1.2, and here kept within its range.
    """
    from ray.tune.schedulers import PopulationBasedTraining

    spaces = plan.spaces
    members = [Trial(i, dict(one)) for i, one in enumerate(params)]
    population = SimpleNamespace(search_alg=None, get_trials=lambda: members, get_live_trials=lambda: members)
    scheduler = PopulationBasedTraining(
        time_attr="round",
        metric="score",
        mode="max",
        perturbation_interval=1,
        hyperparam_mutations={key: domain(space) for key, space in spaces.items()},
        synch=True,
        log_config=False,
    )
    seed = plan.settings.sweep_seed * 1_000_003 + number
    random.seed(seed)  # Ray Tune draws from both
    np.random.seed(seed % 2**32)
    for one in members:
        scheduler.on_trial_add(population, one)
    for one, score in zip(members, scores, strict=False):
        scheduler.on_trial_result(population, one, {"round": 1, "score": score})
    for one in members:
        one.config = {key: within(spaces[key], value) for key, value in one.config.items()}
    return members


def domain(space: Space) -> Any:
    """Return a space as Ray Tune writes it."""
    from ray import tune

    return [*space.values] or (tune.loguniform if space.log else tune.uniform)(*ends(space))


def within(space: Space, value: Any) -> Any:
    """Return a plain value, a number not beyond the ends of its interval."""
    return value if space.values else min(max(float(value), ends(space)[0]), ends(space)[1])


def ends(space: Space) -> tuple[float, float]:
    assert space.low is not None
    assert space.high is not None
    return float(space.low), float(space.high)


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


def end_population(plan: Plan, state: dict[str, Any]) -> int:
    """Print the best member. Returns the exit status."""
    print(f"all rounds: {plan.folder / 'trials.json'}")
    done = [row for row in member_rows(state) if row["value"] is not None]
    if not done:
        print("none finished: the reasons are in trials.csv, each run's output in member-*.log")
        return 1
    best = max(done, key=lambda row: row["value"])
    print(f"best: member {best['trial']}, {plan.settings.objective} {best['value']:,.1f}")
    print(f"pql eval {shlex.quote(str(member_dir(plan, best['trial'])))}")
    return 0
