"""Encoders of observation groups, images included, to one feature vector; and networks supplied by the user."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pql.config import Config, EncoderConfig
from pql.config.networks import NormConfig, ResidualConfig, StateNetConfig, TrainedNetConfig, TrunkConfig
from pql.contract.env import Box, EnvSpec, ObsSpec
from pql.contract.plugins import entry_points
from pql.contract.registry import import_name
from pql.errors import ConfigError, nearest
from pql.nets.cnn import CONVOLUTIONS, NETWORKS, ProductBlock, Residual, Size, least_side, make_cnn, reduced
from pql.nets.mlp import Layers, NetInput, Reads
from pql.types import Obs


class Encoder(nn.Module):
    """Encoder: observation groups -> features [..., size]. Vectors and the outputs of one CNN per image, concatenated.

    Args:
        settings: of the CNNs.

    Attributes:
        groups: names of the observation groups that it reads.
        size: number of features.
    """

    def __init__(self, obs: Mapping[str, ObsSpec], groups: Sequence[str], settings: EncoderConfig):
        super().__init__()
        self.groups, images = tuple(groups), [k for k in groups if len(obs[k].shape) > 1]
        pictures = {k: Pictures(obs[k].shape, settings) for k in images}
        self.pictures = nn.ModuleDict(pictures)
        self.size = sum(pictures[k].size if k in pictures else obs[k].shape[0] for k in groups)

    def forward(self, obs: Obs) -> Tensor:
        return torch.cat([self.pictures[k](obs[k]) if k in self.pictures else obs[k].float() for k in self.groups], -1)

    def plain_layers(self) -> list[nn.Conv2d | nn.Linear]:
        """Return the convolutions and linear layers of the networks without blocks, for orthogonal initialisation.

        Others keep their own: residual blocks should begin near the identity, Hadamax comes with its initialisation.
        """
        networks = [list(p.net) for p in self.pictures.values() if isinstance(p, Pictures)]
        chains = [net for net in networks if not any(isinstance(layer, Residual | ProductBlock) for layer in net)]
        return [layer for net in chains for layer in net if isinstance(layer, nn.Conv2d | nn.Linear)]


class Pictures(nn.Module):
    """CNN: images [..., C, H, W], [..., H, W, C] or [..., H, W] -> features [..., size]. uint8 is scaled to [0, 1].

    The shorter of the first and the last axis is the channel axis.

    Args:
        settings: ``channels`` are per convolution (``resnet``: per section; ``hadamax``: per block); ``features`` 0: no
            final linear layer, the output is the flattened last feature map; ``layer_norm``: before every activation,
            but ``small`` and ``squint`` always end with one, ``resnet`` ignores it, and ``hadamax`` always has it;
            ``size``: images of another size are first reduced to this side, by averages over areas.

    Attributes:
        size: number of features.
    """

    def __init__(self, shape: tuple[int, ...], settings: EncoderConfig):
        super().__init__()
        self.kind = settings.kind
        self.axes, self.last = len(shape), channels_last(shape)
        size, self.side = image_size(shape), settings.size
        if self.side is not None:
            size = (size[0], self.side, self.side)
        self.net = make_cnn(size, settings)
        with torch.no_grad():
            self.size: int = self.net(torch.zeros(1, *size)).shape[1]

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[: -self.axes]
        x = x.flatten(0, -self.axes - 1) if len(lead) != 1 else x
        x = x.movedim(-1, 1) if self.last else x.unsqueeze(1) if self.axes == 2 else x
        if self.side is not None and x.shape[2:] != (self.side, self.side):  # replays store reduced images
            x = reduced(x, self.side)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        # Convolutions are fastest in channels-last layout, except on a CPU, where the large strides of the Nature
        # network profit from it only with float32 gradients.
        last = device != "cpu" or self.kind != "nature" or (torch.is_grad_enabled() and dtype == torch.float32)
        out = self.net(convolvable(x, dtype, torch.channels_last if last else torch.contiguous_format))
        return out if len(lead) == 1 else out.unflatten(0, lead)


def convolvable(x: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    """Convert images [B, C, H, W] to memory format ``layout``, and uint8 to ``dtype`` in [0, 1].

    bfloat16 represents every uint8 exactly.
    """
    if x.is_floating_point() or x.is_contiguous(memory_format=layout):
        x = x.contiguous(memory_format=layout)
    elif x.device.type == "cpu" and not torch.compiler.is_compiling():
        out = torch.empty(x.shape, dtype=dtype, memory_format=layout)
        for plane, channel in zip(out.unbind(1), x.unbind(1), strict=True):  # half the time of one combined copy
            plane.copy_(channel)
        return out.mul_(1 / 255)
    else:
        x = x.contiguous(memory_format=layout)  # before the cast: uint8 is cheaper to move
    return x if x.is_floating_point() else x.to(dtype).mul_(1 / 255)


def is_image(spec: ObsSpec) -> bool:
    """Return True if a group has the shape of an image."""
    return 2 <= len(spec.shape) <= 3


def channels_last(shape: tuple[int, ...]) -> bool:
    """Return True if the last axis of an image's shape holds the channels: it is shorter than the first."""
    return len(shape) == 3 and shape[2] < shape[0]


def image_size(shape: tuple[int, ...]) -> Size:
    """Return (channels, height, width) of a group's shape in any layout."""
    if len(shape) == 2:
        return 1, *shape
    return (shape[2], *shape[:2]) if channels_last(shape) else shape  # type: ignore[return-value]


def groups_of(config: Config, spec: EnvSpec, which: str) -> tuple[str, ...]:
    """Return the names of the observation groups that the network ``which`` ("policy" or "critic") reads.

    Raises:
        ConfigError: the environment lacks a group, or the configured encoder does not accept its shape.
    """
    net, setting = getattr(config.algo, which), f"algo.{which}.obs"
    groups = tuple(net.obs or ((which,) if which in spec.obs else ("policy",)))
    for group in groups:
        if group not in spec.obs:
            raise ConfigError(setting, group, f"groups of {spec.name}: {', '.join(spec.obs)}{nearest(group, spec.obs)}")
        shape = spec.obs[group].shape
        if not 1 <= len(shape) <= 3 or 0 in shape:
            raise ConfigError(setting, group, f"vectors or images; {group!r} is {list(shape)}")
        if len(shape) > 1:
            _check_image(config.algo.encoder, group, shape)
    return groups


def _check_image(encoder: EncoderConfig, group: str, shape: tuple[int, ...]) -> None:
    kind, side = encoder.kind, min(image_size(shape)[1:])
    if encoder.size is not None and encoder.size > side:
        raise ConfigError("algo.encoder.size", encoder.size, f"at most {side}: {group!r} is {list(shape)}")
    if kind not in CONVOLUTIONS:
        return
    least = least_side(kind, len(encoder.channels or NETWORKS[kind].channels))
    if (encoder.size or side) < least:
        known = f"{group!r} is {list(shape)}" if encoder.size is None else f"algo.encoder.size={encoder.size}"
        allowed = f"small, resnet or hadamax: it takes images of at least {least} x {least}; {known}"
        raise ConfigError("algo.encoder.kind", kind, allowed)


def make_encoder(config: Config, spec: EnvSpec, which: str) -> Encoder | None:
    """Build the encoder of the network ``which`` ("policy" or "critic"); None if it reads a single float vector."""
    groups = groups_of(config, spec, which)
    first = read_specs(config, spec)[groups[0]]
    if len(groups) == 1 and len(first.shape) == 1 and first.dtype.is_floating_point:
        return None
    encoder = Encoder(spec.obs, groups, config.algo.encoder)
    if getattr(getattr(config.algo, which), "init", "default") == "orthogonal":
        for layer in encoder.plain_layers():
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(cast(Tensor, layer.bias))
    return encoder


def read_specs(config: Config, spec: EnvSpec) -> dict[str, ObsSpec]:
    """Return the observation groups in the dtypes in which networks read them."""
    integers = config.algo.normalize_integers
    return {k: replace(s, dtype=s.read_dtype(integers)) for k, s in spec.obs.items()}


def make_input(config: Config, spec: EnvSpec, which: str) -> NetInput:
    """Build the input of the network ``which``, with its encoder where it reads more than a single float vector."""
    encoder, group = make_encoder(config, spec, which), groups_of(config, spec, which)[0]
    return NetInput(group, spec.obs[group].shape[0] if encoder is None else encoder.size, encoder)


def make_layers(net: TrainedNetConfig | StateNetConfig) -> Layers:
    """Return the hidden layers of a network's settings."""
    layers = Layers(net.hidden, net.activation, net.layer_norm)
    if isinstance(net, NormConfig):
        return replace(layers, norm=net.norm)
    if isinstance(net, ResidualConfig | TrunkConfig):
        layers = replace(layers, trunk=net.trunk, norm=net.norm if net.trunk == "residual" else "layer")
    if not isinstance(net, TrunkConfig):
        return layers
    return replace(layers, batch_norm=net.batch_norm, unit_weights=net.projected, init=net.init, head=net.head)


def lend_encoder(critic: nn.Module, policy: nn.Module) -> None:
    """Let the policy use the CNNs of ``critic``, the same modules, if it is to have none of its own."""
    if isinstance(policy, Reads) and policy.borrows:
        cast(Encoder, policy.encoder).pictures = cast(Encoder, critic.encoder).pictures


# -- networks supplied by the user ------------------------------------------------------------------------------------


Outputs = list[tuple[str, Any, list[Any]]]
"""Calls of a network on two rows: (call as text, output, expected shape, in which a string stands for any size)."""
Probe = Callable[[nn.Module, Obs, Tensor], Outputs]
"""(network, obs [2, ...], action [2, A]) -> its outputs."""


def probe_features(network: nn.Module, obs: Obs, action: Tensor) -> Outputs:
    """Probe a feature network: obs [2, ...] -> [2, F], the input of the algorithm's heads."""
    return [("forward(obs)", network(obs), [2, "F"])]


def custom_network(config: Config, spec: EnvSpec, which: str, probe: Probe = probe_features) -> nn.Module:
    """Build the network named by ``algo.policy.net`` or ``algo.critic.net`` and test it on two rows.

    Args:
        probe: calls the network as the algorithm will.
    Raises:
        ConfigError: it cannot be found or built, or its outputs have the wrong shapes.
    """
    name, setting = getattr(config.algo, which).net, f"algo.{which}.net"
    factory = find_network(setting, name)
    try:
        network = factory(spec, config)
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(setting, name, f"a class or function that takes (spec, config): {why}") from error
    if not isinstance(network, nn.Module) or not any(True for _ in network.parameters()):
        raise ConfigError(setting, name, f"a torch module with parameters, not {type(network).__name__}")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        raise ConfigError(setting, name, "a network whose only state is its parameters: no BatchNorm (LayerNorm works)")
    try_out(config, spec, which, network, probe)
    return network


def find_network(setting: str, name: str) -> Callable[[EnvSpec, Config], Any]:
    """Find a network factory: ``module:Class`` (the working directory included), or an entry point of ``pql.nets``."""
    if ":" not in name:
        known = {e.name: e for e in entry_points(group="pql.nets")}
        if name not in known:
            there = ", ".join(sorted(known)) or "none is installed"
            raise ConfigError(setting, name, f"module:Class, or a name of pql.nets ({there}){nearest(name, known)}")
        return known[name].load()
    return import_name(setting, name)


@torch.no_grad()
def try_out(config: Config, spec: EnvSpec, which: str, network: nn.Module, probe: Probe) -> None:
    """Raise ``ConfigError`` if outputs of ``network`` on two rows do not have the shapes that the algorithm needs."""
    setting, name = f"algo.{which}.net", getattr(config.algo, which).net
    obs = {k: torch.zeros(2, *s.shape, dtype=s.dtype) for k, s in read_specs(config, spec).items()}
    action = torch.zeros(2, spec.action.size if isinstance(spec.action, Box) else 1)
    try:
        outputs = probe(network, obs, action)
    except Exception as error:
        raise ConfigError(setting, name, f"a {which} for {spec.name}: {type(error).__name__}: {error}") from error
    for call, out, shape in outputs:
        have = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        same = isinstance(have, list) and len(have) == len(shape)
        if not same or any(want != size and not isinstance(want, str) for size, want in zip(have, shape, strict=True)):
            raise ConfigError(setting, name, f"{call} of shape [{', '.join(map(str, shape))}], not {have}")


@torch.no_grad()
def squashes(policy: nn.Module, read: Mapping[str, ObsSpec]) -> bool:
    """Test on two rows, with perturbed weights, that ``forward`` is the tanh of ``before_tanh``."""
    if not hasattr(policy, "before_tanh"):
        return False
    moved, gen = cast(Any, copy.deepcopy(policy)), torch.Generator().manual_seed(0)
    for weight in moved.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=gen)
    drawn = {k: torch.randn(2, *s.shape, generator=gen) for k, s in read.items()}
    kinds = {k: s.dtype for k, s in read.items()}
    obs = {k: v if kinds[k].is_floating_point else (100 * v.abs()).to(kinds[k]) for k, v in drawn.items()}
    return torch.allclose(torch.tanh(moved.before_tanh(obs)).float(), moved(obs).float(), atol=1e-5)
