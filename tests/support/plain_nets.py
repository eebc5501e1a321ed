"""Networks of the library as separate ones in float64: no batched product, normalisations written out."""

import copy
from collections.abc import Iterable

import torch
from torch import nn

from pql.nets.layers import BatchNorm, EnsembleLayerNorm, EnsembleLinear, EnsembleRMSNorm
from pql.nets.mlp import BatchNormBlock, ResidualBlock


class Norm(nn.Module):
    """BatchNorm of one network in float64, written out; the same values for training and for evaluation."""

    def __init__(self, gain, bias):
        super().__init__()
        self.gain, self.bias = nn.Parameter(gain.clone()), nn.Parameter(bias.clone())
        self.mean, self.var = torch.zeros(len(gain)).double(), torch.ones(len(gain)).double()
        self.training_mode = False

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training_mode:
            mean = x.sum(0) / len(x)
            var = ((x - mean) ** 2).sum(0) / len(x)
            with torch.no_grad():
                self.mean = 0.99 * self.mean + 0.01 * mean
                self.var = 0.99 * self.var + 0.01 * var * len(x) / (len(x) - 1)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.gain + self.bias


class Rms(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, gain):
        super().__init__()
        self.gain = nn.Parameter(gain.clone())

    def forward(self, x):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Around(nn.Module):
    """A block's sum with its input."""

    def __init__(self, *layers):
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.inner(x)


def alone(module: nn.Module, e: int | None) -> nn.Module:
    """Member ``e`` of an ensemble's layer, or a plain layer, as a network of its own with a copy of the weights."""
    if isinstance(module, EnsembleLinear | nn.Linear):
        weight = module.weight.data if e is None else module.weight.data[e].T
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, dtype=torch.float64)
        layer.weight.data = weight.clone()
        if module.bias is not None:
            layer.bias.data = (module.bias.data if e is None else module.bias.data[e, 0]).clone()
        return layer
    pick = (lambda t: t) if e is None else (lambda t: t[e, 0])
    if isinstance(module, BatchNorm):
        layer = Norm(pick(module.weight.data), pick(module.bias.data))
        layer.mean, layer.var = pick(module.running_mean).clone(), pick(module.running_var).clone()
        return layer
    if isinstance(module, nn.RMSNorm | EnsembleRMSNorm):
        return Rms(pick(module.weight.data))
    if isinstance(module, nn.LayerNorm | EnsembleLayerNorm):
        layer = nn.LayerNorm(module.weight.shape[-1], dtype=torch.float64)
        layer.weight.data, layer.bias.data = pick(module.weight.data).clone(), pick(module.bias.data).clone()
        return layer
    if isinstance(module, BatchNormBlock):
        return Around(*(alone(m, e) for m in (*module.up, *module.down)))
    if isinstance(module, ResidualBlock):
        return Around(*(alone(m, e) for m in (module.norm, module.up, module.activation, module.down)))
    return {"ReLU": nn.ReLU, "SiLU": nn.SiLU, "ELU": nn.ELU, "Tanh": nn.Tanh}[type(module).__name__]()


def plain(layers: Iterable[nn.Module], e: int | None = None) -> nn.Sequential:
    """Member ``e`` of an ensemble's layers, or plain layers, in float64."""
    return nn.Sequential(*(alone(copy.deepcopy(layer).double(), e) for layer in layers))


def separate(net: nn.Module, e: int | None = None) -> nn.Sequential:
    return plain(net.net, e)
