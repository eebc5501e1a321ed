"""``pql bench placement``: which split of a CPU's threads makes a run's ticks fastest on this machine.

A run reads its split from its settings alone: another one sums in another order, so gives other bits. This measures,
and says what to set.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from pql.config import Config, ThreadsConfig
from pql.config.compose import compose
from pql.contract.env import find_factory
from pql.engine.placement import available_cores, thread_counts, worker_devices
from pql.errors import ConfigError
from pql.run.build import build

Split = dict[str, int]
"""Threads by the names of ``placement.threads``."""

WORTH = 1.03  # times as fast, for another split to be taken: less is noise
WARM_UP, ROWS = 32, 100_000  # of a measurement: what a tick costs does not depend on what a replay holds


class Trial(Protocol):
    """A run that can be timed."""

    split: Split

    def rate(self, seconds: float) -> float:
        """Ticks per second, over about ``seconds``."""
        ...

    def busy(self) -> dict[str, float]:
        """Seconds that each part which has threads was at work so far."""
        ...

    def close(self) -> None: ...


class RealTrial:
    """A run of ``config`` with ``split``, built and warmed up."""

    def __init__(self, config: Config, split: Split):
        self.split = split
        self.parts = parts = build(with_split(config, split))
        parts.prepare()
        parts.start()
        parts.warm_up(config.algo.warmup_steps)
        parts.begin()
        parts.schedule.tick()

    def rate(self, seconds: float) -> float:
        count, begun = 0, time.perf_counter()
        while (spent := time.perf_counter() - begun) < seconds or count == 0:
            self.parts.schedule.tick()
            count += 1
        return count / spent

    def busy(self) -> dict[str, float]:
        seconds = {setting_of(name): busy for name, busy in self.parts.busy().items()}
        return {name: seconds["collector" if name == "simulator" else name] for name in self.split}

    def close(self) -> None:
        self.parts.schedule.executor.close()
        self.parts.close_envs()


def measure_placements(words: Sequence[str], seconds: float = 2.0, rounds: int = 3) -> int:
    """Measure for the run that ``words`` (as for ``pql train``) describe, and print what to set. Returns 0.

    Args:
        seconds: of each measurement; every split tried is measured ``rounds`` times, in turn with the best so far.
    Raises:
        ConfigError: a wrong setting, or nothing of this run has threads on the CPU.
    """
    config = small_run(compose(words))
    start, cores = splits(config), available_cores()
    what = f"{config.algo.name} on {config.task.name}, {cores} cores"
    print(f"{what}; the default split: {show_split(start)}", flush=True)
    tried = 1

    def tell(split: Split, ratio: float) -> None:
        nonlocal tried
        tried += 1
        print(f"{ratio:5.2f} of the best so far: {show_split(split)}", flush=True)

    best = search(lambda split: RealTrial(config, split), start, cores, seconds, rounds, tell)
    if best == start:
        print(f"the default is the best of the {tried} tried: nothing to set")
        return 0
    new, old = RealTrial(config, best), RealTrial(config, start)  # anew: the luckiest of many measurements flatters
    ratio = faster(new, old, seconds, rounds)
    new.close()
    old.close()
    changed = " ".join(f"placement.threads.{k}={v}" for k, v in best.items() if v != start[k])
    print(f"measured anew, {ratio:.2f} of the default's ticks per second with {changed}")
    print(changed if ratio >= WORTH else "which is noise: nothing to set (longer measurements: seconds=10 rounds=5)")
    return 0


def search(
    make: Callable[[Split], Trial],
    start: Split,
    cores: int,
    seconds: float,
    rounds: int,
    tell: Callable[[Split, float], None],
) -> Split:
    """Change one number after another, the busiest part's first, keep what is clearly faster, until nothing is.

    Args:
        tell: called with every split that was tried, and its rate relative to the best before it.
    """
    best, tried = make(start), [start]
    try:
        best.rate(seconds)
        busy = best.busy()
        order = sorted(start, key=lambda name: -busy[name])
        while (split := next((s for s in neighbours(best.split, order, cores) if s not in tried), None)) is not None:
            tried.append(split)
            other = make(split)
            ratio = faster(other, best, seconds, rounds)
            tell(split, ratio)
            if ratio >= WORTH:
                best, other = other, best
            other.close()
        return best.split
    finally:
        best.close()


def neighbours(split: Split, order: Sequence[str], cores: int) -> Iterator[Split]:
    """Splits that differ in one number: a power of two below the number of cores, or that number."""
    for name in order:
        for count in (*(1 << i for i in range(cores.bit_length()) if 1 << i < cores), cores):
            if count != split[name]:
                yield {**split, name: count}


def faster(a: Trial, b: Trial, seconds: float, rounds: int) -> float:
    """``a``'s rate over ``b``'s: the median over rounds in which both are measured, either first in turn."""
    ratios = []
    for i in range(rounds):
        if i % 2:
            second = b.rate(seconds)
            ratios.append(a.rate(seconds) / second)
        else:
            ratios.append(a.rate(seconds) / b.rate(seconds))
    return statistics.median(ratios)


def splits(config: Config) -> Split:
    """The default split, of all that has threads on the CPU.

    Raises:
        ConfigError: nothing has.
    """
    known, out = thread_counts(config), dict[str, int]()
    for worker, device in worker_devices(config, config.algo.learners).items():
        if device.type == "cpu":
            out[setting_of(worker)] = known[worker]
    far = config.task.process.python is not None
    takes = far or "threads" in inspect.signature(find_factory(config.task.name)).parameters
    if takes and "threads" not in config.task.kwargs:
        out["simulator"] = known["simulator"]
    if not out:
        raise ConfigError("placement", config.task.name, "a worker or a simulator with threads on the CPU")
    return out


def setting_of(worker: str) -> str:
    """The name of a worker in ``placement.threads``."""
    return "v" if worker == "learner" else worker


def with_split(config: Config, split: Split) -> Config:
    return replace(config, placement=replace(config.placement, threads=ThreadsConfig(**split)))


def small_run(config: Config) -> Config:
    """``config`` with a short warm-up and a replay that two of can be had."""
    capacity = min(config.replay.capacity, max(ROWS, 4 * WARM_UP * config.num_envs))
    algo = replace(config.algo, warmup_steps=min(config.algo.warmup_steps, WARM_UP))
    return replace(config, algo=algo, replay=replace(config.replay, capacity=capacity))


def show_split(split: Split) -> str:
    return " ".join(f"{k}={v}" for k, v in split.items())
