"""PPO and A2C: losses and rules against manual computations, exact on-policy ratios, learning on known problems."""

import math

import pytest
import torch
from conftest import bits, differences, learners, small_config, start, ticks
from families import FAMILIES
from ppo_runs import EVERY_VARIANT, VARIANTS, config_of, learned_with
from torch import Generator

from pql.algos import ppo
from pql.config.compose import compose
from pql.data.normalize import Moments
from pql.engine.executors import Inline
from pql.errors import ConfigError
from pql.run.build import build

# -- on-policy --------------------------------------------------------------------------------------------------------


@EVERY_VARIANT
@pytest.mark.parametrize("limit", [5, 200])
def test_the_first_minibatch_is_on_policy(variant, limit):
    """Weights, statistics, memory and actions (before clamping) are those that acted: every ratio is 1."""
    task = {"kwargs": {"max_episode_steps": limit, "stagger": True}}
    config = config_of({"task": task}, variant, {"algo": {"epochs": 1}})  # what is checked comes before a second one
    parts = ticks(start(config, Inline()), 3)
    horizon, learner = parts.counts.horizon, parts.learners["learner"]
    parts.workers["collector"].run(horizon)
    state = learner.state
    (batch, *_) = learner.draw(parts.counts.updates["learner"], learner.gen)
    with torch.no_grad():
        params, _ = ppo.evaluate_minibatch(state.net, batch)
        ratio = torch.exp(state.net.policy.dist.log_prob(params, batch.action) - batch.log_prob)
    assert batch.fresh
    assert batch.mask.sum() > 0
    assert (ratio - 1).abs().max() < 1e-6
    assert state.net.policy.dist.kl(batch.params, params).abs().max() < 1e-6
    assert state.progress.steps_per_tick == 8 * horizon


@pytest.mark.parametrize("variant", ["gaussian", "lstm"])
def test_the_check_sees_statistics_that_have_moved_on(variant):
    parts = ticks(start(config_of(VARIANTS[variant]), Inline()), 2)
    rollout, learner = parts.collector.stores[0], parts.learners["learner"]
    parts.workers["collector"].run(8)
    for mine, newer in zip(rollout.norm.frozen(), parts.collector.normalizer.frozen(), strict=True):
        mine.copy_(newer)
    (batch, *_) = learner.draw(8, learner.gen)
    with torch.no_grad():
        params, _ = ppo.evaluate_minibatch(learner.state.net, batch)
    ratio = torch.exp(learner.state.net.policy.dist.log_prob(params, batch.action) - batch.log_prob)
    assert (ratio - 1).abs().max() > 1e-5


@pytest.mark.parametrize("squash", [False, True])
def test_actions_are_stored_before_they_are_clamped_or_squashed(squash):
    parts = start(config_of({"algo": {"squash": squash, "init_std": 3.0}}), Inline())
    sent, step = [], parts.env.step

    def spy(action):
        sent.append(action.clone())
        return step(action)

    parts.env.step = spy
    parts.workers["collector"].run(8)
    raw = parts.collector.stores[0].action
    assert raw.abs().max() > 1
    assert torch.equal(torch.stack(sent), torch.tanh(raw) if squash else raw.clamp(-1, 1))


@pytest.mark.parametrize("value", ["own", "shared"])
def test_memories_are_carried_from_one_segment_to_the_next(value):
    """Two rollouts of eight rows are one of sixteen, cut in two: same actions, same values."""
    task = {"name": "cartpole", "kwargs": {"max_episode_steps": 11, "stagger": True}}
    once = {"epochs": 1, "minibatches": 1}  # nothing is learned here
    change = {"task": task, "algo": {"normalize_obs": False, "lstm": 8, "shared": value == "shared", **once}}
    long = start(config_of(change, {"algo": {"horizon": 16}}), Inline())
    short = start(config_of(change), Inline())
    long.workers["collector"].run(16)
    whole, learner = long.collector.stores[0].segment(), long.learners["learner"]
    expected = ppo.segment_values(learner.state, whole)
    for part in (slice(0, 8), slice(8, 16)):
        short.workers["collector"].run(8)
        segment = short.collector.stores[0].segment()
        values = ppo.segment_values(short.learners["learner"].state, segment)
        assert torch.equal(segment.action, whole.action[part])
        assert torch.allclose(values[:8], expected[:16][part], atol=1e-6)
    assert torch.allclose(values[8], expected[16], atol=1e-6)


def test_a_final_observation_is_valued_with_the_memory_of_its_row():
    task = {"name": "cartpole", "kwargs": {"max_episode_steps": 3}}
    parts = start(config_of({"task": task, "algo": {"lstm": 8}}), Inline())
    parts.workers["collector"].run(8)
    segment, state = parts.collector.stores[0].segment(), parts.learners["learner"].state
    body, head, checked = state.net.value_body, state.net.value, 0
    values = ppo.segment_values(state, segment)
    with torch.no_grad():
        for i in range(8):
            carry = torch.zeros(1, body.carry_size)  # the first rollout begins with an episode, here after the warm-up
            carry = carry if segment.fresh[i] else state.progress.carry[i : i + 1] * 0
            for t in range(8):
                out, left = body.step({"policy": segment.obs["policy"][t, i : i + 1]}, carry)
                assert values[t, i].item() == pytest.approx(head(out).item(), abs=1e-6)
                if int(segment.successor[t, i]) > 8:
                    place = int(segment.successor[t, i])
                    out, _ = body.step({"policy": segment.obs["policy"][place, i : i + 1]}, left)
                    assert values[place, i].item() == pytest.approx(head(out).item(), abs=1e-6)
                    checked += 1
                carry = torch.zeros_like(left) if segment.first[t, i] else left
    assert checked >= 16


# -- manual formulas --------------------------------------------------------------------------------------------------


def test_the_clipped_loss_by_hand():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1])
    advantage = torch.tensor([2.0, 2.0, -2.0, -2.0, 3.0])
    #  min(3, 2.4); min(1, 1.6); min(-3, -2.4); min(-1, -1.6); inside
    expected = [-2.4, -1.0, 3.0, 1.6, -3.3]
    assert ppo.surrogate_loss(ratio, advantage, 0.2).tolist() == pytest.approx(expected)
    assert ppo.surrogate_loss(ratio, advantage, torch.tensor(0.2)).tolist() == pytest.approx(expected)
    assert ppo.surrogate_loss(ratio, advantage, None).tolist() == pytest.approx([-3.0, -1.0, 3.0, 1.0, -3.3])


def test_the_clipped_loss_has_no_gradient_beyond_its_range():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1], requires_grad=True)
    ppo.surrogate_loss(ratio, torch.tensor([2.0, 2.0, -2.0, -2.0, 3.0]), 0.2).sum().backward()
    assert ratio.grad.tolist() == pytest.approx([0.0, -2.0, 2.0, 0.0, -3.0])


def test_the_value_loss_by_hand():
    value, target, old = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([2.0, 0.0, 0.3]), torch.tensor([0.0, 0.0, 0.0])
    assert ppo.value_loss(value, target, old, None).tolist() == pytest.approx([1.0, 1.0, 0.04])
    # held at .2, .2, .1: the worse of the two
    assert ppo.value_loss(value, target, old, 0.2).tolist() == pytest.approx([3.24, 1.0, 0.04])


@pytest.mark.parametrize(
    ("lr", "kl", "expected"),
    [
        (1e-3, 0.0201, 1e-3 / 1.5),
        (1e-3, 0.0199, 1e-3),
        (1e-3, 0.0051, 1e-3),
        (1e-3, 0.0049, 1.5e-3),
        (1e-3, 0.0, 1.5e-3),
        (1.2e-5, 1.0, 1e-5),
        (9e-3, 0.001, 1e-2),
    ],
)
def test_the_kl_rule(lr, kl, expected):
    rate = torch.tensor(lr)
    ppo.adapt_lr(rate, torch.tensor(kl), 0.01)
    assert rate.item() == pytest.approx(expected, rel=1e-6)


def test_masked_moments():
    x, mask = torch.tensor([1.0, 100.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])
    assert [float(v) for v in ppo.masked_moments(x, mask)] == [2.0, 1.0]
    assert [float(v) for v in ppo.masked_moments(x, mask * 0)] == [0.0, 0.0]


def test_a_whole_update_by_hand():
    """One parameter for the mean, one for the value: the loss's gradient and what is reported, from the formulas."""
    parts = start(config_of({"algo": {"entropy_coef": 0.1, "value_coef": 0.7, "lr_schedule": "fixed"}}), Inline())
    state, settings = parts.learners["learner"].state, parts.learners["learner"].settings
    batch = ppo.Minibatch(
        obs={"policy": torch.ones(3, 3)},
        action=torch.tensor([[0.5], [-1.0], [9.0]]),
        params=torch.zeros(3, 2),
        log_prob=torch.full((3,), -1.0),
        advantage=torch.tensor([1.0, -2.0, 50.0]),
        target=torch.tensor([1.0, 0.0, 50.0]),
        value=torch.zeros(3),
        mask=torch.tensor([1.0, 1.0, 0.0]),
        explained=torch.tensor(0.0),
        fresh=True,
    )
    with torch.no_grad():
        params, value = state.net(batch.obs)
    out = ppo.ppo_update(state, batch, settings, Generator())
    log_p = [-0.5 * (a - params[0, 0].item()) ** 2 - 0.5 * math.log(2 * math.pi) for a in (0.5, -1.0)]  # std 1
    ratio = [math.exp(lp + 1) for lp in log_p]
    gain = [min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratio, (1.0, -2.0), strict=True)]
    assert out["loss/policy"].item() == pytest.approx(-sum(gain) / 2, rel=1e-5)
    v = value[0].item()
    assert out["loss/critic"].item() == pytest.approx(((v - 1) ** 2 + v**2) / 2, rel=1e-5)
    assert out["policy/entropy"].item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e), rel=1e-5)
    assert out["policy/clip_fraction"].item() == sum(abs(r - 1) > 0.2 for r in ratio) / 2
    assert out["policy/kl"].item() == pytest.approx(params[0, 0].item() ** 2 / 2, abs=1e-6)
    # the gradient of the standard deviation's logarithm: policy loss through rho, and the entropy bonus
    outside = [(r > 1.2 and a > 0) or (r < 0.8 and a < 0) for r, a in zip(ratio, (1.0, -2.0), strict=True)]
    z = [(a - params[0, 0].item()) for a in (0.5, -1.0)]
    slope = [-a * r * (zi**2 - 1) * (not o) for a, r, zi, o in zip((1.0, -2.0), ratio, z, outside, strict=True)]
    expected = sum(slope) / 2 - 0.1
    clip = min(1.0, 1.0 / (out["grad_norm/policy"].item() + 1e-6))
    assert state.net.policy.log_std.grad.item() == pytest.approx(expected * clip, rel=1e-4)


def test_rows_that_do_not_count_change_nothing():
    """Filler rows and lost observations: whatever they hold, the update is the same, advantage normalisation too."""
    kwargs = {"autoreset": "next_step", "final_obs": "never", "episode_length": 5}
    config = config_of({"task": {"name": "counter", "kwargs": kwargs}, "algo": {"warmup_steps": 0}})
    one, two = (learned_with(config, 8, reward=junk, action=junk) for junk in (0.0, 77.0))
    assert differences(learners(bits(one)), learners(bits(two))) == []
    assert one.gauges["rollout/bootstrap_lost"] > 0


# -- schedules --------------------------------------------------------------------------------------------------------


def test_a_policy_that_went_too_far_stays_for_the_rest_of_the_tick():
    change = {"algo": {"kl_stop": 1e-7, "lr_schedule": "fixed", "epochs": 3}}
    parts = start(config_of(change), Inline())
    parts.workers["collector"].run(8)
    learner = parts.learners["learner"]
    batches = list(learner.draw(12, learner.gen))
    ppo.ppo_update(learner.state, batches[0], learner.settings, learner.gen)
    after_one = {k: v.clone() for k, v in learner.state.optimizer.state_dict().items()}
    weights = learner.state.optimizer.flat.data.detach().clone()
    for batch in batches[1:]:
        out = ppo.ppo_update(learner.state, batch, learner.settings, learner.gen)
    assert torch.equal(weights, learner.state.optimizer.flat.data)
    assert all(torch.equal(v, after_one[k]) for k, v in learner.state.optimizer.state_dict().items())
    assert out["policy/updates_kept"] == 0
    parts.slots["policy"].publish()
    parts.workers["collector"].run(8)
    ppo.ppo_update(learner.state, next(iter(learner.draw(12, learner.gen))), learner.settings, learner.gen)
    assert not torch.equal(weights, learner.state.optimizer.flat.data)  # the next tick starts afresh


def test_learning_rate_and_clip_fall_to_zero_with_the_env_steps():
    change = {"lr_schedule": "linear", "anneal_steps": 256, "anneal_clip": True}  # four ticks of 64 steps
    parts = start(config_of({"algo": change}), Inline())
    state, rates = parts.learners["learner"].state, []
    for _ in range(6):
        before = state.optimizer.flat.data.detach().clone()
        parts.schedule.tick()
        rates.append(state.optimizer.lr.item())
        assert state.progress.fraction.item() == pytest.approx(rates[-1] / 1e-3)
        assert torch.equal(before, state.optimizer.flat.data) == (rates[-1] == 0)
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0, 0.0])


def test_the_adaptive_rate_keeps_the_kl_near_its_target():
    parts = start(config_of({"algo": {"kl_target": 0.02}}), Inline())
    ticks(parts, 20)
    parts.jobs["learner"].metrics.drain()
    ticks(parts, 30)
    out = parts.jobs["learner"].metrics.drain()
    assert 0.005 < out["policy/kl"].item() < 0.04
    assert out["policy/lr"].item() != pytest.approx(1e-3, rel=0.01)


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lstm", [None, 8])
def test_bfloat16_acts_and_learns_alike(lstm):
    """A policy that acts in bfloat16 is recomputed in bfloat16: the ratio stays near 1, and weights stay float32."""
    parts = ticks(start(config_of({"algo": {"amp": True, "lstm": lstm}}), Inline()), 3)
    parts.workers["collector"].run(8)
    learner = parts.learners["learner"]
    (batch, *_) = learner.draw(8, learner.gen)
    with torch.no_grad():
        params, value = ppo.evaluate_minibatch(learner.state.net, batch)
        exact = ppo.evaluate_minibatch(copy_without_amp(parts), batch)[0]
    assert params.dtype == value.dtype == torch.float32
    ratio = torch.exp(learner.state.net.policy.dist.log_prob(params, batch.action) - batch.log_prob)
    assert (ratio - 1).abs().max() < 1e-2
    assert not torch.equal(exact, params)
    assert all(p.dtype == torch.float32 for p in learner.state.net.parameters())


def copy_without_amp(parts):
    import copy

    net = copy.deepcopy(parts.learners["learner"].state.net)
    net.policy.amp = False
    return net


def test_value_statistics_are_those_of_the_returns():
    parts = start(config_of(), Inline())
    parts.workers["collector"].run(8)
    learner, moments = parts.learners["learner"], Moments((), torch.device("cpu"))
    batches = list(learner.draw(8, learner.gen))[:4]  # one epoch
    assert learner.state.returns.count == 64
    target, value = (torch.cat([getattr(b, k) for b in batches]) for k in ("target", "value"))
    assert target.mean().abs() < 1e-5
    assert target.square().mean().item() == pytest.approx(1, abs=1e-4)
    advantage = torch.cat([b.advantage for b in batches])
    assert (advantage.mean().abs() < 1e-5, advantage.square().mean().item()) == (True, pytest.approx(1, abs=1e-4))
    raw = target - value
    assert torch.corrcoef(torch.stack((raw, advantage)))[0, 1] > 0.9999
    moments.update(target)
    assert moments.variance().item() == pytest.approx(1, abs=1e-4)


# -- rejected settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo.minibatches=7"], "=7: expected a divisor of num_envs=256 x algo.horizon=32 rows, such as 8"),
        (["algo.lstm=8", "num_envs=10", "algo.minibatches=4"], "expected a divisor of num_envs=10, such as 5"),
        (["algo.epochs=0"], "algo.epochs=0: expected a number from 1 up to 1000"),
        (["algo.gae_lambda=1.1"], "algo.gae_lambda=1.1: expected a number from 0 up to 1"),
        (["algo.clip=0"], "algo.clip=0.0: expected a number above 0 up to 10"),
        (["algo.lr_schedule=cosine"], "algo.lr_schedule=cosine: expected one of adaptive, fixed, linear"),
        (["algo.lr_schedule=linear"], "algo.anneal_steps=null: expected env steps"),
        (["algo.anneal_steps=9"], "algo.anneal_steps=9: expected algo.lr_schedule=linear with it"),
        (["algo.lr_schedule=fixed", "algo.kl_target=0.02"], "kl_target=0.02: expected algo.lr_schedule"),
        (["algo=a2c", "algo.policy.weight_decay=0.1"], "weight_decay=0.1: expected algo.optimizer=adam with it"),
        (["algo.horizn=9"], "algo.horizn=9: expected a known setting (did you mean algo.horizon?)"),
        (["algo.schedule=concurrent"], "algo.schedule=concurrent: expected lockstep"),
        (["placement.p_learner=cpu"], "placement.p_learner=cpu: expected null: one learner trains policy and value"),
        (["algo.batch_size=64"], "expected no such setting: algo=ppo does not read it: see algo.minibatches"),
        (["algo.explore.low=0.1"], "expected no such setting: algo=ppo does not read it: see algo.init_std"),
        (["algo.critic.tau=0.1"], "algo.critic.tau=0.1: expected no such setting: algo=ppo does not read it"),
        (["replay.capacity=5000"], "replay.capacity=5000: expected no such setting: algo=ppo does not read it"),
        (["replay.dtype=float16"], "replay.dtype=float16: expected no such setting: algo=ppo does not read it"),
        (["algo=pql", "algo.clip=0.1"], "expected no such setting: algo=pql does not read it; ppo would"),
        (["algo=pql", "algo.warmup_steps=0"], "algo.warmup_steps=0: expected at least 1"),
    ],
)
def test_a_wrong_word_is_named_with_what_is_allowed(words, message):
    with pytest.raises(ConfigError) as caught:
        compose(["device=cpu", "algo=ppo", *words])
    assert message in str(caught.value)


def test_squashing_needs_continuous_actions():
    with pytest.raises(ConfigError, match=r"squash=true: expected false: the actions of cartpole are discrete"):
        build(config_of({"task": {"name": "cartpole"}, "algo": {"squash": True}}))


def test_discrete_actions_are_for_ppo():
    with pytest.raises(ConfigError, match="a task with bounded continuous actions"):
        build(small_config(task={"name": "cartpole"}))


@pytest.mark.parametrize("family", ["ppo", "impala, lstm", "pqn", "reppo"])
def test_a_rollout_that_does_not_fit_is_refused_with_what_does(family, monkeypatch):
    monkeypatch.setattr("pql.algos.on_policy.available_bytes", lambda device: 3_000)
    with pytest.raises(ConfigError, match=r"algo\.horizon=\d: expected at most about \d with num_envs=8: this needs"):
        build(FAMILIES[family])
