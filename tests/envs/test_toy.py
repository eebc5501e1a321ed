"""The toy tasks against independent answers: a manual table, rollouts, and Q fitted to the toy's data."""

import pytest
import torch
from regulator import optimal_gain, q_value, value

from pql.envs.toy import FILLER_REWARD, LOST, LQR, Counter, Recall
from pql.errors import ConfigError


def history(env, steps):
    """Per environment, its valid rows: (obs acted in, reward, terminated, truncated, final_obs, final_ok)."""
    obs = env.reset(0)["policy"]
    rows = [[] for _ in range(env.spec.num_envs)]
    for _ in range(steps):
        step = env.step(torch.zeros(env.spec.num_envs, env.spec.action.size))
        for i in range(env.spec.num_envs):
            if step.valid[i]:
                fields = (obs[i], step.reward[i], step.terminated[i], step.truncated[i], step.final_obs["policy"][i])
                rows[i].append((*(f.tolist() for f in fields), bool(step.final_ok[i])))
        obs = step.obs["policy"]
    return rows


def test_counter_against_a_table_written_by_hand():
    # Environment 1, limit 4, every second episode terminates: episode 0 is truncated, episode 1 terminates after
    # 1 + (2 + 3) mod 4 = 2 rows.
    rows = history(Counter(2, episode_length=4, terminate_every=2), 7)[1]
    assert rows == [
        ([0.0, 0.0], 1.0, False, False, [0.0, 1.0], True),
        ([0.0, 1.0], 1.125, False, False, [0.0, 2.0], True),
        ([0.0, 2.0], 1.25, False, False, [0.0, 3.0], True),
        ([0.0, 3.0], 1.375, False, True, [0.0, 4.0], True),
        ([1.0, 0.0], 11.0, False, False, [1.0, 1.0], True),
        ([1.0, 1.0], 11.125, True, False, [1.0, 2.0], True),
        ([2.0, 0.0], 21.0, False, False, [2.0, 1.0], True),
    ]


@pytest.mark.parametrize("kwargs", [{}, {"restart_every": 4, "stagger": True}, {"terminate_every": 0}])
def test_counter_tells_the_same_story_in_both_autoreset_modes(kwargs):
    same = history(Counter(9, **kwargs), 60)
    following = history(Counter(9, autoreset="next_step", **kwargs), 80)
    for one, other in zip(same, following, strict=True):
        both = min(len(one), len(other))
        assert both >= 55
        assert one[:both] == other[:both]


def test_counter_mixes_ends_and_lets_termination_win_on_the_limit():
    env = Counter(21)
    i, e = torch.arange(21)[:, None], torch.arange(21)
    length, terminates = env.length_of(i, e), env.terminates(i, e)
    assert length[~terminates].unique().tolist() == [7]
    assert length[terminates].unique().tolist() == [1, 2, 3, 4, 5, 6, 7]
    flags = [(row[2], row[3], row[0][1]) for rows in history(env, 100) for row in rows if row[2] or row[3]]
    assert (True, False, 6.0) in flags  # terminated on the last row that the limit allows
    assert {f[:2] for f in flags} == {(True, False), (False, True)}
    assert 0.2 < sum(f[0] for f in flags) / len(flags) < 0.7


def test_counter_next_step_rows():
    env = Counter(1, autoreset="next_step", episode_length=2, terminate_every=0)
    env.reset()
    action = torch.zeros(1, 2)
    env.step(action)
    end, filler, first = (env.step(action) for _ in range(3))
    assert end.truncated.item()
    assert end.obs["policy"].tolist() == [[0.0, 2.0]]
    assert (end.first.item(), end.valid.item()) == (False, True)
    assert (filler.first.item(), filler.valid.item(), filler.truncated.item()) == (True, False, False)
    assert filler.reward.item() == FILLER_REWARD
    assert filler.log["rows"].item() == 0
    assert filler.obs["policy"].tolist() == [[1.0, 0.0]]
    assert first.reward.item() == 10.0
    assert first.valid.item()


def test_counter_loses_the_final_observation():
    for mode, shown in (("same_step", [1.0, 0.0]), ("next_step", [LOST, LOST])):
        ends = [row for row in history(Counter(1, autoreset=mode, final_obs="never"), 8)[0] if row[2] or row[3]]
        assert ends[0][4:] == (shown, False)


def test_counter_restarts_unannounced_and_staggers():
    env = Counter(8, restart_every=4, stagger=True)
    assert env.reset()["policy"][:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert env.spec.info == {"restarts": True}
    seen = 0
    for _ in range(60):
        step = env.step(torch.zeros(8, 2))
        jump = step.first & ~step.terminated & ~step.truncated
        assert not step.final_ok[jump].any()
        assert (step.obs["policy"][jump][:, 1] == 0).all()
        assert step.valid.all()
        seen += int(jump.sum())
    assert seen >= 20


@pytest.mark.parametrize(
    ("kwargs", "setting"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"autoreset": "sometimes"}, "autoreset"),
        ({"final_obs": "maybe"}, "final_obs"),
        ({"episode_length": 0}, "episode_length"),
        ({"terminate_every": -1}, "terminate_every"),
        ({"restart_every": 1.5}, "restart_every"),
        ({"action_dim": 0}, "action_dim"),
    ],
)
def test_counter_names_the_setting_that_is_wrong(kwargs, setting):
    with pytest.raises(ConfigError, match=f"^{setting}="):
        Counter(**kwargs)


def test_recall_shows_its_cue_once_and_pays_for_it_at_the_end():
    env = Recall(64)
    cue = env.reset(3)["policy"][:, 0]
    assert set(cue.tolist()) == {-1.0, 1.0}
    for row in range(1, 7):
        action = 0.5 * cue[:, None] if row == 6 else torch.ones(64, 1)
        step = env.step(action)
        assert step.terminated.all() == (row == 6)
        assert step.reward.tolist() == [0.5 if row == 6 else 0.0] * 64
        assert step.log["success"].tolist() == [float(row == 6)] * 64
        assert (step.final_obs["policy"][:, 0] == 0).all()
        assert step.final_obs["policy"][:, 1].tolist() == pytest.approx([row / 6] * 64)
    cue = step.obs["policy"][:, 0]
    assert set(cue.tolist()) == {-1.0, 1.0}
    for _ in range(6):  # always the same answer: right for one cue
        step = env.step(torch.ones(64, 1))
    assert torch.equal(step.log["success"], (cue > 0).float())


def probe(env, count=64):
    gen = torch.Generator().manual_seed(7)
    x = torch.rand(count, 4, generator=gen, dtype=torch.float64) - 0.5
    u = torch.rand(count, 2, generator=gen, dtype=torch.float64) * 2 - 1
    return x, u


def rollout_value(env, x, gamma, gain, steps=400):
    """Discounted return of u = -gain x from x, summed row by row."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for k in range(steps):
        u = -x @ gain.T
        cost = torch.einsum("ni,ij,nj->n", x, env.Q, x) + torch.einsum("ni,ij,nj->n", u, env.R, u)
        total -= gamma**k * cost
        x = x @ env.A.T + u @ env.B.T
    return total


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99])
def test_lqr_values_equal_brute_force_sums(gamma):
    env = LQR(2)
    x, u = probe(env)
    for gain in (optimal_gain(env, gamma), torch.tensor([[0.3, 0.0, 0.1, 0.0], [-0.2, 0.5, 0.0, 0.2]]).double()):
        torch.testing.assert_close(value(env, x, gamma, gain), rollout_value(env, x, gamma, gain), rtol=1e-9, atol=1e-9)
        following = rollout_value(env, x @ env.A.T + u @ env.B.T, gamma, gain)
        first = -((x @ env.Q) * x).sum(1) - ((u @ env.R) * u).sum(1)
        torch.testing.assert_close(q_value(env, x, u, gamma, gain), first + gamma * following, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(value(env, x, gamma), rollout_value(env, x, gamma, optimal_gain(env, gamma)))


def features(x, u):
    """All products of two entries of (x, u): a quadratic form is linear in them. [B, 21]."""
    z = torch.cat((x, u), 1)
    i, j = torch.triu_indices(6, 6)
    return z[:, i] * z[:, j]


def test_lqr_closed_form_equals_value_iteration_on_its_own_transitions():
    """Fitted Q-iteration from steps of the environment, truncated rows included: knows neither A, B, Q nor R."""
    env, gamma = LQR(64, max_episode_steps=5), 0.9
    gen, rows = torch.Generator().manual_seed(2), []
    obs = env.reset(5)["policy"]
    for _ in range(12):
        action = torch.rand(64, 2, generator=gen) * 2 - 1
        step = env.step(action)
        rows.append((obs, action, step.reward, step.final_obs["policy"]))
        obs = step.obs["policy"]
    x, u, reward, following = (torch.cat(column).double() for column in zip(*rows, strict=True))
    fit = torch.linalg.pinv(features(x, u))
    i, j = torch.triu_indices(6, 6)
    weights = torch.zeros(21, dtype=torch.float64)
    for _ in range(250):
        H = torch.zeros(6, 6, dtype=torch.float64).index_put((i, j), weights)
        H = (H + H.T) / 2
        greedy = -following @ H[:4, 4:] @ torch.linalg.pinv(H[4:, 4:])
        weights = fit @ (reward + gamma * (features(following, greedy) @ weights))
    probe_x, probe_u = probe(env)
    fitted = features(probe_x, probe_u) @ weights
    torch.testing.assert_close(fitted, q_value(env, probe_x, probe_u, gamma), rtol=1e-4, atol=1e-4)


def test_lqr_optimal_control_never_saturates_on_reachable_states():
    """sup over starts and all allowed action sequences of |K x_k| stays below 1, for every step and discount."""
    env = LQR(2)
    for gamma in (0.9, 0.99, 1.0):
        K, power = optimal_gain(env, gamma), torch.eye(4, dtype=torch.float64)
        worst, pushed = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for _ in range(500):
            worst = torch.maximum(worst, (K @ power).abs().sum(1) * env.start_range + pushed)
            pushed = pushed + (K @ power @ env.B).abs().sum(1)
            power = env.A @ power
        assert (worst < 0.5).all()
