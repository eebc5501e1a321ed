"""Off-policy networks: MLPs, policies, critic ensembles as one batched network; and ``Flat``, parameters as one tensor.

Networks take all observation groups and read those that they were built for. This file contains no losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class EnsembleLinear(nn.Module):
    """E linear layers as one batched product: [B, in] or [E, B, in] -> [E, B, out]."""

    def __init__(self, ensemble: int, size_in: int, size_out: int):
        super().__init__()
        bound = size_in**-0.5  # torch.nn.Linear's own default
        self.weight = nn.Parameter(torch.empty(ensemble, size_in, size_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(ensemble, 1, size_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x.expand(self.weight.shape[0], -1, -1), self.weight)


class EnsembleLayerNorm(nn.Module):
    """LayerNorm over the last axis of [E, B, size], with a gain and a bias per ensemble member."""

    def __init__(self, ensemble: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble, 1, size))
        self.bias = nn.Parameter(torch.zeros(ensemble, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


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


class EnsembleRMSNorm(nn.Module):
    """RMSNorm over the last axis of [E, B, size] (Zhang & Sennrich 2019), with a gain per ensemble member."""

    def __init__(self, ensemble: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ensemble, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight


@dataclass(frozen=True)
class Layers:
    """Hidden layers of an MLP.

    Attributes:
        hidden: their widths.
        activation: a name in ``ACTIVATIONS``.
        layer_norm: LayerNorm before each activation.
        noisy: sigma_0 of :class:`NoisyLinear` layers; None: ordinary linear layers.
        trunk: ``mlp``, or ``residual``: a :class:`ResidualBlock` for each of ``hidden``, which are equal.
        norm: of residual blocks: ``layer`` or ``rms``.
        init: weights: ``default`` (torch's), or ``orthogonal`` with gain 1 and biases of 0.
        head: of the output layer: ``default`` (as ``init``), ``zero``, or ``small``: weights N(0, 0.01), biases of 0.
    """

    hidden: Sequence[int]
    activation: str = "elu"
    layer_norm: bool = False
    noisy: float | None = None
    trunk: str = "mlp"
    norm: str = "layer"
    init: str = "default"
    head: str = "default"


def mlp(size_in: int, layers: Layers, size_out: int, ensemble: int | None = None) -> nn.Sequential:
    """Build an MLP: Linear (-> LayerNorm) -> activation for each hidden layer, then Linear. [B, in] -> [B, out].

    Args:
        ensemble: E: build E networks as one, [B, in] or [E, B, in] -> [E, B, out]; not with noisy layers.
    """
    linear = linear_of(layers, ensemble)
    if layers.trunk == "residual":
        width = layers.hidden[0]
        blocks = [ResidualBlock(width, layers, ensemble) for _ in layers.hidden]
        net = nn.Sequential(linear(size_in, width), *blocks, norm_of(width, layers, ensemble), linear(width, size_out))
        initialize(net, layers)
        return net
    modules: list[nn.Module] = []
    for size in layers.hidden:
        between = [norm_of(size, Layers(()), ensemble)] if layers.layer_norm else []
        modules += [linear(size_in, size), *between, ACTIVATIONS[layers.activation]()]
        size_in = size
    net = nn.Sequential(*modules, linear(size_in, size_out))
    initialize(net, layers)
    return net


def linear_of(layers: Layers, ensemble: int | None) -> Callable[[int, int], nn.Module]:
    """Return the constructor (size in, size out) of the linear layers."""
    if ensemble is not None:
        return partial(EnsembleLinear, ensemble)
    return nn.Linear if layers.noisy is None else partial(NoisyLinear, sigma=layers.noisy)


def norm_of(size: int, layers: Layers, ensemble: int | None) -> nn.Module:
    """Return the normalisation of a residual block."""
    if layers.norm == "rms":
        return nn.RMSNorm(size, eps=1e-6) if ensemble is None else EnsembleRMSNorm(ensemble, size)
    return nn.LayerNorm(size) if ensemble is None else EnsembleLayerNorm(ensemble, size)


class ResidualBlock(nn.Module):
    """Pre-norm residual block, x + W2 act(W1 norm(x)), with an inner width of four times the outer one.

    [..., size] -> [..., size]. Source: Lee et al. 2025 (SimBa).
    """

    def __init__(self, size: int, layers: Layers, ensemble: int | None):
        super().__init__()
        linear = linear_of(layers, ensemble)
        self.norm, self.up, self.down = norm_of(size, layers, ensemble), linear(size, 4 * size), linear(4 * size, size)
        self.activation = ACTIVATIONS[layers.activation]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


@torch.no_grad()
def initialize(net: nn.Sequential, layers: Layers) -> None:
    """Initialise an MLP's linear layers as ``layers`` says; draws from torch's generator unless it is the default."""
    linear = [m for m in net.modules() if isinstance(m, nn.Linear | EnsembleLinear)]
    if layers.init == "orthogonal":
        for layer in linear:
            for weight in layer.weight if isinstance(layer, EnsembleLinear) else (layer.weight.T,):
                weight.copy_(nn.init.orthogonal_(torch.empty(weight.shape)))
            nn.init.zeros_(layer.bias)
    if layers.head != "default":
        nn.init.normal_(linear[-1].weight, std=0.01 if layers.head == "small" else 0.0)
        nn.init.zeros_(linear[-1].bias)


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
    """

    def __init__(self, source: NetInput):
        super().__init__()
        self.group, self.encoder = source.group, source.encoder
        self.groups: tuple[str, ...] = getattr(source.encoder, "groups", (source.group,))

    def features(self, obs: Obs) -> Tensor:
        """Input of the first layer, [..., D]."""
        return obs[self.group] if self.encoder is None else self.encoder(obs)


def groups_read(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the observation groups that ``net`` reads; ("policy",) if it has no such attribute."""
    return tuple(getattr(net, "groups", ("policy",)))


class DeterministicPolicy(Reads):
    """Deterministic policy: obs [B, D] -> tanh(MLP(features)), [B, A] in [-1, 1]."""

    def __init__(self, source: NetInput, action_size: int, layers: Layers):
        super().__init__(source)
        self.net = mlp(source.size, layers, action_size)

    def before_tanh(self, obs: Obs) -> Tensor:
        """Return the output before the tanh, [B, A]."""
        return self.net(self.features(obs))

    def forward(self, obs: Obs) -> Tensor:
        return torch.tanh(self.before_tanh(obs))

    def mean_action(self, obs: Obs) -> Tensor:
        """Return the action without exploration, [B, A]."""
        return self(obs)


class GaussianPolicy(Reads):
    """Policy of SAC: obs [B, D] -> mean and log standard deviation of a Gaussian before its tanh, [B, A] each.

    Args:
        log_std: range of the log standard deviation.
    """

    def __init__(
        self,
        source: NetInput,
        action_size: int,
        layers: Layers,
        log_std: tuple[float, float] = (LOG_STD_MIN, LOG_STD_MAX),
    ):
        super().__init__(source)
        self.net = mlp(source.size, layers, 2 * action_size)
        self.log_std = log_std

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        mean, spread = self.net(self.features(obs)).chunk(2, -1)
        low, high = self.log_std
        # A smooth map into the range keeps a gradient at both ends; a clamp has none.
        return mean, low + 0.5 * (high - low) * (torch.tanh(spread) + 1)

    def mean_action(self, obs: Obs) -> Tensor:
        """Return tanh(mean), [B, A] in [-1, 1]."""
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
        out = self.net(torch.cat((self.features(obs), action), -1))
        return out if self.atoms else out.squeeze(-1)


class Flat:
    """Parameters of a module as views of one contiguous tensor, and their gradients as views of another.

    Gradient clipping, optimiser step, Polyak averaging and weight broadcast then take one kernel each.

    Attributes:
        data: [P] all parameters; a leaf tensor whose ``grad`` is [P] if the module is trained.
        sent: [P + 1] the gradient and one extra element, reduced over processes together; empty if not trained.
        after: methods ``after_step`` of the module and its parts, which its optimiser calls after each step.
    """

    def __init__(self, module: nn.Module, trained: bool = False):
        self.module = module
        self.after: list[Callable[[], None]] = [
            cast(Any, m).after_step for m in module.modules() if hasattr(m, "after_step")
        ]
        parameters = list(module.parameters())
        self.data = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]), requires_grad=trained)
        self.sent = self.data.new_zeros(self.data.numel() + 1 if trained else 0)
        grad = self.sent[:-1] if trained else None
        self.data.grad = grad
        start = 0
        for p in parameters:
            stop = start + p.numel()
            p.data = self.data.detach()[start:stop].view_as(p)
            p.grad = grad[start:stop].view_as(p) if grad is not None else None
            p.requires_grad_(trained)
            start = stop

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's state dict, under its own names."""
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load in place: views and captured CUDA graphs stay valid."""
        self.module.load_state_dict(state)


def seeded(make: Callable[[], T], seed: int) -> T:
    """Call ``make`` with torch's CPU generator seeded with ``seed``; the generator's state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
