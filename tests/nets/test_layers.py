"""BatchNorm, hyperspherical blocks and unit-norm weights, against torch's layers and loops."""

import math

import pytest
import torch
from torch import nn

from pql.engine.flat import Flat
from pql.nets.layers import (
    BatchNorm,
    EnsembleLinear,
    EnsembleRMSNorm,
    SphereBlock,
    SphereInput,
    batch_statistics,
    project_weights,
)
from pql.nets.mlp import Critic, Layers, NetInput, mlp

BATCHES, B, SIZE = 4, 32, 5


def drawn(layer: nn.Module, seed: int = 0) -> nn.Module:
    """The layer with random parameters."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=gen) + 0.5)
    return layer


def torchs(layer: BatchNorm, member: int | None) -> nn.BatchNorm1d:
    """torch's BatchNorm with the same parameters."""
    other = nn.BatchNorm1d(SIZE, eps=layer.eps, momentum=layer.momentum)
    pick = (lambda t: t) if member is None else (lambda t: t[member, 0])
    other.weight.data, other.bias.data = pick(layer.weight.data).clone(), pick(layer.bias.data).clone()
    return other


@pytest.mark.parametrize("ensemble", [None, 2])
@pytest.mark.parametrize("shared", [False, True], ids=["own inputs", "shared inputs"])
def test_batch_norm_is_torchs_on_the_rows_that_count(ensemble, shared):
    """Outputs, gradients and running statistics; a third of the rows are fillers with large values."""
    layer = drawn(BatchNorm(SIZE, ensemble))
    others = [torchs(layer, e) for e in range(ensemble or 1)] if ensemble else [torchs(layer, None)]
    gen = torch.Generator().manual_seed(1)
    lead = () if shared or ensemble is None else (ensemble,)
    for _ in range(BATCHES):
        x = torch.randn(*lead, B, SIZE, generator=gen) * 3 + 1
        rows = (torch.rand(B, generator=gen) > 0.3).float()
        x[..., rows == 0, :] *= 100
        x.requires_grad_(True)
        with batch_statistics(layer, rows, tracked=True):
            out = layer(x)[..., rows == 1, :]
        out.square().sum().backward()
        y = x.detach().clone().requires_grad_(True)
        inputs = [y] * len(others) if not lead else list(y)
        want = torch.stack([other(one[rows == 1]) for other, one in zip(others, inputs, strict=True)])
        want.square().sum().backward()
        torch.testing.assert_close(out, want if ensemble else want[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(x.grad[..., rows == 1, :], y.grad[..., rows == 1, :], atol=1e-4, rtol=1e-4)
    for mine, theirs in (("running_mean", "running_mean"), ("running_var", "running_var")):
        got = getattr(layer, mine).reshape(-1, SIZE)
        torch.testing.assert_close(got, torch.stack([getattr(o, theirs) for o in others]), atol=1e-5, rtol=1e-5)
    x = torch.randn(*lead, B, SIZE, generator=gen)
    inputs = [x] * len(others) if not lead else list(x)
    want = torch.stack([other.eval()(one) for other, one in zip(others, inputs, strict=True)])
    torch.testing.assert_close(layer.train()(x), want if ensemble else want[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["no row", "one row", "not finite", "not tracked"])
def test_running_statistics_stay_where_a_batch_has_none(case):
    layer, x, rows = BatchNorm(SIZE, 2), torch.randn(B, SIZE) + 3, torch.ones(B)
    if case in ("no row", "one row"):
        rows = torch.zeros(B)
        rows[: case == "one row"] = 1
    if case == "not finite":
        x[0, 1] = math.inf
    with batch_statistics(layer, rows, tracked=case != "not tracked"):
        out = layer(x)
    moved = (layer.running_mean != 0).flatten(1)
    assert moved.tolist() == [[case == "not finite" and i != 1 for i in range(SIZE)]] * 2
    assert case == "not finite" or bool(torch.isfinite(out).all())


def test_statistics_are_published_and_averaged_with_the_gradient():
    """They are views of one tensor, next to the gradient of a trained module, and load in place."""
    make = lambda: Critic(NetInput("policy", 3), 2, Layers((4, 4), batch_norm=True), 2)  # noqa: E731
    trained, copy = Flat(make(), trained=True), Flat(make())
    sizes = 2 * 2 * (5 + 4 + 4)  # mean and variance, two members, three layers
    assert [t.numel() for t in copy.tensors()] == [copy.data.numel(), sizes]
    assert trained.sent.numel() == trained.data.numel() + sizes + 1
    obs, action = {"policy": torch.randn(B, 3) + 2}, torch.randn(B, 2)
    with batch_statistics(trained.module, torch.ones(B), tracked=True):
        trained.module(obs, action).sum().backward()
    assert trained.statistics.data_ptr() == trained.sent[trained.data.numel() :].data_ptr()
    assert not torch.equal(trained.module(obs, action), copy.module(obs, action))
    for there, here in zip(copy.tensors(), trained.tensors(), strict=True):
        there.data.copy_(here.data)
    torch.testing.assert_close(copy.module(obs, action), trained.module(obs, action), rtol=0, atol=0)
    other = Flat(make())
    pointer = other.statistics.data_ptr()
    other.load_state_dict(trained.state_dict())
    assert torch.equal(other.statistics, trained.statistics)
    assert other.statistics.data_ptr() == pointer


def length(values) -> float:
    return math.sqrt(sum(float(v) ** 2 for v in values))


@pytest.mark.parametrize("kind", ["none", "linear", "all"])
def test_projected_weights_have_their_norm(kind):
    net = drawn(mlp(5, Layers((4, 4), "relu", trunk="residual", batch_norm=True), 3, 2))
    before = [p.detach().clone() for p in net.parameters()]
    project_weights(net, kind)
    linear = [m for m in net.modules() if isinstance(m, EnsembleLinear)]
    norms = [m for m in net.modules() if isinstance(m, BatchNorm)]
    rms = [m for m in net.modules() if isinstance(m, EnsembleRMSNorm)]
    assert (len(linear), len(norms), len(rms)) == (6, 5, 1)
    if kind == "none":
        assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
        return
    for layer in linear:
        for e in range(2):
            outputs = layer.weight.shape[2]
            assert [length(layer.weight[e, :, i]) for i in range(outputs)] == pytest.approx([1.0] * outputs, abs=1e-6)
    for layer in norms:
        size = layer.weight.shape[-1]
        joint = [length([*layer.weight[e, 0], *layer.bias[e, 0]]) for e in range(2)]
        assert (joint == pytest.approx([math.sqrt(size)] * 2, abs=1e-5)) == (kind == "all")
    assert ([length(rms[0].weight[e, 0]) for e in range(2)] == pytest.approx([2.0, 2.0], abs=1e-5)) == (kind == "all")
    once = [p.detach().clone() for p in net.parameters()]
    project_weights(net, kind, skip=torch.ones(()))
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), once, strict=True))


def unit(values):
    size = length(values)
    return [float(v) / size for v in values]


def product(weight, x):
    """x W, with ``weight`` [in, out]."""
    return [sum(float(x[i]) * float(weight[i, j]) for i in range(len(x))) for j in range(weight.shape[1])]


@pytest.mark.parametrize("ensemble", [None, 2])
def test_hyperspherical_layers_are_the_formula(ensemble):
    net = drawn(mlp(3, Layers((4, 4), "relu", trunk="sphere"), 2, ensemble))
    x = torch.randn(6, 3)
    got = net(x) if ensemble else net(x).unsqueeze(0)
    for e in range(ensemble or 1):
        pick = lambda p: p[e].double() if ensemble else (p.double().T if p.dim() == 2 else p.double()[None])  # noqa: E731, B023
        for row in range(6):
            h = want_of(net, pick, x[row].tolist())
            assert got[e, row].tolist() == pytest.approx(h, abs=1e-5)


def want_of(net, pick, x):
    """A hyperspherical network with two blocks of width 4, element by element (Lee et al. 2025, section 4)."""
    first, *blocks, inner, scaler, last = net
    assert isinstance(first, SphereInput)
    scale = math.sqrt(2 / 4)
    h = product(pick(first.linear.weight), unit([*x, 3.0]))
    h = unit([v * float(s) * scale / scale for v, s in zip(h, pick(first.scaler.weight)[0], strict=True)])
    for block in blocks:
        assert isinstance(block, SphereBlock)
        up = product(pick(block.up.weight), h)
        up = [max(v * float(s), 0.0) + 1e-8 for v, s in zip(up, pick(block.scaler.weight)[0], strict=True)]
        ahead = unit(product(pick(block.down.weight), up))
        rate = [float(a) * (1 / 3) / 4**-0.5 for a in pick(block.rate.weight)[0]]
        h = unit([a + r * (b - a) for a, b, r in zip(h, ahead, rate, strict=True)])
    h = [v * float(s) for v, s in zip(product(pick(inner.weight), h), pick(scaler.weight)[0], strict=True)]
    return [v + float(b) for v, b in zip(product(pick(last.weight), h), pick(last.bias)[0], strict=True)]


def test_hyperspherical_scalers_begin_at_their_values():
    net = mlp(3, Layers((8, 8, 8), trunk="sphere"), 2)
    first, *blocks, _, scaler, _ = net
    assert first.scaler.weight[0].item() == pytest.approx(math.sqrt(2 / 8))
    assert first.scaler(torch.ones(8))[0].item() == pytest.approx(math.sqrt(2 / 8))
    assert [b.scaler(torch.ones(32))[0].item() for b in blocks] == pytest.approx([math.sqrt(2 / 8) / 2] * 3)
    assert [b.rate(torch.ones(8))[0].item() for b in blocks] == pytest.approx([1 / 4] * 3)
    assert [b.rate.weight[0].item() for b in blocks] == pytest.approx([8**-0.5] * 3)
    assert scaler(torch.ones(8))[0].item() == 1


def test_bfloat16_networks_round_products_and_keep_float32_outputs():
    """The values are those of a network whose inputs and weights are rounded; gradients are float32."""
    critic = Critic(NetInput("policy", 4), 2, Layers((8,), "relu"), 2)
    obs, action = {"policy": torch.randn(B, 4)}, torch.randn(B, 2)
    plain = critic(obs, action)
    critic.amp = True
    out = critic(obs, action)
    assert out.dtype == torch.float32
    x = torch.cat((obs["policy"], action), -1)
    for layer in (critic.net[0], critic.net[2]):
        rounded = [t.detach().bfloat16() for t in (layer.bias, x, layer.weight)]
        x = torch.baddbmm(rounded[0], rounded[1].expand(2, -1, -1), rounded[2])
        x = x.relu() if layer is critic.net[0] else x
    assert torch.equal(out, x.float().squeeze(-1))
    assert 0 < (out - plain).abs().max() < 0.05
    out.sum().backward()
    assert {p.grad.dtype for p in critic.parameters()} == {torch.float32}
