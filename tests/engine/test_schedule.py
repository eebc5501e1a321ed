"""Schedules: exact ratios, exact staleness, and the same bits with and without concurrency."""

import ctypes
import gc
import itertools
import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import FLASH, MODERN, bits, differences, go_on, small_config, start, ticks
from sampling import sample
from stand_in import RecordingStreams

from pql.engine import deadlines
from pql.engine.executors import Inline, LeftError, Threads
from pql.engine.schedule import Trace, tick_counts
from pql.errors import ConfigError, RunError

ORDERS = list(itertools.permutations(("collector", "v", "p")))
TICKS, FEW = 100, 24
ALGOS = {
    "pql": {},
    "pql_d": {"critic": {"hidden": [16], "atoms": 11, "v_min": -50.0, "v_max": 0.0}},
    "pql_sac": {"family": "sac", "explore": {"kind": "none"}},
    "scaled noise": {"family": "sac", "explore": {"kind": "scaled", "low": 0.0, "high": 1.0}},
    "td3 with a target policy": {"policy": {"hidden": [16], "target": True, "reduce": "first"}},
    "modern": MODERN,
    "batch norm": FLASH,
    "hyperspheres": {"critic": {"hidden": [8, 8], "trunk": "sphere"}, "policy": {"batch_norm": True, "target": True}},
    "running reward scale": {"normalize_reward": True, "explore": {"kind": "redrawn", "repeat": True}},
}


def run(config, executor, ticks=TICKS):
    return go_on(start(config, executor), ticks)


@pytest.mark.parametrize("algo", sample(ALGOS, keep=["pql", "batch norm"]))
@pytest.mark.fault(27)
def test_every_worker_order_and_threads_give_the_same_bits(algo):
    """Orders are compared over fewer ticks than threads, for nothing is left to chance there."""
    config, total = small_config(algo=ALGOS[algo]), TICKS if algo == "pql" else FEW
    few = FEW if algo == "pql" else FEW // 2
    parts = run(config, Inline(ORDERS[0]), few)
    early = bits(parts)
    for order in ORDERS[1:]:
        assert differences(early, bits(run(config, Inline(order), few))) == [], order
    reference = bits(go_on(parts, total - few))
    for _ in range(2):  # twice: also two runs with the same seed
        assert differences(reference, bits(run(config, Threads(("collector", "v", "p")), total))) == []


def test_statistics_of_batch_norm_are_one_tick_old_where_others_use_them():
    """Collector and V-learner use the policy's statistics, the P-learner those of the critics."""
    config = small_config(algo=FLASH)
    parts, older = (run(config, Inline(), ticks) for ticks in (12, 11))
    for owner, reader, name in (("p", "v", "policy"), ("v", "p", "critic")):
        own, before = (getattr(one.learners[owner].state, name).module.state_dict() for one in (parts, older))
        copies = [getattr(parts.learners[reader].state, name).state_dict()]
        copies += [parts.collector.actor.policy.state_dict()] if name == "policy" else []
        statistics = [k for k in own if k.endswith(("running_mean", "running_var"))]
        assert len(statistics) >= 4
        for copy in copies:
            for k in statistics:
                assert torch.equal(copy[k], before[k])
                assert not torch.equal(copy[k], own[k])


def late(job, delays, count):
    time.sleep(next(delays))
    job(count)


@pytest.mark.fault(27, count=50)
def test_random_delays_between_workers_change_nothing(trial):
    config = small_config(seed=trial)
    reference = bits(run(config, Inline(), ticks=50))
    parts = start(config, Threads(ORDERS[trial % len(ORDERS)]))
    generator = torch.Generator().manual_seed(trial)
    for worker in parts.workers.values():
        delays = (torch.rand(50, generator=generator) * 0.004).tolist()
        worker.job = partial(late, worker.job, iter(delays))
    assert differences(reference, bits(go_on(parts, 50))) == []


def test_another_seed_gives_other_bits():
    a, b = (bits(run(small_config(seed=s), Inline(), ticks=5)) for s in (3, 4))
    assert "learners/v/state/critic/net.0.weight" in differences(a, b)
    assert "collector/replay/0/action" in differences(a, b)


@pytest.mark.parametrize(
    ("v", "p", "expected"),
    [
        (8, 0.5, (1, 8, 4, 4)),
        (2, 1, (1, 2, 2, 2)),
        (0.5, 0.5, (4, 2, 1, 1)),
        (0.1, 1, (10, 1, 1, 1)),
        (1.5, 2, (2, 3, 6, 3)),
        (2, 0.333333, (3, 6, 2, 2)),
    ],
)
def test_counts_are_the_smallest_whole_numbers(v, p, expected):
    counts = tick_counts(v, p)
    assert (counts.horizon, counts.updates["v"], counts.updates["p"], counts.rounds) == expected


def test_ratios_that_no_horizon_meets_are_refused():
    with pytest.raises(ConfigError, match=r"algo\.v_per_step=0\.001"):
        tick_counts(0.001, 1.0)


@pytest.mark.parametrize(("schedule", "lag"), [("concurrent", 1), ("lockstep", 0)])
@pytest.mark.parametrize(("v", "p", "horizon"), [(2, 0.5, 1), (0.5, 0.5, 4)])
@pytest.mark.fault(25)
def test_ratios_and_lag_are_exact_at_every_tick(schedule, lag, v, p, horizon):
    parts = start(small_config(algo={"schedule": schedule, "v_per_step": v, "p_per_v": p}), Inline())
    warm_up = parts.collector.steps
    for tick in range(1, 30):
        parts.schedule.tick()
        steps = parts.collector.steps - warm_up
        assert steps == tick * horizon
        assert parts.jobs["v"].updates == v * steps
        assert parts.jobs["p"].updates == p * parts.jobs["v"].updates
        assert parts.schedule.lag == lag


def test_lockstep_interleaves_on_the_newest_weights():
    trace = Trace()
    parts = start(small_config(algo={"schedule": "lockstep", "v_per_step": 4}), Inline(), trace)
    parts.schedule.tick()
    who = [e[1] for e in trace.events if e[0] == "publish" and e[2] in ("critic", "policy", "rows")]
    assert who == ["collector", "v", "p", "v", "p"]
    newest = {}
    for what, worker, slot, version in trace.events:
        if what == "publish":
            newest[slot] = version
        else:
            assert version == newest.get(slot, 0), (worker, slot)


def happens_before(events):
    """Event indices that are ordered before each event, by program order per stream and record -> wait edges."""
    before: list[set[int]] = []
    last: dict[str, int] = {}
    recorded: dict[str, int] = {}
    stream = "main"
    for i, event in enumerate(events):
        kind = event[0]
        if kind == "on":
            stream = event[1]
        where = event[1] if kind in ("wait", "record") else stream
        sources = {last[where]} if where in last else set()
        if kind == "wait":
            sources.add(recorded[event[2]])
        before.append(set().union(*(before[s] | {s} for s in sources)) if sources else set())
        last[where] = i
        if kind == "record":
            recorded[event[2]] = i
    return before


def check_order(events):
    """Each pull comes after the publish it reads and before the one that reuses its buffer. Returns their number."""
    before = happens_before(events)
    published = {(e[2], e[3]): i for i, e in enumerate(events) if e[0] == "publish"}
    checked = 0
    for i, e in enumerate(events):
        if e[0] != "pull":
            continue
        _, _, slot, version = e
        if version > 0:
            assert published[slot, version] in before[i], f"{e}: nothing orders it after the publish"
            checked += 1
        reuse = published.get((slot, version + 2))
        assert reuse is None or i in before[reuse], f"{e}: its buffer may be overwritten while it is read"
    return checked


@pytest.mark.parametrize("order", ORDERS[:3])
def test_streams_order_every_cross_worker_read(order):
    trace = Trace()
    parts = start(small_config(), RecordingStreams(order, trace), trace)
    for _ in range(12):
        parts.schedule.tick()
    priorities = {name: event[2] for name, event in zip(order, trace.events, strict=False)}
    assert priorities == {"collector": -2, "v": -1, "p": -1}
    assert check_order(trace.events) >= 11 * 7  # three readers of rows, weights and statistics
    # the host waits for a tick two behind, never for the newest one
    events = [e for e in trace.events if e[0] in ("record", "host")]
    behind = [sum(r[0] == "record" for r in events[:i]) - int(e[1][5:]) for i, e in enumerate(events) if e[0] == "host"]
    assert len(behind) == 3 * 10
    assert min(behind) > 0
    # busy time comes from the device's own clock: ten settled ticks, one (fake) second between a job's two events
    busy = {name: worker.busy for name, worker in parts.workers.items()}
    assert busy == {"v": 10.0, "p": 10.0, "collector": 10.0}


def test_the_order_check_sees_a_missing_edge():
    trace = Trace()
    executor = RecordingStreams(("v", "p", "collector"), trace)
    executor._wait = lambda stream, event: None  # type: ignore[method-assign]
    parts = start(small_config(), executor, trace)
    for _ in range(3):
        parts.schedule.tick()
    with pytest.raises(AssertionError, match=r"nothing orders it|may be overwritten"):
        check_order(trace.events)


def test_exclusive_work_is_ordered_against_the_ticks_around_it():
    trace = Trace()
    parts = start(small_config(), RecordingStreams(("v", "p", "collector"), trace), trace)
    executor = parts.schedule.executor
    parts.schedule.tick()
    with executor.exclusive():
        trace("on", "main")
        trace("publish", "main", "drain", 1)
    parts.schedule.tick()
    before = happens_before(trace.events)
    at = next(i for i, e in enumerate(trace.events) if e[2:3] == ("drain",))
    pulls = [i for i, e in enumerate(trace.events) if e[0] == "pull"]
    earlier = [i for i in pulls if i < at]
    later = [i for i in pulls if i > at]
    assert all(i in before[at] for i in earlier)
    assert all(at in before[i] for i in later)
    assert earlier
    assert later


@pytest.mark.parametrize("name", ["collector", "v", "p"])
@pytest.mark.fault(6, form="{name}", count=25)
def test_a_failing_worker_ends_the_run_with_its_name_and_traceback(name, threads_left, trial):
    parts = ticks(start(small_config(), Threads(("collector", "v", "p"))), 1 + trial % 5)

    def fail(count):
        raise ZeroDivisionError("the cause")

    parts.workers[name].job = fail
    begun = time.monotonic()
    with pytest.raises(RunError, match=f"worker {name} failed: ZeroDivisionError: the cause") as caught:
        parts.schedule.tick()
    assert time.monotonic() - begun < 10
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert any(entry.name == "fail" for entry in _frames(caught.value.__cause__.__traceback__))
    parts.schedule.executor.close()
    assert not threads_left()


def _frames(tb):
    import traceback

    return traceback.extract_tb(tb)


@pytest.mark.fault(7, count=15)
@pytest.mark.parametrize("name", ["collector", "v", "p"])
def test_a_hung_worker_is_named_with_all_stacks(threads_left, name, trial):
    parts = ticks(start(small_config(), Threads(("collector", "v", "p"), watchdog=0.3)), trial % 5)
    release = threading.Event()
    parts.workers[name].job = lambda count: release.wait(20)
    begun = time.monotonic()
    with pytest.raises(RunError, match=rf"worker {name} has not finished its tick in 0\.3 s") as caught:
        parts.schedule.tick()
    assert time.monotonic() - begun < 5
    assert f"--- pql-{name}" in str(caught.value)
    assert "release.wait(20)" in str(caught.value)
    release.set()
    parts.schedule.executor.close()
    assert not threads_left()


def sleeping(seconds, done, name, number):
    time.sleep(seconds)
    done.append((name, number))


def supply(name, seconds, numbers, done):
    return (partial(sleeping, seconds, done, name, n) for n in numbers)


def test_workers_that_draw_from_one_supply_do_all_of_it_once():
    executor, done, numbers = Threads(("fast", "slow")), [], iter(range(40))
    seconds = executor.share({n: supply(n, s, numbers, done) for n, s in (("fast", 0.002), ("slow", 0.05))})
    executor.close()
    assert sorted(number for _, number in done) == list(range(40))
    own = {name: sum(n == name for n, _ in done) for name in seconds}
    assert own["fast"] > 4 * own["slow"] > 0
    assert seconds["fast"] >= 0.002 * own["fast"]


@pytest.mark.fault(7)
def test_the_watchdog_is_for_each_job_and_a_failure_ends_the_supply():
    executor, done = Threads(("a", "b"), watchdog=0.5), []
    executor.share({n: supply(n, 0.1, range(8), done) for n in "ab"})  # 0.8 s in all
    assert len(done) == 16

    def failing(name, fails):
        yield from supply(name, 0.01, range(3), done)
        if fails:
            yield lambda: 1 / 0
        yield from supply(name, 0.01, range(1000), done)

    with pytest.raises(RunError, match="worker b failed: ZeroDivisionError: division by zero"):
        executor.share({n: failing(n, n == "b") for n in "ab"})
    assert len(done) < 16 + 200
    assert executor.share({"a": iter(())}) == {"a": 0.0}  # and it can be used again
    executor.close()


def test_after_a_failure_the_others_get_time_to_finish(monkeypatch):
    """More time than lies between two checks of the deadlines."""
    monkeypatch.setattr(deadlines, "IDLE", 0.05)
    executor, begun, done = Threads(("fails", "slow")), threading.Event(), []

    def slow():
        begun.set()
        time.sleep(0.5)
        done.append("slow")

    def fails():
        begun.wait(20)
        raise ZeroDivisionError("division by zero")

    with pytest.raises(RunError, match="worker fails failed: ZeroDivisionError: division by zero"):
        executor.share({"fails": iter((fails,)), "slow": iter((slow,))})
    assert done == ["slow"]
    executor.close()


def test_inline_workers_take_their_jobs_in_turn():
    done = []
    Inline().share({"a": supply("a", 0, range(3), done), "b": supply("b", 0, range(2), done)})
    assert done == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]


@pytest.mark.fault(7)
def test_a_hang_starts_no_more_jobs():
    """Other workers finish their job and take none of those that are left."""
    executor, release, done, jobs = Threads(("a", "b"), watchdog=0.3), threading.Event(), [], iter(range(200))
    shared = supply("b", 0.02, jobs, done)
    with pytest.raises(RunError, match=r"worker a has not finished its tick in 0\.3 s"):
        executor.share({"a": iter((partial(release.wait, 20),)), "b": shared})
    release.set()
    executor.close()
    assert not any(thread.is_alive() for thread in executor.threads.values())
    assert len(done) < 100
    assert next(jobs) in (len(done), len(done) + 1)  # one may have been taken when the run was given up


def test_whoever_waits_for_others_does_not_hang_and_has_its_time_afterwards():
    executor, release = Threads(("busy", "patient"), watchdog=0.5), threading.Event()

    def patient():
        with executor.waiting("patient"):
            time.sleep(0.8)
        time.sleep(0.3)

    executor.share({"busy": iter(partial(time.sleep, 0.2) for _ in range(6)), "patient": iter((patient,))})

    def hanging():
        release.wait(20)

    with pytest.raises(RunError, match=r"worker busy has not finished its tick in 0\.5 s"):
        executor.share({"busy": iter((hanging,)), "patient": iter((patient,))})
    release.set()
    executor.close()


@pytest.mark.timeout(1200)
@pytest.mark.fault(19, count=1)
@pytest.mark.parametrize("slow", sample(["collector", "v", "p"], keep=["v"]))
def test_nothing_grows_behind_a_slow_worker_and_the_ratios_stay_exact(slow, pytestconfig):
    """Weights and rows are exchanged once per tick: nothing is queued for a late worker. In the suite for 60 ticks,
    with ``--faults`` for ten minutes."""
    if not pytestconfig.option.faults:
        behind_a_slow_worker(slow, 60)
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:  # nobody else's memory
        alone.submit(collected_as_usual, slow, 600.0).result()


def collected_as_usual(slow, seconds):
    gc.set_threshold(700, 10, 10)  # Python's own: conftest.py collects so rarely that cycles grow for minutes
    behind_a_slow_worker(slow, 200, seconds)


def behind_a_slow_worker(slow, least, seconds=0.0):
    """Make ticks for ``seconds``, at least ``least``, the job of one worker late by 3 ms.

    Raises:
        AssertionError: anything grows.
    """
    torch.set_num_threads(1)
    executor = Threads(("collector", "v", "p"))
    parts = start(small_config(), executor)
    worker = parts.workers[slow]
    real = worker.job

    def late(count):
        time.sleep(0.003)
        real(count)

    worker.job = late
    # A long one until the ring is full: its pages are taken as it fills.
    ticks(parts, 600 if seconds else max(20, least // 10))
    (size, objects), before, begun = resident(), parts.counters(), time.monotonic()
    count = 0
    while count < least or time.monotonic() - begun < seconds:
        parts.schedule.tick()
        count += 1
        assert all(inbox.qsize() == 0 for inbox in executor.inbox.values())
    after = parts.counters()
    executor.close()
    assert (after["v"] - before["v"], after["p"] - before["p"]) == (2 * count, count)
    assert after["steps"] - before["steps"] == count
    (now, alive), minutes = resident(), (time.monotonic() - begun) / 60
    assert alive - objects < 200
    assert now - size < 2**20 * max(1.0, minutes), f"{(now - size) / 2**20:.2f} MiB more in {minutes:.1f} minutes"


def resident():
    """Return the resident memory of this process in bytes, and its number of Python objects."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but kept by the allocator comes and goes by megabytes
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects())


def test_the_others_do_their_jobs_of_the_tick_in_which_a_worker_leaves():
    """Otherwise a run that its caller closes would leave other weights behind when a worker begins late."""
    threads, done, left = Threads(("collector", "v")), [], threading.Event()

    def leave():
        left.set()
        raise LeftError

    def late():
        left.wait()
        time.sleep(0.05)  # in which the executor learns of it

    with pytest.raises(RunError):
        threads.share({"collector": iter([leave]), "v": iter([late, partial(done.append, 1)])})
    threads.close()
    assert done == [1]
