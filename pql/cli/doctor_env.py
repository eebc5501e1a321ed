"""``pql doctor --env``: check one environment against the contract; report episode ends, speed and value ranges."""

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pql.cli.doctor_robot import robot_table
from pql.cli.doctor_symmetry import check_symmetry, summary
from pql.cli.tables import table
from pql.config import Config, PlacementConfig, to_dict
from pql.config.compose import compose, split_word
from pql.config.layers import Presets
from pql.config.validate import STEPS, limits
from pql.contract.conformance import Checker, Report, check_env, protocol_fault
from pql.contract.env import EnvSpec, VecEnv
from pql.engine.deadlines import start_limit
from pql.engine.watchdog import Timed, guarded, watching
from pql.errors import ConfigError, RunError
from pql.run.environment import build_env, describe_env
from pql.types import Step

SOON = 10.0  # seconds after which a check says how long it takes
SHORT = 20  # steps of the time limit of a second check
PASSES = 3  # of its steps: the rules, their repetition, the ranges
SYMMETRY_STEPS = 200
SPEED_SECONDS = 1.0  # least duration of the rate measurement
DEADLINES = ("placement.watchdog_seconds", "placement.start_seconds")
NAMED = ("id", "game", "model")  # keywords that have a setting of their own
SECTIONS = {name for name, value in to_dict(Config()).items() if isinstance(value, dict)} - {"task"}
MEANING = {
    "same_step": "same step: the row that ends an episode returns the next one's first observation",
    "next_step": "next step: a filler row follows the end of an episode, and is not learned from",
}


def check_simulator(name: str, num_envs: int, steps: int | None, words: Sequence[str], symmetry: bool = False) -> int:
    """Run ``pql doctor --env``: check the contract's rules, step with random actions, print. Returns the exit status.

    The environment is the one that ``pql train`` would build.

    Args:
        name: of a task (``task=``, with all that its preset sets), a registered environment, or ``module:attribute``.
        steps: of the main run; None: a little over the time limit.
        symmetry: check only the symmetry that the task declares.
        words: ``key=value``; ``device``, ``task.*`` and the two deadlines of ``placement`` as in training; all others
            are keywords of the environment.
    Raises:
        HungError: a call of the environment missed its deadline.
        RunError: it breaks a rule.
    """
    limits("num_envs").check("--num-envs", num_envs)
    STEPS.check("--steps", steps)
    config = replace(compose(simulator_settings(name, words)), num_envs=num_envs)
    with guarded():
        if symmetry:
            _check_symmetry(config, steps)
            return 0
        report = _check(config, steps)
    if not report.ok:
        raise RunError(
            f"{config.task.title} breaks rules of the contract: {', '.join(report.failed)} (docs/simulators.md)"
        )
    return 0


def _check_symmetry(config: Config, steps: int | None) -> None:
    """Print the report on a task's symmetry. Raises ``ConfigError``: it declares none; ``RunError``: it has another."""
    with watching(f"building {config.task.title}", start_limit(config.placement)):
        env = build_env(config)
    with contextlib.closing(env):
        text, wrong = check_symmetry(Paced(env, config.placement, steps or SYMMETRY_STEPS), steps or SYMMETRY_STEPS)
    print(text)
    if wrong:
        raise RunError(f"{config.task.title} is not as symmetric as it declares: {', '.join(wrong)}")


def _check(config: Config, steps: int | None) -> Report:
    """Check the environment, once more with a short time limit if its own was not reached; print the findings."""
    report, rows, spec = _checked(config, steps, visit)
    limited = next((r for r in report.results if r.name == "time_limit"), None)
    if spec is not None and spec.max_episode_steps and limited is not None and limited.ok is None:
        if (short := shortened(config, spec)) is not None:
            changed, word = short
            print(
                f"the time limit of {spec.max_episode_steps:,} steps was not reached: again with {word}",
                file=sys.stderr,
            )
            report = merged(report, _checked(changed, 2 * SHORT + 5)[0], word)
        else:
            hint = f"{limited.message}; --steps {spec.max_episode_steps + 5}, or a shorter limit, tests it"
            report = replace(report, results=[replace(r, message=hint) if r is limited else r for r in report.results])
    print(report)
    if rows:
        print("\n" + table(rows))
    if spec is not None and (joints := robot_table(spec)):
        print("\n" + joints)
    return report


Visit = Callable[[Any, int], list[list[str]]]


def _checked(
    config: Config, steps: int | None, more: Visit | None = None
) -> tuple[Report, list[list[str]], EnvSpec | None]:
    """Build an environment and check it. Return the report, the rows of ``more``, and its specification."""
    place = config.placement
    foreseen: list[EnvSpec] = []
    if spec := describe_env(config):
        foreseen.append(spec)
    whole = {} if "random_lengths" in config.task.kwargs else {"random_lengths": False}  # or few reach the time limit
    with watching(f"building {config.task.title}", start_limit(place)):
        env = build_env(config, approve=foreseen.append, offered=whole)
    if not protocol_fault(env):  # else it is not stepped
        steps = steps or min((env.spec.max_episode_steps or 195) + 5, 2000)
        env = Paced(env, place, PASSES * steps)
    try:
        report = check_env(env, steps or 0, described=foreseen[0] if foreseen else None)
        steppable = not {"protocol", "shapes"} & {*report.failed}
        rows = more(env, steps or 0) if steppable and more is not None else []
        return report, rows, env.spec if steppable else None
    finally:
        env.close()


def shortened(config: Config, spec: EnvSpec) -> tuple[Config, str] | None:
    """Return ``config`` with a time limit of ``SHORT`` steps, and the setting in words; None: no keyword of the
    environment is known to set it, or a second one cannot be built."""
    name = spec.info.get("time_limit")
    if name is None or spec.single_instance:
        return None
    value = round(SHORT * spec.info["dt"], 6) if name.endswith("_s") else SHORT
    first, _, last = name.partition(".")
    kwargs = {**config.task.kwargs, first: {**(config.task.kwargs.get(first) or {}), last: value} if last else value}
    return replace(config, task=replace(config.task, kwargs=kwargs)), f"task.kwargs.{name}={value:g}"


def merged(report: Report, other: Report, word: str) -> Report:
    """Return ``report`` with the results of ``other``, made with the setting ``word``, for rules that it could not
    test, and with its faults."""
    again = {r.name: r for r in other.results}

    def better(one: Any) -> Any:
        new = again[one.name]
        if one.ok is False or (one.ok and new.ok is not False):
            return one
        return new if new.ok is None else replace(new, message=f"{new.message} (with {word})")

    return replace(report, results=[better(one) for one in report.results])


def simulator_settings(name: str, words: Sequence[str]) -> list[str]:
    """Convert words of the command line to a run's settings. Raises ``ConfigError``: a word that does not concern the
    environment."""
    known = name in Presets().names("task") and name != "env"
    out = [f"task={name}"] if known else ["task=env", f"task.name={name}"]
    for word in words:
        key, value = split_word(word)
        if key == "num_envs":
            raise ConfigError(key, value, f"--num-envs {value}")
        if key.partition(".")[0] in SECTIONS and key not in DEADLINES:
            raise ConfigError(key, value, "device, task.* or a keyword of the environment: no run is made")
        named = known and key in NAMED  # which a preset may have set
        own = key in ("device", *DEADLINES) or key.startswith("task.")
        out.append(word if own else f"task.{word}" if named else f"task.kwargs.{word}")
    return out


class Paced(Timed):
    """Says on standard error how long a check takes whose end is not near, and then how far it is. ``total``: number of
    steps that the check makes."""

    def __init__(self, env: Any, place: PlacementConfig, total: int):
        super().__init__(env, place)
        self._total, self._count, self._began, self._next = total, 0, 0.0, SOON

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = super()._call(name, method, *args, **kwargs)
        if name == "step":
            self._began = self._began or time.monotonic()  # the first step may compile
            self._count += 1
            self._say(time.monotonic() - self._began)
        return found

    def _say(self, spent: float) -> None:
        if spent <= self._next:
            return
        first, self._next = self._next == SOON, spent + SOON
        left = spent / max(self._count - 1, 1) * (self._total - self._count)
        if left <= SOON:
            return
        rate = (self._count - 1) * self._env.spec.num_envs / spent
        words = f"the check makes {rate:,.0f} env steps/s" if first else f"{self._count:,} of {self._total:,} steps"
        words += f": about {left:,.0f} s more" + ("; --num-envs 2 or --steps 50 takes less" if first else "")
        print(words, file=sys.stderr, flush=True)


class ValueRange:
    """Smallest and largest finite number, and the number of non-finite ones."""

    def __init__(self) -> None:
        self.low, self.high, self.bad = float("inf"), float("-inf"), 0

    def add(self, values: Tensor) -> None:
        """Include ``values`` (any shape) in the range and count those that are not finite."""
        known = values[values.isfinite()] if values.is_floating_point() else values
        self.bad += values.numel() - known.numel()
        if known.numel():
            self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))

    def __str__(self) -> str:
        found = f"{self.low:.4g} to {self.high:.4g}" if self.low <= self.high else "nothing finite"
        return found + (f"; {self.bad:,} NaN or infinite" if self.bad else "")


@torch.no_grad()
def visit(env: VecEnv, steps: int, seed: int = 0) -> list[list[str]]:
    """Step ``env`` with random actions; return rows of (property, finding). Synchronises at every step."""
    checker, spec = Checker(env, seed), env.spec
    ranges = {f"obs {k}": ValueRange() for k in spec.obs} | {"reward": ValueRange()}
    counts = dict.fromkeys(("rows", "terminated", "truncated", "lost", "fillers", "late"), 0)
    length, limit = torch.zeros(spec.num_envs, dtype=torch.int64, device=spec.device), spec.max_episode_steps
    for name, value in env.reset(seed).items():
        ranges[f"obs {name}"].add(value)
    for action in checker.actions(steps):
        step = env.step(action)
        tally(step, ranges, counts)
        length += step.valid
        counts["late"] += int((step.terminated & (length >= limit)).sum()) if limit else 0
        length[step.first] = 0
    ends = f"{counts['terminated']:,} terminated, {counts['truncated']:,} truncated in {counts['rows']:,} rows"
    final = f"{spec.final_obs}; lost at {counts['lost']:,} time limits"
    late = f"; {counts['late']:,} terminations in its row: if caused by the limit, they must be truncations"
    return [
        ["autoreset", MEANING[spec.autoreset]],
        ["episode ends", f"{ends}; {counts['fillers']:,} filler rows in addition"],
        ["final observations", final + (", which are not bootstrapped from" if counts["lost"] else "")],
        ["time limit", f"{limit or 'none'}" + (late if counts["late"] else "")],
        *([["crosses through", env.crossing]] if hasattr(env, "crossing") else []),  # in a separate process
        ["symmetry", summary(env)],
        ["host syncs a step", syncs(env, checker)],
        ["env-steps/s", f"{speed(env, checker):,.0f} with {spec.num_envs} environments on {spec.device}"],
        *([name, str(found)] for name, found in ranges.items()),
    ]


def tally(step: Step, ranges: dict[str, ValueRange], counts: dict[str, int]) -> None:
    """Add one step's numbers to ``ranges`` and ``counts``."""
    for name, value in step.obs.items():
        ranges[f"obs {name}"].add(value)
    ranges["reward"].add(step.reward[step.valid])
    for name, flags in (
        ("rows", step.valid),
        ("terminated", step.terminated),
        ("truncated", step.truncated),
        ("lost", step.truncated & ~step.final_ok),
        ("fillers", ~step.valid),
    ):
        counts[name] += int(flags.sum())


def syncs(env: VecEnv, checker: Checker) -> str:
    """Count host syncs per step with a GPU, as torch reports them; the simulator's own are not visible."""
    if env.spec.device.type != "cuda":
        return f"none to count: its tensors are on {env.spec.device}"
    (action,) = checker.actions(1)
    before: Any = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            env.step(action)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return str(sum("synchroniz" in str(w.message) for w in seen))


def speed(env: VecEnv, checker: Checker) -> float:
    """Measure env steps per second."""
    actions, count, began = list(checker.actions(8)), 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < SPEED_SECONDS:
        for action in actions:
            step = env.step(action)
        float(step.reward[0])  # waits for a GPU
        count += len(actions)
    return count * env.spec.num_envs / spent
