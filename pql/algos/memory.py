"""Memory of off-policy actor-critics (``algo.lstm``): networks, sequences from a replay, updates on them.

Before an update, memories run over the sequences of its batch: those of policies from the stored state, those of
critics from zeros, both without gradients in the burn-in. Their outputs become observation groups of the trained rows,
which the update reads as a plain batch of L * B rows; gradients of what it trains go back through time.

Sources: Kapturowski et al. 2019 (R2D2: stored state, burn-in); Heess et al. 2015 (recurrent DDPG), Ni et al. 2022
(actor and critic with memories of their own).
"""

from typing import Any, cast

import torch
from torch import Generator, Tensor

from pql.config import Config
from pql.config.algorithms import ActorCriticConfig
from pql.contract.env import Box, EnvSpec
from pql.data.sequences import Sequence
from pql.engine.worker import Update
from pql.errors import ConfigError
from pql.nets.encoders import groups_of, make_input
from pql.nets.memory import RECALLED, CriticMemory, PolicyMemory, cut
from pql.nets.mlp import NetInput, Reads
from pql.types import Batch, Metrics, Obs, ObsBatch


def make_memory_input(config: Config[Any], spec: EnvSpec, which: str) -> NetInput:
    """Build the input of the network ``which`` ("policy" or "critic"), with its memory if it has one."""
    source, algo = make_input(config, spec, which), config.algo
    if getattr(algo, "lstm", None) is None or (which == "critic" and not critics_remember(config, spec)):
        return source
    if which == "policy":
        return NetInput(source.group, algo.lstm, PolicyMemory(source, algo.cell, algo.lstm))
    memory = CriticMemory(source, algo.cell, algo.lstm, cast(Box, spec.action).size)
    return NetInput(source.group, source.size + algo.lstm, memory)


def critics_remember(config: Config[Any], spec: EnvSpec) -> bool:
    """Return True if critics have a memory.

    Raises:
        ConfigError: they would, but have BatchNorm, whose joint batch is of one network's features.
    """
    algo = config.algo
    if algo.lstm is None or algo.critic.net is not None:
        return False
    wanted = algo.critic_memory
    if wanted is None:
        wanted = {*groups_of(config, spec, "critic")} <= {*groups_of(config, spec, "policy")}
    if wanted and algo.critic.batch_norm:
        raise ConfigError("algo.critic.batch_norm", True, "false, or algo.critic_memory=false, with algo.lstm")
    return wanted


def values_on_sequences(update: Update[Any, Batch, Any]) -> Update[Any, Sequence, Any]:
    """Return a V-learner's ``update`` of sequences, which runs the memories over them first."""

    def updated(state: Any, seq: Sequence, settings: ActorCriticConfig, gen: Generator) -> Metrics:
        batch = transitions(seq, settings.burn_in, state.policy, state.critic.module, state.target.module)
        return {**update(state, batch, settings, gen), "replay/used": seq.mask.mean()}

    return updated


def policies_on_sequences(update: Update[Any, ObsBatch, Any]) -> Update[Any, Sequence, Any]:
    """Return a P-learner's ``update`` of sequences, which runs the memories over them first."""

    def updated(state: Any, seq: Sequence, settings: ActorCriticConfig, gen: Generator) -> Metrics:
        seq, obs = trained(seq, settings.burn_in)
        obs[RECALLED["policy"]] = recalled(state.policy.module, seq, settings.burn_in).flatten(0, 1)
        if remembers(state.critic):
            with torch.no_grad():
                obs[RECALLED["critic"]] = recalled(state.critic, seq, settings.burn_in).flatten(0, 1)
        weight = seq.weight.expand_as(seq.mask)
        return update(state, ObsBatch(obs, seq.mask.flatten(), weight.flatten()), settings, gen)

    return updated


def transitions(seq: Sequence, burn_in: int, policy: Reads, critic: Reads, target: Reads) -> Batch:
    """Return the trained rows of sequences as n-step transitions, [L B, ...], with what memories recall.

    ``policy`` chooses the next action, ``target`` evaluates it, and ``critic`` is trained.
    """
    size = seq.mask.shape[1]
    place = (seq.successor * size + torch.arange(size, device=seq.mask.device)).flatten()  # [L B]

    def ahead(x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, place)

    next_obs = {k: ahead(v) for k, v in cut(seq.obs, burn_in)[1].items()}
    with torch.no_grad():
        next_obs[RECALLED["policy"]] = ahead(recalled(policy, seq, burn_in))
        if remembers(target):
            next_obs[RECALLED["critic"]] = ahead(recalled(target, seq, burn_in))
    seq, obs = trained(seq, burn_in)
    if remembers(critic):
        obs[RECALLED["critic"]] = recalled(critic, seq, burn_in).flatten(0, 1)
    action = seq.action[burn_in:].flatten(0, 1)
    weight, index = (x.expand_as(seq.mask).flatten() for x in (seq.weight, seq.index))
    reward, discount, mask, followed = (x.flatten() for x in (seq.reward, seq.discount, seq.mask, seq.followed))
    return Batch(obs, action, reward, discount, next_obs, mask, weight, index, followed)


def trained(seq: Sequence, burn_in: int) -> tuple[Sequence, Obs]:
    """Return sequences without the rows after the trained ones, and the observations of these, [L B, ...]."""
    end = burn_in + seq.mask.shape[0]
    seq = seq._replace(obs=cut(seq.obs, end)[0], first=seq.first[:end], action=seq.action[:end])
    return seq, {k: v[burn_in:].flatten(0, 1) for k, v in seq.obs.items()}


def remembers(net: Any) -> bool:
    """Return True if a network has a memory."""
    return isinstance(getattr(net, "encoder", None), PolicyMemory)


def recalled(net: Reads, seq: Sequence, burn_in: int) -> Tensor:
    """Return the outputs of a network's memory in the rows from ``burn_in`` on, [S - burn_in, B, H]."""
    with net.precision(seq.obs):
        return cast(PolicyMemory, net.encoder).recall(seq.obs, seq.action, seq.first, seq.carry, burn_in)
