"""Weights that arrive late, not at all, or as zeros: the lag is exact, and every worker uses what was published."""

import random
import time

import pytest
import torch
from conftest import bits, differences, go_on, merge, small_config, start, ticks
from families import FAMILIES
from ppo_runs import config_of

from pql.engine.executors import Inline, Threads
from pql.engine.schedule import Trace
from pql.errors import RunError
from pql.run.policy import fresh_policy, snapshot

WEIGHTS = ("policy", "critic")
ORDERS = (("collector", "v", "p"), ("v", "p", "collector"), ("p", "collector", "v"))


@pytest.mark.fault(25, count=20)
def test_a_late_publisher_is_waited_for_and_the_lag_stays_one_tick(trial):
    rng, trace = random.Random(trial), Trace()
    config = small_config(seed=trial)
    reference = bits(go_on(start(config, Inline()), 8))
    parts, name, at = start(config, Threads(ORDERS[trial % 3]), trace), rng.choice("vp"), rng.randrange(1, 8)
    for slot in parts.workers[name].publishes:

        def publish(real=slot.publish, slot=slot):
            if slot.version == at:
                time.sleep(0.05)  # far longer than a tick
            return real()

        slot.publish = publish
    try:
        for tick in range(8):
            ticks(parts, 1)
            assert parts.schedule.lag == 1
            pulls = [event for event in trace.events if event[0] == "pull"]
            assert {event[3] for event in pulls} == {tick}
            trace.events.clear()
    finally:
        parts.schedule.executor.close()
    assert differences(reference, bits(parts)) == []


@pytest.mark.fault(25, count=20)
def test_a_publication_that_is_lost_ends_the_run_by_the_name_of_the_weights(trial, threads_left):
    """No worker goes on with weights that are older than the lag allows."""
    rng = random.Random(trial)
    parts, at = start(small_config(), Threads(ORDERS[trial % 3])), rng.randrange(1, 6)
    owner, name = rng.choice([("p", "policy"), ("v", "critic")])
    (slot,) = (slot for slot in parts.workers[owner].publishes if slot.name == name)
    ticks(parts, at)
    slot.publish = lambda: slot.version
    ticks(parts, 1)  # which read the version before
    with pytest.raises(RunError, match=rf"worker \w+ failed: AssertionError: slot {name}: {at + 1} of {at}"):
        ticks(parts, 1)
    parts.schedule.executor.close()
    assert not threads_left()


def replicas_of(parts):
    return getattr(parts, "replicas", [parts])


def zero_everything(parts):
    """Make every learner publish zeros from the next tick on, and stop learning. Return the slots with weights."""
    slots = []
    for one in replicas_of(parts):
        for name, worker in one.workers.items():
            if name != "collector":
                worker.job = lambda count: None
        slots += [slot for name, slot in one.slots.items() if name in WEIGHTS]
    evaluated = [t for one in replicas_of(parts) for t in one.policy.state_dict().values()]  # perhaps an average
    with torch.no_grad():
        for tensor in [*evaluated, *(t for slot in slots for t in slot.source)]:
            tensor.zero_()
    return slots


def read(parts, slots):
    """Every worker's own copies of ``slots``."""
    workers = [worker for one in replicas_of(parts) for worker in one.workers.values()]
    return [t for worker in workers for slot, target in worker.pulls if slot in slots for t in target]


@pytest.mark.fault(25, count=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_published_zeros_reach_every_worker_and_the_evaluator(family, trial):
    """Within three ticks, for any family; a policy of zeros has one answer to all observations."""
    parts = ticks(start(FAMILIES[family], Inline()), 2 + trial)
    slots = zero_everything(parts)
    assert slots
    before = read(parts, slots)
    assert before
    assert any(t.count_nonzero() for t in before)
    ticks(parts, 3)  # an encoder goes from the critic's learner to the policy's, and from there to the collector
    assert not any(t.count_nonzero() for t in read(parts, slots))
    policy = fresh_policy(parts.config, parts.env.spec, "cpu")
    policy.load_state_dict(snapshot(parts))
    obs = {k: torch.randint(0, 9, (5, *s.shape)).to(s.dtype) for k, s in parts.env.spec.obs.items()}
    action = policy(obs)
    assert torch.equal(action, action[:1].expand_as(action))


@pytest.mark.fault(25, count=10)
def test_zeros_in_the_centre_reach_every_replica(trial):
    change = {"algo": {"schedule": "replicas", "replicas": 2, "central": {"order": "turns", "ticks": 1, "chunk": 64}}}
    parts = start(config_of(merge(change, {"num_envs": 8, "seed": trial, "placement": {"executor": "threads"}})))
    try:
        ticks(parts, 1 + trial % 3)
        slots = zero_everything(parts)
        parts.schedule.central.data.zero_()
        ticks(parts, 2)
    finally:
        parts.schedule.executor.close()
    weights = [t for t in read(parts, slots) if t.dim()]  # the others are running statistics
    assert len(weights) == 2
    assert not any(t.count_nonzero() for t in weights)
