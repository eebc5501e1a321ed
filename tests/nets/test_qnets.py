"""Q networks: dueling, categorical, noisy, and the interface shared with all other policies."""

import math

import pytest
import torch
from oracles import dueling, noisy_linear
from torch import nn

from pql.nets.mlp import Layers, NetInput
from pql.nets.q import NoisyLinear, QNetwork, QuantileNetwork, redraw_noise

D, N = 3, 4  # features, actions
ATOMS = torch.linspace(-2, 2, 5)


def network(seed=0, **kwargs):
    torch.manual_seed(seed)
    return QNetwork(
        NetInput("policy", D), N, Layers(kwargs.pop("hidden", (6, 5)), noisy=kwargs.pop("noisy", None)), **kwargs
    )


def obs(count=7):
    return {"policy": torch.randn(count, D, generator=torch.Generator().manual_seed(5))}


def generator(seed=11):
    return torch.Generator().manual_seed(seed)


def test_shapes():
    assert network()(obs()).shape == (7, N)
    assert network(dueling=True)(obs()).shape == (7, N)
    for net in (network(atoms=ATOMS), network(atoms=ATOMS, dueling=True, noisy=0.5)):
        assert net(obs()).shape == (7, N, 5)
        assert net.values(obs()).shape == (7, N)
    assert network(hidden=())(obs()).shape == (7, N)
    action = network()(obs()).argmax(-1)
    assert torch.equal(network().mean_action(obs()), action)
    assert action.dtype == torch.int64
    assert len({*action.tolist()}) > 1


def test_dueling_streams_are_joined_by_the_mean():
    net = network(dueling=True)
    x = net.trunk(obs()["policy"])
    for row, value, advantages in zip(net(obs()), net.value(x), net.advantage(x), strict=True):
        assert row.tolist() == pytest.approx(dueling(value.item(), advantages.tolist()), abs=1e-6)


def test_categorical_dueling_joins_every_atom():
    net = network(dueling=True, atoms=ATOMS)
    x = net.trunk(obs()["policy"])
    value, advantage = net.value(x), net.advantage(x).view(7, N, 5)
    for b in range(7):
        for z in range(5):
            want = dueling(value[b, z].item(), advantage[b, :, z].tolist())
            assert net(obs())[b, :, z].tolist() == pytest.approx(want, abs=1e-6)


def test_streams_have_the_last_hidden_layer_apart_and_share_the_others():
    net = network(dueling=True, hidden=(6, 5))
    assert [m.out_features for m in net.trunk if isinstance(m, nn.Linear)] == [6]
    for stream, outputs in ((net.value, 1), (net.advantage, N)):
        assert [m.out_features for m in stream if isinstance(m, nn.Linear)] == [5, outputs]
    plain = network(hidden=(6, 5))
    assert len(plain.trunk) == 0
    assert plain.value is None


def test_the_gradient_into_what_the_streams_share_is_scaled_and_no_other():
    scale, grads = 2**-0.5, []
    for factor in (1.0, scale):
        net = network(dueling=True, shared_grad=factor)
        net(obs()).square().sum().backward()
        grads.append({k: p.grad for k, p in net.named_parameters()})
    for name in grads[0]:
        want = grads[0][name] * (scale if name.startswith("trunk") else 1)
        torch.testing.assert_close(grads[1][name], want, rtol=1e-6, atol=1e-7)
    assert grads[0]["trunk.0.weight"].abs().max() > 0.1


def test_values_of_distributions_are_their_means():
    net = network(atoms=ATOMS)
    logits = net(obs())
    for b in range(7):
        for a in range(N):
            weights = [math.exp(v) for v in logits[b, a].tolist()]
            want = sum(w * z for w, z in zip(weights, ATOMS.tolist(), strict=True)) / sum(weights)
            assert net.values(obs())[b, a].item() == pytest.approx(want, abs=1e-5)


# -- noise ------------------------------------------------------------------------------------------------------------


def test_a_noisy_layer_is_that_of_the_paper():
    torch.manual_seed(0)
    layer = NoisyLinear(D, 2, sigma=0.4)
    assert layer.weight_sigma.unique().tolist() == pytest.approx([0.4 / math.sqrt(D)])
    assert layer.bias_sigma.unique().tolist() == pytest.approx([0.4 / math.sqrt(D)])
    assert layer.weight.abs().max() <= 1 / math.sqrt(D)
    with torch.no_grad():
        layer.weight_sigma.uniform_(0.1, 0.9)
    redraw_noise(layer, generator())
    z = torch.randn(D + 2, generator=generator())  # the same draws, in the order of the buffers
    x = torch.tensor([0.3, -1.2, 0.7])
    want = noisy_linear(
        x.tolist(),
        layer.weight.tolist(),
        layer.weight_sigma.tolist(),
        layer.bias.tolist(),
        layer.bias_sigma.tolist(),
        z[:D].tolist(),
        z[D:].tolist(),
    )
    assert layer(x).tolist() == pytest.approx(want, abs=1e-6)
    assert layer(x.expand(4, D))[3].tolist() == pytest.approx(want, abs=1e-6)  # one draw for the whole batch


def test_noise_has_the_moments_of_the_transformed_normal():
    layer = NoisyLinear(20_000, 1)
    redraw_noise(layer, generator())
    assert layer.noise_in.mean().item() == pytest.approx(0, abs=0.03)
    assert layer.noise_in.square().mean().item() == pytest.approx(math.sqrt(2 / math.pi), rel=0.03)  # E|z|


def test_noise_is_drawn_in_place_from_the_generator_alone():
    net = network(noisy=0.5, dueling=True)
    addresses = [b.data_ptr() for b in net.buffers()]
    means = net(obs())
    torch.manual_seed(1)
    redraw_noise(net, generator())
    first = net(obs())
    torch.manual_seed(2)
    redraw_noise(net, generator())
    assert torch.equal(net(obs()), first)
    assert not torch.equal(first, means)
    redraw_noise(net, generator(12))
    assert not torch.equal(net(obs()), first)
    assert [b.data_ptr() for b in net.buffers()] == addresses


def test_noise_belongs_to_no_checkpoint_and_a_fresh_copy_uses_the_means():
    net = network(noisy=0.5)
    means = net(obs())
    redraw_noise(net, generator())
    fresh = network(seed=9, noisy=0.5)
    fresh.load_state_dict(net.state_dict())
    assert not any("noise" in k or "atoms" in k for k in net.state_dict())
    assert torch.equal(fresh(obs()), means)
    assert not torch.equal(net(obs()), means)


def test_every_layer_after_the_encoder_is_noisy_or_none():
    for noisy, kind in ((0.5, NoisyLinear), (None, nn.Linear)):
        net = network(noisy=noisy, dueling=True)
        layers = [m for m in net.modules() if isinstance(m, nn.Linear | NoisyLinear)]
        assert len(layers) == 5
        assert all(type(m) is kind for m in layers)
    generator_state = (gen := generator()).get_state()
    redraw_noise(network(), gen)  # nothing to draw: nothing is drawn
    assert torch.equal(gen.get_state(), generator_state)


def quantile_network(dueling=False, hidden=(6, 5), noisy=None, shared_grad=1.0):
    torch.manual_seed(0)
    layers = Layers(hidden, noisy=noisy)
    return QuantileNetwork(NetInput("policy", D), N, layers, (8, 6), dueling, shared_grad)


@pytest.mark.parametrize("dueling", [False, True])
def test_quantiles_are_values_of_features_times_an_embedding(dueling):
    """IQN, Eq. 4, element by element; the cosines begin with that of 0."""
    net, gen = quantile_network(dueling), generator()
    tau = torch.rand(7, 8, generator=gen)
    got = net(obs(), tau)
    assert got.shape == (7, N, 8)
    weight, bias = net.embedding.weight.tolist(), net.embedding.bias.tolist()
    features = net.trunk(obs()["policy"])
    for b in range(7):
        for k in range(8):
            cosines = [math.cos(math.pi * i * tau[b, k].item()) for i in range(6)]
            embedded = [
                max(0.0, sum(w * c for w, c in zip(row, cosines, strict=True)) + offset)
                for row, offset in zip(weight, bias, strict=True)
            ]
            x = torch.tensor([f * e for f, e in zip(features[b].tolist(), embedded, strict=True)])
            values = net.advantage(x).tolist()
            want = dueling_values(net, x, values) if dueling else values
            assert got[b, :, k].tolist() == pytest.approx(want, abs=1e-5)


def dueling_values(net, x, advantages):
    return dueling(net.value(x).item(), advantages)


def test_quantile_networks_act_on_the_mean_of_fixed_quantiles():
    net = quantile_network()
    middles = torch.tensor([(k + 0.5) / 8 for k in range(8)])
    values = net(obs(), middles.expand(7, 8)).mean(-1)
    torch.testing.assert_close(net.values(obs()), values, atol=1e-6, rtol=0)
    assert torch.equal(net.mean_action(obs()), net.values(obs()).argmax(-1))
    assert not torch.allclose(net(obs(), torch.rand(7, 8)).mean(-1), values, atol=1e-4)


def test_the_last_hidden_layer_of_a_quantile_network_follows_the_product():
    for kind in (False, True):
        net = quantile_network(kind)
        assert [m.out_features for m in net.trunk if isinstance(m, nn.Linear)] == [6]
        assert net.embedding.weight.shape == (6, 6)
    bare = quantile_network(hidden=())
    assert (len(bare.trunk), bare.embedding.out_features) == (0, D)


def test_the_embedding_is_shared_by_both_streams():
    grads = []
    for factor in (1.0, 0.5):
        net = quantile_network(True, shared_grad=factor)
        net(obs()).square().sum().backward()
        grads.append({k: p.grad for k, p in net.named_parameters()})
    for name, grad in grads[0].items():
        want = grad * (0.5 if name.startswith(("trunk", "embedding")) else 1)
        torch.testing.assert_close(grads[1][name], want, atol=1e-6, rtol=1e-5)
