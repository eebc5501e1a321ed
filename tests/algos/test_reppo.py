"""REPPO: soft TD(lambda) targets and updates against second implementations, bit-exact runs, a swing-up."""

import math
import random
from dataclasses import replace

import pytest
import run_files
import torch
from conftest import bits, differences, go_on, learners, start, ticks
from gates import score, train_until
from histories import CPU, Column
from oracles import bin_masses, known_end, soft_lambda_return
from plain_nets import plain
from ppo_runs import learned_with
from reppo_runs import EVERY_VARIANT, config_of, short_of
from run_files import rows
from test_rollout import make_rollout, record
from torch import Generator, nn

from pql.algos import reppo
from pql.algos.reppo import Evaluated
from pql.cli.main import main
from pql.config.compose import compose
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.engine.executors import Inline, Threads
from pql.errors import ConfigError
from pql.nets.actor_critic import Body, StochasticPolicy
from pql.nets.distributions import DiagGaussian
from pql.nets.mlp import Layers, NetInput, RMSNorm, mlp
from pql.run.build import build
from pql.run.policy import fresh_policy, load_policy, snapshot

# -- targets ----------------------------------------------------------------------------------------------------------


def q_of(number):
    """Any value of an observation and the action drawn there."""
    return (number * 37 % 101) / 50 - 1


def log_prob_of(number):
    """Any log-probability of that action."""
    return (number * 53 % 97) / 48 - 1


@pytest.mark.parametrize("next_step", [False, True])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_targets_are_soft_returns(next_step, lam):
    """Terminations without the entropy beyond them, time limits with the true final observation, lost lives, lost final
    observations, unannounced episodes, filler rows."""
    horizon, n, rng = 11, 40, random.Random(f"{next_step}{lam}")
    rollout, _ = make_rollout(n, horizon, next_step)
    settings = replace(config_of().algo, gamma=0.9, td_lambda=lam)
    seen = {"masked": 0, "final": 0, "terminated": 0, "plain": 0}
    sims = [Column(i, next_step) for i in range(n)]
    for _ in range(2):  # the second segment starts in the middle of episodes
        events = record(rollout, sims, horizon, rng)
        segment = rollout.segment()
        number = segment.obs["policy"][..., 0].double()
        found = Evaluated(q_of(number).float(), log_prob_of(number).float(), torch.zeros(0))
        target = reppo.soft_returns(settings, segment, found, torch.tensor(0.3))
        for i, column in enumerate(events):
            scaled = [e._replace(reward=0.5 * e.reward) for e in column]
            for t, e in enumerate(column):
                want = soft_lambda_return(scaled, t, q_of, log_prob_of, 0.3, 0.9, lam)
                assert segment.mask[t, i] == float(want is not None) == float(known_end(column, t))
                if want is not None:
                    assert target[t, i].item() == pytest.approx(want, abs=2e-5)
                cut = e.truncated and not e.terminated
                seen["masked" if want is None else "final" if cut else "terminated" if e.terminated else "plain"] += 1
    assert min(seen.values()) > 20, seen


def test_minibatches_hold_what_follows_each_row():
    """One action is drawn for every observation, final ones included; a row has the embedding of its true successor."""
    parts = ticks(start(short_of(), Inline()), 2)
    parts.workers["collector"].run(8)
    learner, segment = parts.learners["learner"], parts.collector.stores[0].segment()
    state, gen = learner.state, Generator().manual_seed(5)
    found = reppo.evaluate_segment(state, segment, replace(learner.settings, minibatches=1), gen)
    gen, checked = Generator().manual_seed(5), 0
    with torch.no_grad():
        mean, log_std = state.policy(segment.obs).chunk(2, -1)
        raw = mean + log_std.exp() * torch.randn(mean.shape, generator=gen)
        density = torch.distributions.Normal(mean, log_std.exp()).log_prob(raw) - (1 - raw.tanh().square()).log()
        torch.testing.assert_close(found.log_prob, density.sum(-1), rtol=0, atol=1e-4)
        for row in range(len(raw)):
            obs = {k: v[row] for k, v in segment.obs.items()}
            q, embedding = state.critic_net.value(obs, raw[row].tanh())
            torch.testing.assert_close(found.q[row], q, rtol=0, atol=1e-5)
            torch.testing.assert_close(found.embedding[row], embedding, rtol=0, atol=1e-5)
    before = learner.gen.get_state()
    batches = list(learner.draw(8, learner.gen))
    learner.gen.set_state(before)
    found = reppo.evaluate_segment(state, segment, learner.settings, learner.gen)
    want = soft_rows(segment, found, reppo.soft_returns(learner.settings, segment, found, torch.tensor(0.01)))
    for epoch in (batches[:4], batches[4:]):
        got = {}
        for b in epoch:
            for i in range(len(b.target)):
                got[tuple(b.obs["policy"][i].tolist())] = (b.target[i].item(), b.embedding[i], b.action[i], b.params[i])
        assert len(got) == 64
        for key, (target, embedding, action, params) in want.items():
            assert got[key][0] == pytest.approx(target, abs=2e-3)  # the temperature has moved a little in two ticks
            assert torch.equal(got[key][1], embedding)
            assert torch.equal(got[key][2], action)
            assert torch.equal(got[key][3], params)
            checked += 1
    assert checked == 128
    assert (segment.successor > 8).sum() >= 4  # time limits


def soft_rows(segment, found, target):
    """Observation acted on -> target, embedding of the successor, action, parameters."""
    out = {}
    for t in range(8):
        for i in range(8):
            key = tuple(segment.obs["policy"][t, i].tolist())
            beyond = found.embedding[segment.successor[t, i], i]
            out[key] = (target[t, i].item(), beyond, segment.action[t, i].tanh(), segment.params[t, i])
    return out


# -- updates ----------------------------------------------------------------------------------------------------------


B, D, A, F, Z = 12, 5, 3, 6, 9
SPEC = EnvSpec("made up", 8, {"policy": ObsSpec((D,)), "critic": ObsSpec((D + 1,))}, Box(A), CPU)


def double_learner(*words):
    """REPPO's preset with small networks in float64: config and state."""
    sizes = ["algo.critic.hidden=[7,6]", "algo.policy.hidden=[8,7]", f"algo.critic.atoms={Z}", *words]
    config = compose(["task=pendulum", "device=cpu", "algo=reppo", "scale=gpu", "algo.minibatches=1", *sizes])
    torch.manual_seed(3)
    policy, critic = reppo.make_reppo_policy(config, SPEC).double(), reppo.make_reppo_critic(config, SPEC).double()
    with torch.no_grad():
        policy.head.weight.mul_(30)  # away from the symmetric start
    state = reppo.make_reppo_state(config, policy, critic, 8)
    for optimizer in (state.optimizer, state.critic_optimizer):
        optimizer.lr = torch.tensor(3e-4, dtype=torch.float64)
    return config, state


def random_minibatch(gen):
    obs = {"policy": torch.randn(B, D, generator=gen).double(), "critic": torch.randn(B, D + 1, generator=gen).double()}
    params = torch.cat((torch.randn(B, A, generator=gen), 0.3 * torch.randn(B, A, generator=gen)), 1).double()
    draw = [torch.rand(B, generator=gen).double() for _ in range(3)]
    return reppo.ReppoMinibatch(
        obs=obs,
        action=torch.rand(B, A, generator=gen).double() * 2 - 1,
        params=params,
        target=draw[0] * 300 - 100,  # beyond both ends of the support, too
        alive=(draw[1] > 0.3).double(),
        mask=(draw[2] > 0.3).double(),
        embedding=torch.randn(B, F, generator=gen).double(),
    )


class Second:
    """REPPO's update as the paper's repository describes it, on its own copies of the weights."""

    def __init__(self, state, samples):
        policy, critic = state.policy, state.critic_net
        self.samples, self.atoms = samples, critic.atoms.tolist()
        self.actor = plain([*policy.body.trunk, policy.head])
        self.encoder, self.head, self.predictor = map(plain, (critic.embedder.net, critic.head, critic.predictor))
        self.zero = critic.zero.detach().clone().requires_grad_()
        self.log_alpha, self.log_beta = (torch.tensor(0.01).log().double().requires_grad_() for _ in range(2))
        self.actor_leaves = [*self.actor.parameters(), self.log_alpha, self.log_beta]
        judged = nn.ModuleList((self.encoder, self.head, self.predictor))
        self.critic_leaves = [*judged.parameters(), self.zero]
        self.optimizers = [
            torch.optim.AdamW(leaves, lr=3e-4, weight_decay=0.01) for leaves in (self.actor_leaves, self.critic_leaves)
        ]

    def critic_outputs(self, obs, action):
        x = self.encoder(torch.cat((obs["critic"], action), 1))
        x = x / (1 + torch.exp(-x))
        return self.predictor(x), self.head(x) + 40.9 * self.zero

    def critic(self, batch):
        predicted, logits = self.critic_outputs(batch.obs, batch.action)
        log_p, loss, error, count = logits.log_softmax(-1), 0.0, 0.0, float(batch.mask.sum())
        for b in range(B):
            if batch.mask[b] == 0:
                continue
            target = bin_masses(batch.target[b].item(), self.atoms, 0.75)
            loss = loss - sum(t * log_p[b, k] for k, t in enumerate(target)) / count
            if batch.alive[b] == 1:
                error = error + sum((predicted[b, j] - batch.embedding[b, j]) ** 2 for j in range(F)) / F / count
        return (loss, error, self.step(1, loss + error))

    def policy(self, batch, gen):
        mean, log_std = self.actor(batch.obs["policy"]).chunk(2, -1)
        raw = mean + log_std.exp() * torch.randn(B, A, generator=gen)
        action = torch.tanh(raw)
        q = self.critic_outputs(batch.obs, action)[1].softmax(-1) @ torch.tensor(self.atoms).double()
        old_mean, old_log_std = batch.params.chunk(2, -1)
        drawn = None
        if self.samples:
            drawn = old_mean + old_log_std.exp() * torch.randn(self.samples, B, A, generator=gen)
        alpha, beta = self.log_alpha.exp(), self.log_beta.exp()
        loss, multiplier_loss, near, count = 0.0, 0.0, 0, float(batch.mask.sum())
        for b in range(B):
            if batch.mask[b] == 0:
                continue
            new, old = (mean[b], log_std[b].exp()), (old_mean[b], old_log_std[b].exp())
            log_prob = normal(raw[b], *new) - (1 - action[b] ** 2).log().sum()
            if drawn is None:
                kl = sum(
                    (new[1][j] / old[1][j]).log()
                    + (old[1][j] ** 2 + (old[0][j] - new[0][j]) ** 2) / (2 * new[1][j] ** 2)
                    - 0.5
                    for j in range(A)
                )
            else:
                kl = sum(normal(u[b], *old) - normal(u[b], *new) for u in drawn) / self.samples
            if kl < 0.1:
                near, loss = near + 1, loss + (alpha.detach() * log_prob - q[b]) / count
            else:
                loss = loss + beta.detach() * kl / count
            multiplier_loss = (
                multiplier_loss + alpha * (0.5 * A - log_prob.detach()) / count - beta * (kl.detach() - 0.1) / count
            )
        return loss, near / count, self.step(0, loss + multiplier_loss)

    def step(self, which, loss):
        """One step of AdamW after clipping to 0.5; returns the norm."""
        leaves = (self.actor_leaves, self.critic_leaves)[which]
        for p, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            p.grad = g
        norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        self.optimizers[which].step()
        return norm


def normal(x, mean, std):
    return (-0.5 * ((x - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)).sum()


@pytest.mark.parametrize("samples", [None, 4])
def test_updates_agree_with_a_second_implementation(samples):
    """Losses, gradients and all weights over 20 updates of critic and policy; the preset samples 16 actions."""
    config, state = double_learner(f"algo.kl_samples={'null' if samples is None else samples}")
    other, close = Second(state, samples), {"rel": 1e-9, "abs": 1e-9}
    assert (config.algo.gamma, config.algo.td_lambda, config.algo.kl_bound) == (0.99, 0.95, 0.1)
    data, noise, theirs = (Generator().manual_seed(s) for s in (7, 1, 1))
    shares = []
    for _ in range(20):
        batch = random_minibatch(data)
        with torch.no_grad():  # old policies around the present one, so that some rows are near it
            batch = batch._replace(params=state.policy(batch.obs) + 0.25 * batch.params)
        out = reppo.reppo_update(state, batch, config.algo, noise)
        loss, error, norm = other.critic(batch)
        assert out["loss/critic"].item() == pytest.approx(loss.item(), **close)
        assert out["loss/embedding"].item() == pytest.approx(error.item(), **close)
        assert out["grad_norm/critic"].item() == pytest.approx(norm.item(), **close)
        compare([p.grad.flatten() for p in state.critic_net.parameters()], [p.grad for p in other.critic_leaves])
        loss, near, norm = other.policy(batch, theirs)
        assert out["loss/policy"].item() == pytest.approx(loss.item(), **close)
        assert out["policy/kl_exceeded"].item() == pytest.approx(1 - near)
        assert out["grad_norm/policy"].item() == pytest.approx(norm.item(), **close)
        trained = [p.grad.flatten() for p in state.optimizer.flat.module.parameters()]
        compare(trained, [p.grad for p in other.actor_leaves])
        shares.append(near)
    assert min(shares) < 0.9
    assert max(shares) > 0.1
    for ours, leaves in ((state.optimizer.flat.data, other.actor_leaves), (state.critic.data, other.critic_leaves)):
        assert ours.numel() == sum(p.numel() for p in leaves)
    mine = {k: v.flatten() for k, v in state.optimizer.flat.module.named_parameters()}
    assert {*mine} >= {"policy.head.weight", "multipliers.log_alpha", "multipliers.log_beta"}
    compare(list(mine.values()), other.actor_leaves)
    compare([p.flatten() for p in state.critic_net.parameters()], other.critic_leaves)


def compare(ours, theirs):
    """The same tensors, in whatever order."""
    left = [p.detach().flatten() for p in theirs]
    for mine in ours:
        found = [i for i, p in enumerate(left) if p.shape == mine.shape and torch.allclose(p, mine, rtol=0, atol=1e-8)]
        assert found
        left.pop(found[0])
    assert left == []


def test_values_are_zero_at_first():
    """The logits' offset puts the initial mass around the value 0, wherever the support lies."""
    for ends in ("-50 150", "0 150", "-10 10"):
        low, high = ends.split()
        config, _ = double_learner(f"algo.critic.v_min={low}", f"algo.critic.v_max={high}", "algo.critic.atoms=151")
        critic = reppo.make_reppo_critic(config, SPEC)
        q, _ = critic.value({"critic": torch.randn(50, D + 1)}, torch.rand(50, A))
        assert q.abs().max() < 0.02 * (float(high) - float(low))


def test_rows_that_do_not_count_change_nothing():
    kwargs = {"autoreset": "next_step", "final_obs": "never", "episode_length": 5}
    config = config_of({"task": {"name": "counter", "kwargs": kwargs}, "algo": {"warmup_steps": 0}})
    one, two = (learned_with(config, 8, reward=junk, action=junk) for junk in (0.0, 7.0))
    assert differences(learners(bits(one)), learners(bits(two))) == []
    assert one.gauges["rollout/bootstrap_lost"] > 0


# -- networks ---------------------------------------------------------------------------------------------------------


def test_the_standard_deviation_depends_on_the_observation():
    body = Body(NetInput("policy", 3), Layers([8]))
    policy = StochasticPolicy(body, DiagGaussian(2, squash=True), None)
    assert policy.log_std is None
    params = policy({"policy": torch.randn(5, 3)})
    assert params.shape == (5, 4)
    assert params[:, 2:].std(0).min() > 0
    assert params.abs().max() < 0.2  # the last layer is small: mean 0 and deviation 1 at first


def test_an_mlp_has_the_normalisation_that_is_asked_for():
    net = mlp(3, Layers([4], "silu", layer_norm=True, norm="rms"), 2)
    assert [type(m) for m in net] == [nn.Linear, RMSNorm, nn.SiLU, nn.Linear]
    x = torch.randn(3, 4)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(net[1](x), want)
    assert net[1](x.bfloat16()).dtype == torch.float32
    assert [type(m) for m in mlp(3, Layers([4], layer_norm=True), 2)][1] is nn.LayerNorm


class Features(nn.Module):
    """A custom policy network: obs -> features [B, 5]."""

    groups = ("policy",)

    def __init__(self, spec, config):
        super().__init__()
        self.net = nn.Linear(spec.obs["policy"].shape[0], 5)

    def forward(self, obs):
        return self.net(obs["policy"])


class Pairs(nn.Module):
    """A custom critic network: (obs, action) -> embedding [B, 7]."""

    def __init__(self, spec, config):
        super().__init__()
        self.net = nn.Linear(spec.obs["policy"].shape[0] + spec.action.size, 7)

    def forward(self, obs, action):
        return self.net(torch.cat((obs["policy"], action), -1))


def test_custom_networks_are_features_and_embedding():
    nets = {"policy": {"net": "test_reppo:Features"}, "critic": {"net": "test_reppo:Pairs"}}
    parts = ticks(start(config_of({"algo": nets}), Inline()), 2)
    state = parts.learners["learner"].state
    assert (state.policy.head.in_features, state.critic_net.predictor[-1].out_features) == (5, 7)
    with pytest.raises(ConfigError, match=r"algo\.critic\.net=test_reppo:Features: expected a critic for pendulum"):
        build(config_of({"algo": {"critic": {"net": "test_reppo:Features"}}}))


# -- runs -------------------------------------------------------------------------------------------------------------


@EVERY_VARIANT
def test_two_runs_and_threads_have_the_same_bits_and_another_seed_has_not(variant):
    config = short_of(variant)
    one = bits(ticks(start(config, Inline()), 5))
    assert differences(one, bits(go_on(start(config, Threads(("collector", "learner"))), 5))) == []
    other = bits(ticks(start(replace(config, seed=4), Inline()), 5))
    changed = differences(one, other)
    assert {f"learners/learner/state/{k}" for k in ("policy/head.weight", "multipliers/log_alpha")} <= {*changed}


def test_the_collector_acts_with_the_newest_weights():
    parts = ticks(start(config_of(), Inline()), 2)
    parts.workers["collector"].run(8)
    segment, state = parts.collector.stores[0].segment(), parts.learners["learner"].state
    with torch.no_grad():
        params = state.policy({k: v[:8] for k, v in segment.obs.items()})
    torch.testing.assert_close(segment.params, params, rtol=0, atol=1e-5)
    assert bool((segment.version == 2).all())


@pytest.mark.parametrize("variant", [{}, {"amp": True}], ids=["float32", "bfloat16"])
def test_a_policy_acts_as_the_collector_would_without_noise(variant):
    parts = ticks(start(config_of(variant), Inline()), 2)
    policy = fresh_policy(parts.config, parts.env.spec, "cpu")
    policy.load_state_dict(snapshot(parts))
    obs = torch.randn(5, 3)
    net, norm = parts.learners["learner"].state.policy, parts.collector.normalizer
    net.amp = False
    with torch.no_grad():
        want = net(norm({"policy": obs})).chunk(2, -1)[0].tanh()
    torch.testing.assert_close(policy(obs), want, rtol=0, atol=1e-6)


WORDS = (
    *("algo=reppo", "task=pendulum", "task.kwargs.max_episode_steps=11", *run_files.QUICK),
    *("algo.policy.hidden=[8]", "algo.critic.hidden=[8,8]", "algo.critic.atoms=21"),
    *("algo.horizon=4", "algo.epochs=2", "algo.minibatches=2", "algo.anneal_steps=2000"),
)


def run(run_dir, *more):
    return run_files.run(*WORDS, f"run_dir={run_dir}", *more)


@pytest.mark.fault(14, form="reppo", count=10)
def test_n_ticks_resumed_for_n_more_are_2n_ticks_bit_for_bit(tmp_path, trial):
    half, full = (16 * (8 + 4 * n) for n in (4, 8))
    _, one, _ = run_files.whole_and_resumed(tmp_path, [*WORDS, f"seed={trial}"], half, full)
    state = "learners/learner/state/"
    assert {f"{state}{k}" for k in ("critic/zero", "multipliers/log_beta", "critic_optimizer/mean")} <= {*one}
    assert not any("atoms" in k for k in one)
    log = [row for row in rows(tmp_path / "whole") if "updates/v" in row]
    assert (log[-1]["updates/v"], log[-1]["updates/p"], log[-1]["lag/policy_ticks"]) == (32, 32, 0)
    names = ("loss/critic", "loss/embedding", "loss/policy", "policy/kl", "policy/alpha", "policy/beta", "policy/lr")
    assert {*names, "rollout/bootstrap_lost", "value/q"} <= {*log[-1]}
    assert load_policy(tmp_path / "whole")(torch.randn(3, 3)).shape == (3, 1)
    again = run(tmp_path / "new", f"budget.env_steps={half}", f"init_from={tmp_path / 'whole'}")
    assert again.env_steps == half


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algo.minibatches=5", "algo.minibatches=5: expected a divisor of num_envs=16 x algo.horizon=4"),
        ("task=cartpole", "task=cartpole: expected a task with bounded continuous actions"),
        ("algo.v_per_step=2", "v_per_step=2: expected no such setting: algo=reppo does not read it: see algo.epochs"),
        ("algo.schedule=concurrent", "expected lockstep: reppo learns from what its policy did"),
        ("algo.critic.hidden=[]", "algo.critic.hidden=[]: expected at least one width: the last is the embedding's"),
        ("algo.critic.v_min=200", "algo.critic.v_min=200.0: expected below algo.critic.v_max=150"),
        ("algo.critic.layer_norm=false algo.critic.norm=layer", "norm=layer: expected algo.critic.layer_norm=true"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path, capsys, words, message):
    known = [w for w in WORDS if not (words == "task=cartpole" and w.startswith("task"))]
    assert main(["train", *known, f"run_dir={tmp_path}", "budget.env_steps=1000", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_preset_has_the_published_values():
    config = compose(["device=cpu", "algo=reppo", "scale=gpu", "task=halfcheetah"])
    p, policy, critic = config.algo, config.algo.policy, config.algo.critic
    assert (config.num_envs, p.horizon, p.minibatches, p.epochs, p.amp) == (1024, 128, 64, 8, False)
    assert (p.gamma, p.td_lambda, p.kl_bound, p.kl_samples, p.embedding_coef) == (0.99, 0.95, 0.1, 16, 1.0)
    assert (p.alpha, p.beta, p.entropy_per_action) == (0.01, 0.01, -0.5)
    for net in (policy, critic):
        assert (net.hidden, net.activation, net.layer_norm, net.norm) == ([512, 512], "silu", True, "rms")
        assert (net.lr, net.grad_clip, net.weight_decay) == (3e-4, 0.5, 0.01)
    assert (critic.v_max - critic.v_min) / (critic.atoms - 1) == 1.0 == 150 / (151 - 1)  # width of a bin
    assert critic.sigma == 0.75
    small = compose(["device=cpu", "algo=reppo", "scale=cpu", "task=halfcheetah"])
    assert small.num_envs * small.algo.horizon // small.algo.minibatches == 256
    assert (small.algo.epochs, small.algo.kl_samples, small.algo.critic.hidden) == (4, None, [64, 64])
    assert 0.0 in torch.linspace(small.algo.critic.v_min, small.algo.critic.v_max, small.algo.critic.atoms)


# -- learning ---------------------------------------------------------------------------------------------------------


def test_reppo_swings_the_pendulum_up(learns):
    learns(swing_up, -450)  # the best possible is about -150


def swing_up(seed):
    task = {"name": "pendulum", "reward_scale": 0.1, "kwargs": {"stagger": True}}
    critic, policy = {"hidden": [32, 32], "atoms": 31, "v_min": -25.0, "v_max": 5.0}, {"hidden": [32, 32]}
    algo = {"gamma": 0.95, "horizon": 16, "epochs": 4, "minibatches": 4, "alpha": 0.2, "critic": critic}
    algo["policy"] = policy
    parts = start(config_of({"task": task, "num_envs": 64, "seed": seed, "algo": algo}), Inline())
    assert score(parts) < -700  # untrained: it hangs
    return train_until(parts, -450, 50)
