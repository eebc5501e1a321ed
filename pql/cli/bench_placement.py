"""``pql bench placement``: find the split of CPU threads that makes a run's ticks fastest on this machine.

A run reads its split only from its settings, because another split changes the order of summation, hence bits. This
command measures splits and prints the settings to use.
"""

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pql.config import Config, ThreadsConfig
from pql.config.compose import compose
from pql.contract.env import find_factory
from pql.engine.placement import available_cores, machine_of
from pql.errors import ConfigError
from pql.run.build import build

Split = dict[str, int]
"""Threads by the names of ``placement.threads``."""

WORTH = 1.03  # least speed-up at which another split is accepted: less is noise
WARM_UP, ROWS = 32, 100_000  # of a measurement: a tick's cost does not depend on the replay's content


class Trial:
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
        self.parts.close()


def measure_placements(words: Sequence[str], seconds: float = 2.0, rounds: int = 3) -> int:
    """Measure splits for the run that ``words`` (as for ``pql train``) describe; print the settings to use. Returns 0.

    Args:
        seconds: of each measurement; every split is measured ``rounds`` times, alternating with the best so far.
    Raises:
        ConfigError: a wrong setting, or no part of this run has threads on the CPU.
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

    best = search(lambda split: Trial(config, split), start, cores, seconds, rounds, tell)
    if best == start:
        print(f"the default is the best of the {tried} tried: no setting to change")
        return 0
    # Measured again, as the best of many measurements is biased upwards.
    new, old = Trial(config, best), Trial(config, start)
    ratio = faster(new, old, seconds, rounds)
    new.close()
    old.close()
    changed = " ".join(f"placement.threads.{k}={v}" for k, v in best.items() if v != start[k])
    print(f"measured again, {ratio:.2f} of the default's ticks per second with {changed}")
    print(changed if ratio >= WORTH else "within noise: no setting to change (measure longer: seconds=10 rounds=5)")
    return 0


def search(
    make: Callable[[Split], Trial],
    start: Split,
    cores: int,
    seconds: float,
    rounds: int,
    tell: Callable[[Split, float], None],
) -> Split:
    """Change one number at a time, the busiest part's first; keep changes that are clearly faster, until none is.
    ``tell``: called with every split tried, and its rate relative to the best before it."""
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
    """Yield splits that differ in one number: a power of two below the number of cores, or that number."""
    for name in order:
        for count in (*(1 << i for i in range(cores.bit_length()) if 1 << i < cores), cores):
            if count != split[name]:
                yield {**split, name: count}


def faster(a: Trial, b: Trial, seconds: float, rounds: int) -> float:
    """Return ``a``'s rate over ``b``'s: the median over rounds that measure both, in alternating order."""
    ratios = []
    for i in range(rounds):
        if i % 2:
            second = b.rate(seconds)
            ratios.append(a.rate(seconds) / second)
        else:
            ratios.append(a.rate(seconds) / b.rate(seconds))
    return statistics.median(ratios)


def splits(config: Config) -> Split:
    """Return the default split over all parts with threads on the CPU. Raises ``ConfigError``: there are none."""
    machine, out = machine_of(config), dict[str, int]()
    for worker, device in machine.devices.items():
        if device.type == "cpu":
            out[setting_of(worker)] = machine.threads[worker]
    far = config.task.process.python is not None
    takes = far or "threads" in inspect.signature(find_factory(config.task.name)).parameters
    if takes and "threads" not in config.task.kwargs:
        out["simulator"] = machine.threads["simulator"]
    if not out:
        raise ConfigError("placement", config.task.name, "a worker or a simulator with threads on the CPU")
    return out


def setting_of(worker: str) -> str:
    """Return the name of a worker in ``placement.threads``."""
    return "v" if worker == "learner" else worker


def with_split(config: Config, split: Split) -> Config:
    return replace(config, placement=replace(config.placement, threads=ThreadsConfig(**split)))


def small_run(config: Config) -> Config:
    """Return ``config`` with a short warm-up and a replay so small that two runs fit into memory."""
    capacity = min(config.replay.capacity, max(ROWS, 4 * WARM_UP * config.num_envs))
    algo = replace(config.algo, warmup_steps=min(config.algo.warmup_steps, WARM_UP))
    return replace(config, algo=algo, replay=replace(config.replay, capacity=capacity))


def show_split(split: Split) -> str:
    return " ".join(f"{k}={v}" for k, v in split.items())
