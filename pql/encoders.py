"""Networks from elsewhere, and encoders: observation groups, images among them, become one vector of features."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, nn

from pql.config import Config
from pql.env import Box, EnvSpec, ObsSpec
from pql.errors import ConfigError, nearest
from pql.types import Obs


class Encoder(nn.Module):
    """Observation groups -> features [..., size]: vectors as they are, each image through a CNN of its own, in a row.

    Attributes:
        groups: what it reads. size: of the features.
    """

    def __init__(self, obs: Mapping[str, ObsSpec], groups: Sequence[str], channels: Sequence[int], features: int):
        super().__init__()
        self.groups = tuple(groups)
        pictures = {k: Pictures(obs[k].shape, channels, features) for k in groups if len(obs[k].shape) > 1}
        self.pictures = nn.ModuleDict(pictures)
        self.size = sum(features if k in pictures else obs[k].shape[0] for k in groups)

    def forward(self, obs: Obs) -> Tensor:
        return torch.cat([self.pictures[k](obs[k]) if k in self.pictures else obs[k].float() for k in self.groups], -1)


class Pictures(nn.Module):
    """Images [..., C, H, W] (or [..., H, W, C], or [..., H, W]) -> [..., features].

    Convolutions of 3 x 3 that halve height and width, then Linear, LayerNorm and tanh (as Yarats et al. 2022, DrQ-v2,
    end theirs). The shorter of the first and the last axis is taken for the channels. Bytes are scaled to [0, 1].
    """

    def __init__(self, shape: tuple[int, ...], channels: Sequence[int], features: int):
        super().__init__()
        self.axes, self.last = len(shape), len(shape) == 3 and shape[2] < shape[0]
        *size, rows, columns = (shape[2], *shape[:2]) if self.last else shape
        layers: list[nn.Module] = []
        inside = size[0] if size else 1
        for outside in channels:
            layers += [nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.ReLU(inplace=True)]
            inside, rows, columns = outside, math.ceil(rows / 2), math.ceil(columns / 2)
        end = [nn.Flatten(), nn.Linear(inside * rows * columns, features), nn.LayerNorm(features), nn.Tanh()]
        self.net = nn.Sequential(*layers, *end)

    def forward(self, x: Tensor) -> Tensor:
        lead, x = x.shape[: -self.axes], x if x.is_floating_point() else x.float() / 255
        x = x.flatten(0, -self.axes - 1) if len(lead) != 1 else x
        x = x.movedim(-1, 1) if self.last else x.unsqueeze(1) if self.axes == 2 else x
        out = self.net(x)
        return out if len(lead) == 1 else out.unflatten(0, lead)


def groups_of(config: Config, spec: EnvSpec, which: str) -> tuple[str, ...]:
    """The observation groups that the "policy" or the "critic" reads.

    Raises:
        ConfigError: a group that the environment lacks, or one of a shape that no encoder here takes.
    """
    net, setting = getattr(config.algo, which), f"algo.{which}.obs"
    groups = tuple(net.obs or ((which,) if which in spec.obs else ("policy",)))
    for group in groups:
        if group not in spec.obs:
            raise ConfigError(setting, group, f"groups of {spec.name}: {', '.join(spec.obs)}{nearest(group, spec.obs)}")
        shape = spec.obs[group].shape
        if not 1 <= len(shape) <= 3 or 0 in shape:
            raise ConfigError(setting, group, f"vectors or images; {group!r} is {list(shape)}")
    return groups


def make_encoder(config: Config, spec: EnvSpec, which: str) -> Encoder | None:
    """What stands before the hidden layers of the "policy" or "critic"; None where it reads one vector of floats."""
    groups = groups_of(config, spec, which)
    first = spec.obs[groups[0]]
    if len(groups) == 1 and len(first.shape) == 1 and first.dtype.is_floating_point:
        return None
    return Encoder(spec.obs, groups, config.algo.encoder.channels, config.algo.encoder.features)


# -- networks from elsewhere ------------------------------------------------------------------------------------------


def custom_network(config: Config, spec: EnvSpec, which: str) -> nn.Module:
    """The network that ``algo.policy.net`` or ``algo.critic.net`` names, tried on two rows.

    Raises:
        ConfigError: it cannot be found or made, or does not give what the algorithm takes.
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
    try_out(config, spec, which, network)
    return network


def find_network(setting: str, name: str) -> Callable[[EnvSpec, Config], Any]:
    """``module:Class``, looked for in the working directory too, or a name of the entry-point group ``pql.nets``."""
    module, colon, attribute = name.partition(":")
    if not colon:
        known = {e.name: e for e in entry_points(group="pql.nets")}
        if name not in known:
            there = ", ".join(sorted(known)) or "none is installed"
            raise ConfigError(setting, name, f"module:Class, or a name of pql.nets ({there}){nearest(name, known)}")
        return known[name].load()
    try:
        with _working_directory_first():
            found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(setting, name, f"module:Class of a module that can be imported here ({error})") from error
    return found


@contextmanager
def _working_directory_first() -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.pop(0)


@torch.no_grad()
def try_out(config: Config, spec: EnvSpec, which: str, network: nn.Module) -> None:
    """Raises ``ConfigError`` where ``network`` does not turn two rows into what the algorithm's updates take."""
    setting, name = f"algo.{which}.net", getattr(config.algo, which).net
    obs = {k: torch.zeros(2, *s.shape, dtype=s.dtype) for k, s in spec.obs.items()}
    action = torch.zeros(2, spec.action.size if isinstance(spec.action, Box) else 1)
    atoms, outputs, wanted = config.algo.critic.atoms, list[Any](), list[tuple[str, list[Any]]]()
    try:
        if config.algo.family in ("ppo", "dqn"):  # whose own heads come after it
            outputs, wanted = [network(obs)], [("forward(obs)", [2, "F"])]
        elif which == "critic":
            outputs, wanted = [network(obs, action)], [("forward(obs, action)", ["E", 2] + ([atoms] if atoms else []))]
        elif config.algo.family == "sac":
            mean, log_std = network(obs)
            outputs = [mean, log_std, network.mean_action(obs)]  # type: ignore[operator]
            wanted = [(f, list(action.shape)) for f in ("forward(obs)'s mean", "forward(obs)'s log_std", "mean_action")]
        else:
            outputs = [network(obs), network.mean_action(obs)]  # type: ignore[operator]
            wanted = [("forward(obs)", list(action.shape)), ("mean_action(obs)", list(action.shape))]
    except Exception as error:
        raise ConfigError(setting, name, f"a {which} for {spec.name}: {type(error).__name__}: {error}") from error
    for out, (call, shape) in zip(outputs, wanted, strict=True):
        have = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        same = isinstance(have, list) and len(have) == len(shape)
        if not same or any(want != size and not isinstance(want, str) for size, want in zip(have, shape, strict=True)):
            raise ConfigError(setting, name, f"{call} of shape [{', '.join(map(str, shape))}], not {have}")
