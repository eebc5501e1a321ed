"""Off-policy networks: MLPs, policies, critic ensembles as one batched network.

Networks take all observation groups and read those that they were built for. This file contains no losses.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pql.nets.layers import (
    BatchNorm,
    EnsembleLayerNorm,
    EnsembleLinear,
    EnsembleRMSNorm,
    RMSNorm,
    Scaler,
    SphereBlock,
    SphereInput,
    bfloat16,
    project_weights,
)
from pql.types import Obs

T = TypeVar("T")

# In place where the gradient needs only the output, which saves the memory of the input.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class NoisyLinear(nn.Module):
    """Noisy linear layer: y = (W + S * e_out e_in^T) x + b + s * e_out, [..., in] -> [..., out].

    The noise is factorised, e = sign(z) sqrt|z| with z ~ N(0, 1) (Fortunato et al. 2018, Eq. 10, 11 and section 3.2).
    It is in buffers at fixed addresses, not saved in checkpoints. They are zero, so that the layer uses its means,
    until :func:`redraw_noise` fills them.

    Args:
        sigma: sigma_0; the noise weights are initialised to sigma_0 / sqrt(size_in).
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, size_in: int, size_out: int, sigma: float = 0.5):
        super().__init__()
        bound = size_in**-0.5
        self.weight = nn.Parameter(torch.empty(size_out, size_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(size_out).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((size_out, size_in), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((size_out,), sigma * bound))
        self.register_buffer("noise_in", torch.zeros(size_in), persistent=False)
        self.register_buffer("noise_out", torch.zeros(size_out), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(self.noise_out, self.noise_in))
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.noise_out))


@dataclass(frozen=True)
class Layers:
    """Hidden layers of an MLP.

    Attributes:
        hidden: their widths.
        activation: a name in ``ACTIVATIONS``.
        layer_norm: normalisation before each activation of an ``mlp``.
        noisy: sigma_0 of :class:`NoisyLinear` layers; None: ordinary linear layers.
        trunk: ``mlp``; ``residual``: a :class:`ResidualBlock` for each of ``hidden``, which are equal; ``sphere``: a
            :class:`SphereBlock` for each.
        norm: the kind of normalisations: ``layer`` or ``rms``.
        batch_norm: BatchNorm of the input and after each linear layer but the last, which have no biases; in place of
            ``layer_norm`` and ``norm``.
        unit_weights: weights of fixed norm, see :func:`project_weights`.
        init: weights: ``default`` (torch's), or ``orthogonal`` with gain 1 and biases of 0.
        head: of the output layer: ``default`` (as ``init``), ``zero``, or ``small``: weights N(0, 0.01), biases of 0.
    """

    hidden: Sequence[int]
    activation: str = "elu"
    layer_norm: bool = False
    noisy: float | None = None
    trunk: str = "mlp"
    norm: str = "layer"
    batch_norm: bool = False
    unit_weights: str = "none"
    init: str = "default"
    head: str = "default"


def mlp(size_in: int, layers: Layers, size_out: int, ensemble: int | None = None) -> nn.Sequential:
    """Build an MLP: Linear (-> normalisation) -> activation for each hidden layer, then Linear. [B, in] -> [B, out].

    Args:
        ensemble: E: build E networks as one, [B, in] or [E, B, in] -> [E, B, out]; not with noisy layers.
    """
    linear, width = linear_of(layers, ensemble), (layers.hidden[0] if layers.hidden else 0)
    plain = partial(linear, bias=False)
    modules: list[nn.Module] = [BatchNorm(size_in, ensemble)] if layers.batch_norm else []
    if layers.trunk == "sphere":
        blocks = [
            SphereBlock(plain(width, 4 * width), plain(4 * width, width), width, len(layers.hidden), ensemble)
            for _ in layers.hidden
        ]
        modules = [
            SphereInput(plain(size_in + 1, width), width, ensemble),
            *blocks,
            plain(width, width),
            Scaler(width, 1.0, 1.0, ensemble),
        ]
        size_in = width
    elif layers.trunk == "residual" and layers.hidden:
        block = BatchNormBlock if layers.batch_norm else ResidualBlock
        modules += [(plain if layers.batch_norm else linear)(size_in, width)]
        modules += [block(width, layers, ensemble) for _ in layers.hidden]
        modules += [norm_of(width, "rms" if layers.batch_norm else layers.norm, ensemble)]
        size_in = width
    else:
        for size in layers.hidden:
            if layers.batch_norm:
                modules += [plain(size_in, size), BatchNorm(size, ensemble)]
            else:
                norms = [norm_of(size, layers.norm, ensemble)] if layers.layer_norm else []
                modules += [linear(size_in, size), *norms]
            modules.append(ACTIVATIONS[layers.activation]())
            size_in = size
    net = nn.Sequential(*modules, linear(size_in, size_out))
    initialize(net, layers)
    return net


def linear_of(layers: Layers, ensemble: int | None) -> Callable[..., nn.Module]:
    """Return the constructor (size in, size out) of the linear layers."""
    if ensemble is not None:
        return partial(EnsembleLinear, ensemble)
    return nn.Linear if layers.noisy is None else partial(NoisyLinear, sigma=layers.noisy)


def norm_of(size: int, kind: str, ensemble: int | None) -> nn.Module:
    """Return a normalisation over the last axis; ``kind``: ``layer`` or ``rms``."""
    if kind == "rms":
        return RMSNorm(size, eps=1e-6) if ensemble is None else EnsembleRMSNorm(ensemble, size)
    return nn.LayerNorm(size) if ensemble is None else EnsembleLayerNorm(ensemble, size)


class ResidualBlock(nn.Module):
    """Pre-norm residual block, x + W2 act(W1 norm(x)), with an inner width of four times the outer one.

    [..., size] -> [..., size]. Source: Lee et al. 2025 (SimBa).
    """

    def __init__(self, size: int, layers: Layers, ensemble: int | None):
        super().__init__()
        linear, self.norm = linear_of(layers, ensemble), norm_of(size, layers.norm, ensemble)
        self.up, self.down = linear(size, 4 * size), linear(4 * size, size)
        self.activation = ACTIVATIONS[layers.activation]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class BatchNormBlock(nn.Module):
    """Residual block with BatchNorm, x + act(BN(W2 act(BN(W1 x)))), with an inner width of four times the outer one.

    [..., size] -> [..., size]. Source: FlashSAC (arXiv 2604.04539).
    """

    def __init__(self, size: int, layers: Layers, ensemble: int | None):
        super().__init__()
        linear, activation = partial(linear_of(layers, ensemble), bias=False), ACTIVATIONS[layers.activation]
        self.up = nn.Sequential(linear(size, 4 * size), BatchNorm(4 * size, ensemble), activation())
        self.down = nn.Sequential(linear(4 * size, size), BatchNorm(size, ensemble), activation())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


@torch.no_grad()
def initialize(net: nn.Sequential, layers: Layers) -> None:
    """Initialise an MLP's linear layers as ``layers`` says; draws from torch's generator unless it is the default."""
    linear = [m for m in net.modules() if isinstance(m, nn.Linear | EnsembleLinear)]
    if layers.init == "orthogonal":
        for layer in linear:
            for weight in layer.weight if isinstance(layer, EnsembleLinear) else (layer.weight.T,):
                weight.copy_(nn.init.orthogonal_(torch.empty(weight.shape)))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    if layers.head != "default":
        nn.init.normal_(linear[-1].weight, std=0.01 if layers.head == "small" else 0.0)
        nn.init.zeros_(cast(Tensor, linear[-1].bias))
    project_weights(net, layers.unit_weights)


@dataclass(frozen=True)
class NetInput:
    """Input of a network: an observation group, or the features of an encoder.

    Attributes:
        group: name of the observation group.
        size: D of the group, or the number of the encoder's features.
        encoder: None: the group's vectors are the input.
    """

    group: str
    size: int
    encoder: nn.Module | None = None


class Reads(nn.Module):
    """Base of networks on observations.

    Attributes:
        groups: names of the observation groups that it reads.
        amp: compute matrix products in bfloat16 (parameters and outputs stay float32).
        borrows: the encoder's weights are another network's and not trained with this one.
    """

    amp: bool = False
    borrows: bool = False
    net: nn.Sequential

    def __init__(self, source: NetInput):
        super().__init__()
        self.group, self.encoder = source.group, source.encoder
        self.groups: tuple[str, ...] = getattr(source.encoder, "groups", (source.group,))

    def features(self, obs: Obs) -> Tensor:
        """Input of the first layer, [..., D]."""
        return obs[self.group] if self.encoder is None else self.encoder(obs)

    def precision(self, obs: Obs) -> AbstractContextManager[Any]:
        """Return the context of a forward pass: bfloat16 with ``amp``, else whatever the caller has chosen."""
        return bfloat16(True, next(iter(obs.values()))) if self.amp else nullcontext()

    def outputs(self, obs: Obs, action: Tensor | None = None) -> Tensor:
        """Output of the last layer, [..., K]. ``action`` [..., A] is a further input."""
        with self.precision(obs):
            out = self.net(self.inputs(obs, action))
        return out.float() if self.amp else out

    def inputs(self, obs: Obs, action: Tensor | None) -> Tensor:
        """Input of the first layer, with the action if given, [..., D + A]."""
        features = self.features(obs)
        return features if action is None else torch.cat((features, action), -1)


def groups_read(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the observation groups that ``net`` reads; ("policy",) if it has no such attribute."""
    return tuple(getattr(net, "groups", ("policy",)))


class TanhPolicy(Reads):
    """Base of policies with actions in [-1, 1]. Its encoder may be a memory (``pql.nets.memory``)."""

    def mode(self, obs: Obs) -> Tensor:
        """Return the action without exploration, [B, A]."""
        raise NotImplementedError

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Recurrent state of one environment: name -> shape; empty without a memory."""
        return getattr(self.encoder, "state_shapes", {})

    def mean_action(self, obs: Obs, state: Obs | None = None) -> Any:
        """Return the action without exploration, [B, A] in [-1, 1]; with ``state``, before this observation, also the
        next state."""
        if state is None:
            return self.mode(obs)
        seen, carry = cast(Any, self.encoder).step(obs, state["carry"])
        return self.mode(seen), {"carry": carry}


class DeterministicPolicy(TanhPolicy):
    """Deterministic policy: obs [B, D] -> tanh(MLP(features)), [B, A] in [-1, 1]."""

    def __init__(self, source: NetInput, action_size: int, layers: Layers):
        super().__init__(source)
        self.net = mlp(source.size, layers, action_size)

    def before_tanh(self, obs: Obs) -> Tensor:
        """Return the output before the tanh, [B, A]."""
        return self.outputs(obs)

    def forward(self, obs: Obs) -> Tensor:
        return torch.tanh(self.before_tanh(obs))

    def mode(self, obs: Obs) -> Tensor:
        return self(obs)


class GaussianPolicy(TanhPolicy):
    """Policy of SAC: obs [B, D] -> mean and log standard deviation of a Gaussian before its tanh, [B, A] each.

    Args:
        log_std: range of the log standard deviation.
        clip: clip the output to it, which has no gradient beyond its ends; False: map all outputs into it by a tanh.
    """

    def __init__(
        self,
        source: NetInput,
        action_size: int,
        layers: Layers,
        log_std: tuple[float, float] = (LOG_STD_MIN, LOG_STD_MAX),
        clip: bool = False,
    ):
        super().__init__(source)
        self.net = mlp(source.size, layers, 2 * action_size)
        self.log_std, self.clip = log_std, clip

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        mean, spread = self.outputs(obs).chunk(2, -1)
        low, high = self.log_std
        return mean, spread.clamp(low, high) if self.clip else low + 0.5 * (high - low) * (torch.tanh(spread) + 1)

    def mode(self, obs: Obs) -> Tensor:
        """Return tanh(mean), [B, A]."""
        return torch.tanh(self(obs)[0])


class Critic(Reads):
    """Ensemble of E critics: obs [B, D], action [B, A] -> values [E, B], or logits [E, B, Z] if ``atoms`` is given.

    The members share the encoder.
    """

    def __init__(self, source: NetInput, action_size: int, layers: Layers, ensemble: int = 2, atoms: int | None = None):
        super().__init__(source)
        self.atoms = atoms
        self.net = mlp(source.size + action_size, layers, atoms or 1, ensemble)

    def forward(self, obs: Obs, action: Tensor) -> Tensor:
        out = self.outputs(obs, action)
        return out if self.atoms else out.squeeze(-1)


def seeded(make: Callable[[], T], seed: int) -> T:
    """Call ``make`` with torch's CPU generator seeded with ``seed``; the generator's state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
