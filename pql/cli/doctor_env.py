"""``pql doctor --env``: check one environment against the contract; report episode ends, speed and value ranges."""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

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
PASSES = 3  # of its steps: the rules, their repetition, the ranges
SPEED_SECONDS = 1.0  # least duration of the rate measurement
DEADLINES = ("placement.watchdog_seconds", "placement.start_seconds")
NAMED = ("id", "game", "model")  # keywords that have a setting of their own
SECTIONS = {name for name, value in to_dict(Config()).items() if isinstance(value, dict)} - {"task"}
MEANING = {
    "same_step": "same step: the row that ends an episode returns the next one's first observation",
    "next_step": "next step: a filler row follows the end of an episode, and is not learned from",
}


def check_simulator(name: str, num_envs: int, steps: int | None, words: Sequence[str]) -> int:
    """Run ``pql doctor --env``: check the contract's rules, step with random actions, print. Returns the exit status.

    The environment is the one that ``pql train`` would build.

    Args:
        name: of a task (``task=``, with all that its preset sets), a registered environment, or ``module:attribute``.
        steps: of the main run; None: a little over the time limit.
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
        report = _check(config, steps)
    if not report.ok:
        raise RunError(
            f"{config.task.title} breaks rules of the contract: {', '.join(report.failed)} (docs/simulators.md)"
        )
    return 0


def _check(config: Config, steps: int | None) -> Report:
    place = config.placement
    foreseen: list[EnvSpec] = []
    if spec := describe_env(config):
        foreseen.append(spec)
    with watching(f"building {config.task.title}", start_limit(place)):
        env = build_env(config, approve=foreseen.append)
    if not protocol_fault(env):  # else it is not stepped
        steps = steps or min((env.spec.max_episode_steps or 195) + 5, 2000)
        env = Paced(env, place, PASSES * steps)
    try:
        report = check_env(env, steps or 0, described=foreseen[0] if foreseen else None)
        print(report)
        if not {"protocol", "shapes"} & {*report.failed}:
            print("\n" + table(visit(env, steps or 0)))
    finally:
        env.close()
    return report


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
    """Says once, on standard error, how long a check takes whose end is not near. ``total``: number of steps that the
    check makes."""

    def __init__(self, env: Any, place: PlacementConfig, total: int):
        super().__init__(env, place)
        self._total, self._count, self._began = total, 0, 0.0

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = super()._call(name, method, *args, **kwargs)
        if name == "step":
            self._began = self._began or time.monotonic()  # the first step may compile
            self._count += 1
            self._say(time.monotonic() - self._began)
        return found

    def _say(self, spent: float) -> None:
        left = spent / max(self._count - 1, 1) * (self._total - self._count)
        if self._total and spent > SOON:
            self._total = 0  # once
            if left > SOON:
                rate = (self._count - 1) * self._env.spec.num_envs / spent
                words = f"{rate:,.0f} env steps/s: about {left:,.0f} s more; --num-envs 2 or --steps 50 takes less"
                print(f"the check makes {words}", file=sys.stderr, flush=True)


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
