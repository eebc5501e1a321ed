"""Replicas: one equals Lockstep, several in turns equal a serial loop, and asynchronous updates add up."""

import threading
import time
import traceback
from functools import partial

import pytest
import torch
from conftest import bits, differences, merge, start, ticks
from gates import score, train_until
from ppo_runs import VARIANTS, config_of
from sampling import sample

from pql.algos import ppo
from pql.algos.registry import own_seed, seeds
from pql.config.compose import compose
from pql.data.normalize import Moments
from pql.errors import RunError

CHUNK = 64  # of networks of some hundred parameters: many chunks


def replicas(count, *changes, order="turns", each=1, executor="threads", chunk=CHUNK):
    """The config of small on-policy runs, with replicas."""
    algo = {"schedule": "replicas", "replicas": count, "central": {"order": order, "ticks": each, "chunk": chunk}}
    return config_of({"algo": algo, "placement": {"executor": executor}}, *changes)


def run(config, count):
    parts = start(config)
    try:
        return ticks(parts, count)
    finally:
        parts.schedule.executor.close()


# -- one replica ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", sample(VARIANTS, keep=["squashed", "shared lstm", "a2c"]))
def test_one_replica_is_lockstep_bit_for_bit(variant):
    """Every tensor of the state, moments and Adam's count included; three ticks of the run are six of the replica."""
    expected = bits(run(config_of(VARIANTS[variant]), 6))
    for order in ("free", "turns"):
        assert differences(expected, bits(run(replicas(1, VARIANTS[variant], order=order, each=2), 3))) == []


# -- several, in turns ----------------------------------------------------------------------------------------------


class Serial:
    """Optimiser of the serial reference: torch's optimiser of the shared parameters, on a learner's gradient."""

    def __init__(self, own, shared, optimizer):
        self.flat, self.lr, self.clip, self.shared, self.optimizer = own.flat, own.lr, own.clip, shared, optimizer

    def minimize(self, loss, skip=None, mask=None):
        assert skip is None
        self.flat.differentiate(loss)
        norm = self.flat.data.grad.norm()
        self.shared.grad = self.flat.data.grad * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.param_groups[0]["lr"] = self.lr
        self.optimizer.step()
        self.flat.data.data.copy_(self.shared.data)
        return norm


def serial_reference(change, count, rounds, make_optimizer):
    """One loop without threads, locks or chunks: all read, all collect, then one update of each after the other."""
    share = {"num_envs": 12 // count}
    runs = [start(config_of(change, share, {"seed": own_seed(3, i)})) for i in range(count)]
    learners = [one.learners["learner"] for one in runs]
    shared = torch.nn.Parameter(learners[0].state.optimizer.flat.data.detach().clone())
    optimizer = make_optimizer(shared)
    for learner in learners:
        learner.state.optimizer = Serial(learner.state.optimizer, shared, optimizer)
    for _ in range(rounds):
        for one, learner in zip(runs, learners, strict=True):
            learner.state.optimizer.flat.data.data.copy_(shared.data)
            one.slots["policy"].publish()
            one.workers["collector"].run(one.counts.horizon)
        updates = runs[0].counts.updates["learner"]
        batches = [iter(learner.draw(updates, learner.gen)) for learner in learners]
        for _ in range(updates):
            for learner, batch in zip(learners, batches, strict=True):
                ppo.ppo_update(learner.state, next(batch), learner.settings, learner.gen)
    return shared.data, [one.collector.obs["policy"] for one in runs]


def adamw(shared):
    return torch.optim.AdamW([shared], lr=1.0, weight_decay=0.0, fused=True)


def rmsprop(shared):
    return torch.optim.RMSprop([shared], lr=1.0, alpha=0.99, eps=1e-5)


PLAIN = {"num_envs": 12, "algo": {"normalize_obs": False, "normalize_value": False}}


@pytest.mark.parametrize("count", sample([2, 3], keep=[3]))
@pytest.mark.parametrize(("variant", "optimizer", "exact"), [("shared trunk", adamw, True), ("a2c", rmsprop, False)])
def test_replicas_in_turns_are_a_serial_loop(variant, optimizer, exact, count):
    change = merge(VARIANTS[variant], PLAIN)
    if variant == "a2c":
        change = merge(change, {"algo": {"normalize_reward": False}})
    shared, seen = serial_reference(change, count, 6, optimizer)
    parts = run(replicas(count, change, each=3), 2)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}  # torch's RMSprop rounds otherwise
    torch.testing.assert_close(parts.schedule.central.data, shared, **tolerance)
    for one, obs in zip(parts.replicas, seen, strict=True):
        torch.testing.assert_close(one.learners["learner"].state.optimizer.flat.data.detach(), shared, **tolerance)
        torch.testing.assert_close(one.collector.obs["policy"], obs, **tolerance)


@pytest.mark.parametrize("variant", sample(["gaussian", "a2c", "shared lstm", "annealed, stopped"], keep=["gaussian"]))
@pytest.mark.fault(27)
def test_turns_give_the_same_bits_whatever_the_threads_do(variant):
    config = replicas(3, VARIANTS[variant], {"num_envs": 12}, each=2)
    reference = bits(run(config, 3))
    parts, gen = start(config), torch.Generator().manual_seed(0)
    for one in parts.replicas:
        for worker in one.workers.values():
            delays = iter((torch.rand(6, generator=gen) * 0.01).tolist())
            worker.job = partial(late, worker.job, delays)
    ticks(parts, 3)
    parts.schedule.executor.close()
    assert differences(reference, bits(parts)) == []
    assert parts.schedule.reproducible


def late(job, delays, count):
    time.sleep(next(delays))
    job(count)


@pytest.mark.fault(25)
def test_lag_in_turns_is_known_beforehand():
    parts = start(replicas(3, {"num_envs": 12}))  # eight pushes of each a tick
    ticks(parts, 1)
    told = parts.schedule.measures()
    parts.schedule.executor.close()
    # All pull, then push in turn: at first one replica's pushes stand before it for each place in the row, later two.
    assert told["lag/policy_mean"] == pytest.approx((0 + 1 + 2 + 7 * 3 * 2) / 24)
    assert (told["lag/policy_max"], told["schedule/reproducible"]) == (2, 1)
    assert parts.schedule.measures()["lag/policy_max"] == 0  # nothing was pushed since


def test_whole_ticks_in_turn_on_one_thread():
    config = replicas(3, {"num_envs": 12}, order="free", executor="inline", each=2)
    one, two = run(config, 3), run(config, 3)
    assert differences(bits(one), bits(two)) == []
    assert one.schedule.reproducible
    assert one.schedule.measures()["lag/policy_max"] == 0


# -- statistics -----------------------------------------------------------------------------------------------------


def test_between_ticks_all_have_the_statistics_of_all(monkeypatch):
    fed, update = {}, Moments.update

    def recorded(self, x, keep=None, *rest):
        fed.setdefault(id(self), []).append(x.clone() if keep is None else x[keep])
        update(self, x, keep, *rest)

    monkeypatch.setattr(Moments, "update", recorded)
    algo = {"normalize_reward": True, "return_cap": 0.5}
    parts = run(replicas(3, {"num_envs": 12, "algo": algo}, order="free", each=2), 3)
    every = [one.statistics() for one in parts.replicas]
    assert [len(sets) for sets in every] == [3, 3, 3]  # of observations, of rewards, of values
    for sets in zip(*every, strict=True):
        rows = torch.cat([x for moments in sets for x in fed[id(moments)]]).double()
        for moments in sets:
            mean, variance = moments.statistics()
            torch.testing.assert_close(mean, rows.mean(0), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(variance, rows.var(0, correction=0), rtol=1e-9, atol=1e-12)
        assert [moments.count.item() for moments in sets] == [len(rows), 0, 0]  # the first has all of it
    frozen = [one.collector.normalizer.frozen() for one in parts.replicas]
    assert all(torch.equal(a, b) for other in frozen[1:] for a, b in zip(frozen[0], other, strict=True))


# -- freely ---------------------------------------------------------------------------------------------------------


def test_nothing_is_lost_or_counted_twice(threads_left):
    """Three replicas, whose ticks go to any that is free; one is slow."""
    parts = start(replicas(3, {"task": {"name": "cartpole"}, "num_envs": 12}, order="free", each=4))
    slow = parts.replicas[1].workers["collector"]
    slow.job = partial(late, slow.job, iter([0.1] * 100))
    finished = [one.collector.episodes.finished for one in parts.replicas]
    ticks(parts, 2)
    done = [(one.collector.steps - 8) / 8 for one in parts.replicas]
    assert sum(done) == 2 * 4 * 3
    assert done[1] < min(done[0], done[2])  # others wait for the slow one only at the end
    assert parts.env_steps == 12 * 8 + 24 * 8 * 4
    assert parts.updates() == {"v": 24 * 8, "p": 24 * 8}
    assert [job.updates for one in parts.replicas for job in one.jobs.values()] == [8 * n for n in done]
    assert parts.schedule.central.pushes == 24 * 8
    assert [int(c.state["count"]) for c in parts.schedule.central.chunks] == [24 * 8] * len(
        parts.schedule.central.chunks
    )
    ended = sum(one.collector.episodes.count for one in parts.replicas)
    total = sum(finished)[0]
    updates = [one.jobs["learner"].metrics for one in parts.replicas]
    entropy = sum(m.sums[m.names.index("policy/entropy")] for m in updates) / (24 * 8)
    told = parts.drain()
    parts.schedule.executor.close()
    assert told["train/episodes"] == ended > 10
    assert told["train/return_mean"] == pytest.approx(total.item() / ended.item())
    assert told["policy/entropy"].item() == pytest.approx(entropy.item())
    assert parts.drain()["train/episodes"] == 0
    assert not threads_left()


def test_a_replica_that_has_done_nothing_yet_does_not_hide_the_others():
    parts = start(replicas(3, {"num_envs": 12}, executor="inline", order="free"))
    assert "policy/entropy" not in parts.drain()
    parts.replicas[1].schedule.tick()
    assert parts.drain()["policy/entropy"] > 0


def test_the_last_bit_of_a_free_run_is_nobodys_promise_and_the_log_says_so():
    parts = run(replicas(2, order="free"), 2)
    assert not parts.schedule.reproducible
    assert parts.schedule.measures()["schedule/reproducible"] == 0


def test_the_learning_rate_falls_with_all_replicas_steps():
    """64 rows a replica's tick of 4 environments: 640 steps, over which it falls to 0, are 20 such ticks together."""
    change = {"algo": {"lr_schedule": "linear", "anneal_steps": 640}}
    parts = start(replicas(2, change, order="free", each=5))
    parts.replicas[0].workers["collector"].job = partial(
        late, parts.replicas[0].workers["collector"].job, iter([0.05] * 50)
    )
    ticks(parts, 1)
    rates = sorted(one.learners["learner"].state.optimizer.lr.item() for one in parts.replicas)
    assert rates[0] == pytest.approx(1e-3 * (1 - 9 * 32 / 640))  # of the tenth tick, of any replica
    ticks(parts, 1)
    parts.schedule.executor.close()
    rates = sorted(one.learners["learner"].state.optimizer.lr.item() for one in parts.replicas)
    assert rates[0] == pytest.approx(1e-3 * (1 - 19 * 32 / 640))


def test_replicas_see_different_episodes_and_start_from_the_same_weights():
    parts = start(replicas(3, {"num_envs": 12}))
    parts.schedule.executor.close()
    a, b, c = (one.collector.obs["policy"] for one in parts.replicas)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)
    weights = [one.learners["learner"].state.optimizer.flat.data for one in parts.replicas]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert len({seed for i in range(50) for seed in seeds(own_seed(3, i)).values()}) == 50 * len(seeds(3))


def learn(config, goal):
    """Until two evaluations in a row are above ``goal``, 250,000 env steps at most: the first score, the worse of the
    last two, and the mean lag."""
    parts = start(config)
    first, per_tick = score(parts), config.num_envs * parts.counts.horizon * parts.schedule.each
    worse = train_until(parts, goal, 250_000 // per_tick, every=1)
    lag = parts.schedule.measures()["lag/policy_mean"]
    parts.schedule.executor.close()
    return first, worse, lag


STEADY = {"gae_lambda": 0.95, "normalize_advantage": True, "normalize_value": True}
A3C = merge(VARIANTS["a2c"]["algo"], {"normalize_reward": False, "policy": {"grad_clip": 0.5}, **STEADY})
CART_POLE = {"a3c": merge(A3C, {"policy": {"lr": 1e-3}}), "appo_replicas": {"horizon": 32}}


@pytest.mark.parametrize("name", sample(CART_POLE, keep=["a3c"]))
def test_two_free_replicas_balance_a_cart_pole(name, learns):
    learns(lambda seed: balance(name, seed), 450)  # of 500


def balance(name, seed):
    wide = {"critic": {"hidden": [64, 64]}, "policy": {"hidden": [64, 64]}}
    change = {"task": {"name": "cartpole"}, "num_envs": 64, "seed": seed, "algo": merge(CART_POLE[name], wide)}
    each = 25 if name == "a3c" else 5
    first, worse, lag = learn(replicas(2, change, order="free", each=each, chunk=65_536), 450)
    assert first < 400  # now and then the first weights balance for long
    assert lag > 0
    return worse


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a3c", "appo_replicas"])
def test_the_presets_catch_a_ball_seen_as_pixels(name, learns):
    """At random: -0.73. To below the ball's newest place: -0.5. The best: 1."""
    learns(lambda seed: catch(name, seed), 0.6)


def catch(name, seed):
    first, worse, lag = learn(compose(["device=cpu", "task=catch", f"algo={name}", f"seed={seed}"]), 0.6)
    assert first < -0.4
    assert lag > 0
    return worse


# -- failures -------------------------------------------------------------------------------------------------------


def fail(count):
    raise ZeroDivisionError("the cause")


@pytest.mark.parametrize("order", ["free", "turns"])
@pytest.mark.fault(6)
def test_a_failing_replica_ends_the_run_with_its_name_and_traceback(order, threads_left):
    parts = start(replicas(3, {"num_envs": 12}, order=order, each=12))
    ticks(parts, 1)
    parts.replicas[1].workers["learner"].job = fail
    begun = time.monotonic()
    with pytest.raises(
        RunError, match="replica1 failed: worker learner failed: ZeroDivisionError: the cause"
    ) as caught:
        parts.schedule.tick()
    assert time.monotonic() - begun < 10
    cause = caught.value.__cause__.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert any(entry.name == "fail" for entry in traceback.extract_tb(cause.__traceback__))
    parts.schedule.executor.close()
    assert not threads_left()
    assert max(one.collector.steps for one in parts.replicas) < 8 * (2 + 2 * 12)  # the rest was not handed out


@pytest.mark.parametrize("order", ["free", "turns"])
@pytest.mark.fault(7)
def test_a_hung_replica_is_named_with_all_stacks(order, threads_left):
    """Though its tick of the run is long: the watchdog is for a replica's own tick."""
    change = {"num_envs": 12, "placement": {"watchdog_seconds": 2.0, "start_seconds": 2.0}}
    parts, release = start(replicas(3, change, order=order, each=20)), threading.Event()
    parts.replicas[1].workers["learner"].job = lambda count: release.wait(20)
    begun = time.monotonic()
    with pytest.raises(RunError, match="worker replica1 has not finished its tick in 2 s") as caught:
        parts.schedule.tick()
    assert time.monotonic() - begun < 10
    assert "release.wait(20)" in str(caught.value)
    release.set()
    parts.schedule.executor.close()
    assert not threads_left()
