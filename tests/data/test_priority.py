"""The sum tree against plain sums, draws against their probabilities, and which rows can be drawn."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from histories import CPU, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from machines import effort
from oracles import Event, importance_weights, n_step
from scipy.stats import chisquare

from pql.contract.env import ObsSpec
from pql.data import priority
from pql.data.priority import FANOUT, FLOOR, Prioritized, PriorityRule, SumTree, least_rows
from pql.data.replay import Cursor, Replay
from pql.data.sizes import ReplayLayout
from pql.types import Acted, Step


def tree_of(leaves, fanout=FANOUT):
    tree = SumTree(len(leaves), CPU, fanout)
    tree.set(torch.arange(len(leaves)), torch.tensor(leaves, dtype=torch.float64))
    return tree


def find(tree, *masses):
    return tree.find(torch.tensor(masses, dtype=torch.float64))[0].tolist()


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_a_million_leaves_take_three_levels():
    tree = SumTree(1_000_000, CPU)
    assert [level.numel() for level in tree.levels] == [1_000_064, 7936, 128]
    tree.set(torch.tensor([0, 999_999]), torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert find(tree, 0.5, 1.0, 3.9) == [0, 999_999, 999_999]


def test_rounding_never_leads_to_an_empty_leaf():
    tree = tree_of([0.0, 1.0, 0.0, 1e-12, 0.0, 0.0, 0.0], fanout=3)
    top = tree.total.item()
    assert find(tree, 0.0, -1e-18, math.nextafter(1.0, 0.0), top, top * 2) == [1, 1, 1, 3, 3]
    index, value = SumTree(5, CPU, 3).find(torch.zeros(2, dtype=torch.float64))  # nothing at all is there
    assert value.tolist() == [0.0, 0.0]
    assert index.tolist() == [0, 0]


class TreeMachine(RuleBasedStateMachine):
    """A tree and a plain array of its leaves."""

    @initialize(size=st.integers(1, 70), fanout=st.integers(2, 5))
    def start(self, size, fanout):
        self.tree, self.truth = SumTree(size, CPU, fanout), np.zeros(size)

    @rule(data=st.data())
    def set(self, data):
        size = len(self.truth)
        pairs = st.tuples(st.integers(0, size - 1), st.integers(0, 64).map(lambda v: v / 8))
        given = data.draw(st.lists(pairs, min_size=1, max_size=2 * size))
        index, value = zip(*given, strict=True)
        self.tree.set(torch.tensor(index), torch.tensor(value, dtype=torch.float64))
        for i in set(index):
            self.truth[i] = max(v for j, v in given if j == i)

    @rule()
    def clear(self):
        self.tree.set(torch.arange(len(self.truth)), torch.zeros(len(self.truth), dtype=torch.float64))
        self.truth[:] = 0

    @rule(data=st.data())
    def resume(self, data):
        """Load the leaves in use into a tree with other content."""
        filled = self.truth.nonzero()[0]
        used = data.draw(st.integers(int(filled[-1]) + 1 if len(filled) else 0, len(self.truth)))
        state = {k: v.clone() for k, v in self.tree.state_dict(used).items()}
        assert len(state["level0"]) == used
        self.tree = tree_of([3.0] * len(self.truth), self.tree.fanout)
        self.tree.load_state_dict(state)

    @precondition(lambda self: self.truth.any())
    @rule(places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
    def find(self, places):
        """Eighths are added without rounding, so the boundaries between leaves are exact."""
        total, ends = self.truth.sum(), self.truth.cumsum()
        masses = [place * total for place in places] + [end for end in ends if end < total]
        want = np.searchsorted(ends, masses, side="right")
        index, value = self.tree.find(torch.tensor(masses, dtype=torch.float64))
        assert index.tolist() == want.tolist()
        assert value.tolist() == self.truth[want].tolist()

    @invariant()
    def every_node_is_the_sum_of_its_children(self):
        if not hasattr(self, "tree"):
            return
        tree = self.tree
        assert np.array_equal(tree.levels[0][: len(self.truth)].numpy(), self.truth)
        assert tree.total == self.truth.sum()
        for children, parents in zip(tree.levels, tree.levels[1:], strict=False):
            sums = children.view(-1, tree.fanout).sum(1)
            assert torch.equal(parents[: len(sums)], sums)
            assert not parents[len(sums) :].any()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = effort(30, 12)


# -- a ring with a known history --------------------------------------------------------------------------------------


class History:
    """A ring with discrete actions and a list of all that was written, column by column."""

    def __init__(self, num_envs=3, rows=24, horizon=2, n=3, stack=1, fillers=True, **kwargs):
        shape, extra = ((stack, 1) if stack > 1 else (1,)), ("q", "value") if kwargs.get("from_actor") else ()
        specs, written = {"policy": ObsSpec(shape, stack=stack)}, 2 * horizon + 1 if fillers else horizon
        self.ring = Replay(ReplayLayout(specs, None, num_envs, rows, written, fillers, extra=extra), CPU)
        self.shape, self.n, self.gamma, self.count, self.fillers = shape, n, 0.9, num_envs, fillers
        rule = {"alpha": 0.6, "beta": 0.4, "beta_steps": None, "steps_per_tick": horizon * num_envs, **kwargs}
        from_actor = rule.pop("from_actor", False)
        self.ranked = Prioritized(self.ring, n, self.gamma, PriorityRule(**rule), from_actor)
        self.cursor, self.gen = Cursor(num_envs, CPU), torch.Generator().manual_seed(0)
        self.events, self.told = [[] for _ in range(num_envs)], [[] for _ in range(num_envs)]
        self.ring.begin(self.obs(0))

    def obs(self, number):
        return {"policy": torch.full((self.count, *self.shape), float(number))}

    def write(self, rows, told=None):
        """Rows with random ends; ``told``: (q, value) of each column, else random."""
        for _ in range(rows):
            u = torch.rand(4, self.count, generator=self.gen)
            reward, over = (u[0] * 8).round() / 8, u[1] < 0.15
            cut = ~over & (u[1] < 0.25)
            filler = u[2] < 0.05
            ends = (over & (u[2] < 0.7)) | cut  # else a life is lost, and the episode continues
            step = Step(
                self.obs(1),
                reward,
                over & ~filler,
                cut & ~filler,
                ends & ~filler,
                self.obs(2),
                torch.full_like(over, self.fillers),  # without filler rows, final observations are lost
                ~filler,
                {},
            )
            q, value = u[3], u[3] + 0.5
            if told is not None:
                q, value = (torch.full((self.count,), float(v)) for v in told)
            action = torch.zeros(self.count, dtype=torch.int64)
            self.ring.insert(Acted(action, {"q": q, "value": value}) if self.ring.extra else action, step)
            for i in range(self.count):
                flags = (bool(f[i]) for f in (step.terminated, step.truncated, step.first))
                event = Event(0, 0.0, reward[i].item(), *flags, self.fillers, bool(step.valid[i]), 1, 2)
                self.events[i] += stored(event)
                unknown = [(math.nan, math.nan)] * (len(stored(event)) - 1)  # no actor valued the final observation
                self.told[i] += [(q[i].item(), value[i].item()), *unknown]

    def seal(self):
        for mine, live in zip(self.cursor.tensors(), self.ring.live.tensors(), strict=True):
            mine.copy_(live)

    def open(self, scale=1.0):
        self.seal()
        self.ranked.open(self.cursor, torch.tensor(scale))

    def window(self, row, i, head):
        return n_step(self.events[i][:head], row, self.n, self.gamma)

    def expected(self):
        """Leaves of (row, column) that must be in the tree now, by brute force over the history."""
        out = {}
        for i, events in enumerate(self.events):
            head = len(events)
            for row in range(max(0, head - (self.ring.rows - self.ring.guard)), head - self.n):
                if self.window(row, i, head).mask:
                    out[row % self.ring.rows * self.count + i] = (row, i)
        return out

    def leaves(self):
        level = self.ranked.tree.levels[0]
        return {int(c): float(level[c]) for c in level.nonzero()[:, 0]}


@pytest.mark.parametrize(("horizon", "n", "stack"), [(1, 1, 1), (2, 3, 1), (4, 3, 4), (3, 1, 2)])
def test_exactly_the_complete_rows_that_nobody_may_overwrite_are_in_the_tree(horizon, n, stack):
    history = History(horizon=horizon, n=n, stack=stack, rows=30)
    history.write(7)
    history.ranked.begin(history.cursor)
    assert history.leaves().keys() == history.expected().keys()
    for _ in range(40):  # several times around
        history.write(horizon)
        history.open()
        assert history.leaves().keys() == history.expected().keys()
    assert len(history.leaves()) > 30
    assert len({round(v, 9) for v in history.leaves().values()}) == 1  # no update yet: the largest so far, for all


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(horizon=st.integers(1, 5), n=st.integers(1, 6), stack=st.integers(1, 4))
def test_the_smallest_ring_is_the_first_whose_guard_band_is_never_drawn(horizon, n, stack):
    least = least_rows(horizon, n, guard=horizon + stack)
    with pytest.raises(ValueError, match=f"{least - 1} rows is too small for priorities: expected at least {least}"):
        History(num_envs=2, horizon=horizon, n=n, stack=stack, fillers=False, rows=least - 1)
    with mock.patch.object(priority, "least_rows", return_value=0):
        small = History(num_envs=2, horizon=horizon, n=n, stack=stack, fillers=False, rows=least - 1)
    history = History(num_envs=2, horizon=horizon, n=n, stack=stack, fillers=False, rows=least)
    inside = wrong = 0
    for _ in range(3 * least // horizon):
        for one in (history, small):
            one.write(horizon)
            one.open()
        assert history.leaves().keys() == history.expected().keys()
        inside += len(history.leaves())
        wrong += len(small.leaves().keys() - small.expected().keys())
    assert inside > 0
    assert wrong > 0


# -- priorities -------------------------------------------------------------------------------------------------------


def test_a_learned_priority_is_the_clipped_error_to_the_power_of_alpha_and_the_largest_is_for_new_rows():
    history = History(alpha=0.7, clip=2.0)
    history.write(10)
    history.ranked.begin(history.cursor)
    cells = torch.tensor(sorted(history.leaves())[:4])
    history.ranked.update(cells, torch.tensor([-0.5, 3.0, 0.0, 1.5]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    got = [history.ranked.tree.levels[0][c].item() for c in cells]
    want = [(0.5 + FLOOR) ** 0.7, (2 + FLOOR) ** 0.7, FLOOR**0.7, 0.0]  # masked: never again
    assert got == pytest.approx(want, rel=1e-9)
    new = {*history.leaves()}
    history.write(2)
    history.open()
    fresh = {*history.leaves()} - new
    assert fresh
    assert all(history.leaves()[c] == pytest.approx((2 + FLOOR) ** 0.7, rel=1e-9) for c in fresh)


def test_a_new_row_begins_with_its_error_when_acted():
    history = History(from_actor=True, alpha=1.0, n=3)
    history.ranked.begin(history.cursor)
    seen = set()
    for _ in range(30):
        history.write(2)
        history.open(scale=0.5)
        for cell, (row, i) in history.expected().items():
            if cell in seen:
                continue
            window = history.window(row, i, len(history.events[i]))
            ahead = 0.0
            if window.discount > 0:
                ahead = window.discount * history.told[i][row + round(math.log(window.discount, 0.9))][1]
            want = abs(0.5 * window.reward + ahead - history.told[i][row][0])
            want = 1.0 if math.isnan(want) else want  # no actor valued the final observation
            assert history.leaves()[cell] == pytest.approx(want + FLOOR, abs=1e-6)
        seen = {*history.expected()}


def test_rows_that_no_network_acted_on_begin_with_the_largest():
    history = History(from_actor=True, alpha=1.0, n=1)
    history.write(2, told=(math.nan, math.nan))
    history.open()
    assert {round(v, 5) for v in history.leaves().values()} <= {round(1 + FLOOR, 5)}
    assert history.leaves()


# -- drawing ----------------------------------------------------------------------------------------------------------


def drawn(history, batches, size):
    index = [history.ranked.sample(history.cursor, size, history.gen).index for _ in range(batches)]
    return torch.cat(index)


@pytest.mark.parametrize(("size", "batches"), [(1, 2000), (7, 800), (64, 800)])
def test_rows_are_drawn_in_proportion_to_their_priorities(size, batches):
    history = History(rows=40, alpha=1.0)
    history.write(36)
    history.open()
    history.ranked.begin(history.cursor)
    cells = torch.tensor(sorted(history.leaves()))
    history.ranked.update(cells, torch.arange(1, len(cells) + 1) / 10, torch.ones(len(cells)))
    count = torch.bincount(drawn(history, batches, size), minlength=40 * 3)
    assert count.sum() == batches * size
    assert not count[[c for c in range(120) if c not in set(cells.tolist())]].any()
    leaves = history.ranked.tree.levels[0][cells]
    assert chisquare(count[cells], leaves / leaves.sum() * count.sum()).pvalue > 1e-3


def test_a_draw_is_the_window_that_the_ring_itself_would_give():
    history = History(rows=30, n=3, horizon=2)
    for _ in range(40):
        history.write(2)
        history.open()
    batch = history.ranked.sample(history.cursor, 64, history.gen)
    where = history.expected()
    for k, cell in enumerate(batch.index.tolist()):
        row, i = where[cell]
        want = history.window(row, i, len(history.events[i]))
        assert batch.mask[k] == 1
        assert batch.reward[k].item() == pytest.approx(want.reward, abs=1e-5)
        assert batch.discount[k].item() == pytest.approx(want.discount, rel=1e-6)


def test_importance_weights_are_those_of_the_paper_over_the_batchs_largest():
    history = History(rows=40, alpha=0.8, beta=0.7)
    history.write(36)
    history.ranked.begin(history.cursor)
    cells = torch.tensor(sorted(history.leaves()))
    history.ranked.update(cells, torch.linspace(0.1, 3, len(cells)), torch.ones(len(cells)))
    batch = history.ranked.sample(history.cursor, 32, history.gen)
    leaves = history.ranked.tree.levels[0]
    probabilities = (leaves[batch.index] / history.ranked.tree.total).tolist()
    want = importance_weights(probabilities, len(cells), 0.7)
    assert batch.weight.tolist() == pytest.approx(want, rel=1e-5)
    assert batch.weight.max() == 1
    assert batch.weight.min() < 0.5


def test_an_empty_tree_gives_rows_that_count_for_nothing():
    history = History()
    for rows in (0, 2):  # the second time there are rows, but none is complete
        history.write(rows)
        history.open()
        assert history.leaves() == {}
        batch = history.ranked.sample(history.cursor, 8, history.gen)
        assert not batch.mask.any()
        assert not batch.followed.any()
        assert not batch.weight.any()


def test_beta_rises_to_one_over_env_steps_and_stays():
    history = History(num_envs=3, horizon=2, beta=0.4, beta_steps=60)  # 6 env steps a tick: ten ticks
    got = []
    for _ in range(13):
        history.write(2)
        history.open()
        got.append(history.ranked.beta.item())
    want = [0.4, 0.46, 0.52, 0.58, 0.64, 0.7, 0.76, 0.82, 0.88, 0.94, 1.0, 1.0, 1.0]
    assert got == pytest.approx(want, abs=1e-15)  # in float64, as it is kept
