"""Memory of off-policy actor-critics: networks, sequences as transitions, stored states, runs, a hidden velocity."""

import copy
import itertools
from dataclasses import replace

import pytest
import run_files
import torch
from conftest import bits, configured, differences, go_on, start
from gates import train_until

from pql.algos.memory import recalled, remembers, transitions
from pql.config.compose import compose
from pql.engine.executors import Inline, Threads
from pql.errors import ConfigError
from pql.nets.memory import RECALLED, CriticMemory, PolicyMemory
from pql.nets.mlp import NetInput
from pql.run.build import build
from pql.run.environment import build_env
from pql.run.episodes import run_episodes
from pql.run.policy import fresh_policy, load_policy, snapshot

HIDDEN = {"name": "pendulum", "kwargs": {"velocity": False, "max_episode_steps": 11, "stagger": True}}
LSTM = {"lstm": 6, "length": 4, "burn_in": 3, "period": 2, "n_step": 2, "warmup_steps": 16}
GRU = {**LSTM, "cell": "gru", "critic": {"obs": ["policy"]}}
KINDS = {
    "sac": {**LSTM, "family": "sac", "alpha_updates": "critic", "explore": {"kind": "none"}},
    "td3": {**GRU, "policy": {"target": True}},
}
"""SAC with an LSTM and critics that read the state; TD3 with GRUs of policy and critics."""


def config_of(kind, *changes):
    return configured({"task": HIDDEN, "placement": {"matmul": "exact"}}, KINDS[kind], *changes)


def run(config, executor=None, ticks=12):
    return go_on(start(config, executor or Inline()), ticks)


# -- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_memories_unroll_as_they_step_and_forget_where_episodes_begin(kind):
    torch.manual_seed(0)
    size = {"lstm": 10, "gru": 5}[kind]
    policy, critic = PolicyMemory(NetInput("x", 3), kind, 5), CriticMemory(NetInput("x", 3), kind, 5, 2)
    assert policy.state_shapes == {"carry": (size,)}
    obs, action, first = {"x": torch.randn(7, 4, 3)}, torch.randn(7, 4, 2), torch.rand(7, 4) < 0.3
    start, own = torch.randn(4, size), torch.zeros(4, size)
    after, before = (memory.recall(obs, action, first, start, 2) for memory in (policy, critic))
    assert after.shape == before.shape == (5, 4, 5)
    carry = start
    for t in range(7):
        seen, carry = policy.step({"x": obs["x"][t]}, carry)
        if t >= 2:
            torch.testing.assert_close(after[t - 2], policy(seen))
            torch.testing.assert_close(before[t - 2], own[:, :5])
        own = critic.cell.step(torch.cat((obs["x"][t], action[t]), 1), own) * ~first[t].unsqueeze(1)
        carry = carry * ~first[t].unsqueeze(1)
    now = {"x": obs["x"][3], RECALLED["critic"]: before[1]}
    assert torch.equal(critic(now), torch.cat((obs["x"][3], before[1]), 1))


def test_a_gru_follows_its_equations():
    torch.manual_seed(1)
    memory = PolicyMemory(NetInput("x", 2), "gru", 3)
    x, h, cell = torch.randn(4, 2), torch.randn(4, 3), memory.cell.cell
    (wr, wz, wn), (ur, uz, un) = cell.weight_ih.chunk(3), cell.weight_hh.chunk(3)
    (br, bz, bn), (cr, cz, cn) = cell.bias_ih.chunk(3), cell.bias_hh.chunk(3)
    reset, keep = (x @ wr.T + br + h @ ur.T + cr).sigmoid(), (x @ wz.T + bz + h @ uz.T + cz).sigmoid()
    want = (1 - keep) * (x @ wn.T + bn + reset * (h @ un.T + cn)).tanh() + keep * h  # Cho et al. 2014
    torch.testing.assert_close(memory.step({"x": x}, h)[1], want)


# -- sequences as transitions -----------------------------------------------------------------------------------------


@torch.no_grad()
def stepped(net, seq, b, carry, with_actions):
    """Outputs of a memory in every row of one sequence: after it (policies) or before it (critics)."""
    out, memory = [], net.encoder
    for t in range(len(seq.first)):
        x = memory.seen({k: v[t, b : b + 1] for k, v in seq.obs.items()})
        x = torch.cat((x, seq.action[t, b : b + 1]), 1) if with_actions else x
        out.append(carry[0, : memory.cell.hidden])
        carry = memory.cell.step(x, carry)
        if not with_actions:
            out[-1] = carry[0, : memory.cell.hidden]
        carry = carry * ~seq.first[t, b]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_become_transitions_row_by_row(kind):
    parts = run(config_of(kind, {"batch_size": 128}), ticks=40)
    learner = parts.learners["v"]
    state, burn = learner.state, learner.settings.burn_in
    (seq,) = learner.draw(1, torch.Generator().manual_seed(1))
    batch = transitions(seq, burn, state.policy, state.critic.module, state.target.module)
    length, size = seq.mask.shape
    assert (length, size) == (4, 128 // 4)
    cut, critics = 0, remembers(state.critic.module)
    assert critics == (kind == "td3")
    for b in range(size):
        policy = stepped(state.policy, seq, b, seq.carry[b : b + 1], False)
        mine, old = (
            stepped(net.module, seq, b, torch.zeros(1, net.module.encoder.cell.carry_size), True) if critics else None
            for net in (state.critic, state.target)
        )
        for t in range(length):
            if not seq.mask[t, b]:
                continue
            k, after = t * size + b, burn + int(seq.successor[t, b])
            cut += bool(seq.first[burn : burn + t + 1, b].any())
            assert torch.equal(batch.obs["policy"][k], seq.obs["policy"][burn + t, b])
            assert torch.equal(batch.next_obs["policy"][k], seq.obs["policy"][after, b])
            assert torch.equal(batch.action[k], seq.action[burn + t, b])
            assert (batch.reward[k], batch.discount[k]) == (seq.reward[t, b], seq.discount[t, b])
            torch.testing.assert_close(batch.next_obs[RECALLED["policy"]][k], policy[after])
            if critics:
                torch.testing.assert_close(batch.obs[RECALLED["critic"]][k], mine[burn + t])
                torch.testing.assert_close(batch.next_obs[RECALLED["critic"]][k], old[after])
    assert cut > 3  # rows after an episode's end


def test_gradients_go_back_through_time_but_not_into_the_burn_in():
    parts = run(config_of("td3"), ticks=20)
    for learner, net in ((parts.learners["v"], "critic"), (parts.learners["p"], "policy")):
        (seq,) = learner.draw(1, torch.Generator().manual_seed(1))
        seq = seq._replace(obs={k: v.clone().requires_grad_() for k, v in seq.obs.items()}, first=seq.first & False)
        recalled(getattr(learner.state, net).module, seq, 3)[-1].sum().backward()
        grad = seq.obs["policy"].grad.abs().sum((1, 2))
        assert grad[:3].tolist() == [0, 0, 0]
        assert grad[3:-1].min() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_trains_every_part_of_its_network(kind):
    parts = run(config_of(kind), ticks=8)
    for learner, flat in ((parts.learners["v"], "critic"), (parts.learners["p"], "policy")):
        net = getattr(learner.state, flat).module
        (seq,) = learner.draw(1, torch.Generator().manual_seed(1))
        metrics = learner.update(learner.state, seq, learner.settings, learner.gen)
        assert all(torch.isfinite(v).all() for v in metrics.values())
        assert [k for k, p in net.named_parameters() if not p.grad.abs().sum() > 0] == []


# -- stored states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "groups"), [("sac", 1), ("td3", 2)])
def test_stored_states_are_those_of_the_whole_episode_with_the_same_weights(kind, groups):
    """The policy never changes here, so its states can be recomputed from the first row that it acted in."""
    parts = start(config_of(kind, {"placement": {"groups": groups}}), Inline())
    collector, warm = parts.collector, 16
    norm = copy.deepcopy(collector.normalizer)  # with the statistics that this run acts by
    collector.run(40)
    states, ring = collector.stores
    memory, n, compared = collector.actor.policy.encoder, ring.num_envs, 0
    for i in range(n):
        carry, made = torch.zeros(1, memory.cell.carry_size), 0
        for row in range(int(ring.live.head[i])):
            cell = torch.tensor([row * n + i])
            made += (valid := bool(ring.rule("valid", ring.flags[cell].int())))
            if not valid:  # the filler row of an episode's end
                carry.zero_()
            elif made > warm:
                if row % 2 == 0:
                    stored = states.at(torch.tensor([row]), torch.tensor([i]))
                    torch.testing.assert_close(stored, carry, rtol=0, atol=1e-6)
                    compared += bool(carry.any())
                with torch.no_grad():
                    carry = memory.step(norm({k: v[cell] for k, v in ring.obs.items()}), carry)[1]
    assert compared > 100  # and not all of them are an episode's first


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_concurrent_run_does_not_depend_on_the_order_of_workers(kind):
    config = config_of(kind, {"schedule": "concurrent"})
    orders = [*itertools.permutations(("collector", "v", "p"))]
    reference = bits(run(config, Inline(orders[0])))
    for order in orders[1:]:
        assert differences(reference, bits(run(config, Inline(order)))) == [], order
    assert differences(reference, bits(run(config, Threads(orders[0])))) == []
    assert "collector/replay/0/carry" in reference
    assert differences(reference, bits(run(replace(config, seed=4))))


@pytest.mark.parametrize("machine", ["stand-in"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_the_bits_of_eager_updates(machine, kind):
    config = config_of(kind)
    parts = [run(replace(config, graphs=graphs)) for graphs in ("on", "off")]
    captured = [[job.graph.graph is not None for job in one.jobs.values()] for one in parts]
    assert captured == [[True, True], [False, False]]
    assert differences(*map(bits, parts)) == []


WORDS = (
    *("task=pendulum", "task.kwargs.velocity=false", "algo=pql2", *run_files.QUICK[:3], "algo.critic.hidden=[16]"),
    *run_files.QUICK[5:],
    *("algo.policy.hidden=[16]", "replay.capacity=8192", "algo.batch_size=32", "algo.warmup_steps=20", "algo.lstm=8"),
    *("algo.length=8", "algo.burn_in=4", "algo.period=4", "eval.final=false", "placement.threads.p=1"),
)


@pytest.mark.parametrize("own", [(), ("algo.critic.obs=[policy]", "algo.cell=gru", "algo.schedule=lockstep")])
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, own):
    half, full = (16 * (20 + n) for n in (40, 80))
    _, a, _ = run_files.whole_and_resumed(tmp_path, [*WORDS, *own], half, full)
    assert any(k.endswith("carry") for k in a)


def test_an_exported_policy_and_a_loaded_one_act_like_the_learned_one(tmp_path):
    pytest.importorskip("onnxruntime")
    from pql.run.export.writer import export_policy

    run_files.run(*WORDS, "algo.cell=gru", f"run_dir={tmp_path / 'run'}", "budget.env_steps=800", "eval.final=true")
    assert "replay/used" in {k for row in run_files.rows(tmp_path / "run") for k in row}
    live = load_policy(tmp_path / "run")
    assert (live.groups, live.state_shapes) == (("policy",), {"carry": (8,)})
    out = export_policy(tmp_path / "run", tmp_path / "out")
    obs = torch.randn(5, 20, 2)
    for file in out.files.values():
        stored = load_policy(file, trust=True)
        one, two = (p.initial_state(20) for p in (stored, live))
        for x in obs:
            (a, one), (b, two) = stored.act(x, one), live.act(x, two)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
            torch.testing.assert_close(one["carry"], two["carry"], rtol=0, atol=1e-5)
        assert two["carry"].abs().max() > 0.01


def test_bonuses_for_new_states_and_recorded_rows_work_with_a_memory(tmp_path):
    run_files.run(
        *WORDS, f"run_dir={tmp_path / 'a'}", "budget.env_steps=600", "replay.save=true", "algo.rnd.weight=0.5"
    )
    assert "reward/bonus" in {k for row in run_files.rows(tmp_path / "a") for k in row}
    file = f"replay.prefill={tmp_path / 'a' / 'replay.safetensors'}"
    run_files.run(*WORDS, f"run_dir={tmp_path / 'b'}", "budget.env_steps=600", file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo.cell=rnn"], "algo.cell=rnn: expected one of lstm, gru"),
        (["algo.period=9"], "algo.period=9: expected at most algo.length=8"),
        (["algo.batch_size=36"], "algo.batch_size=36: expected a multiple of algo.length=8, such as 32"),
        (["algo.warmup_steps=9"], "algo.warmup_steps=9: expected at least 15 with algo.lstm, the rows of a sequence"),
        (["algo.symmetry.augment=half"], "algo.symmetry.augment=half: expected off with algo.lstm"),
        (["replay.demos=file"], "replay.demos=file: expected null with algo.lstm"),
        (["algo.policy.net=a:B"], "algo.policy.net=a:B: expected null with algo.lstm"),
        (["algo.policy.encoder=critic"], "algo.policy.encoder=critic: expected own with algo.lstm"),
        (["algo.encoder.shift=4"], "algo.encoder.shift=4: expected 0 with algo.lstm"),
        (
            ["algo.critic.net=a:B", "algo.critic_memory=true"],
            "algo.critic_memory=true: expected false or null with the",
        ),
        (["algo.lstm=null"], "algo.length=8: expected algo.lstm with it; nothing else reads it"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        compose([*WORDS, *words])
    assert message in str(caught.value)


def test_refusals_that_depend_on_the_task():
    normed = ("algo.critic.batch_norm=true", "algo.critic.layer_norm=false")
    build(compose([*WORDS, *normed]))  # these critics read the state
    with pytest.raises(ConfigError, match=r"batch_norm=true: expected false, or algo\.critic_memory=false"):
        build(compose([*WORDS, *normed, "algo.critic.obs=[policy]"]))
    with pytest.raises(ConfigError, match=r"replay\.capacity=432: expected at least 448: 28 rows of 16 environments"):
        build(compose([*WORDS, "replay.capacity=432", "algo.burn_in=9"]))


# -- learning ---------------------------------------------------------------------------------------------------------

SWING = {
    "budget": {"env_steps": 100_000},
    "num_envs": 32,
    "graphs": "auto",
    "replay": {"capacity": 200_000},
    "task": {"reward_scale": 0.1, "kwargs": {"velocity": False, "stagger": True}},
    "algo": {
        **{"family": "sac", "explore": {"kind": "none"}, "alpha": 0.1, "n_step": 1, "batch_size": 256, "v_per_step": 2},
        **{"warmup_steps": 50},
        "critic": {"hidden": [64, 64], "activation": "relu", "lr": 1e-3, "tau": 0.02},
        "policy": {"hidden": [64, 64], "activation": "relu", "lr": 1e-3},
    },
}
TICKS = 1500  # of 32 env steps


def greedy(parts):
    env = build_env(parts.config, 32)
    policy = fresh_policy(parts.config, env.spec, env.spec.device)
    policy.load_state_dict(snapshot(parts))
    return run_episodes(env, policy, seed=7).mean


OWN = {"cell": "gru", "critic": {"obs": ["policy"]}, "length": 16, "burn_in": 8}


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"length": 8, "burn_in": 4}, OWN], ids=["lstm", "gru, critics with one"])
def test_a_pendulum_is_swung_up_without_seeing_its_velocity(own, learns):
    learns(lambda seed: swung(seed, {"lstm": 32, "period": 4, **own}), -250)


@pytest.mark.slow
def test_without_a_memory_it_is_not():
    assert greedy(run(configured(SWING), ticks=TICKS)) < -600


def swung(seed, own):
    parts = start(replace(configured(SWING, own), seed=seed), Inline())
    return train_until(parts, -250, TICKS, lambda: greedy(parts), every=250)
