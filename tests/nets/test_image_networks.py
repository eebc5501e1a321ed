"""Image networks against their papers' layers, computed position by position; sizes, initialisation, errors."""

import math

import pytest
import torch
from conftest import make_networks, small_config
from torch import nn
from torch.nn import functional as F

from pql.algos.on_policy import make_body, make_stochastic_policy
from pql.config import EncoderConfig, PlacementConfig, from_dict, to_dict
from pql.config.validate import validate
from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.engine.placement import set_precision
from pql.errors import ConfigError
from pql.nets.encoders import Encoder, Pictures, Residual, convolvable, groups_of, least_side

CPU = torch.device("cpu")


def convolved(x, layer):
    """y[b, o, i, j] = bias[o] + sum over c, p, q of weight[o, c, p, q] x[b, c, s i + p, s j + q], x padded by zeros."""
    (kernel, _), (stride, _), (padding, _) = layer.kernel_size, layer.stride, layer.padding
    x, weight = F.pad(x, [padding] * 4), layer.weight.double()
    rows, columns = ((side - kernel) // stride + 1 for side in x.shape[2:])
    y = torch.empty(x.shape[0], layer.out_channels, rows, columns, dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            patch = x[:, :, stride * i : stride * i + kernel, stride * j : stride * j + kernel]
            y[:, :, i, j] = torch.einsum("bcpq,ocpq->bo", patch, weight) + layer.bias.double()
    return y


def pooled(x):
    """The largest of 3 x 3 neighbours, at every second place of height and width."""
    x = F.pad(x, [1] * 4, value=-math.inf)
    rows, columns = ((side - 1) // 2 for side in x.shape[2:])
    y = torch.empty(*x.shape[:2], rows, columns, dtype=x.dtype)
    for i in range(rows):
        for j in range(columns):
            y[:, :, i, j] = x[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].amax((2, 3))
    return y


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 12, 10), (2, 1, 7, 7), (0, 4, 5, 5)])
def test_bytes_become_floats_in_the_layout_asked_for(shape, last, layout):
    x = torch.randint(256, shape, dtype=torch.uint8)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    y = convolvable(x, torch.float32, layout)
    assert y.dtype == torch.float32
    assert y.is_contiguous(memory_format=layout)
    assert torch.equal(y, x.float() * (1 / 255))
    assert torch.equal(convolvable(x, torch.bfloat16, layout), x.bfloat16() * (1 / 255))
    y = convolvable(x.float(), torch.float32, layout)
    assert y.is_contiguous(memory_format=layout)
    assert torch.equal(y, x.float())


def dense(x, layer):
    return x.flatten(1) @ layer.weight.double().T + layer.bias.double()


def layers(net, kind):
    return [m for m in net.modules() if isinstance(m, kind)]


def frames(batch, side, gen_seed=3):
    gen = torch.Generator().manual_seed(gen_seed)
    return torch.randint(256, (batch, 4, side, side), dtype=torch.uint8, generator=gen)


@torch.no_grad()
def test_nature_is_the_network_of_mnih_et_al_2015():
    torch.manual_seed(0)
    net = Pictures((4, 84, 84), "nature")
    assert [(c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0]) for c in layers(net, nn.Conv2d)] == [
        (32, 8, 4, 0),
        (64, 4, 2, 0),
        (64, 3, 1, 0),
    ]
    assert (net.size, sum(p.numel() for p in net.parameters())) == (512, 8224 + 32832 + 36928 + 3136 * 512 + 512)
    net, x = Pictures((4, 44, 44), "nature"), frames(2, 44)
    y = x.double() / 255
    for conv in layers(net, nn.Conv2d):
        y = convolved(y, conv).relu()
    assert y.shape == (2, 64, 2, 2)
    torch.testing.assert_close(net(x).double(), dense(y, *layers(net, nn.Linear)).relu(), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "size"), [("nature", 64 * 2 * 2), ("small", 32 * 6 * 6), ("resnet", 32 * 6 * 6)])
def test_without_features_a_network_ends_with_its_last_image(kind, size):
    torch.manual_seed(0)
    net, x = Pictures((4, 44, 44), kind, features=0), frames(3, 44)
    assert net.size == size
    assert not layers(net, nn.Linear)
    y = net(x)
    assert y.shape == (3, size)
    assert y.min() == 0  # rectified
    torch.manual_seed(0)
    whole = Pictures((4, 44, 44), kind)
    linear = layers(whole, nn.Linear)[0]
    seen = []
    linear.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    whole(x)
    torch.testing.assert_close(y, seen[0])


@torch.no_grad()
def test_resnet_is_the_deep_network_of_espeholt_et_al_2018():
    torch.manual_seed(0)
    net, side = Pictures((4, 21, 21), "resnet"), 21
    assert [c.out_channels for c in layers(net, nn.Conv2d)] == [16] * 5 + [32] * 10
    assert sum(p.numel() for p in Pictures((4, 84, 84), "resnet").parameters()) == 1_089_232
    x, convs = frames(2, side), iter(layers(net, nn.Conv2d))
    y = x.double() / 255
    for _ in range(3):
        y = pooled(convolved(y, next(convs)))
        for _ in range(2):
            inner = convolved(y.relu(), next(convs)).relu()
            y = y + convolved(inner, next(convs))
    assert y.shape == (2, 32, 3, 3)
    want = dense(y.relu(), *layers(net, nn.Linear)).relu()
    assert net(x).shape == want.shape == (2, 256)
    torch.testing.assert_close(net(x).double(), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["small", "nature", "resnet"])
def test_gradients_are_those_of_channels_first_and_plain_division(kind):
    torch.manual_seed(0)
    net, x = Pictures((4, 44, 44), kind, [4, 6], 8), frames(3, 44)
    fast = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    slow = torch.autograd.grad(net.net(x / 255).square().sum(), list(net.parameters()))
    for mine, want in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_layer_norm_is_over_the_channels_of_each_place():
    torch.manual_seed(0)
    net, x = Pictures((4, 44, 44), "nature", layer_norm=True), frames(2, 44)
    for p in net.parameters():
        p.add_(0.1 * torch.randn_like(p))  # gains and offsets that matter
    norms = layers(net, nn.LayerNorm)
    assert [n.normalized_shape for n in norms] == [(32,), (64,), (64,), (512,)]
    y = x.double() / 255
    for conv, norm in zip(layers(net, nn.Conv2d), norms, strict=False):
        y = convolved(y, conv)
        mean, var = y.mean(1, keepdim=True), y.var(1, correction=0, keepdim=True)
        gain, offset = (p.double().view(1, -1, 1, 1) for p in (norm.weight, norm.bias))
        y = ((y - mean) / (var + 1e-5).sqrt() * gain + offset).relu()
    y = dense(y, *layers(net, nn.Linear))
    y = (y - y.mean(1, keepdim=True)) / (y.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    y = (y * norms[-1].weight.double() + norms[-1].bias.double()).relu()
    torch.testing.assert_close(net(x).double(), y, atol=1e-4, rtol=1e-4)
    assert len(layers(Pictures((4, 44, 44), "small", layer_norm=True), nn.LayerNorm)) == 4


def test_the_residual_network_has_no_layer_norm():
    with pytest.raises(ConfigError, match=r"algo\.encoder\.layer_norm=true: expected false"):
        validate(from_dict(to_dict(config_of(kind="resnet", layer_norm=True))))


def image_spec(side, action=None):
    return EnvSpec("made up", 3, {"policy": ObsSpec((4, side, side), torch.uint8)}, action or Discrete(6), CPU)


def config_of(**encoder):
    return small_config(algo={"family": "ppo", "schedule": "lockstep", "encoder": encoder})


@pytest.mark.parametrize(("channels", "least"), [(None, 36), ([16, 32], 20), ([16], 8)])
def test_images_too_small_for_nature_are_refused_by_name(channels, least):
    config = config_of(kind="nature", channels=channels)
    assert groups_of(config, image_spec(least), "policy") == ("policy",)
    net = Pictures((4, least, least), "nature", channels)
    assert net(frames(1, least)).shape == (1, 512)
    with pytest.raises(ConfigError) as caught:
        groups_of(config, image_spec(least - 1), "policy")
    assert str(caught.value) == (
        f"algo.encoder.kind=nature: expected small or resnet: it takes images of at least {least} x {least}; "
        f"'policy' is [4, {least - 1}, {least - 1}]"
    )
    assert least_side(len(channels or (32, 64, 64))) == least
    for kind in ("small", "resnet"):
        assert groups_of(config_of(kind=kind), image_spec(least - 1), "policy") == ("policy",)


def test_nature_has_three_convolutions_at_most():
    with pytest.raises(ConfigError, match=r"algo\.encoder\.channels=\[8, 8, 8, 8\]: expected three at most"):
        validate(from_dict(to_dict(config_of(kind="nature", channels=[8, 8, 8, 8]))))
    validate(from_dict(to_dict(config_of(kind="resnet", channels=[8, 8, 8, 8]))))


@pytest.mark.parametrize(("kind", "sizes"), [("small", (3, 128)), ("nature", (3, 512)), ("resnet", (15, 256))])
def test_each_kind_has_sizes_of_its_own_and_takes_others(kind, sizes):
    net = Pictures((4, 40, 40), kind)
    assert (len(layers(net, nn.Conv2d)), net.size) == sizes
    other = Encoder({"x": ObsSpec((4, 40, 40), torch.uint8)}, ("x",), kind, [5, 7], 9)
    assert (other.size, layers(other, nn.Conv2d)[-1].out_channels) == (9, 7)
    assert other({"x": frames(2, 40)}).shape == (2, 9)


def test_without_hidden_layers_the_heads_stand_on_the_encoder():
    algo = {
        "encoder": {"kind": "nature", "channels": [4, 8], "features": 12},
        "policy": {"hidden": []},
        "critic": {"hidden": []},
    }
    config = validate(small_config(algo={**algo, "family": "ppo", "schedule": "lockstep"}))
    policy = make_stochastic_policy(config, image_spec(40))
    assert len(policy.body.trunk) == 0
    assert policy.head.weight.shape == (6, 12)
    obs = {"policy": frames(3, 40)}
    torch.testing.assert_close(policy(obs), policy.head(policy.body.encoder(obs)))
    plain, critic = make_networks(small_config(algo=algo), image_spec(40, Box(2)), 0)
    assert plain(obs).shape == (3, 2)
    assert critic(obs, plain(obs)).shape == (2, 3)
    vector = EnvSpec("made up", 1, {"policy": ObsSpec((5,))}, Box(2), CPU)
    assert make_body(config, vector, "policy")({"policy": torch.ones(2, 5)}).tolist() == [[1.0] * 5] * 2


def test_on_policy_networks_begin_orthogonal_but_for_residual_ones():
    torch.manual_seed(0)
    body = make_body(config_of(kind="nature"), image_spec(40), "policy")
    for layer in layers(body, nn.Conv2d | nn.Linear):
        weight = layer.weight.detach().flatten(1)
        short = weight if weight.shape[0] <= weight.shape[1] else weight.T
        torch.testing.assert_close(short @ short.T, 2 * torch.eye(short.shape[0]), atol=1e-5, rtol=0)
        assert not layer.bias.any()
    deep = make_body(config_of(kind="resnet"), image_spec(40), "policy")
    block = layers(deep, Residual)[0].second
    assert block.bias.any()
    assert block.weight.abs().max() <= (16 * 9) ** -0.5  # torch's own, uniform


def test_exact_products_are_exact_in_convolutions_too():
    backends = (torch.backends.cudnn.conv, torch.backends.mkldnn.conv)
    try:
        set_precision(PlacementConfig(matmul="exact"))
        assert [b.fp32_precision for b in backends] == ["ieee", "ieee"]
    finally:
        set_precision(PlacementConfig())
    assert [b.fp32_precision for b in backends] == ["tf32", "bf16"]
    assert torch.backends.cudnn.deterministic


def test_a_policy_of_an_older_config_is_read_as_it_was():
    old = {"channels": [16, 32, 32], "features": 128}
    net = Pictures((4, 84, 84), **{**vars(EncoderConfig()), **old})
    assert [*net.state_dict()] == [f"net.{i}.{w}" for i in (0, 2, 4, 7, 8) for w in ("weight", "bias")]
