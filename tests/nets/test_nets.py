"""Networks: an ensemble as one batched product equals separate networks, in values and gradients."""

import pytest
import torch
from plain_nets import plain
from torch import nn

from pql.nets.layers import EnsembleLinear
from pql.nets.mlp import LOG_STD_MAX, LOG_STD_MIN, Critic, DeterministicPolicy, GaussianPolicy, Layers, NetInput, mlp


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "elu", "silu", "tanh"])
def test_ensemble_equals_separate_networks(activation, layer_norm):
    torch.manual_seed(0)
    net = mlp(5, Layers((8, 6), activation, layer_norm), 3, ensemble=3)
    with torch.no_grad():  # gains and biases start at 1 and 0, at which members are indistinguishable
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, seen = torch.randn(7, 5, requires_grad=True), torch.randn(3, 7, 3)
    out = net(x)
    (out * seen).sum().backward()
    wide = x.detach().double().requires_grad_()
    for e in range(3):
        alone = plain(net, e)
        one = alone(wide)
        (one * seen[e]).sum().backward()
        torch.testing.assert_close(out[e].double(), one, rtol=0, atol=1e-5)
        for mine, own in zip(net.parameters(), alone.parameters(), strict=True):
            got = mine.grad[e] if own.dim() == 2 else mine.grad[e, 0]
            torch.testing.assert_close(got.T.double() if own.dim() == 2 else got.double(), own.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


def test_ensemble_members_differ_and_start_like_torch_linear():
    torch.manual_seed(0)
    layer, theirs = EnsembleLinear(4, 100, 50), nn.Linear(100, 50)
    assert not torch.equal(layer.weight[0], layer.weight[1])
    for mine, other in ((layer.weight, theirs.weight), (layer.bias, theirs.bias)):
        assert 0.097 < mine.abs().max() <= 0.1  # uniform in +-1 / sqrt(100)
        assert 0.09 < other.abs().max() <= 0.1
    assert layer.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)


BY_HAND = {
    "relu": lambda y: torch.where(y > 0, y, 0.0),
    "elu": lambda y: torch.where(y > 0, y, y.exp() - 1),
    "silu": lambda y: y / (1 + (-y).exp()),
    "tanh": lambda y: 1 - 2 / (1 + (2 * y).exp()),
}


@pytest.mark.parametrize("activation", BY_HAND)
def test_plain_network_equals_layers_by_hand(activation):
    torch.manual_seed(0)
    net = mlp(4, Layers((6,), activation, layer_norm=True), 2)
    x = torch.randn(9, 4)
    first, norm, _, last = net
    y = x @ first.weight.T + first.bias
    y = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, correction=0) + 1e-5).sqrt() * norm.weight + norm.bias
    y = BY_HAND[activation](y) @ last.weight.T + last.bias
    torch.testing.assert_close(net(x), y, rtol=0, atol=1e-5)


def test_critic_reads_its_own_group_and_gives_values_or_logits():
    torch.manual_seed(0)
    obs = {"policy": torch.randn(5, 3), "critic": torch.randn(5, 4)}
    action = torch.randn(5, 2)
    critic = Critic(NetInput("critic", 4), 2, Layers((8,)), ensemble=3)
    values = critic(obs, action)
    assert values.shape == (3, 5)
    changed = critic({**obs, "policy": torch.randn(5, 3)}, action)
    assert torch.equal(values, changed)
    assert not torch.equal(values, critic({**obs, "critic": torch.randn(5, 4)}, action))
    assert not torch.equal(values, critic(obs, -action))
    assert Critic(NetInput("policy", 3), 2, Layers((8,)), 2, atoms=11)(obs, action).shape == (2, 5, 11)


def test_policies_stay_in_range():
    torch.manual_seed(0)
    obs = {"policy": 100 * torch.randn(64, 3)}
    sharp, soft = (kind(NetInput("policy", 3), 2, Layers((16,))) for kind in (DeterministicPolicy, GaussianPolicy))
    assert sharp(obs).abs().max() <= 1
    assert torch.equal(sharp.mean_action(obs), sharp(obs))
    mean, log_std = soft(obs)
    assert mean.shape == log_std.shape == (64, 2)
    assert torch.equal(soft.mean_action(obs), mean.tanh())
    assert log_std.min() >= LOG_STD_MIN
    assert log_std.max() <= LOG_STD_MAX
    assert log_std.max() - log_std.min() > 0.5 * (LOG_STD_MAX - LOG_STD_MIN)
    narrow = GaussianPolicy(NetInput("policy", 3), 2, Layers((16,)), log_std=(-10.0, -9.0))
    log_std = narrow(obs)[1]
    assert -10 <= log_std.min() < -9.75
    assert -9.25 < log_std.max() <= -9
    clipped = GaussianPolicy(NetInput("policy", 3), 2, Layers((16,)), clip=True)
    assert torch.equal(clipped(obs)[1], clipped.outputs(obs)[:, 2:].clamp(-5, 2))


@pytest.mark.parametrize("ensemble", [None, 3])
def test_orthogonal_weights_and_small_heads(ensemble):
    """Every layer of every member has orthonormal rows or columns; biases and a zero head are 0."""
    torch.manual_seed(0)
    net = mlp(5, Layers((8, 6), init="orthogonal"), 3, ensemble)
    for layer in net[::2]:
        stack = layer.weight if ensemble else layer.weight.T.unsqueeze(0)  # [E, in, out]
        for weight in stack.detach().double():
            gram = weight.T @ weight if weight.shape[0] >= weight.shape[1] else weight @ weight.T
            torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), atol=1e-6, rtol=0)
        assert (layer.bias == 0).all()
    if ensemble:
        assert not torch.allclose(net[0].weight[0], net[0].weight[1])
    x = torch.randn(4, 5)
    assert (mlp(5, Layers((8,), head="zero"), 3, ensemble)(x) == 0).all()
    small = mlp(5, Layers((400,), head="small"), 300, ensemble)[-1]
    assert small.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert (small.bias == 0).all()


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("ensemble", [None, 3])
def test_residual_blocks_are_the_formula(norm, ensemble):
    """embed, then x + W2 relu(W1 norm(x)) twice, then norm and head, in float64 for each member."""
    torch.manual_seed(0)
    net = mlp(5, Layers((6, 6), "relu", trunk="residual", norm=norm), 3, ensemble)
    with torch.no_grad():  # gains and biases start at 1 and 0
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    x = torch.randn(7, 5)
    out = net(x)
    for e in range(ensemble or 1):
        want = plain(net, e if ensemble else None)(x.double())
        torch.testing.assert_close((out[e] if ensemble else out).double(), want, rtol=1e-4, atol=1e-5)
    if ensemble:
        assert not torch.allclose(out[0], out[1])
