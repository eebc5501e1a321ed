"""The replay ring: sampling, storage, rejected input, restoring."""

import random
import re

import pytest
import torch
from histories import CPU, SPECS, Recorded, stack
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import chi_square_fits

from pql.contract.env import ObsSpec
from pql.data.flags import NEXT_FIRST, TERMINATED, TRUNCATED, VALID
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout, preflight, replay_bytes
from pql.errors import ConfigError, gib
from pql.run.store.checkpoint import flatten, unflatten
from pql.types import Step, split

STORED = ("flags", "action", "reward")

# --- sampling ---


def test_sampling_is_uniform_in_every_column_and_stays_inside():
    ring = Recorded(3, 24, 2)
    for t in range(100):
        who = [i for i, end in enumerate((5, 20, 100)) if t < end]
        ring.insert(["step"] * len(who), who)
    ring.seal()
    row, column, head = ring.replay.draw(ring.cursor, 60_000, torch.Generator().manual_seed(0))
    assert torch.equal(head, ring.cursor.head[column])
    assert chi_square_fits(column.bincount(minlength=3).tolist(), [20_000] * 3)
    for i, (low, high) in enumerate([(0, 5), (2, 20), (82, 100)]):  # 24 rows less guard: 18 at most
        drawn = row[column == i]
        assert (int(drawn.min()), int(drawn.max())) == (low, high - 1)
        counts = (drawn - low).bincount(minlength=high - low)
        assert chi_square_fits(counts.tolist(), [len(drawn) / (high - low)] * (high - low))


def test_rows_of_a_huge_ring_are_drawn_to_the_last_bit():
    """A float32 uniform would reach one row in 16 of these only."""
    ring = Recorded(2, 8, 1)
    ring.replay.rows = 2**28 + 2
    ring.cursor.head.fill_(2**29)
    row, _, _ = ring.replay.draw(ring.cursor, 4096, torch.Generator().manual_seed(0))
    assert row.min() >= 2**28
    assert row.max() < 2**29
    for bit in range(16):
        assert 0.4 < (row >> bit & 1).float().mean() < 0.6


def test_an_empty_ring_gives_masked_rows():
    ring = Recorded(2, 8, 2)
    gen = torch.Generator().manual_seed(0)
    batch = ring.replay.sample(ring.cursor, 8, 3, 0.9, gen)
    assert batch.mask.sum() == 0
    assert ring.replay.sample_obs(ring.cursor, 8, gen).mask.sum() == 0
    assert ring.cursor.lost == 0


def test_one_large_batch_splits_into_its_parts():
    ring = Recorded(3, 24, 2)
    for _ in range(20):
        ring.insert(["step"] * 3)
    ring.seal()
    gen = torch.Generator().manual_seed(0)
    whole, views = ring.replay.sample(ring.cursor, 12, 3, 0.9, gen), ring.replay.sample_obs(ring.cursor, 12, gen)
    assert split(whole, 1) == [whole]
    for i, part in enumerate(split(whole, 3)):
        assert part.index.tolist() == whole.index[4 * i : 4 * i + 4].tolist()
        ring.check(part, 0, 3, 0.9)
    for i, part in enumerate(split(views, 4)):
        assert all(torch.equal(part.obs[k], views.obs[k][3 * i : 3 * i + 3]) for k in SPECS)
        assert part.mask.shape == part.weight.shape == (3,)


# --- memory ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_storage_keeps_its_precision_and_bytes_stay_bytes(dtype):
    specs = {"policy": ObsSpec((4,)), "frame": ObsSpec((2, 2), torch.uint8)}
    replay = Replay(ReplayLayout(specs, 2, 3, 12, 1, True, dtype), CPU)
    gen = torch.Generator().manual_seed(0)
    off, on = torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)

    def draw():
        frame = torch.randint(256, (3, 2, 2), generator=gen).to(torch.uint8)
        return {"policy": torch.randn(3, 4, generator=gen) * 30, "frame": frame}

    first, second, final = draw(), draw(), draw()
    replay.begin(first)
    replay.insert(torch.zeros(3, 2), Step(second, torch.zeros(3), off, on, on, final, on, on, {}))
    head = replay.live.head
    batch = replay.windows(replay.live, head - 2, torch.arange(3), head, 1, 0.9)
    for seen, put in ((batch.obs, first), (batch.next_obs, final)):
        assert seen["policy"].dtype == torch.float32
        assert torch.equal(seen["policy"], put["policy"].to(dtype).float())
        assert seen["frame"].dtype == torch.uint8
        assert torch.equal(seen["frame"], put["frame"])
    assert replay.obs["policy"].dtype == dtype


SIZES = st.tuples(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(1, 4)), min_size=1, max_size=3),  # groups
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
)


def spec_of(groups):
    """Groups of (size, bytes, frames of a stack)."""
    types = (torch.float32, torch.uint8)
    return {str(k): ObsSpec((n, d) if n > 1 else (d,), types[b], n) for k, (d, b, n) in enumerate(groups)}


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(sizes=SIZES, rows=st.integers(4, 50), discrete=st.booleans(), extra=st.sampled_from([(), ("q", "value")]))
def test_bytes_computed_are_bytes_allocated(sizes, rows, discrete, extra):
    groups, action, num_envs, horizon, fillers, dtype = sizes
    size = None if discrete else action
    layout = ReplayLayout(spec_of(groups), size, num_envs, rows, horizon, fillers, dtype, extra)
    replay = Replay(layout, CPU)
    tensors = [*replay.obs.values(), *replay.extra.values(), *(getattr(replay, name) for name in STORED)]
    assert sum(t.nbytes for t in tensors) == replay_bytes(layout)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sizes=SIZES, rows=st.integers(10, 10**7), share=st.floats(0.01, 0.999))
def test_preflight_names_the_largest_capacity_that_fits(sizes, rows, share):
    groups, action, num_envs, horizon, fillers, dtype = sizes

    def size(rows):
        return replay_bytes(ReplayLayout(spec_of(groups), action, num_envs, rows, horizon, fillers, dtype))

    def ask(capacity, available):
        layout = ReplayLayout(spec_of(groups), action, num_envs, 0, horizon, fillers, dtype)
        return preflight(layout, capacity, available)

    need = size(rows)
    assert ask(rows * num_envs + num_envs - 1, need) == rows  # a capacity rounds down to whole rows
    available = int(need * share)
    with pytest.raises(ConfigError) as caught:
        ask(rows * num_envs, available)
    error = caught.value
    assert (error.setting, error.value) == ("replay.capacity", rows * num_envs)
    for amount in (need, available):
        assert gib(amount) in error.allowed
    best = int(re.search(r"at most (\d+)", error.allowed)[1])
    assert best % num_envs == 0
    assert size(best // num_envs + 1) > available
    if best:
        assert ask(best, available) == best // num_envs


# --- checkpoints ---


def copied(ring: Replay) -> Replay:
    """Restore a ring as a checkpoint does: a new one, filled from a flat copy of its state."""
    flat = {k: v.clone() for k, v in flatten({"ring": ring.state_dict()}).items()}
    fresh = Recorded(ring.num_envs, ring.rows, ring.horizon // 2, depth=max(ring.stacks.values())).replay
    addresses = {k: t.data_ptr() for k, t in fresh.state_dict().items()}
    fresh.load_state_dict(unflatten(flat, {"ring": fresh.state_dict()})["ring"])
    assert {k: t.data_ptr() for k, t in fresh.state_dict().items()} == addresses
    return fresh


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_a_restored_ring_holds_the_same_bits_however_full_it_was(depth, apart):
    """All that was ever written is restored: what the first writes later, the second does, to the last bit."""
    rng = random.Random(0)
    one = Recorded(3, 16, 2, depth=depth)
    for _ in range(40):
        two = copied(one.replay)
        assert all(torch.equal(v, getattr(two, k)) for k, v in vars(one.replay).items() if k in STORED)
        assert all(torch.equal(v, two.obs[k]) for k, v in one.replay.obs.items())
        assert all(map(torch.equal, one.replay.live.tensors(), two.live.tensors()))
        who = [i for i in range(3) if not apart or rng.random() < 0.6 or i == 1]
        one.insert([rng.choice(("step", "step", "truncate", "terminate")) for _ in who], who)


def test_what_was_written_for_an_answer_yet_to_come_is_kept():
    """It lies above the head: unread, but part of what an uninterrupted run saves when its rows have grown past it."""
    ring = Recorded(2, 12, 2)
    for _ in range(3):
        ring.insert(["step"] * 2)
    action, step = stack([sim.event("step", 5.0) for sim in ring.sims])
    ring.replay.insert(action, step, None, torch.tensor([False, False]))
    assert torch.equal(copied(ring.replay).obs["policy"], ring.replay.obs["policy"])


def test_an_answer_yet_to_come_takes_one_row_whatever_the_last_one_said():
    """The guard band has no room for the filler row of an end that did not happen again."""
    ring = Recorded(2, 12, 1)
    for _ in range(3):
        ring.insert(["step"] * 2)
    before = ring.replay.obs["policy"].clone()
    action, step = stack([sim.event("truncate", 5.0) for sim in ring.sims])
    ring.replay.insert(action, step, None, torch.tensor([False, True]))
    assert ring.replay.live.head.tolist() == [3, 5]
    changed = (ring.replay.obs["policy"] != before).any(1).view(12, 2)
    assert changed[:, 0].nonzero().flatten().tolist() == [4]
    assert changed[:, 1].nonzero().flatten().tolist() == [4, 5]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.fault(15)
def test_a_ring_of_an_older_release_is_taken(behind):
    """It had a bit for known final observations, which were kept apart from the rows (0.1: ``behind`` them)."""
    ring = Recorded(1, 12, 1, next_step=True).replay
    known, rows = 16, [VALID, VALID | TRUNCATED, VALID | TERMINATED, VALID | TRUNCATED | NEXT_FIRST]
    flags = [f | known for f in rows] + [VALID | TRUNCATED, VALID | TERMINATED]  # these two lost theirs
    state = {k: v.clone() for k, v in ring.state_dict().items()}
    state = {k: torch.arange(6).view(6, *[1] * (v.dim() - 1)).expand(6, *v.shape[1:]).to(v) for k, v in state.items()}
    state |= {"flags": torch.tensor(flags, dtype=torch.uint8), "head": torch.tensor([6])}
    if behind:
        state["obs.policy"] = torch.cat((state["obs.policy"], torch.full((11, 2), 99.0)))
    ring.load_state_dict(state)
    last = [VALID | TRUNCATED | NEXT_FIRST, VALID | TERMINATED | NEXT_FIRST]
    assert ring.flags[:6].tolist() == [*rows, *last]
    batch = ring.windows(ring.live, torch.arange(6), torch.zeros(6, dtype=torch.int64), torch.full((6,), 6), 1, 0.9)
    assert batch.mask.tolist() == [1, 1, 1, 0, 0, 1]
    assert batch.followed.tolist() == [1, 1, 1, 0, 0, 0]
    assert batch.next_obs["policy"][:3, 0].tolist() == [1, 2, 3]
    assert ring.live.lost == 2
    assert not (ring.obs["policy"] == 99).any() or behind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s | {"reward": s["reward"][:9]},
            "checkpoint=reward: expected 24 to 36 rows, from this run's settings",
        ),
        (lambda s: s | {"flags": s["flags"].repeat(20)}, "checkpoint=flags: expected 24 to 36 rows, .*, not 600"),
        (lambda s: s | {"obs.policy": s["obs.policy"][:0]}, "obs.policy: expected 24 to 36 rows"),
        (lambda s: s | {"head": s["head"][:1]}, "checkpoint=head: expected 3 to 3 rows"),
    ],
)
def test_rows_that_do_not_fit_the_ring_or_its_positions_are_refused(change, message):
    ring = Recorded(3, 12, 2)
    for _ in range(4):
        ring.insert(["truncate"] * 3)
    with pytest.raises(ConfigError, match=message):
        Recorded(3, 12, 2).replay.load_state_dict(change(dict(ring.replay.state_dict())))
