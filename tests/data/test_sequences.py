"""Sequences against brute force over the full history: rows, states, targets, which ones can be drawn."""

import math
import random

import pytest
import torch
from histories import ENDS, SCENARIOS, Fate, Recorded, assert_shows, stack, stored
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from machines import effort
from oracles import n_step
from sampling import sample

from pql.data.priority import PriorityRule
from pql.data.sequences import RankedSequences, Sequences, Span, States, mixed
from pql.types import Acted

GAMMA = 0.9


class Remembering(Recorded):
    """A ring with stored states. Every row's state is unique: its column and its row."""

    def __init__(self, num_envs, periods, horizon, shape, next_step=False, depth=1):
        self.burn, self.length, self.n, self.period = shape
        super().__init__(num_envs, periods * self.period, horizon, next_step, depth=depth)
        self.given = (num_envs, periods, horizon, shape, next_step, depth)
        self.replay.extra = {k: torch.zeros(self.replay.flags.shape) for k in ("q", "value")}
        self.told: dict[tuple[int, int], tuple[float, float]] = {}  # (row, column) -> q and value when acted
        self.states = States(self.replay, 2, self.period)
        self.sequences = Sequences(self.states, Span(self.burn, self.length, self.n), GAMMA)

    def insert(self, kinds, columns=None):
        columns = list(range(len(self.sims))) if columns is None else columns
        new = [self.sims[i].event(k, len(self.events[i]) % 64 / 8) for i, k in zip(columns, kinds, strict=True)]
        carry = torch.tensor([[i, len(self.events[i])] for i in columns]).float()
        q = torch.tensor([(37 * len(self.events[i]) + 11 * i) % 23 / 8 for i in columns])
        if len(self.events[0]) < 6:  # as in a warm-up: no values were computed
            q.fill_(torch.nan)
        self.told |= {(len(self.events[i]), i): (v, 3 - v) for i, v in zip(columns, q.tolist(), strict=True)}
        for i, event in zip(columns, new, strict=True):
            self.events[i] += stored(event)
            if len(stored(event)) == 2:  # no actor valued the final observation
                self.told[len(self.events[i]) - 1, i] = (math.nan, math.nan)
        action, step = stack(new, self.shown())
        for store in (self.states, self.replay):
            store.insert(Acted(action, {"carry": carry, "q": q, "value": 3 - q}), step, torch.tensor(columns))

    def allowed(self):
        """(first row, column) of every sequence that may be drawn, by the rules in words."""
        size = self.burn + self.length + self.n
        return {
            (row, i)
            for i, events in enumerate(self.events)
            for row in range(0, len(events), self.period)
            if row + size <= len(events) and row >= self.oldest(len(events))
        }

    def offered(self):
        start, usable = self.sequences.starts(self.cursor)
        pairs = zip(start.tolist(), self.sequences.column(torch.arange(len(start))).tolist(), strict=True)
        return [pair for pair, ok in zip(pairs, usable.tolist(), strict=True) if ok]

    def read(self, pairs):
        start, column = torch.tensor(pairs).unbind(1)
        return self.sequences.read(self.cursor, start, column)

    def check_sequence(self, seq, b, start, i, tally):
        events, size = self.events[i], self.burn + self.length + self.n
        if events[start].valid:  # a filler row needs no state: it is the last of its episode
            assert seq.carry[b].tolist() == [i, start]
        for t in range(size):
            self.shows({k: v[t] for k, v in seq.obs.items()}, b, events[start + t].obs)
            assert bool(seq.first[t, b]) == events[start + t].first
        for t in range(self.length):
            self.check_row(seq, b, events, start + self.burn + t, t, tally)

    def check_row(self, seq, b, events, row, t, tally):
        want = n_step(events, row, self.n, GAMMA)
        assert seq.action[self.burn + t, b] == events[row].action or not events[row].valid
        assert bool(seq.mask[t, b]) == want.mask
        if not want.mask:
            tally["lost" if want.lost else "dropped"] += 1
            return
        assert seq.reward[t, b].item() == pytest.approx(want.reward, rel=1e-6, abs=1e-5)
        assert seq.discount[t, b].item() == pytest.approx(want.discount, rel=1e-6)
        if want.discount == 0:
            tally["terminated"] += 1
            return
        after = int(seq.successor[t, b])
        self.shows({k: v[self.burn + after] for k, v in seq.obs.items()}, b, want.next_obs)
        last = row - t + after - 1
        tally["final" if events[last].truncated else "plain"] += 1
        assert not seq.first[self.burn + after - 1, b]  # evaluated with the recurrent state after its row

    def shows(self, obs, b, number):
        assert_shows(obs, b, number, self.shown())


def history(scenario, seed, next_step, unequal, depth=1):
    rates, _ = SCENARIOS[scenario]
    rng = random.Random(seed)
    period = rng.randint(1, 4)
    shape = (rng.randint(0, 5), rng.randint(period, 6), rng.randint(1, 4), period)
    horizon = rng.randint(1, 4)
    size = sum(shape[:3])
    periods = -(-(size + 2 * horizon + 1 + depth + period) // period) + rng.randint(0, 5)
    ring = Remembering(rng.randint(1, 3), periods, horizon, shape, next_step, depth)
    fate = Fate(rng, rates, len(ring.sims))
    for _ in range(3 * ring.replay.rows // horizon):
        for _ in range(horizon):
            columns = [i for i in range(len(ring.sims)) if not unequal or rng.random() < (i + 1) / len(ring.sims)]
            if columns:
                ring.insert(fate.kinds(ring.sims, columns), columns)
        ring.seal()
        yield ring, fate, rng


@pytest.mark.parametrize(
    ("next_step", "unequal", "depth"),
    sample([(False, False, 1), (True, True, 1), (False, True, 3)], keep=[(True, True, 1)]),
)
@pytest.mark.parametrize("scenario", ["truncations", "lost", "restarts", "lives", "cuts", "stalls", "everything"])
def test_every_sequence_is_what_was_written(scenario, next_step, unequal, depth):
    tally = dict.fromkeys(("plain", "final", "terminated", "dropped", "lost"), 0)
    for seed in range(2):
        for ring, _, rng in history(scenario, 10 * seed + 1, next_step, unequal, depth):
            pairs = ring.offered()
            assert {*pairs} == ring.allowed()
            assert len({*pairs}) == len(pairs)
            if not pairs or rng.random() < 0.7:
                continue
            some = rng.sample(pairs, min(3, len(pairs)))
            before, dropped = int(ring.cursor.lost), tally["lost"]
            seq = ring.read(some)
            for b, (start, i) in enumerate(some):
                ring.check_sequence(seq, b, start, i, tally)
            assert int(ring.cursor.lost) - before == tally["lost"] - dropped
    assert tally["plain"] > 20
    if scenario in ("truncations", "everything"):
        assert min(tally["final"], tally["terminated"]) > 5


def test_a_writer_that_runs_ahead_changes_nothing_that_may_be_read():
    for ring, fate, _ in history("truncations", 5, False, False):
        pairs = ring.offered()
        if not pairs:
            continue
        before = ring.read(pairs)
        for _ in range(ring.horizon):
            ring.insert(fate.kinds(ring.sims, list(range(len(ring.sims)))))
        after = ring.read(pairs)
        for name in ("first", "carry", "action", "reward", "discount", "successor", "mask"):
            assert torch.equal(getattr(before, name), getattr(after, name)), name
        used = before.obs["policy"][: ring.sequences.size]
        assert torch.equal(used, after.obs["policy"][: ring.sequences.size])
        ring.seal()


@pytest.mark.parametrize("unequal", [False, True])
def test_draws_without_priorities_are_uniform_over_all_that_may_be_drawn(unequal):
    gen, checked = torch.Generator().manual_seed(0), 0
    for ring, _, rng in history("truncations", 3, False, unequal):
        allowed = ring.allowed()
        if allowed and rng.random() < 0.7:
            continue
        ring.sequences.read = lambda cursor, start, column, whole=ring.sequences.read: whole(
            cursor, start, column
        )._replace(index=torch.stack((start, column), 1))
        seq = ring.sequences.sample(ring.cursor, 4000, gen)
        del ring.sequences.read
        if not allowed:
            assert not seq.mask.any()
            assert not seq.followed.any()
            continue
        drawn, counts = seq.index.unique(dim=0, return_counts=True)
        assert {*map(tuple, drawn.tolist())} == allowed
        assert (counts - 4000 / len(allowed)).abs().max() < 5 * (4000 / len(allowed)) ** 0.5
        checked += len(allowed)
    assert checked > 50


# -- priorities -------------------------------------------------------------------------------------------------------


def ranked_of(ring, **settings):
    own = {k: settings.pop(k) for k in ("eta", "target") if k in settings}
    rule = PriorityRule(**{"alpha": 0.9, "beta": 0.6, "beta_steps": None, "steps_per_tick": 1, **settings})
    return RankedSequences(ring.sequences, rule, **own)


def leaves(ranked):
    """(first row, column) -> leaf, of all that may be drawn."""
    level, count = ranked.tree.levels[0][: ranked.sequences.count], ranked.sequences.ring.num_envs
    return {(int(ranked.entered[k]), int(k) % count): float(level[k]) for k in level.nonzero()[:, 0]}


def error_when_acted(ring, i, row, scale):
    """A row's TD error by the values that its actor stored; None where they do not give one."""
    events = ring.events[i]
    want = n_step(events, row, ring.n, GAMMA)
    q, ahead = ring.told[row, i][0], 0.0
    if not want.mask:
        return None
    if want.discount > 0:
        ahead = ring.told[row + round(math.log(want.discount, GAMMA)), i][1]
    error = math.tanh(scale * want.reward + want.discount * ahead) - q
    return None if math.isnan(error) else abs(error)


@pytest.mark.parametrize("unequal", [False, True])
def test_a_new_sequence_begins_with_its_errors_when_acted(unequal):
    ranked, seen, known, unknown = None, set(), 0, 0
    for seed in (2, 4):
        for ring, _, _ in history("everything", seed, False, unequal):
            if ranked is None or ranked.sequences.ring is not ring.replay:
                ranked = ranked_of(ring, target=lambda r, d, v: (r + d * v).tanh())
                seen = set()
            ranked.open(ring.cursor, torch.tensor(0.5))
            found, largest = leaves(ranked), float(ranked.largest)
            for start, i in {*found} - seen:
                first = start + ring.burn
                errors = [error_when_acted(ring, i, row, 0.5) for row in range(first, first + ring.length)]
                errors = [e for e in errors if e is not None]
                mix = 0.9 * max(errors) + 0.1 * sum(errors) / len(errors) if errors else None
                assert found[start, i] == pytest.approx(largest if mix is None else (mix + 1e-6) ** 0.9, abs=1e-5)
                known, unknown = known + bool(errors), unknown + (not errors)
            seen |= {*found}
    assert known > 20
    assert unknown > 0


def test_draws_are_in_proportion_and_weights_are_those_of_schaul():
    ring = Remembering(2, 8, 1, (1, 4, 1, 4))
    for _ in range(20):
        ring.insert(["step", "step"])
    ring.seal()
    ranked = ranked_of(ring, alpha=1.0)
    ranked.open(ring.cursor, torch.ones(()))
    pairs = sorted(leaves(ranked))
    assert pairs == [(r, i) for r in (0, 4, 8, 12) for i in (0, 1)]
    errors = torch.tensor([1.0, 2, 3, 4, 1, 2, 3, 4])
    ranked.update(torch.arange(8), errors, torch.ones(8))
    seq = ranked.sample(ring.cursor, 2000, torch.Generator().manual_seed(0))
    shares = seq.index.bincount(minlength=8) / 2000
    assert torch.allclose(shares, errors / 20, atol=2e-3)  # stratified: far closer than independent draws
    assert torch.allclose(seq.weight, (1 / errors[seq.index]) ** 0.6, atol=1e-4)
    assert torch.equal(seq.carry[:, 1], (seq.index // 2 * 4).float())
    ranked.update(torch.tensor([0]), torch.tensor([9.0]), torch.zeros(1))  # nothing in it counts
    assert (0, 0) not in leaves(ranked)
    ranked.open(ring.cursor, torch.ones(()))
    assert (0, 0) not in leaves(ranked)


def test_a_priority_mixes_the_largest_and_the_mean_error_of_the_rows_that_count():
    error, mask = torch.tensor([[1.0, -4.0], [-2.0, 9.0], [3.0, 1.0]]), torch.tensor([[1.0, 1], [1, 0], [1, 1]])
    assert mixed(error, mask, 0.9).tolist() == pytest.approx([0.9 * 3 + 0.1 * 2, 0.9 * 4 + 0.1 * 2.5])
    assert mixed(error, torch.zeros_like(mask), 0.9).tolist() == [0, 0]


def test_the_ring_must_hold_whole_periods():
    ring = Recorded(1, 10, 1)
    with pytest.raises(AssertionError):
        States(ring.replay, 2, 4)


def test_no_state_is_kept_where_no_answer_has_come():
    ring = Remembering(2, 3, 1, (1, 4, 1, 4))
    ring.insert(["step", "step"])
    before = ring.states.carry[:6].clone()
    action, step = stack([s.event("step", 0.0) for s in ring.sims])
    acted = Acted(action, {"carry": torch.full((2, 2), 9.0)})
    ring.replay.live.head.fill_(4)
    ring.states.insert(acted, step, None, torch.tensor([False, True]))
    after = ring.states.carry[:6]
    assert after.view(3, 2, 2)[1].tolist() == [[0.0, 0.0], [9.0, 9.0]]
    assert torch.equal(after.view(3, 2, 2)[::2], before.view(3, 2, 2)[::2])


class SequenceMachine(RuleBasedStateMachine):
    """A ring with sequences; ``truth``: (first row, column) -> leaf of every sequence that may be drawn."""

    @initialize(
        num_envs=st.integers(1, 2),
        period=st.integers(1, 3),
        burn=st.integers(0, 2),
        length=st.integers(0, 2),
        n=st.integers(1, 3),
        horizon=st.integers(1, 3),
        spare=st.integers(0, 3),
        next_step=st.booleans(),
        depth=st.sampled_from([1, 1, 2]),
    )
    def start(self, num_envs, period, burn, length, n, horizon, spare, next_step, depth):
        shape = (burn, period + length, n, period)
        periods = -(-(sum(shape) + 2 * horizon + 1 + depth) // period) + spare
        self.ring = Remembering(num_envs, periods, horizon, shape, next_step, depth)
        self.ranked, self.truth, self.largest = ranked_of(self.ring), {}, (1 + 1e-6) ** 0.9

    @rule(
        kinds=st.lists(st.sampled_from(["step", "step", "life", "cut", "stall", *ENDS]), min_size=2, max_size=2),
        who=st.sets(st.integers(0, 1), min_size=1),
        ticks=st.integers(1, 8),
    )
    def advance(self, kinds, who, ticks):
        """Write ``horizon`` rows, then open a tick, several times."""
        ring = self.ring
        columns = [i for i in who if i < len(ring.sims)]
        for _ in range(ticks):
            for _ in range(ring.horizon if columns else 0):
                ring.insert([kinds[i] for i in columns], columns)
            ring.seal()
            self.ranked.open(ring.cursor, torch.ones(()))
            self.truth = {pair: self.truth.get(pair, self.largest) for pair in ring.allowed()}
            self.check_leaves()

    def check_leaves(self):
        assert leaves(self.ranked) == pytest.approx({k: v for k, v in self.truth.items() if v > 0})
        assert float(self.ranked.largest) == pytest.approx(self.largest)

    @rule()
    def restart(self):
        self.ring.restart()

    @rule(seed=st.integers(0, 99))
    def read(self, seed):
        pairs = self.ring.offered()
        assert {*pairs} == {*self.truth}
        if pairs:
            some = random.Random(seed).sample(sorted(pairs), min(2, len(pairs)))
            tally = dict.fromkeys(("plain", "final", "terminated", "dropped", "lost"), 0)
            before = int(self.ring.cursor.lost)
            seq = self.ring.read(some)
            for b, (start, i) in enumerate(some):
                self.ring.check_sequence(seq, b, start, i, tally)
            assert int(self.ring.cursor.lost) - before == tally["lost"]

    @rule(seed=st.integers(0, 99), error=st.floats(0, 3), counts=st.booleans())
    def draw_and_learn(self, seed, error, counts):
        seq = self.ranked.sample(self.ring.cursor, 3, torch.Generator().manual_seed(seed))
        known = {pair: leaf for pair, leaf in self.truth.items() if leaf > 0}
        if not known:
            assert not seq.mask.any()
            assert not seq.weight.any()
            return
        pairs = [(int(self.ranked.entered[k]), int(k) % len(self.ring.sims)) for k in seq.index]
        found = torch.tensor([known[pair] for pair in pairs])
        torch.testing.assert_close(seq.weight, (found.min() / found) ** 0.6, rtol=1e-4, atol=0)
        assert [(int(c[1]), int(c[0])) for c in seq.carry] == pairs
        self.ranked.update(seq.index[:1], torch.tensor([error]), torch.tensor([float(counts)]))
        self.truth[pairs[0]] = (error + 1e-6) ** 0.9 if counts else 0.0
        self.largest = max(self.largest, self.truth[pairs[0]])
        self.check_leaves()

    @rule()
    def resume(self):
        """Continue with a ring and priorities loaded from their checkpoints."""
        old, new = self.ring, Remembering(*self.ring.given)
        ranked = ranked_of(new)
        for mine, other in ((new.replay, old.replay), (new.states, old.states), (ranked, self.ranked)):
            state = other.state_dict()
            copied = {k: v.clone() if k != "tree" else {n: t.clone() for n, t in v.items()} for k, v in state.items()}
            mine.load_state_dict(copied)
        new.events, new.sims, new.seen, new.told = old.events, old.sims, old.seen, old.told
        self.ring, self.ranked = new, ranked
        new.seal()
        self.check_leaves()


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = effort(15, 15)
