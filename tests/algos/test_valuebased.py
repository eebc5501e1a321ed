"""Value-based runs as a whole: exact counts and periods, the same bits in any order and after a resume, policies."""

import itertools
import json
import threading

import pytest
import run_files
import torch
from conftest import bits, differences, go_on, small_config, start, ticks
from dqn_runs import EVERY_VARIANT, PIXELS, VARIANTS, config_of
from run_files import manifest, points, rows, words
from sampling import sample

import pql
from pql.algos.value import GATHERED, target_updates, update_shares, value_counts
from pql.cli.main import main
from pql.config import leaves
from pql.config.compose import compose
from pql.config.layers import Presets
from pql.engine.executors import Inline, Threads
from pql.errors import ConfigError
from pql.nets.q import NoisyLinear
from pql.run.build import build
from pql.run.episodes import EpisodeRules, random_actions, run_episodes
from pql.run.evaluation import EvaluationPlan, evaluate_saved
from pql.run.policy import fresh_policy, load_policy, snapshot
from pql.run.session import Session

TICKS = 25


def run(config, executor=None, ticks=TICKS):
    return go_on(start(config, executor or Inline()), ticks)


# -- determinism ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", sample(["prioritized", "rainbow", "ape-x"], keep=["rainbow", "ape-x"]))
def test_concurrent_workers_give_the_same_bits_in_any_order_and_on_threads(variant):
    config = config_of(VARIANTS[variant], {"schedule": "concurrent"})
    reference = bits(run(config, Inline(("collector", "v"))))
    for order in itertools.permutations(("collector", "v")):
        assert differences(reference, bits(run(config, Inline(order)))) == [], order
    assert differences(reference, bits(run(config, Threads(("collector", "v"))))) == []
    assert {"learners/v/state/priorities/tree/level0", "learners/v/state/priorities/largest"} <= {*reference}


def test_vectors_of_the_spectral_norm_are_exchanged_with_the_weights():
    """BTR on pixels: the same bits in any order and on threads; the actor has the vectors of one tick ago."""
    config = config_of(VARIANTS["btr"], PIXELS, {"schedule": "concurrent"})
    parts = run(config, Inline(("collector", "v")), 12)
    first = bits(parts)
    for executor in (Inline(("v", "collector")), Threads(("collector", "v"))):
        assert differences(first, bits(run(config, executor, 12))) == []
    older = run(config, Inline(("collector", "v")), 11).policy.module.state_dict()
    own, acting = (net.state_dict() for net in (parts.policy.module, parts.collector.actor.policy))
    names = [k for k in own if k.endswith((".left", ".right"))]
    assert len(names) == 8
    for k in names:
        assert own[k].norm().item() == pytest.approx(1, abs=1e-6)
        assert torch.equal(acting[k], older[k])
        assert not torch.equal(acting[k], own[k])


@pytest.mark.parametrize("variant", ["dqn", "c51", "bfloat16"])
def test_bfloat16_is_for_the_learners_networks_alone(variant):
    """The quantiles' cosines are computed in float32: in bfloat16 those of 64 pi tau would have no correct digit."""
    fine = {"critic": {"quantiles": 64, "cosines": 64}, "noisy": None} if variant == "bfloat16" else {}
    parts = ticks(start(config_of(VARIANTS[variant], fine, {"amp": True}), Inline()), 8)
    state, acting = parts.learners["v"].state, parts.collector.actor.policy
    obs = {"policy": torch.randn(256, 4, generator=torch.Generator().manual_seed(1))}
    for net in state.nets:
        acting.load_state_dict(net.state_dict())
        rounded, exact = net(obs), acting(obs)
        assert rounded.dtype == exact.dtype == torch.float32
        error = (rounded - exact).square().mean() / exact.square().mean()
        assert 1e-8 < error.item() < 1e-3


@pytest.mark.parametrize("variant", ["dqn", "prioritized", "bfloat16"])
def test_bfloat16_keeps_small_differences_between_large_values(variant):
    """Values near 1,000, where neighbours of bfloat16 are 4 apart, and of actions less than 1 apart."""
    net = start(config_of(VARIANTS[variant], {"amp": True, "noisy": None}), Inline()).learners["v"].state.q.module
    with torch.no_grad():
        (net.advantage if net.value is None else net.value)[-1].bias += 1000.0
    obs = {"policy": torch.randn(256, 4, generator=torch.Generator().manual_seed(1))}
    rounded = net.values(obs)
    net.amp = False
    exact = net.values(obs)
    gap, error = exact.amax(1) - exact.amin(1), (rounded - exact).abs().amax(1)
    assert exact.mean().item() == pytest.approx(1000, abs=2)
    assert 0 < gap.median().item() < 1
    assert error.median() < 0.05 * gap.median()


def test_copies_to_the_target_network_have_the_vectors_of_the_spectral_norm():
    config = config_of(VARIANTS["btr"], PIXELS, {"target_period": 32, "v_per_step": 1})  # a copy every 4 updates
    parts = start(config, Inline())
    state = parts.learners["v"].state
    for tick in range(1, 9):
        parts.schedule.tick()
        mine, theirs = (net.state_dict() for net in (state.q.module, state.target.module))
        names = [k for k in mine if k.endswith((".left", ".right"))]
        assert len(names) == 8
        assert all(torch.equal(mine[k], theirs[k]) == (tick % 4 == 0) for k in names)


@pytest.mark.parametrize("variant", ["rainbow", "ape-x"])
def test_alternating_groups_give_the_bits_of_one_after_the_other(variant):
    turns, serial = (
        bits(run(config_of(VARIANTS[variant], {"placement": {"groups": 2, "overlap": overlap}})))
        for overlap in (True, False)
    )
    assert differences(turns, serial) == []


# -- the tick ---------------------------------------------------------------------------------------------------------


def test_priorities_are_errors_clipped_as_hubers_loss_is_or_whole_divergences():
    delta, plain, kl, quantiles = (
        build(config_of(VARIANTS[v], {"huber": h})).learners["v"].state.priorities
        for v, h in (("prioritized", 0.7), ("prioritized", None), ("rainbow", 0.7), ("btr", 0.7))
    )
    assert (delta.clip, plain.clip, kl.clip, quantiles.clip) == (0.7, None, None, None)
    assert kl.power(torch.tensor(5.0)).item() == pytest.approx(5**0.6, rel=1e-5)


@pytest.mark.parametrize("schedule", ["lockstep", "concurrent"])
@pytest.mark.parametrize(("ratio", "horizon", "updates"), [(2, 1, 2), (0.5, 2, 1), (1.25, 4, 5), (0.015625, 64, 1)])
def test_updates_per_step_are_exact(schedule, ratio, horizon, updates):
    parts = start(config_of({"schedule": schedule, "v_per_step": ratio, "target_period": 512}), Inline())
    begun = parts.collector.steps
    for tick in range(1, 4):
        parts.schedule.tick()
        assert parts.collector.steps - begun == tick * horizon
        assert parts.updates() == {"v": tick * updates, "p": 0}
        assert parts.schedule.lag == (1 if schedule == "concurrent" else 0)


def test_the_target_follows_every_so_many_env_steps_exactly():
    parts = start(config_of({"v_per_step": 2, "target_period": 40}), Inline())  # 8 envs: 5 ticks, 10 updates
    state, copies = parts.learners["v"].state, []
    for tick in range(1, 21):
        before = state.target.data.clone()
        parts.schedule.tick()
        if not torch.equal(before, state.target.data):
            assert torch.equal(state.target.data, state.q.data)
            copies.append(tick * 8)
    assert copies == [40, 80, 120, 160]


def test_a_period_that_is_no_whole_number_of_updates_is_refused_with_the_nearest():
    config = config_of({"v_per_step": 0.5, "target_period": 40})  # an update every 16 env steps
    with pytest.raises(ConfigError, match=r"target_period=40: expected .* a multiple of 16, such as 32"):
        build(config)
    assert target_updates(config_of({"v_per_step": 0.5, "target_period": 48}), value_counts(config)) == 3
    assert target_updates(config_of({"v_per_step": 2, "target_period": 4}), value_counts(config_of())) == 1


def test_ratios_that_no_horizon_meets_are_refused():
    with pytest.raises(ConfigError, match=r"algo\.v_per_step=0\.001: expected a ratio that gives a whole number"):
        build(config_of({"v_per_step": 0.001}))


@pytest.mark.parametrize(
    ("count", "size", "parts"),
    [
        (8, 100, [8]),
        (8, GATHERED // 8, [8]),
        (8, GATHERED // 3, [3, 3, 2]),
        (3, GATHERED, [1, 1, 1]),
        (2, 10 * GATHERED, [1, 1]),
        (1, 1, [1]),
    ],
)
def test_large_batches_are_gathered_apart(count, size, parts):
    assert update_shares(count, size) == parts


def test_a_burst_has_all_its_batches_whatever_their_size(monkeypatch):
    monkeypatch.setattr("pql.algos.value.GATHERED", 1)
    parts = start(config_of({"algo": {"v_per_step": 3}}), Inline())
    parts.schedule.tick()
    batches = list(parts.learners["v"].draw(3, torch.Generator().manual_seed(0)))
    assert [len(b.reward) for b in batches] == [parts.config.algo.batch_size] * 3
    assert not torch.equal(batches[0].index, batches[1].index)


def test_new_rows_come_up_as_soon_as_they_are_complete():
    parts = start(config_of(VARIANTS["ape-x"], {"schedule": "lockstep"}), Inline())
    ranked = parts.learners["v"].state.priorities
    ring = parts.collector.replays[0]
    for _ in range(6):
        assert torch.equal(ranked.entered, ring.live.head - 3)  # three rows late
        before = ring.live.head.clone()
        parts.schedule.tick()
        made = ring.live.head - before
    assert {*made.tolist()} <= {1, 2}
    unknown = ring.extra["q"].view(-1, 8).isnan()
    filler = ~ring.rule("valid", ring.flags.int()).view(-1, 8)
    for i, head in enumerate(ring.live.head.tolist()):  # those of the warm-up, and of filler rows
        assert int((unknown[:head, i] & ~filler[:head, i]).sum()) == 16


# -- runs and resuming ------------------------------------------------------------------------------------------------

WORDS = (
    *("task=cartpole", *run_files.QUICK, "replay.capacity=2048", "algo.batch_size=16", "algo.v_per_step=0.5"),
    *("algo.target_period=64", "eval.final=false"),
)
NAMES = [a for a in Presets().names("algo") if not a.endswith("_512")]  # those differ on task=atari alone
FAMILY = [a for a in NAMES if compose(["device=cpu", "scale=cpu", f"algo={a}"]).algo.family == "dqn"]


def train(run_dir, *overrides):
    return run_files.run(*WORDS, f"run_dir={run_dir}", *overrides)


def test_recorded_rows_are_in_the_tree_before_the_first_tick(tmp_path):
    train(tmp_path / "a", "algo=eps_rainbow", "budget.env_steps=1200", "replay.save=true")
    file = tmp_path / "a" / "replay.safetensors"
    words = [*WORDS, "algo=eps_rainbow", "budget.env_steps=2400", f"replay.prefill={file}", f"run_dir={tmp_path / 'b'}"]
    session = Session(compose(words), quiet=True)
    ring, ranked = session.parts.collector.replays[0], session.parts.learners["v"].state.priorities
    assert ring.live.head.min() > 8 + 50  # rows of the warm-up, and recorded ones
    assert torch.equal(ranked.entered, ring.live.head - 3)
    assert (ranked.tree.levels[0] > 0).sum() > 16 * 50
    session.train()


RESIDUAL = (  # BTR with images, and vectors of the spectral norm
    *("task=catch", "algo.encoder.kind=resnet", "algo.encoder.channels=[4]", "algo.encoder.pool=3"),
    "algo.encoder.spectral_norm=true",
)


@pytest.mark.fault(14, form="{algo}", count=10)
@pytest.mark.parametrize("algo", sample(FAMILY, keep=["dqn", "btr", "apex"]))
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, algo, trial):
    more = (*(RESIDUAL if algo == "btr" else ()), f"seed={trial}")
    half, full = (16 * (8 + 2 * n) for n in (30, 60))
    second, a, _ = run_files.whole_and_resumed(tmp_path, [*WORDS, f"algo={algo}", *more], half, full)
    assert any("priorities/tree" in k for k in a) == (algo in ("rainbow", "eps_rainbow", "apex", "btr"))
    assert (second.updates_v, second.updates_p) == (60, 0)


def test_a_run_writes_what_every_run_writes(tmp_path):
    summary = train(tmp_path, "algo=eps_rainbow", "budget.env_steps=2000", "eval.final=true")
    log = [row for row in rows(tmp_path) if "updates/v" in row]
    assert log[-1]["updates/v"] == summary.updates_v == (summary.env_steps // 16 - 8) // 2
    assert (log[-1]["ratio/v_per_step"], log[-1]["updates/p"]) == (0.5, 0)
    names = {k for row in log for k in row}
    assert {"busy/collector", "busy/v", "loss/critic", "value/q", "value/td_error", "grad_norm/critic"} <= names
    replay = {"replay/beta", "replay/weight_mean", "replay/bootstrap_lost"}
    assert {"explore/epsilon", "train/return_mean", *replay} <= names
    assert manifest(tmp_path / "checkpoints" / "last")["spec"]["action"] == {"discrete": 2}
    for kind in (tmp_path / "checkpoints" / "last", points(tmp_path)[-1]):  # a policy checkpoint and a resume point
        action = load_policy(kind)(torch.zeros(3, 4))
        assert (action.shape, action.dtype) == ((3,), torch.int64)


def test_the_command_line_trains_and_evaluates(tmp_path, capsys):
    words = [*WORDS, "algo=dqn", f"run_dir={tmp_path}", "budget.env_steps=1000"]
    assert main(["train", *words]) == 0
    assert "the tick is bounded by" in capsys.readouterr().out
    assert main(["eval", str(tmp_path), "num_envs=4", "epsilon=1"]) == 0
    (file,) = (tmp_path / "evaluations").iterdir()
    assert json.loads(file.read_text())["epsilon"] == 1.0
    assert main(["eval", str(tmp_path), "epsilon=2"]) == 2
    assert "epsilon=2.0: expected a number from 0 up to 1" in capsys.readouterr().err


# -- policies ---------------------------------------------------------------------------------------------------------


@EVERY_VARIANT
def test_a_policy_acts_greedily_in_the_values_without_noise(variant):
    parts = run(config_of(variant), ticks=3)
    policy = fresh_policy(parts.config, parts.env.spec, "cpu")
    policy.load_state_dict(snapshot(parts))
    obs = torch.randn(64, 4)
    net = parts.policy.module
    net.amp = False  # policies compute in float32
    for layer in net.modules():
        if isinstance(layer, NoisyLinear):
            layer.noise_in.zero_()  # the learner's last draw
            layer.noise_out.zero_()
    want = net.values(parts.collector.normalizer({"policy": obs}))
    got = policy(obs)
    best = want.gather(1, got.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(best, want.amax(1), rtol=0, atol=1e-5)  # weights lie elsewhere: near ties may turn


def test_an_evaluation_with_epsilon_is_random_to_that_extent_and_repeats():
    parts = run(config_of(), ticks=2)
    env = type(parts.env)(64, "cpu", max_episode_steps=50)
    seen = []

    def policy(obs):
        return torch.zeros(64, dtype=torch.int64)

    step = env.step

    def spy(action):
        seen.append(action.float().mean().item())
        return step(action)

    env.step = spy
    one = run_episodes(env, policy, seed=3, rules=EpisodeRules(epsilon=0.4))
    share = sum(seen) / len(seen)
    assert share == pytest.approx(0.2, abs=0.03)  # half of the random ones are the other action
    two = run_episodes(env, policy, seed=3, rules=EpisodeRules(epsilon=0.4))
    assert one.returns == two.returns
    assert run_episodes(env, policy, seed=3).returns != one.returns


def test_a_runs_own_evaluations_are_as_random_as_it_says(tmp_path, monkeypatch):
    """Beside the training, and, of an environment that there is only one of, after it."""
    shares = {}

    def noted(env, epsilon, seed):
        shares.setdefault(threading.current_thread().name, set()).add(epsilon)
        return random_actions(env, epsilon, seed)

    monkeypatch.setattr("pql.run.episodes.random_actions", noted)
    more = ["algo=dqn", "eval.final=true", "eval.epsilon=0.25", "budget.env_steps=1000"]
    train(tmp_path / "a", *more)
    words = [w for w in WORDS if not w.startswith(("task", "num_envs", "device"))]
    pql.train(*words, *more, f"run_dir={tmp_path / 'b'}", env=pql.make_env("cartpole", 16), quiet=True)
    assert shares == {"pql-evaluator": {0.25}, "MainThread": {0.25}}


def test_random_actions_in_evaluations_are_for_discrete_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"eval\.epsilon=0\.1: expected 0: the actions of pendulum are continuous"):
        Session(compose(words(tmp_path, "eval.epsilon=0.1")), quiet=True)


def test_an_exported_policy_agrees(tmp_path):
    pytest.importorskip("onnxruntime")
    from pql.run.export.writer import export_policy

    train(tmp_path / "run", "algo=rainbow", "budget.env_steps=600")
    (file,) = export_policy(tmp_path / "run", tmp_path / "out", ("pt2",)).files.values()  # below also as ONNX
    live, obs = load_policy(tmp_path / "run"), torch.randn(50, 4)
    assert (load_policy(file, trust=True)(obs) == live(obs)).float().mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["resnet", "hadamax"])
def test_an_exported_encoder_has_plain_convolutions(tmp_path, kind):
    """Without the singular vectors; the actions of all frames are those of the live policy."""
    pytest.importorskip("onnxruntime")
    from pql.run.export.writer import export_policy

    more = RESIDUAL if kind == "resnet" else ("task=catch", "algo.encoder.kind=hadamax", "algo.encoder.channels=[4,4]")
    train(tmp_path / "run", "algo=btr", *more, "budget.env_steps=600")
    out = export_policy(tmp_path / "run", tmp_path / "out", ("pt2", "onnx") if kind == "resnet" else ("onnx",))
    live = load_policy(tmp_path / "run")
    (shape,) = (s.shape for s in live.spec.obs.values())
    obs = torch.randint(256, (50, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for file in out.files.values():
        assert (load_policy(file, trust=True)(obs) == live(obs)).float().mean() > 0.95
    if kind == "resnet":
        assert "encoder.pictures.policy.net.2.first.left" in live.state_dict()["policy"]
        assert not [k for k in torch.export.load(out.files["pt2"]).state_dict if k.endswith((".left", ".right"))]


def test_a_run_starts_from_another_ones_network(tmp_path):
    train(tmp_path / "a", "algo=c51", "budget.env_steps=1000")
    again = [*WORDS, "algo=c51", "budget.env_steps=1000"]
    session = Session(compose([*again, f"run_dir={tmp_path / 'b'}", f"init_from={tmp_path / 'a'}"]), quiet=True)
    old = load_policy(tmp_path / "a").state_dict()["policy"]
    state = session.parts.learners["v"].state
    assert all(torch.equal(state.q.state_dict()[k], old[k]) for k in old)
    policy = f"init_from={tmp_path / 'a' / 'checkpoints' / 'last'}"
    only = Session(compose([*again, f"run_dir={tmp_path / 'c'}", policy]), quiet=True)
    target = only.parts.learners["v"].state.target.state_dict()
    assert all(torch.equal(target[k], old[k]) for k in old)
    for one in (session, only):
        one.closing.close()
    with pytest.raises(ConfigError, match=r"algo\.dueling=true: expected false, as in init_from"):
        train(tmp_path / "d", *again[-2:], "algo.dueling=true", f"init_from={tmp_path / 'a'}")


def test_features_of_a_network_from_elsewhere_get_the_heads(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, spec, config):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(4, 9)\n"
        "    def forward(self, obs):\n"
        "        return self.layer(obs['policy']).tanh()\n"
    )
    monkeypatch.chdir(tmp_path)
    summary = train(tmp_path / "run", "algo=rainbow", "algo.critic.net=mine:Net", "budget.env_steps=600")
    assert load_policy(summary.run_dir, trust=True)(torch.zeros(2, 4)).shape == (2,)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo.epsilon.kind=boltzmann"], "kind=boltzmann: expected one of annealed, decayed, ladder, fixed"),
        (["algo.epsilon.end=1.5"], "algo.epsilon.end=1.5: expected a number from 0 up to 1"),
        (["algo.epsilon.start=0.01"], "algo.epsilon.start=0.01: expected at least algo.epsilon.end=0.05"),
        (["algo.huber=0"], "algo.huber=0.0: expected a number above 0"),
        (["algo.target_perod=5"], "(did you mean algo.target_period?)"),
        (["algo.shared_grad=0.5"], "shared_grad=0.5: expected 1, or algo.dueling=true with it"),
        (["algo=c51", "algo.priority.initial=actor"], "initial=actor: expected max with algo.critic.atoms"),
        (["algo.priority.beta=0.5"], "priority.beta=0.5: expected algo.priority.alpha above 0 with it"),
        (["algo.rms_decay=0.9"], "rms_decay=0.9: expected algo.optimizer=rmsprop with it"),
        (["algo=c51", "algo.huber=2"], "huber=2.0: expected algo.critic.atoms=null with it"),
        (["algo.munchausen.tau=0.1"], "munchausen.tau=0.1: expected algo.munchausen.alpha above 0 with it"),
        (["algo.munchausen.alpha=0.9", "algo.double=true"], "double=true: expected false with algo.munchausen.alpha"),
        (["algo=c51", "algo.munchausen.alpha=0.9"], "munchausen.alpha=0.9: expected 0 with algo.critic.atoms"),
        (["algo.munchausen.clip=1"], "munchausen.clip=1.0: expected a number from -1000000.0 up to 0"),
        (["algo=c51", "algo.critic.quantiles=8"], "critic.quantiles=8: expected null with algo.critic.atoms"),
        (["algo.critic.quantiles=0"], "critic.quantiles=0: expected a number from 1 up to 1024"),
        (["algo.critic.cosines=9"], "critic.cosines=9: expected algo.critic.quantiles with it"),
        (["algo.critic.quantiles=8", "algo.huber=null"], "huber=null: expected a number with algo.critic.quantiles"),
        (
            ["algo=apex", "algo.critic.quantiles=8"],
            "initial=actor: expected max with algo.critic.quantiles: there priorities are errors of all quantiles",
        ),
        (["algo.encoder.pool=6"], "encoder.pool=6: expected algo.encoder.kind=resnet with it"),
        (["algo.encoder.spectral_norm=true"], "spectral_norm=true: expected algo.encoder.kind=resnet with it"),
        (["algo=pqn", "algo.encoder.spectral_norm=true"], "algo=pqn does not read it; dqn, r2d2 would"),
        (["algo=ppo", "algo.encoder.pool=0"], "encoder.pool=0: expected a number from 1 up to 1024"),
        (
            ["algo.epsilon.kind=none", "algo.epsilon.until=9"],
            "until=9: expected algo.epsilon.kind=annealed or decayed or",
        ),
        (["algo.epsilon.kind=decayed", "algo.epsilon.start=0.01"], "start=0.01: expected at least algo.epsilon.end"),
        (["algo.critic.v_max=50"], "algo.critic.v_max=50.0: expected algo.critic.atoms with it"),
        (["algo=apex", "algo.epsilon.steps=50"], "steps=50: expected algo.epsilon.kind=annealed or decayed with it"),
        (["algo.epsilon.base=0.5"], "base=0.5: expected algo.epsilon.kind=ladder with it"),
        (["placement.p_learner=cpu"], "placement.p_learner=cpu: expected null: the V-learner's network is the policy"),
        (["algo.policy.lr=1e-3"], "algo=dqn does not read it: see algo.critic"),
        (["algo.explore.low=0.1"], "algo=dqn does not read it: see algo.epsilon"),
        (["algo.critic.tau=0.1"], "algo=dqn does not read it: see algo.target_period"),
        (["algo.p_per_v=0.5"], "algo.p_per_v=0.5: expected no such setting: algo=dqn does not read it"),
        (["algo=pql", "algo.double=true"], "expected no such setting: algo=pql does not read it; dqn, r2d2 would"),
        (["algo.warmup_steps=0"], "algo.warmup_steps=0: expected at least 1"),
        (["batch=512"], "batch=512: expected a known setting (did you mean algo.batch_size; or algo=dqn_512, c51_512,"),
        (["algo.batch_sise=512"], "algo.batch_sise=512: expected a known setting (did you mean algo.batch_size?)"),
    ],
)
def test_a_wrong_word_is_named_with_what_is_allowed(words, message):
    with pytest.raises(ConfigError) as caught:
        compose(["device=cpu", "algo=dqn", "task=cartpole", *words])
    assert message in str(caught.value)


@pytest.mark.parametrize("algo", FAMILY)
@pytest.mark.parametrize("task", [("task=atari", "task.game=pong"), ("task=catch",)], ids=["atari", "catch"])
def test_a_tasks_own_settings_are_the_same_at_every_scale(task, algo):
    small, large = (compose(["device=cpu", f"scale={s}", *task, f"algo={algo}"]) for s in ("cpu", "gpu"))
    unread = ("algo.policy.", "algo.p_per_v", "algo.smoothing", "algo.critic.tau")
    pairs = zip(leaves(small), leaves(large), strict=True)
    assert [k for (k, a), (_, b) in pairs if a != b and not k.startswith(unread)] == []
    target_updates(small, value_counts(small))  # whole


def test_settings_that_another_one_switches_on_are_read():
    words = ["algo.priority.alpha=0.6", "algo.priority.beta=0.5", "algo.critic.atoms=5", "algo.critic.v_max=3"]
    words += ["algo.epsilon.kind=ladder", "algo.epsilon.base=0.3"]
    config = compose(["device=cpu", "algo=dqn", "task=cartpole", *words]).algo
    assert (config.priority.beta, config.critic.v_max, config.epsilon.base) == (0.5, 3, 0.3)


def test_actions_must_be_discrete_and_the_other_way_round():
    with pytest.raises(ConfigError, match=r"task=pendulum: expected a task with discrete actions; this one has Box"):
        build(config_of({"task": {"name": "pendulum"}}))
    with pytest.raises(ConfigError, match=r"this one has Discrete\(n=2, start=0\): for that, algo=dqn, ppo"):
        build(small_config(task={"name": "cartpole"}))


def test_a_replay_too_small_for_the_warm_up_is_refused():
    with pytest.raises(ConfigError, match=r"replay\.capacity=120: expected at least 168: 21 rows of 8 environments"):
        build(config_of({"replay": {"capacity": 120}}))


@pytest.mark.parametrize(("n", "warm_up", "rows"), [(3, 1, 22), (3, 13, 24)])
def test_the_smallest_prioritised_replay_gives_the_same_bits_in_any_order(n, warm_up, rows):
    """With one row less, rows in the guard band would be drawn while the collector overwrites them."""
    change = {**VARIANTS["ape-x"], "n_step": n, "warmup_steps": warm_up, "v_per_step": 0.25}  # 4 rows a tick
    config = config_of(change, {"replay": {"capacity": rows * 8}})
    one, other = (bits(run(config, Inline(order), 25)) for order in (("collector", "v"), ("v", "collector")))
    assert differences(one, other) == []
    needs = "a tick and its n-step windows" if warm_up < 13 else "the warm-up"
    match = rf"replay\.capacity={rows * 8 - 1}: expected at least {rows * 8}: {rows} rows of 8 environments for {needs}"
    with pytest.raises(ConfigError, match=match):
        build(config_of(change, {"replay": {"capacity": rows * 8 - 1}}))


def test_the_optimisers_settings_arrive():
    for kind, name in (("adam", "AdamW"), ("rmsprop", "RMSProp")):
        change = {"critic": {"lr": 3e-4, "eps": 2e-3, "grad_clip": 7.0}, "optimizer": kind, "rms_decay": 0.9}
        optimizer = build(config_of(change)).learners["v"].state.optimizer
        assert type(optimizer).__name__ == name
        assert (optimizer.eps, optimizer.clip, round(float(optimizer.lr), 8)) == (2e-3, 7.0, 3e-4)
        assert getattr(optimizer, "decay", 0.9) == 0.9


def test_evaluations_of_a_saved_run_repeat_the_runs_own_epsilon(tmp_path):
    train(tmp_path, "algo=dqn", "budget.env_steps=600", "eval.epsilon=0.25")
    assert evaluate_saved(tmp_path, EvaluationPlan(2, 2))["epsilon"] == 0.25
    assert evaluate_saved(tmp_path, EvaluationPlan(2, 2, epsilon=0.0))["epsilon"] == 0.0
