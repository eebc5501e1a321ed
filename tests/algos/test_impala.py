"""IMPALA and APPO: updates against manual computations, concurrent rollouts bit for bit, lags, whole runs."""

import itertools
from dataclasses import replace

import pytest
import run_files
import torch
from conftest import bits, differences, learners, start, ticks
from impala_runs import APPO, VARIANTS, config_of
from ppo_runs import A2C, learned_with
from run_files import rows
from sampling import some_of
from test_schedule import RecordingStreams, check_order
from torch import Generator

from pql.algos import impala, ppo
from pql.cli.main import main
from pql.config import VtraceConfig
from pql.config.compose import compose
from pql.engine.executors import Inline, Threads
from pql.engine.schedule import Trace
from pql.run.policy import load_policy

ORDERS = list(itertools.permutations(("collector", "learner")))

# -- schedules --------------------------------------------------------------------------------------------------------


@some_of(VARIANTS, keep=["lstm", "appo", "averaged, adam, two parts"])
def test_every_worker_order_and_threads_give_the_same_bits(variant):
    config = config_of(variant)
    reference = bits(ticks(start(config, Inline(ORDERS[0])), 8))
    assert differences(reference, bits(ticks(start(config, Inline(ORDERS[1])), 8))) == []
    threads = Threads(ORDERS[1])
    assert differences(reference, bits(ticks(start(config, threads), 8))) == []
    threads.close()
    other = bits(ticks(start(replace(config, seed=4), Inline()), 8))
    assert "learners/learner/state/policy/head.weight" in differences(reference, other)


@pytest.mark.parametrize("variant", ["lstm", "shallow", "appo"])
def test_the_learner_reads_the_rollout_of_the_tick_before(variant, monkeypatch):
    """Although the collector has by then filled the other half."""
    config = replace(config_of(VARIANTS[variant]), graphs="off")
    parts = ticks(start(config, Inline(ORDERS[0])), 3)
    rollout, module = parts.collector.stores[0], ppo if variant == "appo" else impala
    begin_tick, seen = module.begin_ppo_tick, []

    def spy(state, segment, settings):
        seen.append(segment)
        return begin_tick(state, segment, settings)

    monkeypatch.setattr(module, "begin_ppo_tick", spy)
    for _ in range(3):
        before = rollout.segment()
        parts.schedule.tick()
        for mine, theirs in zip(seen.pop(), before, strict=True):
            for a, b in zip(*(([*x.values()] if isinstance(x, dict) else [x]) for x in (mine, theirs)), strict=True):
                assert torch.equal(a, b)
        assert not torch.equal(rollout.segment().action, before.action)


def test_streams_order_every_cross_worker_read():
    trace = Trace()
    parts = start(config_of(), RecordingStreams(ORDERS[0], trace), trace)
    ticks(parts, 8)
    assert check_order(trace.events) == 2 * 7  # policy and rollout


@pytest.mark.parametrize(("schedule", "lag"), [("concurrent", 1), ("lockstep", 0)])
@pytest.mark.fault(25)
def test_ratios_and_lags_are_exact_at_every_tick(schedule, lag):
    parts = start(config_of({"algo": {"schedule": schedule}}), Inline())
    begun = parts.collector.steps
    assert begun == 4 + 6 * lag  # one rollout before the first tick
    for tick in range(1, 14):
        before = parts.collector.stores[0].segment().version.clone()
        parts.schedule.tick()
        assert parts.collector.steps - begun == 6 * tick
        assert parts.jobs["learner"].updates == tick
        assert parts.schedule.lag == lag
        metrics = parts.jobs["learner"].metrics.drain()
        assert metrics["lag/rows_mean"] == metrics["lag/rows_max"] == min(lag, tick - 1)
        acted = parts.collector.stores[0].segment().version
        assert (acted == tick - 1).all()
        assert lag == 0 or tick == 1 or (acted >= before).all()


@pytest.mark.fault(25)
def test_rows_of_different_lags_are_told_apart():
    """An environment that acted long ago keeps the version it acted with: the mean is over rows, the largest its."""
    parts = ticks(start(config_of({"algo": {"schedule": "lockstep"}}), Inline()), 5)
    parts.workers["collector"].run(6)
    rollout, learner = parts.collector.stores[0], parts.learners["learner"]
    rollout.version[:3, 1] = 1
    (batch,) = learner.draw(1, learner.gen)
    out = impala.impala_update(learner.state, batch, learner.settings, learner.gen)
    assert out["lag/rows_max"] == 4
    assert out["lag/rows_mean"].item() == pytest.approx(3 * 4 / batch.mask.sum().item())


# -- updates ----------------------------------------------------------------------------------------------------------


def fresh(*changes):
    """A learner and the minibatch of its first tick, under lockstep."""
    parts = start(config_of({"algo": {"schedule": "lockstep"}}, *changes), Inline())
    parts.workers["collector"].run(6)
    learner = parts.learners["learner"]
    return learner, next(iter(learner.draw(1, learner.gen)))


def gradient(learner, batch, settings):
    impala.impala_update(learner.state, batch, settings, Generator().manual_seed(0))
    return learner.state.optimizer.flat.data.grad.clone()


def test_an_update_by_hand():
    """Losses and gradients of both heads' biases from their formulas; half of the rows acted twice as likely."""
    learner, batch = fresh({"algo": {"policy": {"grad_clip": None}}})
    settings = replace(learner.settings, entropy_coef=0.0, vtrace=VtraceConfig(1.0, 1.0, 0.8), value_coef=0.7)
    net, dist = learner.state.net, learner.state.net.policy.dist
    shift = torch.zeros_like(batch.params)
    shift[::2].scatter_(-1, batch.action[::2].unsqueeze(-1), 0.5)
    batch = batch._replace(params=batch.params + shift)
    with torch.no_grad():
        params, values = net.evaluate(batch.obs, batch.carry[0], batch.first, batch.final_row)
    log_prob = dist.log_prob(params, batch.action)
    ratio = torch.exp(log_prob - dist.log_prob(batch.params, batch.action))
    assert (ratio[::2] < 0.99).all()
    target, advantage, weight = impala.correct(settings, batch, ratio.log(), values)
    assert torch.equal(weight, ratio.clamp(max=0.8))
    out = impala.impala_update(learner.state, batch, settings, learner.gen)
    count, error = batch.mask.sum().item(), (values[:6] - target) * batch.mask
    assert out["loss/policy"].item() == pytest.approx(-(weight * advantage * log_prob).sum().item() / count, rel=1e-4)
    assert out["loss/critic"].item() == pytest.approx((error**2).sum().item() / 2 / count, rel=1e-4)
    assert out["policy/entropy"].item() == pytest.approx(0.69, abs=0.01)
    chosen = torch.nn.functional.one_hot(batch.action, 2) - params.softmax(-1)
    expected = -((weight * advantage).unsqueeze(-1) * chosen).sum((0, 1))
    torch.testing.assert_close(net.policy.head.bias.grad, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.value.head.bias.grad, 0.7 * error.sum().view(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("correction", ["vtrace", "one_step", "none"])
@pytest.mark.parametrize("variant", ["summed, rmsprop", "lstm"])
def test_on_policy_it_is_a2c(variant, correction):
    """The gradient of PPO's code with one unclipped update, on the same rows; V-trace or not."""
    learner, batch = fresh(VARIANTS[variant], {"algo": {"minibatches": 1, "policy": {"grad_clip": None}}})
    settings = replace(learner.settings, reduce="mean", correction=correction)
    mine = gradient(learner, batch, settings)
    more = {"value_coef": 0.25, "shared": True, "horizon": 6, "policy": {"grad_clip": None}}
    lstm = learner.state.net.policy.body.carry_size // 2 or None
    algo = {"family": "ppo", "schedule": "lockstep", **A2C, **more, "lstm": lstm}
    parts = start(config_of({"algo": algo}), Inline())
    parts.workers["collector"].run(6)
    other = parts.learners["learner"]
    (rows_,) = other.draw(1, other.gen)
    ppo.ppo_update(other.state, rows_, other.settings, other.gen)
    torch.testing.assert_close(mine, other.state.optimizer.flat.data.grad, rtol=1e-3, atol=1e-6)


def test_summed_losses_are_averaged_ones_times_the_rows():
    learner, batch = fresh({"algo": {"policy": {"grad_clip": None, "lr": 1e-9}}})
    mean, total = (gradient(learner, batch, replace(learner.settings, reduce=r)) for r in ("mean", "sum"))
    torch.testing.assert_close(total, mean * batch.mask.sum(), rtol=1e-4, atol=1e-6)


def test_the_kl_option_pulls_towards_the_policy_that_acted():
    learner, batch = fresh({"algo": {"policy": {"grad_clip": None, "lr": 1e-9}}})
    batch = batch._replace(params=batch.params + torch.tensor([0.7, 0.0]))
    grads = {k: gradient(learner, batch, replace(learner.settings, kl_coef=k)) for k in (0.0, 2.0)}
    net = learner.state.net
    params, _ = net({k: v[:6] for k, v in batch.obs.items()})
    kl = (batch.mask * net.policy.dist.kl(batch.params, params)).sum()
    (expected,) = torch.autograd.grad(kl, net.policy.head.bias)
    index = [n for n, _ in net.named_parameters()].index("policy.head.bias")
    at = sum(p.numel() for p in list(net.parameters())[:index])
    torch.testing.assert_close((grads[2.0] - grads[0.0])[at : at + 2], 2 * expected, rtol=1e-3, atol=1e-4)


def test_corrections_differ_off_policy():
    learner, batch = fresh()
    values, log_ratio = torch.randn(batch.successor.max() + 8, 8), torch.full((6, 8), -1.0)
    both = {
        c: impala.correct(replace(learner.settings, correction=c), batch, log_ratio, values)
        for c in ("vtrace", "one_step", "none")
    }
    assert torch.equal(both["one_step"].target, both["none"].target)
    assert torch.equal(both["one_step"].weight, both["vtrace"].weight)
    assert (both["none"].weight == 1).all()
    assert not torch.allclose(both["vtrace"].target, both["none"].target)


@pytest.mark.parametrize("appo", [False, True])
def test_rows_that_do_not_count_change_nothing(appo):
    kwargs = {"autoreset": "next_step", "final_obs": "never", "episode_length": 5}
    config = config_of({"algo": {**(APPO if appo else {}), "schedule": "lockstep", "warmup_steps": 0}})
    config = replace(config, task=replace(config.task, name="counter", kwargs=kwargs))
    one, two = (learned_with(config, 6, reward=junk, version=version) for junk, version in ((77.0, -5), (0.0, 0)))
    assert differences(learners(bits(one)), learners(bits(two))) == []
    assert one.jobs["learner"].metrics.drain()["lag/rows_max"] == 0


@pytest.mark.parametrize("lstm", [None, 8])
def test_appo_on_policy_is_ppo(lstm):
    """Under lockstep V-trace has nothing to correct: the minibatches are PPO's."""
    change = {"algo": {**APPO, "schedule": "lockstep"}}
    runs = [
        start(config_of(change, {"algo": {"vtrace": {"enabled": v}, "lstm": lstm}}), Inline()) for v in (True, False)
    ]
    batches = []
    for parts in runs:
        parts.workers["collector"].run(6)
        learner = parts.learners["learner"]
        batches.append(list(learner.draw(4, learner.gen)))
    for mine, theirs in zip(*batches, strict=True):
        for name in ("advantage", "target", "log_prob", "params", "value", "mask"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=1e-5)
    assert (batches[0][0].lag.mean, batches[1][0].lag) == (0, None)


def test_appo_clips_around_the_policy_that_the_tick_began_with():
    parts = ticks(start(config_of(VARIANTS["appo"]), Inline()), 4)
    learner, view = parts.learners["learner"], parts.workers["learner"].pulls[0][1]
    parts.slots["rollout"].pull(view, parts.schedule.ticks)
    batch = next(iter(learner.draw(4, learner.gen)))
    with torch.no_grad():
        params, _ = ppo.evaluate_minibatch(learner.state.net, batch)
    ratio = learner.state.net.policy.dist.log_prob(params, batch.action) - batch.log_prob
    assert ratio.abs().max() < 1e-6
    assert batch.lag.mean == 1


# -- runs -------------------------------------------------------------------------------------------------------------

WORDS = ("task=cartpole", "task.kwargs.max_episode_steps=11", *run_files.QUICK, "algo.policy.hidden=[16]")
IMPALA = ("algo=impala", "algo.horizon=4", "algo.anneal_steps=3000")
LSTM = ("algo.lstm=8", "algo.shared=true")
CASES = {
    "impala": IMPALA,
    "lstm, filler rows": (*IMPALA, *LSTM, "task=counter", "algo.minibatches=2"),
    "lockstep": (*IMPALA, "algo.schedule=lockstep"),
    "appo": ("algo=appo", "algo.horizon=4", "algo.epochs=1", "algo.minibatches=1"),
}


@pytest.mark.fault(14, form=lambda given: "appo" if "algo=appo" in given["case"] else "impala", count=10)
@some_of(CASES, keep=["lstm, filler rows", "appo"], name="case")
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, case, trial):
    ahead = 0 if "algo.schedule=lockstep" in case else 4
    half, full = (16 * (8 + ahead + 4 * n) for n in (5, 10))
    words = [*WORDS, *case, f"seed={trial}"]
    if "task=counter" in case:
        words = [w for w in words if "max_episode_steps" not in w] + ["task.kwargs.autoreset=next_step"]
    second, one, _ = run_files.whole_and_resumed(tmp_path, words, half, full)
    assert one["learners/learner/state/progress/ticks"] == 10
    assert any(k.startswith("collector/replay/0/obs/") for k in one) == bool(ahead)
    last = [row for row in rows(tmp_path / "whole") if "updates/v" in row][-1]
    parts = 2 if "algo.minibatches=2" in case else 1
    assert (last["ratio/v_per_step"], last["ratio/p_per_v"]) == (parts / 4, 1)
    assert last["lag/policy_ticks"] == (1 if ahead else 0)
    assert {"loss/policy", "loss/critic", "policy/entropy", "policy/kl", "lag/rows_mean", "lag/rows_max"} <= {*last}
    assert second.updates_v == second.updates_p == 10 * parts


def test_the_command_line_trains_evaluates_and_hands_out_a_policy(tmp_path, capsys):
    words = [*WORDS, *CASES["impala"], f"run_dir={tmp_path}", "budget.env_steps=1000", *LSTM]
    assert main(["train", *words]) == 0
    assert main(["eval", str(tmp_path), "num_envs=4"]) == 0
    action = load_policy(tmp_path)(torch.randn(3, 4))
    assert (action.shape, action.dtype) == ((3,), torch.int64)
    again = [w for w in words if not w.startswith("run_dir")]
    assert main(["train", *again, f"run_dir={tmp_path / 'x'}", f"init_from={tmp_path}"]) == 0
    capsys.readouterr()
    again = [w for w in again if "lstm" not in w]
    assert main(["train", *again, f"run_dir={tmp_path / 'y'}", f"init_from={tmp_path}"]) == 2
    assert "algo.lstm=null: expected 8, as in init_from=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algo=impala algo.minibatches=3", "algo.minibatches=3: expected a divisor of num_envs=16, suc"),
        ("algo=ppo algo.vtrace.c_bar=0.5", "algo.vtrace.c_bar=0.5: expected algo.vtrace.enabled=true with it"),
        ("algo=impala algo.vtrace.rho_bar=0.5", "algo.vtrace.c_bar=1.0: expected at most algo.vtrace.rho_bar=0.5"),
        ("algo=impala algo.lstm=8 algo.shared=false", "algo.shared=false: expected true with"),
        ("algo=impala algo.correction=vtrac", "expected one of vtrace, one_step, none (did you mean vtrace?)"),
        (
            "algo=impala algo.schedule=replicas",
            "algo.schedule=replicas: expected concurrent or lockstep with algo=impala; only ppo can",
        ),
        ("algo=impala algo.critic.lr=1e-3", "algo.critic.lr=0.001: expected no such setting: algo=impala does not"),
        ("algo=a2c algo.schedule=concurrent", "algo.schedule=concurrent: expected lockstep or replicas: a2c learns"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path, capsys, words, message):
    known = [] if "task=pendulum" in words else ["task=cartpole"]
    more = (*run_files.QUICK[:4], f"run_dir={tmp_path}", "budget.env_steps=1000")
    assert main(["train", *known, *more, *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_papers_settings_on_atari():
    config = compose(["device=cpu", "algo=impala", "task=atari", "task.game=pong", "atari=paper"])
    p, net = config.algo, config.algo.policy
    assert (p.horizon, config.num_envs // p.minibatches, p.reduce, p.optimizer) == (20, 32, "sum", "rmsprop_tf")
    assert (net.lr, net.eps, net.grad_clip, p.entropy_coef, p.value_coef) == (6e-4, 0.01, 40.0, 0.01, 0.5)
    assert (p.anneal_steps, config.algo.encoder.kind, p.shared) == (config.budget.env_steps, "resnet", True)
    assert config.task.reward_clip == 1.0
