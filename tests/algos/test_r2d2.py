"""R2D2: formulas against the papers, stored states, whole runs, and a maze that needs memory."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import run_files
import torch
from conftest import bits, differences, go_on, start
from gates import train_until
from oracles import huber, q_target
from r2d2_runs import config_of
from run_files import points, rows
from sampling import sample

from pql.algos import r2d2
from pql.algos.r2d2 import r2d2_counts
from pql.algos.value import target_updates
from pql.config import leaves
from pql.config.compose import compose
from pql.engine.executors import Inline, Threads
from pql.engine.flat import Flat
from pql.engine.world import World
from pql.errors import ConfigError
from pql.nets.mlp import Layers, NetInput
from pql.nets.q import RecurrentQNetwork
from pql.run.build import build
from pql.run.environment import build_env
from pql.run.episodes import run_episodes
from pql.run.policy import fresh_policy, load_policy, snapshot
from pql.run.ranks import share_of
from pql.run.session import Session


def run(config, executor=None, ticks=12):
    return go_on(start(config, executor or Inline()), ticks)


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_the_rescaling_of_values_and_its_inverse():
    x = torch.tensor([3.0, 100.0, 1000.0, -3.0, 0.0])
    want = [1.003, 9.149876, 31.638584, -1.003, 0.0]
    assert r2d2.rescale_value(x, 1e-3).tolist() == pytest.approx(want, rel=1e-6)
    assert r2d2.restore(torch.tensor(want), 1e-3).tolist() == pytest.approx(x.tolist(), rel=1e-5, abs=1e-6)
    many = torch.linspace(-100, 100, 2001)
    assert (r2d2.restore(r2d2.rescale_value(many, 1e-3), 1e-3) - many).abs().max() < 2e-4


@pytest.mark.parametrize("epsilon", [None, 1e-3, 0.01])
def test_targets_are_discounted_in_units_of_the_reward(epsilon):
    gen = torch.Generator().manual_seed(0)
    reward, discount, ahead = (torch.rand(5, 3, generator=gen) * 4 - 2 for _ in range(3))

    def h(x):
        return x if epsilon is None else math.copysign(math.sqrt(abs(x) + 1) - 1, x) + epsilon * x

    got = r2d2.targets(reward, discount, ahead, epsilon)
    for t, b in itertools.product(range(5), range(3)):
        low, high = -1e4, 1e4  # h is increasing: its inverse by bisection
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if h(middle) < ahead[t, b] else (low, middle)
        assert got[t, b].item() == pytest.approx(h(float(reward[t, b]) + float(discount[t, b]) * low), abs=1e-5)


@torch.no_grad()
def steps_of(net, batch, b, burn_in):
    """Values in every row of one sequence, one row after the other, as the actor sees them."""
    values, carry = [], batch.carry[b : b + 1]
    for t in range(batch.first.shape[0]):
        q, carry = net.step({k: v[t, b : b + 1] for k, v in batch.obs.items()}, carry)
        values.append(q[0].tolist())
        carry = torch.zeros_like(carry) if batch.first[t, b] else carry
    return values[burn_in:]


@pytest.mark.parametrize("change", [{}, {"double": False, "huber": 0.1, "rescale": None}])
def test_an_update_follows_the_formulas_row_by_row(change):
    config = config_of({"burn_in": 5}, change)
    parts = run(config, ticks=9)
    learner = parts.learners["v"]
    state, settings = learner.state, learner.settings
    (batch,) = learner.draw(1, torch.Generator().manual_seed(1))
    net, target = state.nets
    losses, weights, priorities, cuts = 0.0, 0.0, [], 0
    for b in range(len(batch.index)):
        ours, theirs = (steps_of(n, batch, b, settings.burn_in) for n in (net, target))
        errors = []
        for t in range(batch.mask.shape[0]):
            if not batch.mask[t, b]:
                continue
            after, q = int(batch.successor[t, b]), ours[t][int(batch.action[settings.burn_in + t, b])]
            # An episode ends after its successor: that is the filler row with the final observation.
            cuts += bool(batch.first[settings.burn_in + after, b]) and batch.discount[t, b] > 0
            best = ours[after] if settings.double else None
            ahead = q_target(0.0, 1.0, theirs[after], best)
            wide = [torch.tensor([float(v)]) for v in (batch.reward[t, b], batch.discount[t, b], ahead)]
            error = float(r2d2.targets(*wide, settings.rescale)) - q
            losses += huber(error, settings.huber) * float(batch.weight[b])
            weights += 1
            errors.append(abs(error))
        priorities.append(0.9 * max(errors) + 0.1 * sum(errors) / len(errors))
    assert cuts > 0  # time limits: values of true final observations
    seen = {}
    state.priorities.update = lambda index, priority, mask: seen.update(index=index, priority=priority, mask=mask)
    metrics = r2d2.r2d2_update(state, batch, settings, learner.gen)
    assert metrics["loss/critic"].item() == pytest.approx(losses / weights, rel=1e-4)
    assert seen["priority"].tolist() == pytest.approx(priorities, rel=1e-4, abs=1e-6)
    assert torch.equal(seen["index"], batch.index)
    assert seen["mask"].tolist() == [1] * len(batch.index)


def test_no_gradient_flows_through_burn_in():
    config = config_of()
    parts = run(config, ticks=9)
    (batch,) = parts.learners["v"].draw(1, torch.Generator().manual_seed(1))
    leaves = {k: v.clone().requires_grad_() for k, v in batch.obs.items()}
    net = parts.learners["v"].state.nets[0]
    r2d2.sequence_values(net, batch._replace(obs=leaves), 3).sum().backward()
    grad = leaves["policy"].grad.abs().sum((1, 2))
    assert grad[:3].tolist() == [0, 0, 0]
    assert grad[3:].min() > 0


def test_bfloat16_is_for_the_learners_networks_alone():
    """Values near 1,000: the last layers are computed in float32, where actions differ by less than bfloat16 holds."""
    parts = run(config_of({"amp": True}), ticks=9)
    learner, acting = parts.learners["v"], parts.collector.actor.policy
    (batch,) = learner.draw(1, torch.Generator().manual_seed(1))
    for net in learner.state.nets:
        with torch.no_grad():
            net.value[-1].bias += 1000.0
        acting.load_state_dict(net.state_dict())
        rounded, exact = (r2d2.sequence_values(n, batch, 3) for n in (net, acting))
        assert rounded.dtype == exact.dtype == torch.float32
        gap, error = exact.amax(-1) - exact.amin(-1), (rounded - exact).abs().amax(-1)
        assert 1e-5 < error.median() < 0.05 * gap.median() < 0.05


# -- the stored states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_stored_states_are_those_of_the_whole_history_with_the_same_weights(groups):
    """The policy never changes here, so its states can be recomputed from the first row that it acted in."""
    parts = start(config_of({"placement": {"groups": groups}, "replay": {"capacity": 8 * 80}}), Inline())
    collector, warm = parts.collector, 16
    norm = copy.deepcopy(collector.normalizer)  # with the statistics that this run acts by
    collector.run(40)
    states, ring = collector.stores
    net, n = collector.actor.policy, ring.num_envs
    compared = 0
    for i in range(n):
        carry, made = torch.zeros(1, net.carry_size), 0
        for row in range(int(ring.live.head[i])):
            cell, at = torch.tensor([row * n + i]), (torch.tensor([row]), torch.tensor([i]))
            made += (valid := bool(ring.rule("valid", ring.flags[cell].int())))
            if not valid:  # the filler row of an episode's end
                carry.zero_()
            elif made > warm:
                if row % 4 == 0:
                    torch.testing.assert_close(states.at(*at), carry, rtol=0, atol=1e-6)
                    compared += bool(carry.any())
                with torch.no_grad():
                    carry = net.step(norm({k: v[cell] for k, v in ring.obs.items()}), carry)[1]
    assert compared > 40  # and not all of them are an episode's first
    assert not states.at(torch.zeros(n, dtype=torch.int64), torch.arange(n)).any()  # a warm-up leaves no state


def test_the_learner_sees_the_values_that_the_actor_saw():
    """With the weights that acted, a sequence that begins with its stored state gives the actor's own actions."""
    fixed = {"epsilon": {"kind": "fixed", "end": 0.0}, "burn_in": 0}
    parts = start(config_of(fixed), Inline())
    parts.collector.run(43)
    learner = parts.learners["v"]
    cursor = parts.learners["v"].draw.cursor
    for mine, live in zip(cursor.tensors(), parts.collector.replays[0].live.tensors(), strict=True):
        mine.copy_(live)
    ranked = learner.state.priorities
    ranked.open(cursor, torch.ones(()))
    begun = [int(s) for s in ranked.entered if s >= 24]  # after the 16 steps of the warm-up and their filler rows
    assert len(begun) > 20
    batch = ranked.sample(cursor, 200, torch.Generator().manual_seed(0))
    acted = (ranked.entered[batch.index] >= 24) & (batch.mask > 0)
    values = r2d2.sequence_values(parts.collector.actor.policy, batch, 0)[: batch.mask.shape[0]]
    top = values.topk(2, -1).values
    clear = (top[..., 0] - top[..., 1] > 1e-5) & acted
    assert clear.sum() > 200
    assert torch.equal(values.argmax(-1)[clear], batch.action[: len(clear)][clear])


def test_without_stored_states_sequences_begin_with_zeros_and_learn_otherwise():
    one, two = (run(config_of({"stored_state": stored})) for stored in (True, False))
    assert "learners/v/state/q/memory.cell.weight_ih" in differences(bits(one), bits(two))
    (batch,) = two.learners["v"].draw(1, torch.Generator().manual_seed(1))
    assert not batch.carry.any()


# -- the tick ---------------------------------------------------------------------------------------------------------


RATIOS = [(2, 3, 1), (1, 6, 1), (0.75, 8, 1), (12, 1, 2), (10, 3, 5)]


@pytest.mark.parametrize("schedule", ["lockstep", "concurrent"])
@pytest.mark.parametrize(("ratio", "horizon", "updates"), sample(RATIOS, keep=[RATIOS[2], RATIOS[4]]))
def test_the_replay_ratio_is_exact(schedule, ratio, horizon, updates):
    period = 8 * horizon  # 8 environments
    config = config_of({"schedule": schedule, "replay_ratio": ratio, "target_period": period})
    parts = start(config, Inline())
    begun = parts.env_steps
    for tick in range(1, 4):
        parts.schedule.tick()
        assert parts.updates() == {"v": tick * updates, "p": 0}
        assert parts.updates()["v"] * 6 * 8 == ratio * (parts.env_steps - begun)
        assert parts.env_steps - begun == tick * horizon * 8


def test_ratios_that_no_tick_meets_are_refused_with_one_that_does():
    with pytest.raises(ConfigError, match=r"replay_ratio=0\.00123: expected .* such as 0\.00585") as caught:
        build(config_of({"replay_ratio": 0.00123}))
    near = float(caught.value.allowed.split()[-1])
    r2d2_counts(config_of({"replay_ratio": 0.005859375}))
    assert near == pytest.approx(0.005859375, rel=1e-4)


# -- determinism ------------------------------------------------------------------------------------------------------


def test_concurrent_workers_give_the_same_bits_in_any_order_and_on_threads():
    config = config_of({"schedule": "concurrent", "priority": {"initial": "actor"}})
    reference = bits(run(config, Inline(("collector", "v"))))
    for order in itertools.permutations(("collector", "v")):
        assert differences(reference, bits(run(config, Inline(order)))) == [], order
    assert differences(reference, bits(run(config, Threads(("collector", "v"))))) == []
    assert {"learners/v/state/priorities/entered", "collector/replay/0/carry"} <= {*reference}
    assert differences(reference, bits(run(replace(config, seed=4))))


WORDS = (
    *("task=tmaze", "task.kwargs.length=3", "algo=r2d2", *run_files.QUICK, "num_envs=8", "replay.capacity=960"),
    *("algo.batch_size=6", "algo.n_step=2", "algo.warmup_steps=16", "algo.lstm=8", "algo.burn_in=3", "algo.length=8"),
    *("algo.period=4", "algo.replay_ratio=2", "algo.target_period=24", "eval.num_envs=4", "eval.final=false"),
)


def train(run_dir, *more):
    return run_files.run(*WORDS, f"run_dir={run_dir}", *more)


@pytest.mark.fault(14, form="r2d2", count=10)
@pytest.mark.parametrize("schedule", ["lockstep", "concurrent"])
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, schedule, trial):
    half, full = (8 * (16 + 3 * n) for n in (20, 40))
    words = [*WORDS, f"algo.schedule={schedule}", f"seed={trial}"]
    _, a, _ = run_files.whole_and_resumed(tmp_path, words, half, full)
    assert any(k.endswith("carry") for k in a)


# -- policies ---------------------------------------------------------------------------------------------------------


def test_a_run_logs_evaluates_and_gives_a_policy_with_a_memory(tmp_path):
    summary = train(tmp_path, "budget.env_steps=1000", "eval.final=true")
    assert 0 <= summary.success <= 1
    names = {k for row in rows(tmp_path) for k in row}
    assert {"loss/critic", "value/q", "replay/used", "replay/beta", "explore/epsilon", "replay/bootstrap_lost"} <= names
    config = compose([*WORDS, f"run_dir={tmp_path}"])
    for source in (tmp_path, points(tmp_path)[-1]):  # a policy checkpoint and a resume point
        policy = load_policy(source)
        assert policy.groups == ("policy", "last")
        assert policy.state_shapes == {"carry": (16,)}
        env = build_env(config, 5)
        obs, actions = env.reset(1), []
        for _ in range(6):
            actions.append(policy(obs))
            step = env.step(actions[-1])
            obs = step.obs
            policy.reset(step.first)
        state, obs = policy.initial_state(5), env.reset(1)
        for action in actions:
            again, state = policy.act(obs, state)
            assert torch.equal(action, again)
            step = env.step(action)
            obs, state = step.obs, {k: v * ~step.first.unsqueeze(1) for k, v in state.items()}


def test_a_policy_says_what_it_was_not_shown():
    parts = run(config_of(), ticks=1)
    policy = fresh_policy(parts.config, parts.env.spec, "cpu")
    with pytest.raises(ValueError, match=r"reads .*'policy', 'last'.* \['last'\] not among those given"):
        policy(torch.zeros(3, 2))


def test_recorded_rows_can_be_drawn_without_states(tmp_path):
    train(tmp_path / "a", "budget.env_steps=600", "replay.save=true")
    file = f"replay.prefill={tmp_path / 'a' / 'replay.safetensors'}"
    words = [*WORDS, "budget.env_steps=600", file, f"run_dir={tmp_path / 'b'}"]
    session = Session(compose(words), quiet=True)
    assert session.parts.collector.replays[0].live.head.min() > 16 + 40
    session.parts.schedule.tick()
    ranked = session.parts.learners["v"].state.priorities
    assert (ranked.tree.levels[0] > 0).sum() > 8 * 10
    session.train()


@pytest.mark.slow
def test_an_exported_policy_agrees(tmp_path):
    pytest.importorskip("onnxruntime")
    from pql.run.export.writer import export_policy

    train(tmp_path / "run", "budget.env_steps=600")
    out = export_policy(tmp_path / "run", tmp_path / "out")
    live = load_policy(tmp_path / "run")
    obs = {"policy": torch.randn(50, 2), "last": torch.randn(50, 4)}
    for file in out.files.values():
        stored = load_policy(file, trust=True)
        one, two = (p.act(obs, p.initial_state(50)) for p in (stored, live))
        assert (one[0] == two[0]).float().mean() > 0.95
        torch.testing.assert_close(one[1]["carry"], two[1]["carry"], rtol=0, atol=1e-5)


def test_a_live_environment_is_told_what_was_done_last(tmp_path):
    import pql

    env = pql.make_env("tmaze", num_envs=8, length=3)
    summary = pql.train(*WORDS[2:], f"run_dir={tmp_path}", "budget.env_steps=400", env=env, quiet=True)
    assert load_policy(summary.run_dir).groups == ("policy", "last")


def test_a_network_that_sees_observations_alone():
    parts = run(config_of({"feedback": False}), ticks=2)
    assert {*parts.env.spec.obs} == {"policy"}
    assert parts.collector.actor.policy.groups == ("policy",)


# -- networks and settings --------------------------------------------------------------------------------------------


def test_a_recurrent_network_unrolls_as_it_steps():
    torch.manual_seed(0)
    net = RecurrentQNetwork(NetInput("policy", 3), 5, 4, Layers([7, 6], "relu"), dueling=True)
    Flat(net)
    x, first = torch.randn(6, 2, 3), torch.rand(6, 2) < 0.3
    carry = state = torch.randn(2, 10)
    q = net.unroll({"policy": x}, carry, first)
    for t in range(6):
        one, state = net.step({"policy": x[t]}, state)
        torch.testing.assert_close(one, q[t])
        state = state * ~first[t].unsqueeze(1)
    torch.testing.assert_close(net.remember({"policy": x}, carry, first), state)


@pytest.mark.parametrize("task", [("task=atari", "task.game=pong"), ("task=pong",), ("task=tmaze",)])
def test_a_tasks_own_settings_are_the_same_at_every_scale_and_make_whole_ticks(task):
    small, large = (compose(["device=cpu", f"scale={s}", *task, "algo=r2d2"]) for s in ("cpu", "gpu"))
    assert [k for (k, a), (_, b) in zip(leaves(small), leaves(large), strict=True) if a != b] == []
    target_updates(small, r2d2_counts(small))  # whole
    shared = share_of(small, World(0, 2, 0, 2))
    assert r2d2_counts(shared) == r2d2_counts(small)  # each of two processes has half of everything


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo.v_per_step=2"], "algo=r2d2 does not read it: see algo.replay_ratio"),
        (["algo.overlap=40"], "a known setting"),
        (["algo.period=9"], "algo.period=9: expected at most algo.length=8"),
        (["algo.warmup_steps=12"], "algo.warmup_steps=12: expected at least 13, the rows of a sequence"),
        (["algo.eta=1.5"], "algo.eta=1.5: expected a number from 0 up to 1"),
        (["algo.noisy=0.5"], "algo.noisy=0.5: expected no such setting: algo=r2d2 does not read it; dqn would"),
        (
            ["algo=dqn", "algo.lstm=4"],
            "algo.lstm=4: expected no such setting: algo=dqn does not read it; ddpg, sac, distill, r2d2, ppo, impala",
        ),
        (["placement.p_learner=cpu"], "placement.p_learner=cpu: expected null"),
        (["algo.schedule=replicas"], "concurrent or lockstep with algo=r2d2; only ppo can have replicas"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        compose([*WORDS, *words])
    assert message in str(caught.value)


def test_a_replay_too_small_for_a_sequence_is_refused_and_the_smallest_is_not():
    longer = {"burn_in": 5}
    with pytest.raises(ConfigError, match=r"replay\.capacity=199: expected at least 200: 25 rows of 8"):
        build(config_of(longer, {"replay": {"capacity": 199}}))
    parts = start(config_of(longer, {"replay": {"capacity": 224}}), Inline())
    ranked = parts.learners["v"].state.priorities
    for _ in range(20):
        parts.schedule.tick()
        assert (ranked.tree.levels[0][:56].view(7, 8) > 0).any(0).all()  # a sequence of each environment


def test_continuous_actions_are_refused():
    with pytest.raises(ConfigError, match="a task with discrete actions"):
        build(compose(["task=pendulum", *WORDS[2:]]))


# -- learning ---------------------------------------------------------------------------------------------------------


def success(parts, episodes=100):
    env = build_env(parts.config, episodes)
    policy = fresh_policy(parts.config, env.spec, env.spec.device)
    policy.load_state_dict(snapshot(parts))
    return run_episodes(env, policy, seed=7).success


def test_the_sign_at_the_entrance_is_remembered_to_the_end_of_the_maze(learns):
    learns(remember, 0.9)  # without a memory .5


def remember(seed):
    words = ("device=cpu", "task=tmaze", "task.kwargs.length=5", "algo=r2d2", f"seed={seed}")
    parts = start(compose(words), Inline())
    return train_until(parts, 0.9, 300, lambda: success(parts), every=25)


def test_it_runs_on_remote_actors_that_come_late(tmp_path):
    pytest.importorskip("grpc")
    from remotes import acting, remote, wait_until

    from pql.remote.actor.sims import make_sim

    address = f"unix:{tmp_path}/socket"
    with remote(address, [make_sim("tmaze", 4, {"length": 3})], 8) as env:
        parts = build(config_of({"replay": {"capacity": 8 * 120}}), env=env, executor=Inline())
        parts.start()
        parts.warm_up(16)
        parts.begin()
        parts.schedule.tick()
        heads = parts.collector.replays[0].live.head
        assert int(heads[4:].sum()) == 0
        with acting(address, make_sim("tmaze", 4, {"length": 3})):
            wait_until(lambda: env.table.live == 2)
            for _ in range(12):
                parts.schedule.tick()
            assert int(heads[4:].min()) > 4
            assert heads.unique().numel() > 1
            (batch,) = parts.learners["v"].draw(1, torch.Generator().manual_seed(0))
            assert batch.mask.any()
            env.close()
