"""DQN's update against the papers in float64, row by row: targets, losses, priorities, target period."""

import copy
import math

import pytest
import torch
from oracles import AdamW as SlowAdamW
from oracles import (
    bin_masses,
    c51_projection,
    huber,
    kl_divergence,
    munchausen_bonus,
    munchausen_value,
    q_target,
    quantile_loss,
    soft_policy,
)

from pql.algos import dqn
from pql.algos.value import ValueState
from pql.config import DqnConfig, MunchausenConfig
from pql.config.networks import QuantileNetConfig
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, Clock
from pql.nets.mlp import Layers, NetInput
from pql.nets.q import QNetwork, QuantileNetwork, redraw_noise
from pql.types import Batch

B, D, A = 24, 3, 4  # batch, features, actions
ATOMS = torch.linspace(-3, 3, 13)
OPTIMIZER = {"lr": 1e-3, "clip": 0.5, "weight_decay": 0.0, "eps": 1e-4}  # eps: rounding must not turn a step's sign
SOFT = MunchausenConfig(alpha=0.9, tau=0.5, clip=-5.0)  # warmer than BTR's: every action counts, some are clipped
VARIANTS = {
    "dqn": {},
    "double": {"double": True},
    "squared": {"huber": None},
    "small delta": {"huber": 0.3, "double": True},
    "dueling": {"dueling": True, "double": True},
    "c51": {"atoms": ATOMS},
    "double c51": {"atoms": ATOMS, "double": True, "dueling": True},
    "hl-gauss": {"atoms": ATOMS, "loss": "hl_gauss", "double": True},
    "munchausen": {"munchausen": SOFT, "dueling": True},
    "iqn": {"quantiles": 5},
    "double iqn": {"quantiles": 5, "double": True, "dueling": True, "huber": 0.4},
    "munchausen iqn": {"quantiles": 5, "munchausen": SOFT, "dueling": True},
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def network(seed, **kwargs):
    torch.manual_seed(seed)
    kind = QuantileNetwork if "quantiles" in kwargs else QNetwork
    if "quantiles" in kwargs:
        kwargs["quantiles"] = (kwargs["quantiles"], 8)  # float32 rounds the cosines of large arguments
    net = kind(NetInput("policy", D), A, Layers((7, 6), noisy=kwargs.pop("noisy", None)), **kwargs)
    with torch.no_grad():  # values far enough apart: now one action is best, now another
        for p in net.parameters():
            p.mul_(3)
    return net


NETWORK = ("atoms", "dueling", "noisy", "shared_grad", "quantiles")


class Noted:
    """Stand-in for priorities that records its updates."""

    def update(self, index, priority, mask):
        self.reported = (index.clone(), priority.clone(), mask.clone())


def state_of(variant, priorities=None, period=1000):
    kwargs = {k: v for k, v in variant.items() if k in NETWORK}
    flat = Flat(network(0, **kwargs), trained=True)
    optimizer = AdamW(flat, **OPTIMIZER)
    return ValueState(flat, Flat(network(1, **kwargs)), optimizer, Clock(torch.device("cpu")), period, priorities)


def settings_of(variant):
    soft = variant.get("munchausen", MunchausenConfig())
    critic = QuantileNetConfig(loss=variant.get("loss", "c51"), sigma=0.6)
    return DqnConfig(
        double=variant.get("double", False), huber=variant.get("huber", 1.0), munchausen=soft, critic=critic
    )


def make_batch(masked=8):
    gen = torch.Generator().manual_seed(7)

    def draw(*size):
        return torch.randn(*size, generator=gen)

    mask = (torch.arange(B) >= masked).float()
    weight = torch.rand(B, generator=gen) + 0.5
    discount = 0.97 * (torch.rand(B, generator=gen) > 0.2)
    action = torch.randint(A, (B,), generator=gen)
    obs, reward, next_obs = {"policy": draw(B, D)}, draw(B), {"policy": draw(B, D)}
    return Batch(obs, action, reward, discount, next_obs, mask, weight, torch.arange(B) + 100, mask)


def generator():
    return torch.Generator().manual_seed(11)


def by_the_papers(net, target_net, settings, batch):
    """(loss, error or divergence) of every row; the loss of float64 tensors, so that autograd goes through them."""
    if isinstance(net, QuantileNetwork):
        return by_quantiles(net, target_net, settings, batch)
    atoms = net.atoms
    wide = {k: v.double() for k, v in batch.obs.items()}, {k: v.double() for k, v in batch.next_obs.items()}
    now = net(wide[0])
    with torch.no_grad():
        ahead, online = target_net(wide[1]), net(wide[1])
        if atoms is not None:
            probs = ahead.softmax(-1)
            means, online = probs @ atoms, online.softmax(-1) @ atoms
    losses, errors, soft = [], [], settings.munchausen
    for b in range(B):
        chooser = online[b].tolist() if settings.double else None
        r, g, a = batch.reward[b].item(), batch.discount[b].item(), int(batch.action[b])
        if atoms is None:
            target = q_target(r, g, ahead[b].tolist(), chooser)
            if soft.alpha:
                policy = soft_policy(ahead[b].tolist(), soft.tau)
                bonus = munchausen_bonus(now[b].tolist(), a, soft.alpha, soft.tau, soft.clip)
                target = r + bonus + g * munchausen_value(ahead[b].tolist(), policy, soft.tau)
            error = target - now[b, a].item()
            errors.append(error)
            small = settings.huber is None or abs(error) <= settings.huber
            e = target - now[b, a]
            losses.append(e * e / 2 if small else settings.huber * e.abs() - settings.huber**2 / 2)
            assert losses[-1].item() == pytest.approx(huber(error, settings.huber), rel=1e-9)
            continue
        values = means[b].tolist() if chooser is None else chooser
        best = max(range(A), key=values.__getitem__)
        support = [r + g * z for z in atoms.tolist()]
        if settings.critic.loss == "c51":
            target = c51_projection(support, probs[b, best].tolist(), atoms.tolist())
        else:
            target = bin_masses(r + g * means[b, best].item(), atoms.tolist(), settings.critic.sigma)
        log_p = now[b, a].log_softmax(-1)
        losses.append(-(torch.tensor(target, dtype=torch.float64) * log_p).sum())
        errors.append(kl_divergence(target, log_p.exp().tolist()))
    return torch.stack(losses), errors


def by_quantiles(net, target_net, settings, batch):
    """The same for quantiles, which the learner draws first, for s and then for s'."""
    soft, tau = settings.munchausen, torch.rand(2, B, net.quantiles, generator=generator())
    obs, next_obs = ({k: v.double() for k, v in o.items()} for o in (batch.obs, batch.next_obs))
    now = net(obs, tau[0])
    with torch.no_grad():
        ahead, online = target_net(next_obs, tau[1]), net.values(next_obs)
    losses, errors = [], []
    for b in range(B):
        r, g, a = batch.reward[b].item(), batch.discount[b].item(), int(batch.action[b])
        means = [sum(quantiles) / len(quantiles) for quantiles in ahead[b].tolist()]
        if soft.alpha:
            policy = soft_policy(means, soft.tau)
            values = [sum(quantiles) / len(quantiles) for quantiles in now[b].tolist()]
            r += munchausen_bonus(values, a, soft.alpha, soft.tau, soft.clip)
            next_values = [
                sum(p * (z - soft.tau * math.log(p)) for p, z in zip(policy, column, strict=True))
                for column in ahead[b].T.tolist()
            ]
        else:
            values = online[b].tolist() if settings.double else means
            next_values = ahead[b, max(range(A), key=values.__getitem__)].tolist()
        target = [r + g * z for z in next_values]
        q = now[b, a]
        parts = []
        for k in range(net.quantiles):
            error = torch.tensor(target, dtype=torch.float64) - q[k]
            small = error.abs() <= settings.huber
            size = torch.where(small, error**2 / 2, settings.huber * (error.abs() - settings.huber / 2))
            parts.append((tau[0, b, k] - (error < 0).double()).abs() * size / settings.huber)
        losses.append(torch.stack(parts).sum(0).mean())
        oracle = quantile_loss(tau[0, b].tolist(), q.tolist(), target, settings.huber)
        assert losses[-1].item() == pytest.approx(oracle, rel=1e-6)
        errors.append(sum(abs(z - v) for v in q.tolist() for z in target) / len(target))
    return torch.stack(losses), errors


@EVERY_VARIANT
def test_an_update_is_the_papers(variant):
    noted, batch = Noted(), make_batch()
    state, settings = state_of(variant, noted), settings_of(variant)
    net, target_net = (copy.deepcopy(m).double() for m in state.nets)
    losses, errors = by_the_papers(net, target_net, settings, batch)
    loss = (losses * batch.mask * batch.weight).sum() / batch.mask.sum()
    loss.backward()
    grads = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).tolist()
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()
    metrics = dqn.dqn_update(state, batch, settings, generator())
    norm = math.sqrt(sum(g * g for g in grads))
    assert metrics["loss/critic"].item() == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm/critic"].item() == pytest.approx(norm, rel=1e-4)
    want = SlowAdamW(**OPTIMIZER).step(before, grads)
    assert state.q.data.tolist() == pytest.approx(want, abs=3e-6)
    index, reported, mask = noted.reported
    assert torch.equal(index, batch.index)
    assert torch.equal(mask, batch.mask)
    assert reported.tolist() == pytest.approx(errors, rel=1e-3, abs=1e-4)
    kept = [abs(e) for e, m in zip(errors, batch.mask.tolist(), strict=True) if m]
    assert metrics["value/td_error"].item() == pytest.approx(sum(kept) / len(kept), rel=1e-3)


def test_the_munchausen_bonus_is_clipped_below_and_never_above_zero():
    values = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.1, 0.09, 0.0]])
    action = torch.tensor([0, 0, 1, 1])
    soft = MunchausenConfig(alpha=0.9, tau=0.03, clip=-1.0)  # BTR's
    want = [-0.9 * 0.03 * math.log(3), 0.0, -0.9, -0.9 * 0.03 * math.log(math.exp(1 / 3) + 1 + math.exp(-3))]
    assert dqn.munchausen_bonus(values, action, soft).tolist() == pytest.approx(want, abs=1e-6)
    same = torch.full((1, 3), 2.0)
    assert dqn.soft_value(same, same, 0.03).item() == pytest.approx(2 + 0.03 * math.log(3), rel=1e-6)
    apart = torch.tensor([[2.0, -2.0, -9.0]])
    assert dqn.soft_value(apart, apart, 0.03).item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("kind", [{}, {"quantiles": 5}], ids=["scalar", "quantiles"])
def test_the_variants_clip_some_bonuses_and_not_others(kind):
    batch, net = make_batch(), network(0, dueling=True, **kind)
    bonus = dqn.munchausen_bonus(net.values(batch.obs), batch.action, SOFT)
    clipped = (bonus == SOFT.alpha * SOFT.clip).sum()
    assert 3 < clipped < B - 3


def test_quantiles_are_drawn_anew_for_every_update():
    state, gen, settings = state_of({"quantiles": 5}), generator(), settings_of({})
    state.optimizer.lr.zero_()
    losses = [dqn.dqn_update(state, make_batch(), settings, gen)["loss/critic"].item() for _ in range(3)]
    assert len({*losses}) == 3


@pytest.mark.parametrize("period", [1, 3])
def test_the_target_is_copied_after_every_period_and_stays_in_between(period):
    state = state_of({}, period=period)
    for i in range(1, 8):
        before = state.target.data.clone()
        dqn.dqn_update(state, make_batch(), settings_of({}), generator())
        if i % period == 0:
            assert torch.equal(state.target.data, state.q.data)
            assert not torch.equal(state.target.data, before)
        else:
            assert torch.equal(state.target.data, before)
    assert state.clock.updates == 7


def test_both_networks_of_a_noisy_pair_have_noise_of_their_own_drawn_for_this_update():
    variant = {"noisy": 0.5}
    state, batch = state_of(variant), make_batch()
    nets = [copy.deepcopy(m) for m in state.nets]
    metrics = dqn.dqn_update(state, batch, settings_of(variant), generator())
    gen = generator()
    for net in nets:
        redraw_noise(net, gen)
    assert not torch.equal(nets[0].advantage[0].noise_in, nets[1].advantage[0].noise_in)
    loss, _, _ = dqn.value_scalar_loss(*nets, settings_of(variant), batch)
    want = (loss * batch.mask * batch.weight).sum() / batch.mask.sum()
    assert metrics["loss/critic"].item() == pytest.approx(want.item(), rel=1e-5)
    again = dqn.dqn_update(state, batch, settings_of(variant), gen)
    assert again["loss/critic"] != metrics["loss/critic"]
