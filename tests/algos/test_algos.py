"""Updates of DDPG and SAC against float64 references with explicit layers; masked rows have no effect."""

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from conftest import go_on, small_config, start
from oracles import AdamW as SlowAdamW
from oracles import bin_masses, c51_projection, tanh_gaussian_log_prob
from plain_nets import separate

from pql.algos import critics, ddpg, sac
from pql.config import DdpgConfig, SacConfig
from pql.config.compose import compose
from pql.engine.executors import Inline
from pql.engine.flat import Flat
from pql.engine.optim import AdamW
from pql.nets.mlp import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    Critic,
    DeterministicPolicy,
    EnsembleLinear,
    GaussianPolicy,
    Layers,
    NetInput,
)
from pql.types import Batch, ObsBatch

B, D, P, A = 24, 4, 3, 2  # batch, features of "critic" and "policy", actions
ATOMS = torch.linspace(-3, 3, 13)
OPTIMIZER = {"lr": 1e-3, "clip": 0.5, "weight_decay": 0.1, "eps": 1e-4}  # eps: rounding must not turn a step's sign
TAU, ALPHA = 0.05, 0.2


# --- updated parameters ---


def critic(seed, atoms=None, members=2):
    torch.manual_seed(seed)
    net = Critic(NetInput("critic", D), A, Layers((7, 6)), members, None if atoms is None else len(atoms))
    with torch.no_grad():  # so that now one member has the lower value, now the other
        for weight in list(net.parameters())[::2]:
            weight.mul_(2.5)
    return net


def policy(seed, kind=DeterministicPolicy):
    torch.manual_seed(seed)
    net = kind(NetInput("policy", P), A, Layers((7, 6)))
    with torch.no_grad():  # far from the linear range: some actions are close to the ends
        list(net.parameters())[-2].mul_(6)
    Flat(net)
    return net


def settings_of(kind=DdpgConfig, critic=None, policy=None, **changes):
    """A record of settings whose targets move by TAU; DDPG's without noise on target actions."""
    changes = {"smoothing": 0.0} | changes if kind is DdpgConfig else changes
    default = kind()
    critic = dataclasses.replace(default.critic, tau=TAU, **(critic or {}))
    extra = {"tau": TAU} if kind is DdpgConfig else {}
    return dataclasses.replace(
        default, critic=critic, policy=dataclasses.replace(default.policy, **extra, **(policy or {})), **changes
    )


def value_state(atoms=None, members=2):
    flat = Flat(critic(0, atoms, members), trained=True)
    target, adam = Flat(critic(1, atoms, members)), AdamW(flat, **OPTIMIZER)
    return critics.CriticState(critic=flat, target=target, optimizer=adam, clock=None, policy=policy(2), atoms=atoms)


def sac_value_state(atoms=None):
    named = {**vars(value_state(atoms)), "policy": policy(2, GaussianPolicy)}
    log_alpha = torch.tensor([ALPHA]).log()
    return sac.SacCriticState(
        **named, log_alpha=log_alpha, temperature=None, temperature_optimizer=None, log_slope=None
    )


def actor_fields(network, atoms):
    """Fields of a P-learner's state: a policy, and a copy of the critics."""
    flat, net = Flat(policy(2, network), trained=True), critic(3, atoms)
    Flat(net)
    return {"policy": flat, "optimizer": AdamW(flat, **OPTIMIZER), "average": None, "critic": net, "atoms": atoms}


def policy_state(atoms=None):
    return ddpg.DdpgPolicyState(**actor_fields(DeterministicPolicy, atoms), target=Flat(policy(4)))


def sac_policy_state(atoms=None):
    temperature = Flat(sac.Temperature(ALPHA), True)
    return sac.SacPolicyState(
        **actor_fields(GaussianPolicy, atoms),
        log_alpha=temperature.module.log_alpha,
        temperature=temperature,
        temperature_optimizer=AdamW(temperature, 5e-3),
        log_slope=None,
    )


def sac_settings(target_entropy=-2.0, **changes):
    return settings_of(SacConfig, target_entropy=target_entropy, **changes)


def make_batch(masked=8, count=B):
    gen = torch.Generator().manual_seed(7)

    def draw(size):
        return torch.randn(count, size, generator=gen)

    obs, next_obs = ({"policy": draw(P), "critic": draw(D)} for _ in range(2))
    mask = (torch.arange(count) >= masked).float()
    weight = torch.rand(count, generator=gen) + 0.5
    discount = 0.97 * (torch.rand(count, generator=gen) > 0.2)
    return Batch(obs, draw(A).tanh(), draw(1)[:, 0], discount, next_obs, mask, weight, torch.arange(count), mask)


def obs_part(batch):
    return ObsBatch(batch.obs, batch.mask, batch.weight)


def generator():
    return torch.Generator().manual_seed(11)


# --- the same in float64, one layer and one member at a time ---


class Plain:
    """A network of this file as separate ones in float64, one for each member."""

    def __init__(self, net):
        self.ensemble = isinstance(net.net[0], EnsembleLinear)
        count = len(net.net[0].weight) if self.ensemble else 1
        self.members = [separate(net, e if self.ensemble else None) for e in range(count)]

    def __call__(self, x, e=0):
        return self.members[e](x)

    def flat(self, what):
        """Values or gradients in the order of the library's flat tensor, as a list."""
        ones = [what(p) for same in zip(*(m.parameters() for m in self.members), strict=True) for p in same]
        return torch.cat([(t.T if self.ensemble and t.dim() == 2 else t).reshape(-1) for t in ones]).tolist()

    def values(self):
        return self.flat(lambda t: t.detach())

    def grads(self):
        return self.flat(lambda t: t.grad)


def wide(batch):
    return [{k: v.double() for k, v in f.items()} if isinstance(f, dict) else f.double() for f in batch]


def rows_share(mask, weight):
    return (mask * weight / mask.sum()).tolist()


def check_step(flat, metrics, name, plain, loss):
    """Loss, gradient norm and parameters after one clipped AdamW step. Returns the new parameters."""
    loss.backward()
    grads = plain.grads()
    norm = math.sqrt(sum(g * g for g in grads))
    assert norm > 1e-2
    assert metrics[f"loss/{name}"].item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert metrics[f"grad_norm/{name}"].item() == pytest.approx(norm, rel=1e-4)
    want = SlowAdamW(**OPTIMIZER).step(plain.values(), grads)
    assert max(abs(a - b) for a, b in zip(want, plain.values(), strict=True)) > 5e-4
    assert flat.data.tolist() == pytest.approx(want, abs=2e-6)
    return want


def check_polyak(target, before, moved):
    want = [(1 - TAU) * t + TAU * s for t, s in zip(before, moved, strict=True)]
    assert target.data.tolist() == pytest.approx(want, abs=1e-6)


def value_loss(batch, plain, target, action, bonus, atoms, reduce="min", sigma=None, drawn=(0, 1)):
    """sum_b share_b sum_e loss_e, by a loop over rows and members. Returns (loss, mean value of member 0).

    The target is that of the members ``drawn``; of two critics, now one is the lower one, now the other.
    """
    obs, taken, reward, discount, next_obs, mask, weight, *_ = wide(batch)
    ahead = [target(torch.cat((next_obs["critic"], action), 1), e).detach() for e in drawn]
    now = [plain(torch.cat((obs["critic"], taken), 1), e) for e in range(len(plain.members))]
    n = len(now)
    loss, value, choices = torch.zeros((), dtype=torch.float64), 0.0, set()
    for b, share in enumerate(rows_share(mask, weight)):
        if atoms is None:
            values = [one[b, 0] for one in ahead]
            aims = {"min": [min(values)] * n, "mean": [sum(values) / 2] * n, "own": values}[reduce]
            ys = [reward[b] + discount[b] * (aim + bonus[b]) for aim in aims]
            loss = loss + share * sum((now[e][b, 0] - ys[e]) ** 2 for e in range(n))
            value += share * now[0][b, 0].item()
        else:
            probs = [torch.softmax(one[b], 0).tolist() for one in ahead]
            values = [sum(x * z for x, z in zip(p, atoms.tolist(), strict=True)) for p in probs]
            if sigma is None:
                lower = probs[values.index(min(values))]
                both = [(x + y) / 2 for x, y in zip(*probs, strict=True)]
                aims = {"min": [lower] * n, "mean": [both] * n}.get(reduce, probs)
                support = [(reward[b] + discount[b] * (z + bonus[b])).item() for z in atoms.tolist()]
                ys = [c51_projection(support, aim, atoms.tolist()) for aim in aims]
                if reduce == "projected":
                    ys = [min(ys, key=lambda y: sum(p * z for p, z in zip(y, atoms.tolist(), strict=True)))] * n
            else:
                aims = {"min": [min(values)] * n, "mean": [sum(values) / 2] * n, "own": values}[reduce]
                means = [(reward[b] + discount[b] * (aim + bonus[b])).item() for aim in aims]
                ys = [bin_masses(mean, atoms.tolist(), sigma) for mean in means]
            ys = [torch.tensor(y, dtype=torch.float64) for y in ys]
            loss = loss - share * sum((ys[e] * torch.log_softmax(now[e][b], 0)).sum() for e in range(n))
            value += share * (torch.softmax(now[0][b], 0) @ atoms.double()).item()
        choices.add(bool(values[0] < values[1]))
    assert choices == {True, False} or n > 2
    return loss, value


def gaussian(plain, obs, gen):
    """(action, log-probability of each row) in float64 of the noise that ``gen`` gives."""
    mean, spread = plain(obs["policy"]).chunk(2, 1)
    log_std = LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) * torch.sigmoid(2 * spread)
    noise = torch.randn(mean.shape, generator=gen).double()
    raw = mean + log_std.exp() * noise
    normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = (normal + 2 * torch.log(torch.cosh(raw))).sum(1)
    rows = zip(*(x.detach().tolist() for x in (raw, mean, log_std.exp())), strict=True)
    assert log_prob.tolist() == pytest.approx([tanh_gaussian_log_prob(*r) for r in rows])
    return raw.tanh(), log_prob


# --- value updates ---


@pytest.mark.parametrize("atoms", [None, ATOMS], ids=["scalar", "c51"])
@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_ddpg_value_update(smoothing, atoms):
    state, batch = value_state(atoms), make_batch()
    settings = settings_of(smoothing=smoothing, smoothing_clip=0.2)
    plain, target = Plain(state.critic.module), Plain(state.target.module)
    with torch.no_grad():
        action = Plain(state.policy)(batch.next_obs["policy"].double()).tanh()
        if smoothing:
            noise = (smoothing * torch.randn(B, A, generator=generator())).double()
            clipped = noise.clamp(-0.2, 0.2)
            inside, outside = (clipped == noise).sum(), ((action + clipped).abs() > 1).sum()
            assert min(inside, noise.numel() - inside, outside) >= 5  # both clips matter here
            action = (action + clipped).clamp(-1, 1)
    loss, value = value_loss(batch, plain, target, action, [0.0] * B, atoms)
    metrics = ddpg.ddpg_value_update(state, batch, settings, generator())
    moved = check_step(state.critic, metrics, "critic", plain, loss)
    check_polyak(state.target, target.values(), moved)
    assert metrics["value/q"].item() == pytest.approx(value, abs=1e-5)


TARGETS = [
    (*kind, reduce) for reduce in ("min", "mean", "own") for kind in ((None, None), (ATOMS, None), (ATOMS, 0.75))
]


@pytest.mark.parametrize(("atoms", "sigma", "reduce"), [*TARGETS, (ATOMS, None, "projected")])
def test_sac_value_update(atoms, sigma, reduce):
    state, batch = sac_value_state(atoms), make_batch()
    loss_of = {} if sigma is None else {"loss": "hl_gauss", "sigma": sigma}
    settings = sac_settings(critic={"target": reduce, **loss_of})
    plain, target = Plain(state.critic.module), Plain(state.target.module)
    with torch.no_grad():
        next_obs = {k: v.double() for k, v in batch.next_obs.items()}
        action, log_prob = gaussian(Plain(state.policy), next_obs, generator())
    loss, value = value_loss(batch, plain, target, action, (-ALPHA * log_prob).tolist(), atoms, reduce, sigma)
    metrics = sac.sac_value_update(state, batch, settings, generator())
    moved = check_step(state.critic, metrics, "critic", plain, loss)
    check_polyak(state.target, target.values(), moved)
    assert metrics["value/q"].item() == pytest.approx(value, abs=1e-5)


def test_the_lower_critic_may_change_when_targets_leave_the_support():
    """Means 0 and .1; shifted by .9 on atoms that end at 1, they are .9 and .45 * -.1 + .55 = .505."""
    atoms, flat = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([[[0.0, 1.0, 0.0]], [[0.45, 0.0, 0.55]]])
    batch = make_batch(0, 1)._replace(reward=torch.tensor([0.9]), discount=torch.tensor([1.0]))
    losses = {}
    for reduce in ("min", "projected"):
        net, q = settings_of(critic={"target": reduce}).critic, torch.tensor([[[0.0, 0.0, 1.0]]] * 2)
        losses[reduce] = critics.categorical_loss(net, atoms, batch, q, flat.log(), None)[0]
    log = torch.tensor([0.0, 0.0, 1.0]).log_softmax(0)
    for reduce, goal in (("min", [0.0, 0.1, 0.9]), ("projected", [0.045, 0.405, 0.55])):
        torch.testing.assert_close(losses[reduce], torch.full((2, 1), -float(torch.tensor(goal) @ log)))


def test_both_targets_move_with_the_delayed_policy_update(monkeypatch):
    """TD3's order in a run: two critic updates, one of the policy, then one move of each target (its Algorithm 1)."""
    seen = []

    def spy(name, update):
        def wrapped(state, *args):
            net, before = state.critic if name == "v" else state.policy, state.target.data.detach().clone()
            out = update(state, *args)
            expected = before.lerp(net.data.detach(), 0.005)
            after = state.target.data.detach()
            moved = bool((expected != before).any()) and torch.equal(after, expected)
            assert moved or torch.equal(after, before)
            seen.append(name + ("+" if moved else ""))
            return out

        monkeypatch.setattr(ddpg, update.__name__, wrapped)

    spy("v", ddpg.ddpg_value_update)
    spy("p", ddpg.ddpg_policy_update)
    algo = compose(["device=cpu", "algo=td3"]).algo
    critic, policy = (dataclasses.replace(net, hidden=[8]) for net in (algo.critic, algo.policy))
    algo = dataclasses.replace(algo, critic=critic, policy=policy, v_per_step=3.0, warmup_steps=4, batch_size=8)
    go_on(start(dataclasses.replace(small_config(graphs="off"), algo=algo), Inline()), 3)
    assert seen == ["v", "v+", "p+"] * 9


@pytest.mark.parametrize("atoms", [None, ATOMS], ids=["scalar", "c51"])
@pytest.mark.parametrize("reduce", ["min", "mean"])
def test_two_of_ten_critics_form_the_target_of_all(reduce, atoms):
    """REDQ: each critic is trained on a target of two, drawn anew for each update."""
    found = []
    for seed in range(5):
        state, settings = value_state(atoms, members=10), settings_of(critic={"target": reduce, "subset": 2})
        plain, target, batch = Plain(state.critic.module), Plain(state.target.module), make_batch()
        with torch.no_grad():
            action = Plain(state.policy)(batch.next_obs["policy"].double()).tanh()
        metrics = ddpg.ddpg_value_update(state, batch, settings, torch.Generator().manual_seed(seed))
        loss_of = partial(value_loss, batch, plain, target, action, [0.0] * B, atoms, reduce)
        found.append(metrics["loss/critic"].item())
        with torch.no_grad():
            losses = {pair: loss_of(drawn=pair)[0].item() for pair in itertools.combinations(range(10), 2)}
        pair = min(losses, key=lambda pair: abs(losses[pair] - found[-1]))
        check_polyak(
            state.target, target.values(), check_step(state.critic, metrics, "critic", plain, loss_of(drawn=pair)[0])
        )
    assert len({*found}) >= 4
    assert max(losses.values()) - min(losses.values()) > 0.01 * found[-1]


@pytest.mark.parametrize(
    ("settings", "goal"),
    [
        ({}, -6.0),
        ({"entropy_per_action": 0.0}, 0.0),
        ({"target_sigma": 0.15}, -0.4782 * 6),  # of a Gaussian: log(0.15) + log(2 pi e) / 2 for each
        ({"target_entropy": -2.5, "target_sigma": 0.15}, -2.5),
    ],
)
def test_target_entropies(settings, goal):
    assert SacConfig(**settings).entropy_goal(6) == pytest.approx(goal, abs=1e-3)


# --- policy updates ---


def ensemble_q(plain, obs, action, reduce, atoms):
    """[B] float64."""
    both = [plain(torch.cat((obs["critic"], action), 1), e) for e in range(2)]
    q = [o[:, 0] if atoms is None else torch.softmax(o, 1) @ atoms.double() for o in both]
    return {"min": torch.minimum(*q), "mean": (q[0] + q[1]) / 2, "first": q[0]}[reduce]


@pytest.mark.parametrize("atoms", [None, ATOMS], ids=["scalar", "c51"])
@pytest.mark.parametrize("reduce", ["min", "mean", "first"])
def test_ddpg_policy_update(reduce, atoms):
    state, batch, settings = policy_state(atoms), obs_part(make_batch()), settings_of(policy={"reduce": reduce})
    plain, target = Plain(state.policy.module), Plain(state.target.module)
    obs, mask, weight = wide(batch)
    q = ensemble_q(Plain(state.critic), obs, plain(obs["policy"]).tanh(), reduce, atoms)
    loss = -sum(share * one for share, one in zip(rows_share(mask, weight), q, strict=True))
    metrics = ddpg.ddpg_policy_update(state, batch, settings, generator())
    moved = check_step(state.policy, metrics, "policy", plain, loss)
    check_polyak(state.target, target.values(), moved)


@pytest.mark.parametrize("kind", ["ddpg", "sac"])
def test_the_average_follows_the_updated_policy(kind):
    """theta' <- (1 - w) theta' + w theta after each update; the average, not the policy, is evaluated."""
    network = ddpg.DeterministicPolicy if kind == "ddpg" else GaussianPolicy
    state = policy_state() if kind == "ddpg" else sac_policy_state()
    assert state.evaluated is state.policy
    state.average = Flat(policy(5, network))
    assert state.evaluated is state.average
    settings = (settings_of if kind == "ddpg" else sac_settings)(policy={"average": TAU})
    update = ddpg.ddpg_policy_update if kind == "ddpg" else sac.sac_policy_update
    for _ in range(3):
        before = state.average.data.tolist()
        update(state, obs_part(make_batch()), settings, generator())
        check_polyak(state.average, before, state.policy.data.tolist())


def test_a_penalty_on_what_the_tanh_takes():
    state, batch, settings = policy_state(), obs_part(make_batch()), settings_of(policy={"saturation_penalty": 0.3})
    plain = Plain(state.policy.module)
    obs, mask, weight = wide(batch)
    before = plain(obs["policy"])
    q = ensemble_q(Plain(state.critic), obs, before.tanh(), "min", None)
    cost = 0.3 * (before**2).sum(1) / before.shape[1]
    loss = -sum(share * (one - c) for share, one, c in zip(rows_share(mask, weight), q, cost, strict=True))
    check_step(state.policy, ddpg.ddpg_policy_update(state, batch, settings, generator()), "policy", plain, loss)


@pytest.mark.parametrize("atoms", [None, ATOMS], ids=["scalar", "c51"])
def test_sac_policy_update(atoms):
    state, batch = sac_policy_state(atoms), obs_part(make_batch())
    plain = Plain(state.policy.module)
    obs, mask, weight = wide(batch)
    action, log_prob = gaussian(plain, obs, generator())
    q = ensemble_q(Plain(state.critic), obs, action, "min", atoms)
    rows = list(zip(rows_share(mask, weight), log_prob, q, strict=True))
    loss, entropy = sum(s * (ALPHA * p - q) for s, p, q in rows), -sum(s * p.item() for s, p, _ in rows)
    metrics = sac.sac_policy_update(state, batch, sac_settings(policy={"reduce": "min"}), generator())
    check_step(state.policy, metrics, "policy", plain, loss)
    assert metrics["policy/entropy"].item() == pytest.approx(entropy, abs=1e-5)
    want = SlowAdamW(5e-3).step([math.log(ALPHA)], [entropy + 2.0])
    assert state.temperature.data.tolist() == pytest.approx(want, abs=1e-6)
    assert metrics["policy/alpha"].item() == pytest.approx(math.exp(want[0]), abs=1e-6)


@pytest.mark.parametrize(("gap", "direction"), [(1.0, -1), (-1.0, 1)])
def test_temperature_falls_where_the_entropy_is_above_its_target_and_rises_below(gap, direction):
    batch, state = obs_part(make_batch()), sac_policy_state()
    entropy = sac.sac_policy_update(sac_policy_state(), batch, sac_settings(), generator())["policy/entropy"].item()
    before, target = state.temperature.data.item(), entropy - gap
    sac.sac_policy_update(state, batch, sac_settings(target), generator())
    assert state.temperature.data.item() - before == pytest.approx(direction * 5e-3, rel=1e-3)
    fixed = sac_policy_state()
    sac.sac_policy_update(fixed, batch, sac_settings(target, auto_alpha=False), generator())
    assert fixed.temperature.data.item() == before


# --- masks, and state that an update may change ---

SMOOTHED = settings_of(smoothing=0.5, smoothing_clip=0.2)
CASES = {
    "ddpg value": (ddpg.ddpg_value_update, value_state, SMOOTHED),
    "c51 value": (ddpg.ddpg_value_update, lambda: value_state(ATOMS), settings_of()),
    "sac value": (sac.sac_value_update, sac_value_state, sac_settings()),
    "ddpg policy": (ddpg.ddpg_policy_update, policy_state, settings_of()),
    "sac policy": (sac.sac_policy_update, sac_policy_state, sac_settings()),
}


def run_case(name, batch):
    """(state, metrics) after one update."""
    update, make, settings = CASES[name]
    state = make()
    return state, update(state, obs_part(batch) if "policy" in name else batch, settings, generator())


def pulled(state):
    """The state's copies of what other learners publish."""
    return [v for k, v in vars(state).items() if k not in state.own()]


def leaves(tree):
    """Every tensor of a nested dict, tuple or dataclass."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, torch.nn.Module):
        return list(tree.parameters())
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else vars(tree).values()
    return [t for part in parts if part is not None for t in leaves(part)]


@pytest.mark.parametrize("name", CASES)
def test_masked_rows_have_no_influence_at_all(name):
    batch, masked = make_batch(), 8
    other = Batch(*({k: v.clone() for k, v in f.items()} if isinstance(f, dict) else f.clone() for f in batch))
    for field in (*other.obs.values(), *other.next_obs.values(), other.reward, other.weight, other.action):
        field[:masked] = field[:masked] * 1e4 + 77
    other.discount[:masked] = 0.5
    one, metrics = run_case(name, batch)
    two, again = run_case(name, other)
    for a, b in zip(leaves(one.state_dict()), leaves(two.state_dict()), strict=True):
        assert torch.equal(a, b)
    assert {k: v.item() for k, v in metrics.items()} == {k: v.item() for k, v in again.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_wholly_masked_batch_gives_no_gradient_and_no_nan(name):
    state, metrics = run_case(name, make_batch(masked=B))
    assert metrics[next(k for k in metrics if k.startswith("grad_norm"))].item() == 0
    assert all(t.isfinite().all() for t in [*metrics.values(), *leaves(state.state_dict())])


@pytest.mark.parametrize("name", CASES)
def test_an_update_touches_its_state_only(name):
    batch = make_batch()
    fresh_batch, (_, make, _) = make_batch(), CASES[name]
    state, metrics = run_case(name, batch)
    copies, fresh = pulled(state), pulled(make())
    assert copies
    for a, b in zip(leaves(dict(enumerate(copies))), leaves(dict(enumerate(fresh))), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None
    for a, b in zip(leaves(batch), leaves(fresh_batch), strict=True):
        assert torch.equal(a, b)
    assert any(
        not torch.equal(a, b) for a, b in zip(leaves(state.state_dict()), leaves(make().state_dict()), strict=True)
    )
    assert not any(v.requires_grad for v in metrics.values())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 0.1 * 3), ({"normalize_reward": True}, 3.0), ({"normalize_reward": True, "return_cap": 5.0}, 3.0)],
)
def test_a_tasks_reward_scale_does_not_shrink_normalised_rewards(settings, expected):
    parts = start(small_config(task={"reward_scale": 0.1}, algo={**settings, "reward_scale": 3.0}), Inline())
    assert parts.collector.normalizer.base_scale == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "algo"),
    [("cartpole", "c51"), ("cartpole", "r2d2"), ("cartpole", "pqn"), ("pendulum", "ppo"), ("pendulum", "reppo")],
)
def test_the_cap_on_the_largest_return_applies_to_other_families(task, algo):
    words = ["algo.normalize_reward=true", "algo.return_cap=0.5", "algo.reward_scale=3.0", "num_envs=8", "seed=1"]
    words.append("task.reward_scale=0.1")
    config = compose([f"task={task}", f"algo={algo}", "scale=cpu", "device=cpu", *words])
    norm = go_on(start(config, Inline()), 2).collector.normalizer
    deviation, largest = float(norm.returns.variance().sqrt()), float(norm.largest_return)
    assert largest > 0.5 * deviation  # the cap, not the deviation, gives the scale
    assert float(norm.reward_scale) == pytest.approx(3.0 * 0.1 * 0.5 / largest)
