"""Image networks against their papers' layers, computed position by position; sizes, initialisation, errors."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import make_networks, small_config
from pictures import averaged
from torch import nn
from torch.nn import functional as F

from pql.algos.on_policy import make_body, make_stochastic_policy
from pql.config import EncoderConfig, PlacementConfig, ValueEncoderConfig, from_dict, to_dict
from pql.config.validate import validate
from pql.contract.env import Box, Discrete, EnvSpec, ObsSpec
from pql.engine.placement import set_precision
from pql.errors import ConfigError
from pql.nets.cnn import MaxPoolTo, Residual, SpectralConv2d, fold, least_side, reduced
from pql.nets.encoders import Encoder, Pictures, convolvable, groups_of

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
    net = Pictures((4, 84, 84), EncoderConfig("nature"))
    assert [(c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0]) for c in layers(net, nn.Conv2d)] == [
        (32, 8, 4, 0),
        (64, 4, 2, 0),
        (64, 3, 1, 0),
    ]
    assert (net.size, sum(p.numel() for p in net.parameters())) == (512, 8224 + 32832 + 36928 + 3136 * 512 + 512)
    net, x = Pictures((4, 44, 44), EncoderConfig("nature")), frames(2, 44)
    y = x.double() / 255
    for conv in layers(net, nn.Conv2d):
        y = convolved(y, conv).relu()
    assert y.shape == (2, 64, 2, 2)
    torch.testing.assert_close(net(x).double(), dense(y, *layers(net, nn.Linear)).relu(), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "size"), [("nature", 64 * 2 * 2), ("small", 32 * 6 * 6), ("resnet", 32 * 6 * 6)])
def test_without_features_a_network_ends_with_its_last_image(kind, size):
    torch.manual_seed(0)
    net, x = Pictures((4, 44, 44), EncoderConfig(kind, features=0)), frames(3, 44)
    assert net.size == size
    assert not layers(net, nn.Linear)
    y = net(x)
    assert y.shape == (3, size)
    assert y.min() == 0  # rectified
    torch.manual_seed(0)
    whole = Pictures((4, 44, 44), EncoderConfig(kind))
    linear = layers(whole, nn.Linear)[0]
    seen = []
    linear.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    whole(x)
    torch.testing.assert_close(y, seen[0])


@torch.no_grad()
def test_resnet_is_the_deep_network_of_espeholt_et_al_2018():
    torch.manual_seed(0)
    net, side = Pictures((4, 21, 21), EncoderConfig("resnet")), 21
    assert [c.out_channels for c in layers(net, nn.Conv2d)] == [16] * 5 + [32] * 10
    assert sum(p.numel() for p in Pictures((4, 84, 84), EncoderConfig("resnet")).parameters()) == 1_089_232
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


@pytest.mark.parametrize("kind", ["small", "nature", "resnet", "hadamax"])
def test_gradients_are_those_of_channels_first_and_plain_division(kind):
    torch.manual_seed(0)
    net, x = Pictures((4, 44, 44), EncoderConfig(kind, [4, 6], 8)), frames(3, 44)
    fast = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    slow = torch.autograd.grad(net.net(x / 255).square().sum(), list(net.parameters()))
    for mine, want in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine, want, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_layer_norm_is_over_the_channels_of_each_place():
    torch.manual_seed(0)
    net, x = Pictures((4, 44, 44), EncoderConfig("nature", layer_norm=True)), frames(2, 44)
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
    assert len(layers(Pictures((4, 44, 44), EncoderConfig("small", layer_norm=True)), nn.LayerNorm)) == 4


def test_the_residual_network_has_no_layer_norm():
    with pytest.raises(ConfigError, match=r"algo\.encoder\.layer_norm=true: expected false"):
        validate(from_dict(to_dict(config_of(kind="resnet", layer_norm=True))))


@pytest.mark.parametrize("shape", [(11, 11), (13, 7), (3, 6)])
def test_adaptive_pooling_and_its_gradient_are_torchs(shape):
    x = torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True)
    scale, (mine, theirs) = torch.randn(2, 3, 6, 6), (MaxPoolTo(6)(x), F.adaptive_max_pool2d(x, 6))
    assert torch.equal(mine, theirs)
    slopes = (torch.autograd.grad((y * scale).sum(), x)[0] for y in (mine, theirs))
    torch.testing.assert_close(*slopes, atol=1e-12, rtol=0)


def test_a_resnet_that_ends_with_a_pooling_has_as_many_features_for_every_image():
    for side in (40, 84):
        net = Pictures((4, side, side), EncoderConfig("resnet", [4, 6], 0, pool=6))
        assert net.size == 6 * 6 * 6
    settings = ValueEncoderConfig("resnet", [32, 64, 64], 0, pool=6, spectral_norm=True)
    assert Pictures((4, 84, 84), settings).size == 2304


def spectral(seed=0):
    torch.manual_seed(seed)
    return SpectralConv2d(5, 7, 3, padding=1)


def test_spectral_norm_iterates_and_differentiates_as_torchs_parametrization():
    conv = spectral().double()
    theirs = nn.Conv2d(5, 7, 3, padding=1).double()
    theirs.load_state_dict({"weight": conv.weight, "bias": conv.bias})
    theirs = nn.utils.parametrizations.spectral_norm(theirs)
    vectors = theirs.parametrizations.weight[0]
    x = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    for step in range(3):
        with torch.no_grad():
            vectors._u.copy_(conv.left)
            vectors._v.copy_(conv.right)
            conv.weight += 0.3 * torch.randn_like(conv.weight)
            theirs.parametrizations.weight.original.copy_(conv.weight)
        conv.after_step()  # theirs is in the forward pass
        want = theirs(x)
        torch.testing.assert_close(conv(x), want, atol=1e-12, rtol=0)
        torch.testing.assert_close(conv.right.detach(), vectors._v, atol=1e-12, rtol=0)
        (grad,) = torch.autograd.grad(want.square().sum(), theirs.parametrizations.weight.original)
        conv.zero_grad()
        conv(x).square().sum().backward()
        torch.testing.assert_close(conv.weight.grad, grad, atol=1e-10, rtol=0)
        assert conv.left.grad is conv.right.grad is None, step


def test_spectral_norm_is_on_the_residual_convolutions_alone():
    net = Pictures((4, 20, 20), ValueEncoderConfig("resnet", [4, 6], 8, spectral_norm=True))
    assert len(layers(net, SpectralConv2d)) == 8
    assert len(layers(net, nn.Conv2d)) == 10
    x, before = frames(2, 20), None
    before = net(x).detach()
    names = [*net.state_dict()]
    assert "net.2.first.left" in names
    torch.testing.assert_close(fold(net)(x), before, atol=1e-6, rtol=0)
    assert not layers(net, SpectralConv2d)
    assert not [name for name in net.state_dict() if name.endswith(("left", "right"))]


@torch.no_grad()
def test_hadamax_is_the_network_of_kooi_et_al_2025():
    """Every block by its formula; a map of 21 x 21 is pooled to 6, 3 and 3."""
    torch.manual_seed(0)
    net, x = Pictures((4, 21, 21), EncoderConfig("hadamax", [3, 5, 6], 9)), frames(2, 21)
    for p in net.parameters():
        p.add_(0.1 * torch.randn_like(p))  # gains and offsets that matter
    convs, norms, linear = layers(net, nn.Conv2d), layers(net, nn.LayerNorm), layers(net, nn.Linear)[0]
    y = x.double() / 255
    for block, (kernel, window, stride) in enumerate(((8, 4, 4), (4, 2, 2), (3, 3, 1))):
        branches = []
        before, after = (kernel - 1) // 2, kernel - 1 - (kernel - 1) // 2
        for k in (2 * block, 2 * block + 1):
            z = convolved(F.pad(y, [before, after, before, after]), convs[k])
            branches.append(gelu(normal(z, norms[k], 1)))
        y = same_pooled(branches[0] * branches[1], window, stride)
    assert y.shape == (2, 6, 3, 3)
    want = gelu(normal(dense(y, linear), norms[-1], 1))
    torch.testing.assert_close(net(x).double(), want, atol=1e-5, rtol=1e-4)
    assert Pictures((4, 84, 84), EncoderConfig("hadamax", features=0)).size == 7744


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def normal(x, norm, axis):
    """x normalised over an axis, with epsilon 1e-6."""
    mean, var = x.mean(axis, keepdim=True), x.var(axis, correction=0, keepdim=True)
    shape = (1, -1, *[1] * (x.dim() - 2))
    return (x - mean) / (var + 1e-6).sqrt() * norm.weight.double().view(shape) + norm.bias.double().view(shape)


def same_pooled(x, window, stride):
    """Maxima of ceil(side / stride) windows, which extend beyond both ends alike, or by one more beyond the second."""
    side = x.shape[2]
    count = math.ceil(side / stride)
    first = -(max(0, (count - 1) * stride + window - side) // 2)
    y = torch.empty(*x.shape[:2], count, count, dtype=x.dtype)
    for i in range(count):
        for j in range(count):
            (top, bottom), (left, right) = (
                (max(0, first + k * stride), min(side, first + k * stride + window)) for k in (i, j)
            )
            y[:, :, i, j] = x[:, :, top:bottom, left:right].amax((2, 3))
    return y


def image_spec(side, action=None):
    return EnvSpec("made up", 3, {"policy": ObsSpec((4, side, side), torch.uint8)}, action or Discrete(6), CPU)


def config_of(**encoder):
    return small_config(algo={"family": "ppo", "schedule": "lockstep", "encoder": encoder})


@pytest.mark.parametrize(("channels", "least"), [(None, 36), ([16, 32], 20), ([16], 8)])
def test_images_too_small_for_nature_are_refused_by_name(channels, least):
    config = config_of(kind="nature", channels=channels)
    assert groups_of(config, image_spec(least), "policy") == ("policy",)
    net = Pictures((4, least, least), EncoderConfig("nature", channels))
    assert net(frames(1, least)).shape == (1, 512)
    with pytest.raises(ConfigError) as caught:
        groups_of(config, image_spec(least - 1), "policy")
    assert str(caught.value) == (
        f"algo.encoder.kind=nature: expected small, resnet or hadamax: it takes images of at least {least} x {least}; "
        f"'policy' is [4, {least - 1}, {least - 1}]"
    )
    assert least_side("nature", len(channels or (32, 64, 64))) == least
    for kind in ("small", "resnet", "hadamax"):
        assert groups_of(config_of(kind=kind), image_spec(least - 1), "policy") == ("policy",)


@pytest.mark.parametrize(("kind", "most"), [("nature", "three"), ("hadamax", "three"), ("squint", "two")])
def test_some_networks_have_few_layers(kind, most):
    with pytest.raises(ConfigError, match=rf"algo\.encoder\.channels=\[8, 8, 8, 8\]: expected {most} at most"):
        validate(from_dict(to_dict(config_of(kind=kind, channels=[8, 8, 8, 8]))))


def test_resnet_has_any_number_of_sections():
    validate(from_dict(to_dict(config_of(kind="resnet", channels=[8, 8, 8, 8]))))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("small", (3, 128)), ("squint", (2, 50)), ("nature", (3, 512)), ("resnet", (15, 256)), ("hadamax", (6, 512))],
)
def test_each_kind_has_sizes_of_its_own_and_takes_others(kind, sizes):
    net = Pictures((4, 40, 40), EncoderConfig(kind))
    assert (len(layers(net, nn.Conv2d)), net.size) == sizes
    other = Encoder({"x": ObsSpec((4, 40, 40), torch.uint8)}, ("x",), EncoderConfig(kind, [5, 7], 9))
    assert (other.size, layers(other, nn.Conv2d)[-1].out_channels) == (9, 7)
    assert other({"x": frames(2, 40)}).shape == (2, 9)


# -- smaller images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 84, 84), (3, 33, 20), (20, 33, 3), (16, 16)])
def test_images_are_reduced_by_averages_over_areas(shape):
    """Then come the layers of Squint: 4 x 4 with stride 2, 4 x 4, Linear to 50, LayerNorm, tanh."""
    torch.manual_seed(0)
    net = Pictures(shape, EncoderConfig("squint", size=16))
    x = torch.randint(256, (2, *shape), dtype=torch.uint8)
    planes = x.permute(0, 3, 1, 2) if net.last else x.view(2, -1, *shape[-2:])
    small = averaged(planes.double(), 16)
    torch.testing.assert_close(F.interpolate(planes.double(), (16, 16), mode="area"), small)
    bytes_ = reduced(x, 16, net.last).movedim(-1, 1) if net.last else reduced(x, 16).view(small.shape)
    assert bytes_.dtype == torch.uint8
    assert (bytes_ - small).abs().max() <= 0.5 + 1e-4
    small = bytes_.double() / 255
    first, second = layers(net, nn.Conv2d)
    assert [(c.kernel_size, c.stride, c.out_channels) for c in (first, second)] == [
        ((4, 4), (2, 2), 32),
        ((4, 4), (1, 1), 64),
    ]
    y = convolved(convolved(small, first).relu(), second).relu().flatten(1)
    (linear,), (norm,) = layers(net, nn.Linear), layers(net, nn.LayerNorm)
    assert tuple(linear.weight.shape) == (50, 64 * 4 * 4)
    y = y @ linear.weight.double().T + linear.bias.double()
    y = (y - y.mean(1, keepdim=True)) / (y.var(1, correction=0, keepdim=True) + norm.eps).sqrt()
    torch.testing.assert_close(net(x).double(), torch.tanh(y), atol=1e-5, rtol=0)
    assert torch.equal(net(reduced(x, 16, net.last)), net(x))  # as replays store them


@pytest.mark.parametrize("kind", ["small", "nature", "resnet", "hadamax"])
def test_every_kind_can_read_smaller_images(kind):
    torch.manual_seed(0)
    net, plain = (Pictures((3, side, side), EncoderConfig(kind, size=size)) for side, size in ((80, 40), (40, None)))
    assert net.size == plain.size
    assert [tuple(p.shape) for p in net.parameters()] == [tuple(p.shape) for p in plain.parameters()]
    for p, q in zip(plain.parameters(), net.parameters(), strict=True):
        p.data.copy_(q.data)
    x = frames(2, 80)[:, :3]
    torch.testing.assert_close(net(x / 255), plain(averaged(x.double() / 255, 40).float()), atol=1e-5, rtol=0)
    assert torch.equal(net(x), plain(reduced(x, 40)))


@pytest.mark.parametrize(
    ("encoder", "side", "message"),
    [
        ({"size": 41}, 40, r"algo.encoder.size=41: expected at most 40: 'policy' is [4, 40, 40]"),
        (
            {"kind": "squint", "size": 9},
            40,
            "algo.encoder.kind=squint: expected small, resnet or hadamax: it takes images of at least 10 x 10; "
            "algo.encoder.size=9",
        ),
        (
            {"kind": "squint"},
            9,
            "algo.encoder.kind=squint: expected small, resnet or hadamax: it takes images of at least 10 x 10; "
            "'policy' is [4, 9, 9]",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(encoder, side, message):
    with pytest.raises(ConfigError) as caught:
        groups_of(config_of(**encoder), image_spec(side), "policy")
    assert str(caught.value) == message


# -- the networks around them -----------------------------------------------------------------------------------------


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
    product = make_body(config_of(kind="hadamax"), image_spec(40), "policy")
    first, linear = layers(product, nn.Conv2d)[0], layers(product, nn.Linear)[0]
    assert not first.bias.any()
    assert first.weight.std().item() == pytest.approx((2 / ((4 + 32) * 64)) ** 0.5, rel=0.03)  # Xavier
    assert linear.weight.std().item() == pytest.approx((2 / linear.in_features) ** 0.5, rel=0.03)  # He


def test_exact_products_are_exact_in_convolutions_too():
    """And in recurrent layers. The older setting of all of cuDNN agrees, or torch.export could not read it."""
    backends = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.mkldnn.conv)
    set_precision(PlacementConfig(matmul="fast"))
    assert [b.fp32_precision for b in backends] == ["tf32", "tf32", "bf16"]
    assert torch.backends.cudnn.allow_tf32
    set_precision(PlacementConfig(matmul="exact"))
    assert [b.fp32_precision for b in backends] == ["ieee", "ieee", "ieee"]
    assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.deterministic


@pytest.mark.fault(15)
def test_a_policy_of_an_older_config_is_read_as_it_was():
    old = {"channels": [16, 32, 32], "features": 128}
    net = Pictures((4, 84, 84), replace(EncoderConfig(), **old))
    assert [*net.state_dict()] == [f"net.{i}.{w}" for i in (0, 2, 4, 7, 8) for w in ("weight", "bias")]
