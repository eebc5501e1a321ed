"""Convert the words of ``pql sweep`` to a checked :class:`Plan`. Does not depend on Optuna or Ray."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pql.cli.sweep_values import Space, parse_space
from pql.config import Config, leaves
from pql.config.compose import FREE, compose, known_settings, live, split_word, whole_numbers
from pql.config.files import expanded
from pql.config.layers import GROUPS
from pql.errors import ConfigError, nearest, show

SAMPLERS = ("tpe", "random")
OBJECTIVES = ("return_mean", "return_iqm")
AXES = ("seconds", "env_steps", "none")
PRUNERS = ("median", "asha")
SEARCH = ("trials", "sampler", "prune", "pruner")  # settings of a search alone
POPULATION = ("population", "every")  # of a population alone
UNASKED = ("trials", "sweep_dir")  # may change when a sweep continues
INSTEAD = {"seed": "seeds=1,2", "run_dir": "sweep_dir=FOLDER: each run gets a subfolder"}


@dataclass(frozen=True)
class Settings:
    """Settings of ``pql sweep`` in addition to a run's."""

    trials: int = 20  # in all, earlier sittings included
    seeds: tuple[int, ...] = (0,)  # one run per seed, in sequence
    sampler: str = "tpe"  # tpe | random
    objective: str = "return_mean"  # return_mean | return_iqm of the final evaluation
    prune: str = ""  # seconds | env_steps | none: axis for comparing intermediate evaluations; empty: the budget's
    pruner: str = "median"  # median | asha (successive halving; Li et al. 2020)
    population: int = 4  # members
    every: float = 0.0  # steps or seconds, as the budget is counted, between exchanges of a population
    sweep_seed: int = 0  # of the sampler
    sweep_dir: str = ""  # empty: runs/sweep-<task>-<algo>


NAMES = tuple(f.name for f in dataclasses.fields(Settings))


@dataclass(frozen=True)
class Plan:
    """A checked sweep: its settings, and a run's words with spaces for the searched ones."""

    settings: Settings
    words: dict[str, str | Space]
    folder: Path
    budget: float = 0.0  # of each member, with population based training; 0: a search

    @property
    def spaces(self) -> dict[str, Space]:
        return spaces(self.words)

    def asked(self) -> dict[str, str]:
        """Return everything that must be unchanged when the sweep continues."""
        own = {k: str(v) for k, v in dataclasses.asdict(self.settings).items() if k not in UNASKED}
        own["seeds"] = ",".join(map(str, self.settings.seeds))
        for name in SEARCH if self.budget else (*POPULATION, *(["pruner"] if self.settings.pruner == "median" else [])):
            own.pop(name, None)
        return own | {k: v.text if isinstance(v, Space) else v for k, v in self.words.items()}


def spaces(words: dict[str, str | Space]) -> dict[str, Space]:
    return {k: v for k, v in words.items() if isinstance(v, Space)}


def chosen_values(words: dict[str, str | Space], params: dict[str, Any]) -> list[str]:
    """Return a run's words, with ``params`` for the searched settings."""
    return [f"{k}={show_param(params[k]) if isinstance(v, Space) else v}" for k, v in words.items()]


def make_plan(words: Sequence[str], pbt: bool = False) -> Plan:
    """Check the command and the runs at both ends of the spaces. ``pbt``: for population based training. Raises
    ``ConfigError``: a wrong setting."""
    own: dict[str, Any] = {}
    run: dict[str, str | Space] = {}
    for word in words:
        key, value = parse_space(word) if not word.startswith("sweep_dir=") else split_word(word)
        if key in INSTEAD:
            raise ConfigError(key, getattr(value, "text", value), INSTEAD[key])
        if key in ("task", "task.name", "task.id", "task.game") and isinstance(value, Space):
            raise ConfigError(key, value.text, "a single value: returns of two tasks cannot be compared")
        if key in (SEARCH if pbt else POPULATION):
            raise ConfigError(
                key, getattr(value, "text", value), f"no such setting {'with' if pbt else 'without'} --pbt"
            )
        if key in NAMES:
            own[key] = own_setting(key, value)
        else:
            check_known_setting(key, word)
            run[key] = fit(key, value) if isinstance(value, Space) else value
    settings = Settings(**own)
    if not spaces(run):
        raise ConfigError("sweep", " ".join(words), "a setting to search, such as algo.critic.lr=interval(1e-4,1e-2)")
    if pbt:
        run.setdefault("eval.every_seconds", "null")  # members are evaluated before each exchange
    run.setdefault("checkpoint.replay", str(pbt).lower())  # resume points of all trials would fill the disk
    low, _ = (compose(chosen_values(run, {k: end_of_name(s, i) for k, s in spaces(run).items()})) for i in (0, -1))
    if not low.eval.final:
        raise ConfigError("eval.final", False, "true: a trial's value is that of its final evaluation")
    folder = settings.sweep_dir or f"runs/{'pbt' if pbt else 'sweep'}-{low.task.name}-{low.algo.name}"
    settings = dataclasses.replace(settings, prune=axis(settings, low))
    if pbt:
        unit, budget = check_population(settings, run, low)
        return Plan(dataclasses.replace(settings, prune=unit), run, expanded("sweep_dir", folder), budget)
    return Plan(settings, run, expanded("sweep_dir", folder))


def check_population(settings: Settings, words: dict[str, str | Space], config: Config) -> tuple[str, float]:
    """Check the settings of a population and complete ``words``, those of a member. Returns unit and budget. Raises
    ``ConfigError``: a wrong setting, or a searched one that must not change when a run is resumed."""
    budget, free = dataclasses.asdict(config.budget), live(config)
    counted = [k for k, v in budget.items() if v is not None]
    unit = counted[0]
    if len(counted) != 1 or unit not in AXES:
        raise ConfigError("budget", " ".join(counted), "budget.env_steps or budget.seconds alone")
    if len(settings.seeds) != 1:
        raise ConfigError("seeds", ",".join(map(str, settings.seeds)), "one number: member k has the seed seeds + k")
    if not config.checkpoint.replay:
        raise ConfigError("checkpoint.replay", False, "true: members continue from each other's resume points")
    if not 0 < settings.every <= budget[unit]:
        raise ConfigError("every", f"{settings.every:g}", f"a number above 0 up to budget.{unit}={budget[unit]:g}")
    for key, space in spaces(words).items():
        if key.endswith(".lr") and getattr(config.algo, "lr_schedule", "") == "adaptive":
            raise ConfigError(key, space.text, "algo.lr_schedule=fixed with it: an adaptive rate is learned")
        if key not in free:
            allowed = f"one of {', '.join(free)}: a resumed run may change only these"
            raise ConfigError(key, space.text, allowed + nearest(key, free))
    words[f"budget.{unit}"] = show(budget[unit])
    first = {**words, f"budget.{unit}": until(settings.every, unit)}
    short = dict(leaves(compose(chosen_values(first, {k: end_of_name(s, 0) for k, s in spaces(words).items()}))))
    for name, value in leaves(config):  # derived from the budget of the whole run, such as algo.anneal_steps
        if value != short[name] and not name.startswith("budget."):
            words[name] = show(value)
    return unit, budget[unit]


def until(amount: float, unit: str) -> str:
    """Return a budget as written on the command line."""
    return str(round(amount)) if unit == "env_steps" else repr(float(amount))


def check_known_setting(key: str, word: str) -> None:
    """Raises ``ConfigError`` for a name that is a setting of neither a run nor a sweep."""
    names = [*NAMES, *GROUPS, *known_settings()]
    if key not in names and not key.startswith(FREE):
        raise ConfigError(key, word.partition("=")[2], f"a known setting{nearest(key, names)}")


def own_setting(key: str, value: str | Space) -> Any:
    """Parse and check one of the sweep's own settings."""
    if key == "seeds":
        texts = value.values if isinstance(value, Space) else (value,)
        if not texts or not all(t.isdecimal() for t in texts):
            raise ConfigError(key, getattr(value, "text", value), "whole numbers, at least 0, such as 1,2")
        return tuple(int(t) for t in texts)
    if isinstance(value, Space):
        raise ConfigError(key, value.text, "a single value")
    if key == "every":
        try:
            return float(value)
        except ValueError:
            raise ConfigError(key, value, "a number of env steps or seconds, as the budget is counted") from None
    if key in ("trials", "sweep_seed", "population"):
        least = {"trials": 1, "population": 2}.get(key, 0)
        if not value.isdecimal() or int(value) < least:
            raise ConfigError(key, value, f"a whole number, at least {least}")
        return int(value)
    allowed = {"sampler": SAMPLERS, "objective": OBJECTIVES, "prune": AXES, "pruner": PRUNERS}.get(key)
    if allowed and value not in allowed:
        raise ConfigError(key, value, f"one of {', '.join(allowed)}{nearest(value, allowed)}")
    return value


def fit(key: str, space: Space) -> Space:
    """Convert a space of numbers to the type of its setting: integers for an integer setting."""
    if space.low is None or space.high is None or key not in whole_numbers():
        return space
    if not (float(space.low).is_integer() and float(space.high).is_integer() and (space.step or 1) % 1 == 0):
        raise ConfigError(key, space.text, "whole numbers")
    return dataclasses.replace(space, low=int(space.low), high=int(space.high), integer=True)


def end_of_name(space: Space, which: int) -> Any:
    """Return the first (0) or last (-1) value of a space."""
    return space.values[which] if space.values else (space.low, space.high)[which]


def axis(settings: Settings, config: Config) -> str:
    """Return the axis on which evaluations are compared: the given one, or the budget's unit."""
    budget = dataclasses.asdict(config.budget)
    counted = [k for k in AXES[:2] if budget[k] is not None]
    if not counted:
        raise ConfigError("budget", None, "budget.seconds or budget.env_steps: trials of equal length can be compared")
    if settings.prune not in (*counted, "none", ""):
        raise ConfigError("prune", settings.prune, f"one of {', '.join([*counted, 'none'])}, as the budget is counted")
    if config.eval.every_seconds is None:
        if settings.prune not in ("none", ""):
            raise ConfigError("prune", settings.prune, "none: eval.every_seconds is null")
        return "none"
    return settings.prune or counted[0]


def show_param(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
