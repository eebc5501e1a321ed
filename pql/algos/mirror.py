"""Mirroring in learners (``algo.symmetry``): the reflection of a task's rows, and the mirror loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from pql.config import Config
from pql.contract.env import EnvSpec
from pql.data.mirror import Mirror
from pql.engine.worker import Update
from pql.nets.encoders import groups_of
from pql.types import Metrics, Obs

MeanAction = Callable[[nn.Module, Obs], Tensor]
"""(policy, obs [B, ...]) -> its mean action [B, A]."""


def make_mirror(config: Config, spec: EnvSpec, device: torch.device) -> Mirror | None:
    """Create the reflection of a task's rows; None if the settings ask for none.

    Raises:
        ConfigError: the task declares no symmetry of what the networks read.
    """
    wanted = getattr(config.algo, "symmetry", None)
    if wanted is None or not wanted.used:
        return None
    read = {k for which in ("policy", "critic") for k in groups_of(config, spec, which)}
    return Mirror(spec, wanted.augment, sorted(read), device)


def with_mirror_loss(update: Update[Any, Any, Any], mean: MeanAction, mirror: Mirror) -> Update[Any, Any, Any]:
    """Return ``update`` with the mirror loss added to its policy's loss.

    ``algo.symmetry.mirror_coef`` times E[|mu(M o) - M mu(o)|^2] / A, where the second term has no gradient (rsl_rl).
    """

    def updated(state: Any, batch: Any, settings: Any, gen: Generator) -> Metrics:
        policy = state.policy.module if hasattr(state.policy, "module") else state.policy
        parts: list[Tensor] = []

        def added() -> Tensor:
            wanted = mirror.reflected("action", mean(policy, batch.obs).detach())
            apart = (mean(policy, mirror.obs(batch.obs)) - wanted).square().mean(-1)
            parts.append((apart * batch.mask).sum() / batch.mask.sum().clamp(min=1))
            return settings.symmetry.mirror_coef * parts[0]

        state.optimizer.extra = added
        metrics = update(state, batch, settings, gen)
        state.optimizer.extra = None
        return {**metrics, "loss/mirror": parts[0].detach()}

    return updated
