"""n-step windows of the replay ring against a brute-force oracle over synthetic histories."""

from collections import Counter as Tally

import pytest
import torch
from histories import CPU, SCENARIOS, Recorded, run_history

from pql.data.replay import Replay
from pql.data.sizes import ReplayLayout
from pql.envs.toy import Counter

# --- the oracle over random histories ---


@pytest.mark.parametrize("unequal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["together", "apart"])
@pytest.mark.parametrize("next_step", [False, True], ids=["same_step", "next_step"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_windows_equal_the_oracle(name, next_step, unequal):
    rates, expected = SCENARIOS[name]
    kinds = sum((run_history(rates, seed, next_step, unequal) for seed in range(3)), Tally())
    ends = set(rates) - {"life", "restart", "cut"}
    assert set(kinds) == expected | ({"filler"} if next_step and ends else set())
    assert kinds.total() > 400  # 40 of these: more than 20,000 windows


def test_all_environments_time_out_at_once():
    """Every row of final observations is full at the same moment, ticks and limits aligned, over several wraps."""
    ring = Recorded(5, 20, 4, 4)
    finals = 0
    for t in range(1, 81):
        ring.insert(["truncate" if t % 4 == 0 else "step"] * 5)
        if t % 4 == 0:
            ring.seal()
            kinds = ring.check(ring.everything(3, 0.9), int(ring.cursor.lost), 3, 0.9)
            finals += kinds["final"]
            assert kinds["plain"] + kinds["final"] == kinds.total()
    assert finals > 500


def test_more_truncations_than_the_side_ring_holds():
    """Every row is cut off: exactly the newest K - horizon keep their successor, per column; the rest is counted."""
    ring = Recorded(3, 30, 2, 10)  # K = 3 + 2 + 1
    for _ in range(50):
        ring.insert(["truncate"] * 3)
    ring.seal()
    batch = ring.everything(2, 0.9)
    kept = ring.replay.finals - 2
    assert kept == 4
    assert batch.mask.sum() == 3 * kept
    assert ring.cursor.lost == batch.mask.numel() - 3 * kept
    ring.check(batch, int(ring.cursor.lost), 2, 0.9)


def test_rows_in_flight_are_never_read():
    """Rows that the writer is about to write may have any content; they must not even be multiplied by zero."""
    ring = Recorded(3, 12, 2, None)
    for _ in range(7):
        ring.insert(["step"] * 3)
    ring.seal()
    for stored, junk in (
        (ring.replay.reward, float("nan")),
        (ring.replay.action, float("nan")),
        (ring.replay.flags, 31),
    ):
        stored[7 * 3 :] = junk
    kinds = ring.check(ring.everything(4, 0.9), int(ring.cursor.lost), 4, 0.9)
    assert kinds == {"plain": 21}


@pytest.mark.parametrize("kind", ["step", "terminate", "truncate"])
def test_a_restart_from_outside_ends_every_window(kind):
    """No window crosses into the new episode; one that had an end or a final observation keeps it."""
    ring = Recorded(2, 12, 1, 4)
    ring.restart()  # also before the first row
    for what in ("step", "step", kind):
        ring.insert([what] * 2)
    ring.restart()
    ring.seal()
    counts = []
    for _ in range(3):
        batch = ring.everything(2, 0.9)
        lost = int(ring.cursor.lost)
        counts.append(int(batch.mask.sum()))
        kinds = ring.check(batch, lost, 2, 0.9)
        assert kinds["dropped"] == (4 if kind == "step" else 0)
        ring.insert(["step"] * 2)
        ring.seal()
    assert counts == ([2, 4, 6] if kind == "step" else [6, 8, 10])


# --- the counter environment: the same targets whatever the simulator's autoreset mode ---

EPISODES = 6


def counter_targets(env, n, gamma):
    """Multiset of all usable windows of the first episodes: (env, obs, action, reward, discount, next obs)."""
    steps, num_envs = 70, env.spec.num_envs
    replay = Replay(ReplayLayout(env.spec.obs, 2, num_envs, steps + 3, 1, env.spec.max_episode_steps), CPU)
    obs = env.reset(0)["policy"]
    replay.begin({"policy": obs})
    for _ in range(steps):
        action = torch.stack((obs.sum(1), obs[:, 1]), 1) / 64  # a function of the observation, so modes can agree
        step = env.step(action)
        replay.insert(action, step)
        obs = step.obs["policy"]
    row, column = torch.cartesian_prod(torch.arange(steps), torch.arange(num_envs)).unbind(1)
    cursor = replay.live
    b = replay.windows(cursor, row, column, cursor.head[column], n, gamma)
    keep = (b.mask > 0) & (b.obs["policy"][:, 0] < EPISODES)
    fields = (column, b.obs["policy"], b.action, b.reward, b.discount, b.next_obs["policy"])
    rows = zip(*(f[keep].tolist() for f in fields), strict=True)
    return Tally((i, *o, *a, r, d, *(x if d > 0 else ())) for i, o, a, r, d, x in rows)


def counter_expectation(env, n, gamma):
    """The same, from the environment's formulas alone. Windows that end in an unannounced restart are dropped."""
    out = Tally()
    for i in range(env.spec.num_envs):
        for e in range(EPISODES):
            one, two = torch.tensor(i), torch.tensor(e)
            ends, length = bool(env.terminates(one, two)), int(env.length_of(one, two))
            restart = bool(env.restarts(one, two))
            length = 2 if restart else length
            for s in range(length):
                m = min(n, length - s)
                if restart and s + m == length:
                    continue
                reward = sum(gamma**k * (i % 8 + 10 * (e % 8) + (s + k) / 8) for k in range(m))
                over = ends and s + m == length
                after = (0.0,) if over else (gamma**m, float(e), float(s + m))
                out[i, float(e), float(s), (e + s) / 64, s / 64, reward, *after] += 1
    return out


MODES = [(reset, final) for reset in ("same_step", "next_step") for final in ("always", "on_done")]


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kwargs", [{}, {"restart_every": 3}, {"terminate_every": 0}, {"terminate_every": 1}])
def test_counter_gives_the_same_targets_in_every_autoreset_mode(n, kwargs):
    gamma = 0.5  # keeps every sum exact
    want = counter_expectation(Counter(9, **kwargs), n, gamma)
    assert want.total() > 9 * EPISODES
    for reset, final in MODES:
        assert counter_targets(Counter(9, autoreset=reset, final_obs=final, **kwargs), n, gamma) == want
    # Where the simulator loses final observations, exactly the targets that would need one are missing.
    limit = Counter().episode_length
    fewer = Tally({w: c for w, c in want.items() if not (len(w) > 7 and w[-1] == limit)})
    for reset in ("same_step", "next_step"):
        assert counter_targets(Counter(9, autoreset=reset, final_obs="never", **kwargs), n, gamma) == fewer
