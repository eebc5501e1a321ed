"""Unrolls of environments that answer late: each contains the rows of its environment, and the delay does not affect
learning."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from conftest import bits, differences, merge, ticks
from histories import CPU, SPECS, Column, picture, stack
from impala_runs import APPO, config_of
from late import Late
from oracles import Event
from test_rollout import KINDS

from pql.algos import impala
from pql.contract.env import Box, EnvSpec
from pql.data.normalize import Normalizer
from pql.data.rollout import PolicyOutput, Rollout
from pql.data.unrolls import FULL, Reader, Unrolls
from pql.engine.executors import Inline, Threads
from pql.nets.distributions import DiagGaussian
from pql.run.build import build

C = 3  # size of a made-up memory
HISTORY = {"restart_every": 4, "stagger": True, "episode_length": 5}

# -- the store --------------------------------------------------------------------------------------------------------


class Played:
    """A store, its reader, and all that made-up environments did that answer when they please."""

    def __init__(self, num_envs, horizon, next_step, seed):
        mode = "next_step" if next_step else "same_step"
        spec = EnvSpec("made up", num_envs, SPECS, Box(1), CPU, max_episode_steps=50, autoreset=mode, spread=4)
        self.spec, self.horizon, self.random = spec, horizon, random.Random(seed)
        self.norm = Normalizer(SPECS, num_envs, CPU, False)
        self.store = Unrolls(spec, self.norm, horizon, 2, CPU, C)
        self.reader = Reader(self.store)
        self.sims = [Column(i, next_step) for i in range(num_envs)]
        self.store.begin(picture([s.now for s in self.sims]))
        self.kept = [[] for _ in self.sims]  # rows, except those of dropped unrolls
        self.begun = [[s.now] for s in self.sims]  # the state in which each unroll began
        self.ended = [False] * num_envs
        self.rows = self.dropped = 0

    def replaced(self, i):
        """Its actor was lost, and another one's environment is there."""
        sim, before = self.sims[i], self.sims[i].now
        sim.now, sim.filler_due = sim.new(True), False
        return Event(before, 0.0, 0.0, False, False, True, True, False, sim.now, sim.now)

    def answer(self, who):
        """A row of each environment of ``who``; of the others nothing."""
        events = []
        for i, sim in enumerate(self.sims):
            if i not in who:
                events.append(Event(sim.now, 0.7, 5.0, False, False, False, True, False, sim.now, sim.now))
            else:
                lost = self.random.random() < 0.03
                events.append(
                    self.replaced(i) if lost else sim.event(self.random.choice(KINDS), len(self.kept[i]) % 64 / 8)
                )
                self.keep(i, events[-1])
        action, step = stack(events)
        version = torch.tensor([len(k) for k in self.kept])
        carry = torch.tensor([float(e.obs) for e in events]).unsqueeze(1).expand(-1, C).clone()
        acted = PolicyOutput(action, torch.cat((action, -action), 1), version, carry)
        self.store.insert(acted, step, None, torch.tensor([i in who for i in range(len(self.sims))]))
        self.rows += len(who)

    def keep(self, i, event):
        part = len(self.kept[i]) % self.horizon
        if event.first and not event.valid and not self.ended[i]:  # of another episode, though none had ended
            self.dropped += part + 1
            del self.kept[i][len(self.kept[i]) - part :]
            self.begun[i][-1] = event.after
        else:
            self.kept[i].append(event)
            if part == self.horizon - 1:
                self.begun[i].append(event.after)
        self.ended[i] = (event.terminated or event.truncated) and event.valid

    def seal(self):
        for mine, theirs in zip(self.reader.tensors(), self.store.tensors(), strict=True):
            mine.copy_(theirs)

    def alone(self, i, number):
        """Unroll ``number`` of environment ``i`` as a rollout of it alone, and the versions that acted."""
        rollout = Rollout(replace(self.spec, num_envs=1), self.norm, self.horizon, 2, CPU, C)
        rollout.open(picture([self.begun[i][number]]), None)
        start = number * self.horizon
        for event in self.kept[i][start : start + self.horizon]:
            action, step = stack([event])
            rollout.insert(
                PolicyOutput(action, torch.cat((action, -action), 1), torch.zeros(1, dtype=torch.int64)), step
            )
        return rollout.segment()


def crowd(kind, n, rng):
    """Return the environments that answer together."""
    if kind == "late":
        return [i for i in range(n) if rng.random() < 0.9]
    if kind == "one":
        return [0]
    return [i for i in range(n) if rng.random() < (i + 1) / n]


@pytest.mark.parametrize(("next_step", "horizon"), [(False, 5), (True, 5), (False, 1)])
@pytest.mark.parametrize("kind", ["late", "unequal", "one"])
def test_every_unroll_is_a_rollout_of_its_environment_alone_and_is_read_once(next_step, horizon, kind):
    """It is read after the next tick's rows were written, as always with concurrent learners."""
    n, rng = 6, random.Random(f"{kind}{horizon}")
    played = Played(n, horizon, next_step, f"{kind}{next_step}")
    seen, lost = [0] * n, 0
    for tick in range(1, 25):
        played.seal()
        while played.rows < tick * n * horizon:
            played.answer(crowd(kind, n, rng))
        unread = int(played.store.completed - played.reader.taken)
        assert unread <= FULL * n
        segment = played.reader.segment()
        lost += int(segment.lost)
        for c in range(n):
            if segment.obs["policy"][0, c, 0] == 0:  # empty: fewer unrolls were complete
                assert not segment.mask[:, c].any()
                continue
            i = int(segment.obs["policy"][0, c, 0]) // 100_000
            alone = played.alone(i, seen[i])
            seen[i] += 1
            for name in ("action", "params", "reward", "alive", "goes_on", "successor", "first", "mask", "final_row"):
                mine, theirs = getattr(segment, name)[:, c], getattr(alone, name)[:, 0]
                if name == "final_row":  # beyond those that are led to, anything
                    mine, theirs = (x[: int(alone.successor.max()) - horizon] for x in (mine, theirs))
                assert torch.equal(mine, theirs), name
            rows = torch.cat((torch.arange(horizon + 1), alone.successor[alone.mask[:, 0] > 0, 0]))
            for k in SPECS:
                assert torch.equal(segment.obs[k][rows, c], alone.obs[k][rows, 0])
            assert segment.carry[c, 0] == segment.obs["policy"][0, c, 0]  # recurrent state before row 0
            assert segment.version[:, c].diff().eq(1).all()
    complete = sum(len(k) // horizon for k in played.kept)
    assert complete == int(played.store.completed)
    assert sum(seen) == int(played.reader.taken) >= 22 * n - played.dropped // horizon - n
    assert played.dropped > 0 or horizon == 1


def test_actions_of_a_warm_up_are_not_learned_from():
    played = Played(4, 3, False, 1)
    _, step = stack([Event(1, 0.0, 1.0, False, False, False, True, True, i + 7, i + 7) for i in range(4)])
    idle = PolicyOutput(torch.zeros(4, 1), torch.zeros(4, 2), torch.full((4,), -1), torch.zeros(4, C))
    for _ in range(5):
        played.store.insert(idle, step, None, torch.tensor([True, True, True, False]))
    assert int(played.store.completed) == 0
    for _ in range(3):
        played.store.insert(idle._replace(version=torch.tensor([0, 0, -1, 0])), step)
    played.seal()
    segment = played.reader.segment()
    assert int(played.reader.taken) == 3
    assert segment.mask.sum(0).tolist() == [3, 3, 3, 0]
    assert segment.obs["policy"][0, :2, 0].tolist() == [7, 8]  # the observation at the end of the warm-up


# -- runs -------------------------------------------------------------------------------------------------------------

MEMORY = {"lstm": 8, "shared": True, "entropy_coef": 0.0}
RUN = {"num_envs": 8, "algo": {"warmup_steps": 2, "normalize_obs": False, "horizon": 6, **MEMORY}}


def begin(env, *changes, executor=None):
    base = RUN
    for change in changes:
        base = merge(base, change)
    parts = build(config_of(base), env=env, executor=executor or Inline())
    parts.start()
    parts.warm_up(parts.config.algo.warmup_steps)
    parts.begin()
    return parts


@pytest.fixture
def decided(monkeypatch):
    """Actions are a function of what is seen and remembered, so that two runs do the same."""
    monkeypatch.setattr(DiagGaussian, "sample", lambda self, params, gen: params[..., : self.size] + 0.4)


def targets_of(env, rounds):
    """V-trace targets and weights of every unroll, by environment and first row, for another policy than that which
    acted."""
    parts = begin(env, {"algo": {"schedule": "lockstep"}})
    learner, store = parts.learners["learner"], parts.collector.stores[0]
    parts.collector.actor.policy.head.weight.data.add_(0.3)
    reader, out = learner.state.reader, {}
    for _ in range(rounds):
        parts.collector.run(6)
        for mine, theirs in zip(reader.tensors(), store.tensors(), strict=True):
            mine.copy_(theirs)
        batch = next(iter(learner.draw(1, learner.gen)))
        net, dist = learner.state.net, learner.state.net.policy.dist
        with torch.no_grad():
            params, values = net.evaluate(batch.obs, batch.carry[0], batch.first, batch.final_row)
        log_ratio = dist.log_prob(params, batch.action) - dist.log_prob(batch.params, batch.action)
        corrected = torch.stack(impala.correct(learner.settings, batch, log_ratio, values))
        for c in range(8):
            if not (batch.mask[:, c] > 0).any():
                continue
            t = int((batch.mask[:, c] > 0).nonzero()[0])
            episode, step = batch.obs["policy"][t, c].tolist()
            who = round(float(batch.reward[t, c]) - 10 * (episode % 8) - step / 8)  # as Counter pays
            first = tuple(batch.obs["policy"][0, c].tolist())
            assert (who, first) not in out
            out[who, first] = (corrected[:, :, c], batch.mask[:, c])
    return out, store


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_targets_are_those_of_the_same_history_without_delay(decided, autoreset):
    """Through an LSTM, with weights on both sides of V-trace's limit; one answer in ten is late."""
    kwargs = {**HISTORY, "autoreset": autoreset, "final_obs": "on_done", "terminate_every": 4}
    on_time, _ = targets_of(Late(**kwargs), 24)
    late, store = targets_of(Late(late=0.1, **kwargs), 24)
    row = store.rollout.row[store.place]
    assert row.unique().numel() > 2  # they did advance apart
    both = on_time.keys() & late.keys()
    assert len(both) > 0.8 * len(on_time) > 100
    weights = []
    for key in both:
        (ours, mask), (theirs, same) = late[key], on_time[key]
        assert torch.equal(mask, same)
        torch.testing.assert_close(ours * mask, theirs * mask, rtol=1e-5, atol=1e-5)
        weights.append(ours[2][mask > 0])
    weight = torch.cat(weights)
    assert (weight == 1).any()
    assert (weight < 0.9).any()


@pytest.mark.parametrize("schedule", ["lockstep", "concurrent"])
@pytest.mark.parametrize("gone", [(), pytest.param((0, 5), marks=pytest.mark.slow), (0, 1, 2, 3, 4, 5, 7)])
def test_ratios_count_transitions(schedule, gone):
    """An update for every T * N transitions of any environments; every complete unroll is used once."""
    env = Late(gone=gone, late=0.1, **HISTORY)
    parts = begin(env, {"algo": {"schedule": schedule}})
    store, learner = parts.collector.stores[0], parts.learners["learner"]
    ahead = 6 * 8 * (schedule == "concurrent")
    for _ in range(30):
        parts.schedule.tick()
        updates = parts.jobs["learner"].updates
        made = env.rows - 2 * 8 - ahead
        assert abs(made - updates * 6 * 8) <= 2 * 6 * 8  # never ahead or behind by more than a short tick and a group
        unread = int(store.completed - learner.state.reader.taken)
        assert 0 <= unread <= FULL * 8
        assert parts.env_steps == env.rows
    assert int(learner.state.reader.taken) >= (updates - 2) * 8
    assert updates >= (2 if len(gone) == 7 else 30)


def test_rows_know_how_old_the_policy_was_that_made_them():
    """One tick under ``concurrent``, one more for an unroll that spans ticks, and more for a late environment."""
    lags = []
    for late in (0.0, 0.2):
        parts = ticks(begin(Late(late=late, **HISTORY)), 20)
        lags.append(parts.jobs["learner"].metrics.drain())
    assert 1 < lags[0]["lag/rows_mean"] <= lags[0]["lag/rows_max"] <= 2
    assert lags[0]["lag/rows_mean"] < lags[1]["lag/rows_mean"] < 3
    assert 2 < lags[1]["lag/rows_max"] < 5


@pytest.mark.parametrize("algo", [{}, pytest.param(APPO, marks=pytest.mark.slow)], ids=["impala", "appo"])
def test_worker_orders_and_threads_give_the_same_bits(algo):
    """With the same arrivals: no worker reads rows that another may be writing."""

    def run(executor):
        algorithm = {"algo": {**algo, "schedule": "concurrent"}}
        env = Late(late=0.2, lost={(3, 20), (6, 31)}, **HISTORY)
        out = bits(ticks(begin(env, algorithm, executor=executor), 12))
        executor.close()
        return out

    reference, *others = (
        run(e)
        for e in (
            *(Inline(order) for order in itertools.permutations(("collector", "learner"))),
            Threads(("collector", "learner")),
        )
    )
    assert "learners/learner/state/reader/taken" in reference
    for other in others:
        assert differences(reference, other) == []


def test_a_resumed_run_drops_what_was_not_full():
    parts = ticks(begin(Late(late=0.1, **HISTORY)), 7)
    state = parts.state_dict()
    again = begin(Late(late=0.1, **HISTORY))
    again.load_state_dict(state, 7)
    before, after = (p.collector.stores[0] for p in (parts, again))
    assert not after.rollout.row[after.place].any()
    assert torch.equal(after.completed, before.completed)
    assert torch.equal(after.place, before.place)
    ticks(again, 8)
    assert again.jobs["learner"].metrics.drain()["lag/rows_max"] < 6


def test_who_waits_for_everybody():
    """Algorithms that need rows of the newest policy only, or a separate recurrent state of the value, are rejected."""
    own = {"lstm": 8, "shared": False, "lr_schedule": "fixed"}
    plain = {"schedule": "lockstep", "vtrace": {"enabled": False}}
    for algo, apart in (({}, True), (APPO, True), (merge(APPO, own), False), (merge(APPO, plain), False)):
        parts = build(config_of(merge(RUN, {"algo": algo})), env=Late(**HISTORY), executor=Inline())
        assert parts.collector.state.late is apart
