"""Environments that answer late: columns advance independently, and learning is not affected."""

from dataclasses import replace

import pytest
import torch
from conftest import fit, small_config
from late import Late, cells
from oracles import chi_square_fits
from r2d2_runs import config_of

from pql.algos import r2d2
from pql.contract.env import Discrete, ObsSpec
from pql.data.flags import VALID
from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.engine.executors import Inline
from pql.engine.interrupt import Interrupt
from pql.run.build import build

N, GAMMA = 8, 0.9


def collected(env, steps=20, **change):
    """A run's parts after its warm-up and ``steps`` ticks of four steps of every environment, on the mean."""
    base = {"replay": {"capacity": 4096 * N}, "num_envs": N, "algo": {"v_per_step": 0.25, "p_per_v": 1}}
    parts = build(small_config(**fit(base, change)), env=env, executor=Inline())
    parts.start()
    parts.warm_up(16)
    parts.begin()
    for _ in range(steps):
        parts.schedule.tick()
    return parts


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_targets_are_those_of_the_same_history_without_delay(autoreset):
    kwargs = {"autoreset": autoreset, "final_obs": "on_done", "restart_every": 4, "stagger": True}
    envs = [Late(late=share, **kwargs) for share in (0.0, 0.1)]
    on_time, late = (collected(env).collector.replays[0] for env in envs)
    made = [env.time.tolist() for env in envs]
    assert (len({*made[0]}), len({*made[1]}) > 1) == (1, True)  # they did advance apart
    assert sum(made[1]) == pytest.approx(96 * N, abs=4)
    heads = torch.minimum(on_time.live.head, late.live.head)
    for n in (1, 3):
        rows = int(heads.min()) - n  # windows that are complete on both sides
        assert rows > 60
        one, two = (ring.windows(ring.live, *cells(ring, rows), n, GAMMA) for ring in (on_time, late))
        assert 0 < float(one.mask.mean()) < 1
        assert torch.equal(one.mask, two.mask)
        for name in ("reward", "discount", "followed"):
            assert torch.equal(getattr(one, name)[one.mask > 0], getattr(two, name)[one.mask > 0]), name
        for name in ("obs", "next_obs"):
            here, there = (getattr(b, name)["policy"][b.mask > 0] for b in (one, two))
            assert torch.equal(here, there), name


def sequences_of(env, steps=60):
    """A run's sequences and their targets, by column and first row, after steps of the policy that it began with."""
    greedy = {"normalize_obs": False, "epsilon": {"kind": "fixed", "end": 0.0}}
    parts = build(config_of(greedy), env=env, executor=Inline())
    parts.start()
    parts.warm_up(16)
    parts.begin()
    parts.collector.run(steps)
    learner, cursor = parts.learners["v"], parts.learners["v"].draw.cursor
    for mine, live in zip(cursor.tensors(), parts.collector.replays[0].live.tensors(), strict=True):
        mine.copy_(live)
    sequences, out = learner.state.priorities.sequences, {}
    start, usable = sequences.starts(cursor)
    for index in usable.nonzero().flatten():
        batch = sequences.read(cursor, start[index].view(1), sequences.column(index).view(1))
        q, after = (r2d2.sequence_values(net, batch, sequences.burn_in) for net in learner.state.nets)
        ahead = after.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1).gather(0, batch.successor)
        target = r2d2.targets(batch.reward, batch.discount, ahead, learner.settings.rescale)
        row = int(start[index])
        out[int(index) % N, row] = (batch.carry, batch.action, batch.mask, target * batch.mask)
    return out, cursor.head


def test_sequences_are_those_of_the_same_history_without_delay():
    """R2D2: states that were stored, what was done last, and targets; from the second episode after the warm-up on,
    whose random actions differ."""
    kwargs = {"restart_every": 4, "stagger": True, "autoreset": "next_step", "final_obs": "on_done"}
    made = []
    for late in (0.0, 0.1):
        env = Late(late=late, **kwargs)
        env.spec = replace(env.spec, action=Discrete(3))
        made.append(sequences_of(env))
    (on_time, _), (late, heads) = made
    assert heads.unique().numel() > 1
    both = [k for k in on_time.keys() & late.keys() if k[1] >= 40]
    assert len(both) > 20
    for key in both:
        for name, ours, theirs in zip(("carry", "action", "mask", "target"), late[key], on_time[key], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=f"{name} of {key}")
    assert sum(bool(late[k][0].any()) for k in both) > 10  # most do not begin with an episode


def test_the_action_that_was_sent_is_the_one_in_the_row():
    """However often the slice has acted since: a late environment's action, and its noise, are left alone."""
    env = Late(late=0.3)
    change = {"algo": {"explore": {"kind": "redrawn", "repeat": True}}}
    ring = collected(env, **change).collector.replays[0]
    for i in range(N):
        cell = torch.arange(int(ring.live.head[i])) * N + i
        cell = cell[ring.flags[cell] & VALID > 0]  # all but filler rows
        assert torch.equal(ring.action[cell], torch.stack(env.sent[i][: len(cell)]))


def test_a_replaced_actor_begins_an_episode_that_no_window_crosses_into():
    lost = {(3, 40), (6, 25)}
    ring = collected(Late(lost=lost, terminate_every=0, episode_length=50)).collector.replays[0]
    for column, row in lost:
        around = torch.arange(row - 4, row + 4)
        where = torch.full_like(around, column)
        batch = ring.windows(ring.live, around, where, ring.live.head[where], 3, GAMMA)
        obs, after = batch.obs["policy"], batch.next_obs["policy"]
        assert batch.mask.tolist() == [1, 1, 1, 1, 0, 1, 1, 1]  # the row whose action was lost: a filler
        same = batch.mask > 0
        assert torch.equal(obs[same, 0], after[same, 0])  # start and end of a window are of one episode
        assert (after - obs)[:, 1].tolist()[:4] == [3, 3, 2, 1]  # the rows before end with what was last seen


@pytest.mark.parametrize("schedule", ["lockstep", "concurrent"])
@pytest.mark.parametrize(("gone", "short"), [((), 0), ((0, 5), 0), ((0, 1, 2, 3, 4, 5, 7), 1)])
def test_ratios_count_transitions(schedule, gone, short):
    """With one of eight environments a tick ends short of its eight transitions: four are the most an environment may
    make. The learners then sit one out."""
    env = Late(gone=gone, late=0.1)
    parts = build(small_config(algo={"schedule": schedule, "v_per_step": 0.5, "n_step": 1}), env=env, executor=Inline())
    parts.start()
    parts.warm_up(16)
    parts.begin()
    sat_out = 0
    for _ in range(20):
        before = parts.collector.behind_target()
        updates = parts.jobs["v"].updates
        parts.schedule.tick()
        rested = before if schedule == "concurrent" else parts.collector.behind_target()
        assert parts.jobs["v"].updates - updates == (0 if rested else 2)  # a tick is four steps: p_per_v is 1/2
        sat_out += rested
        learned = parts.jobs["v"].updates / 0.5 * N
        made = env.rows - 16 * N
        assert abs(made - learned) <= 4 * N + N  # never ahead or behind by more than a tick and one group
    assert bool(sat_out) == bool(short)
    assert parts.env_steps == env.rows
    assert parts.counters()["transitions"] == env.rows


def test_a_run_that_is_to_end_does_not_wait_for_its_warm_up():
    """No environment ever answers: the missing steps of the warm-up stay due."""
    parts = build(small_config(), env=Late(gone=range(8)), executor=Inline())
    parts.start()
    with Interrupt() as interrupt:
        interrupt.asked = True
        parts.warm_up(16)
    assert (parts.env_steps, parts.collector.behind_target()) == (0, True)


def test_no_environment_makes_more_rows_in_a_tick_than_the_guard_band_holds():
    env = Late(gone=(1, 2, 3, 4, 5, 6, 7))
    parts = collected(env, steps=0, algo={"n_step": 1})
    ring = parts.collector.replays[0]
    for _ in range(5):
        before = ring.live.head.clone()
        parts.schedule.tick()
        assert int((ring.live.head - before).max()) <= ring.guard - 1


def test_rows_are_drawn_evenly_however_long_their_columns_are():
    ring = Replay(ReplayLayout({"policy": ObsSpec((1,))}, 1, 4, 64, 2, False), torch.device("cpu"), ragged=True)
    ring.live.head.copy_(torch.tensor([0, 10, 200, 30]))
    row, column, head = ring.draw(ring.live, 40_000, torch.Generator().manual_seed(1))
    lengths = [0, 10, 61, 30]
    assert torch.equal(head, ring.live.head[column])
    assert chi_square_fits(
        [int(((column == c) & (head - 1 - row == a)).sum()) for c in range(4) for a in range(lengths[c])],
        [40_000 / sum(lengths)] * sum(lengths),
    )
    ring.live.head.zero_()
    assert (ring.draw(ring.live, 8, torch.Generator())[0] < 0).all()  # empty: rows that are masked


def test_priorities_hold_with_columns_apart():
    """Every row that may be drawn is in the tree, no other is: the same as with equal columns."""
    env = Late(late=0.2, gone=(2,), episode_length=9)
    env.spec = type(env.spec)(**{**vars(env.spec), "action": Discrete(2)})
    change = {"family": "dqn", "n_step": 3, "priority": {"alpha": 0.6}, "target_period": 64}
    parts = collected(env, steps=25, algo=change, replay={"capacity": 100 * N})
    ranked, ring, cursor = (
        parts.learners["v"].state.priorities,
        parts.collector.replays[0],
        parts.learners["v"].draw.cursor,
    )
    ranked.open(cursor, torch.tensor(1.0))  # as of the newest seal
    leaves = ranked.tree.levels[0][: ring.rows * N].view(ring.rows, N)
    head = cursor.head
    for column in range(N):
        top = int(head[column])
        low = max(0, top - ring.reach)
        row = torch.arange(low, max(low, top - 3))
        where = torch.full_like(row, column)
        mask = ring.targets(cursor, row, where, head[where], 3, GAMMA).mask
        inside = torch.zeros(ring.rows, dtype=torch.bool)
        inside[row[mask] % ring.rows] = True
        assert torch.equal(leaves[:, column] > 0, inside), column
