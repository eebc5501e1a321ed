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
@pytest.mark.parametrize("stacks", [False, True], ids=["plain", "stacks"])
def test_windows_equal_the_oracle(name, next_step, unequal, stacks):
    """With stacks, both observations of a window are those that the environment showed."""
    rates, expected = SCENARIOS[name]
    if stacks:
        depth = 2 if unequal and next_step else 3 if unequal else 4
        kinds = run_history(rates, depth, next_step, unequal, depth)
        assert expected <= set(kinds) | {"dropped", "lost"}
    else:
        kinds = sum((run_history(rates, seed, next_step, unequal) for seed in range(3)), Tally())
        ends = set(rates) - {"life", "restart", "cut"}
        assert set(kinds) == expected | ({"filler"} if ends else set())
    assert kinds.total() > 400  # 80 of these: more than 36,000 windows


@pytest.mark.parametrize("next_step", [False, True])
def test_no_window_is_lost_where_every_row_is_cut_off(next_step):
    """Whatever the simulator announced: half of the rows are then fillers, and all others bootstrap."""
    ring = Recorded(3, 30, 2, next_step)
    for _ in range(100 if next_step else 50):
        ring.insert(["truncate"] * 3)
    ring.seal()
    batch = ring.everything(2, 0.9)
    assert ring.check(batch, 0, 2, 0.9) == {"final": batch.mask.numel() // 2, "filler": batch.mask.numel() // 2}
    assert batch.mask.numel() >= 66


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("kind", ["step", "terminate", "truncate", "life"])
def test_a_restart_from_outside_ends_every_window_and_stack(kind, depth):
    """No window crosses into the new episode, and none is lost."""
    ring = Recorded(2, 24, 1, depth=depth)
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
        assert kinds["dropped"] == 0
        ring.insert(["step"] * 2)
        ring.seal()
    assert counts == [6, 8, 10]


# --- the counter environment: the same targets whatever the simulator's autoreset mode ---

EPISODES = 6


def counter_targets(env, n, gamma):
    """Multiset of all usable windows of the first episodes: (env, obs, action, reward, discount, next obs)."""
    steps, num_envs = 70, env.spec.num_envs
    same = env.spec.autoreset == "same_step"
    replay = Replay(ReplayLayout(env.spec.obs, 2, num_envs, 2 * steps + 3, 3, same), CPU)
    obs = env.reset(0)["policy"]
    replay.begin({"policy": obs})
    for _ in range(steps):
        action = torch.stack((obs.sum(1), obs[:, 1]), 1) / 64  # a function of the observation, so modes can agree
        step = env.step(action)
        replay.insert(action, step)
        obs = step.obs["policy"]
    cursor = replay.live
    pairs = [(row, i) for i, head in enumerate(cursor.head.tolist()) for row in range(head)]
    row, column = torch.tensor(pairs).unbind(1)
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
