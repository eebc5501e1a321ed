"""Optimisers on a flat parameter tensor, and ``Flat``, against the papers and torch's optimisers."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import go_on, small_config, start
from families import FAMILIES
from oracles import AdamW as SlowAdamW
from torch import nn

from pql.engine.executors import Inline
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, LrSchedule, Optimizer, RAdam, RMSProp, RMSPropTF, polyak
from pql.nets.mlp import Layers, mlp
from pql.run.build import build


def net(seed=0):
    torch.manual_seed(seed)
    return mlp(3, Layers((5, 4), layer_norm=True), 2)


def changed(record, values):
    """Return a record of settings with other ``values``; those of its groups are dictionaries."""
    new = {k: changed(getattr(record, k), v) if isinstance(v, dict) else v for k, v in values.items()}
    return replace(record, **new)


def flat_grads(module):
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


def flat_values(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def backward(gen, *pairs):
    """Give every (module, optimizer) the gradient of the same regression on rows of ``gen``."""
    x, y = torch.randn(16, 3, generator=gen), torch.randn(16, 2, generator=gen)
    for module, optimizer in pairs:
        loss = (module(x) - y).square().mean()
        if isinstance(optimizer, Optimizer):
            optimizer.flat.differentiate(loss)
        else:
            optimizer.zero_grad()
            loss.backward()


def moved(optimizer, *skip):
    """Return how far a step on gradients of 1 goes downwards."""
    data = optimizer.flat.data
    before = data.detach().clone()
    data.grad.fill_(1.0)
    optimizer.step(*skip)
    return before - data.detach()


# --- AdamW ---


@pytest.mark.parametrize("clip", [None, 0.5, 1e3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_equals_torch_and_the_algorithm(clip, decay):
    module = net()
    theirs, slow = copy.deepcopy(module), flat_values(module).double().tolist()
    flat = Flat(module, trained=True)
    mine = AdamW(flat, 3e-3, clip, decay)
    other = torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=decay, foreach=False)
    oracle = SlowAdamW(3e-3, decay, clip)
    gen, clipped = torch.Generator().manual_seed(1), 0
    for _ in range(20):
        backward(gen, (module, mine), (theirs, other))
        slow = oracle.step(slow, flat_grads(module).double().tolist())
        norm = mine.step()
        want = nn.utils.clip_grad_norm_(theirs.parameters(), clip if clip is not None else float("inf"))
        other.step()
        clipped += clip is not None and norm.item() > clip
        assert norm.item() == pytest.approx(want.item(), rel=1e-4)
        torch.testing.assert_close(flat_values(module), flat_values(theirs), rtol=0, atol=1e-6)
        torch.testing.assert_close(flat.data.detach().double(), torch.tensor(slow).double(), rtol=0, atol=3e-6)
    assert clipped == {None: 0, 0.5: 20, 1e3: 0}[clip]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_schedule_is_torchs_and_ends(kind):
    """As torch's own schedulers step by step, with betas of (0.9, 0.95); constant after the last of 12 steps."""
    module = net()
    theirs = copy.deepcopy(module)
    flat = Flat(module, trained=True)
    mine = AdamW(flat, 3e-3, betas=(0.9, 0.95))
    mine.schedule = LrSchedule(kind, 12, 0.25)
    other = torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95))
    if kind == "cosine":
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(other, 12, eta_min=0.25 * 3e-3)
    else:
        schedule = torch.optim.lr_scheduler.LinearLR(other, 1.0, 0.25, 12)
    gen = torch.Generator().manual_seed(1)
    for step in range(16):
        backward(gen, (module, mine), (theirs, other))
        mine.step()
        if step >= 12:
            other.param_groups[0]["lr"] = 0.25 * 3e-3
        other.step()
        if step < 12:
            schedule.step()
        torch.testing.assert_close(flat_values(module), flat_values(theirs), rtol=0, atol=1e-6)
    factors = [mine.schedule(torch.tensor(float(k))).item() for k in (0, 6, 12, 100)]
    assert factors == pytest.approx([1.0, 0.625, 0.25, 0.25])


CRITIC, POLICY = {"beta1": 0.7, "beta2": 0.95}, {"beta1": 0.6, "beta2": 0.9}
ADAMS = {
    **{family: {"critic": CRITIC, "policy": POLICY} for family in ("pql", "sac", "reppo")},
    **{family: {"critic": CRITIC} for family in ("rainbow", "r2d2", "pqn")},
    "ppo": {"policy": POLICY},
    "impala, lstm": {"optimizer": "adam", "policy": POLICY},
}


@pytest.mark.parametrize("family", ADAMS)
def test_the_betas_of_the_settings_are_those_of_every_step(family, monkeypatch):
    """The temperature of SAC has the policy's betas; REPPO's multipliers are in its policy's optimiser."""
    steps, fused = [], torch._fused_adamw_

    def noted(data, *args, **kwargs):
        steps.append((data[0].numel(), kwargs["beta1"], kwargs["beta2"]))
        return fused(data, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", noted)
    config = replace(FAMILIES[family], graphs="off")
    parts = go_on(start(replace(config, algo=changed(config.algo, ADAMS[family])), Inline()), 4)
    assert len(steps) >= 4
    if len({size for size, *_ in steps}) == 1:
        assert len({*steps}) == 1
        assert steps[0][1:] == ((0.7, 0.95) if "critic" in ADAMS[family] else (0.6, 0.9))
        return
    state = next(learner.state for learner in parts.learners.values() if hasattr(learner.state, "critic"))
    size = state.critic.data.numel()
    assert {(n == size, *betas) for n, *betas in steps} == {(True, 0.7, 0.95), (False, 0.6, 0.9)}


@pytest.mark.parametrize("family", ["rainbow", "r2d2"])
@pytest.mark.parametrize(("kind", "third"), [("linear", 0.7), ("cosine", 0.775)])
def test_learning_rates_of_q_networks_fall_within_the_updates(family, kind, third, monkeypatch):
    rates, fused = [], torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **k: rates.append(k["lr"].item()) or fused(*a, **k))
    config = replace(FAMILIES[family], graphs="off")
    schedule = {"lr_schedule": kind, "lr_updates": 6, "lr_final": 0.1}
    parts = go_on(start(replace(config, algo=changed(config.algo, schedule)), Inline()), 12)
    assert len(rates) == parts.learners["v"].state.clock.updates > 8
    first = config.algo.critic.lr
    assert [rates[k] / first for k in (0, 2, 6, 8)] == pytest.approx([1, third, 0.1, 0.1])
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("kind", "theirs", "steps", "clip", "settings"),
    [
        (RAdam, torch.optim.RAdam, 30, 0.5, {"eps": 1e-12}),  # eps stand in different places: none matters here
        (RMSProp, partial(torch.optim.RMSprop, alpha=0.99), 20, None, {"eps": 1e-5}),
        (RMSProp, partial(torch.optim.RMSprop, alpha=0.99), 20, 0.5, {"eps": 1e-5}),
    ],
)
def test_radam_and_rmsprop_equal_torchs(kind, theirs, steps, clip, settings):
    """RAdam's factor appears with the sixth step."""
    module = net()
    copied, flat = copy.deepcopy(module), Flat(module, trained=True)
    mine, other = kind(flat, 3e-3, clip, **settings), theirs(copied.parameters(), lr=3e-3, foreach=False, **settings)
    gen = torch.Generator().manual_seed(1)
    for _ in range(steps):
        backward(gen, (module, mine), (copied, other))
        mine.step()
        nn.utils.clip_grad_norm_(copied.parameters(), clip if clip is not None else float("inf"))
        other.step()
        torch.testing.assert_close(flat_values(module), flat_values(copied), rtol=0, atol=2e-6)


def test_tensorflows_rmsprop_has_eps_under_the_root_and_begins_with_one():
    """By hand: squares .99 + .01 g^2 and so on, steps lr g / sqrt(square + .01)."""
    flat = Flat(net(), trained=True)
    optimizer, before, square, moved = RMSPropTF(flat, 1e-2, eps=0.01), flat.data.detach().clone(), 1.0, 0.0
    for g in (0.5, -2.0, 0.1):
        flat.data.grad.fill_(g)
        optimizer.step()
        square = 0.99 * square + 0.01 * g * g
        moved += 1e-2 * g / (square + 0.01) ** 0.5
    torch.testing.assert_close(before - flat.data, torch.full_like(before, moved), rtol=0, atol=1e-6)


def test_radam_may_begin_with_a_skipped_step():
    optimizer = RAdam(Flat(net(), trained=True), 1e-3)
    assert (moved(optimizer, torch.tensor(1.0)) == 0).all()
    distance = moved(optimizer, torch.tensor(0.0))
    torch.testing.assert_close(distance, torch.full_like(distance, 1e-3), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("kind", "size"), [(AdamW, 1e-3 / 1.5), (RMSProp, 1e-3 / (0.1 + 0.5))])
def test_eps_stands_beside_the_root(kind, size):
    for eps, want in ((0.5, size), (None, None)):
        optimizer = kind(Flat(net(), trained=True), 1e-3, eps=eps)
        distance = moved(optimizer)  # Adam's corrected moments are 1 then, RMSProp's is 0.01
        if want is not None:
            torch.testing.assert_close(distance, torch.full_like(distance, want), rtol=0, atol=1e-6)
    assert optimizer.eps == {AdamW: 1e-8, RMSProp: 1e-5}[kind]


@pytest.mark.parametrize("family", ["ddpg", "sac", "adam", "rmsprop"])
def test_eps_of_the_config_reaches_the_optimisers(family):
    on_policy = {"family": "ppo", "schedule": "lockstep", "optimizer": family, "horizon": 4}
    algo = on_policy if family in ("adam", "rmsprop") else {"family": family, "critic": {"eps": 0.25}}
    algo["policy"] = {"eps": 0.5}
    parts = build(small_config(algo=algo))
    eps = {name: learner.state.optimizer.eps for name, learner in parts.learners.items()}
    assert eps == ({"learner": 0.5} if family in ("adam", "rmsprop") else {"v": 0.25, "p": 0.5})


@pytest.mark.parametrize("kind", [AdamW, RAdam, RMSProp])
def test_a_skipped_step_leaves_everything_as_it_was(kind):
    flat = Flat(net(), trained=True)
    optimizer = kind(flat, 0.1, clip=1.0)
    for skip in (None, torch.tensor(0.0), torch.tensor(1.0)):
        flat.data.grad.normal_(generator=torch.Generator().manual_seed(1))
        state = {"data": flat.data, **optimizer.state_dict()}
        before = {k: v.detach().clone() for k, v in state.items()}
        optimizer.step(skip)
        changed = {k for k, v in state.items() if not torch.equal(v, before[k])}
        assert changed == (set() if skip is not None and skip == 1 else set(state) - {"lr"})


def test_optimizer_state_restores_in_place_and_continues_bit_for_bit():
    gen = torch.Generator().manual_seed(2)
    grads = [torch.randn(Flat(net()).data.shape, generator=gen) for _ in range(10)]

    def steps(flat, optimizer, some):
        for g in some:
            flat.data.grad.copy_(g)
            optimizer.step()

    one, two = Flat(net(), trained=True), Flat(net(1), trained=True)
    first, second = AdamW(one, 1e-3, 0.5, 0.01), AdamW(two, 9.0, 0.5, 0.01)
    steps(one, first, grads[:5])
    address = {k: t.data_ptr() for k, t in second.state_dict().items()}
    two.load_state_dict({k: t.clone() for k, t in one.state_dict().items()})
    second.load_state_dict({k: t.clone() for k, t in first.state_dict().items()})
    assert {k: t.data_ptr() for k, t in second.state_dict().items()} == address
    for flat, optimizer in ((one, first), (two, second)):
        steps(flat, optimizer, grads[5:])
    assert torch.equal(one.data, two.data)


# --- Flat ---


def test_flat_parameters_and_gradients_are_views():
    module = net()
    names, values = list(module.state_dict()), flat_values(module)
    flat = Flat(module, trained=True)
    assert torch.equal(flat.data, values)
    start = 0
    for p in module.parameters():
        assert p.data_ptr() == flat.data.data_ptr() + 4 * start
        assert p.grad.data_ptr() == flat.data.grad.data_ptr() + 4 * start
        start += p.numel()
    assert start == flat.data.numel()
    assert list(flat.state_dict()) == names
    module(torch.ones(2, 3)).sum().backward()
    assert torch.equal(flat_grads(module), flat.data.grad)
    assert flat.data.grad.abs().sum() > 0
    with torch.no_grad():
        flat.data.fill_(0.25)
    assert all((p == 0.25).all() for p in module.parameters())


def test_flat_without_training_takes_no_gradient():
    module = net()
    flat = Flat(module)
    assert flat.data.grad is None
    assert not flat.data.requires_grad
    assert not any(p.requires_grad for p in module.parameters())
    x = torch.ones(2, 3, requires_grad=True)
    module(x).sum().backward()  # still differentiable in its input: a policy climbs a critic it does not train
    assert x.grad.abs().sum() > 0


def test_flat_loads_in_place():
    one, two = Flat(net(0)), Flat(net(1), trained=True)
    address = [two.data.data_ptr(), *(p.data_ptr() for p in two.module.parameters())]
    assert not torch.equal(one.data, two.data)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.data, two.data)
    assert [two.data.data_ptr(), *(p.data_ptr() for p in two.module.parameters())] == address


# --- polyak ---


@pytest.mark.parametrize("tau", [0.0, 0.05, 0.7, 1.0])
def test_polyak_moves_the_target_by_tau(tau):
    target, source = Flat(net(0)), Flat(net(1), trained=True)
    want = [(1 - tau) * t + tau * s for t, s in zip(target.data.tolist(), source.data.tolist(), strict=True)]
    before = source.data.detach().clone()
    polyak(target, source, tau)
    assert flat_values(target.module).tolist() == pytest.approx(want, abs=1e-7)
    assert torch.equal(source.data, before)
