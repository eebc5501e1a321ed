"""A policy of pql as the model that rsl_rl's runners, players and exporters expect."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pql.errors import ConfigError
from pql.lab.describe import Described
from pql.run.export.writer import Deployed
from pql.run.policy import Policy


class LabPolicy(nn.Module):
    """Acts on the stack's observations, in the simulator's units, without exploration.

    Args:
        policy: network and statistics, which become submodules.
        described: the environment.
    """

    is_recurrent = False

    def __init__(self, policy: Policy, described: Described):
        super().__init__()
        self.net, self.norm = policy.net, policy.norm
        self._described, self._policy = described, policy
        self.old_names = {new: old for old, new in described.names.items()}
        self.is_recurrent = bool(policy.state_shapes)
        self.std: Callable[[], Tensor] = lambda: torch.zeros(described.actions.spec.size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LabPolicy":
        moved = super()._apply(fn, recurse)
        self._policy = Policy(self.net, self.norm, self._policy.spec)
        return moved

    @property
    def policy(self) -> Policy:
        """The policy itself, which acts in [-1, 1]."""
        return self._policy

    @property
    def output_std(self) -> Tensor:
        """Standard deviation of the last actions about the mean action, [A], in the simulator's units."""
        return self.std()

    @torch.no_grad()
    def forward(self, obs: Mapping[str, Tensor], *_: Any, **__: Any) -> Tensor:
        """Return the simulator's actions [N, A] for observations by group, [N, ...]."""
        groups = {new: obs[self.old_names[new]] for new in self._policy.groups}
        return self._described.actions(self._policy(groups))

    def reset(self, dones: Tensor | None = None, hidden_state: Any = None) -> None:
        """Forget the recurrent state of all environments, or of those of ``dones`` [N]."""
        self._policy.reset(None if dones is None else dones > 0)

    def get_hidden_state(self) -> None:
        return None

    def as_onnx(self, verbose: bool = False) -> nn.Module:
        """Return a module on the CPU with ``get_dummy_inputs``, ``input_names`` (``obs``, or the groups' names) and
        ``output_names``. Raises ``ConfigError``: a recurrent policy."""
        return _Exported(self)

    def as_jit(self) -> nn.Module:
        """Return the traced module. Raises ``ConfigError``: a recurrent policy."""
        model = _Exported(self)
        return torch.jit.trace(model, model.get_dummy_inputs())


class _Exported(nn.Module):
    """(groups [1, ...]) -> the simulator's actions [1, A]."""

    is_recurrent = False

    def __init__(self, lab: LabPolicy):
        super().__init__()
        if lab.policy.state_shapes:
            raise ConfigError("algo.lstm", "on", "a policy without memory: pql export writes recurrent ones")
        self.model = Deployed(lab.policy, True).eval().requires_grad_(False)
        spec, groups = lab.policy.spec, lab.policy.groups
        self._shapes = [(1, *spec.obs[name].shape) for name in groups]
        self.input_names = ["obs"] if len(groups) == 1 else [lab.old_names[name] for name in groups]
        self.output_names = ["actions"]

    def forward(self, *groups: Tensor) -> Tensor:
        action: Tensor = self.model(*groups)[0]
        return action

    def get_dummy_inputs(self) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape) for shape in self._shapes)
