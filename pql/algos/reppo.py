"""REPPO: the policy follows the gradient of a critic of actions, which is trained on fresh rollouts.

Source: Voelcker et al. 2025, "Relative Entropy Pathwise Policy Optimization" (arXiv 2507.11019), and its repository
(cvoelcker/reppo at a7ab85b). There is no replay and no target network: values stay accurate because the policy stays
within a KL bound of the policy that acted. The temperature keeps its entropy near a target.

Deviations are listed in ``docs/recipes.md``.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Generator, Tensor, nn

from pql.algos.builders import check_continuous, check_obs, make_normalizer
from pql.algos.on_policy import begin_rollout_tick, check_room, make_body, on_policy_counts
from pql.algos.registry import Family, Setup, Wiring
from pql.collect.actors import StochasticActor
from pql.collect.collector import Collector
from pql.config import Config, ReppoConfig
from pql.contract.env import Box, EnvSpec
from pql.data.returns import lambda_returns, valued_rows
from pql.data.rollout import Progress, Rollout, Segment, by_parts, minibatches
from pql.engine.flat import Flat
from pql.engine.optim import AdamW, make_adamw
from pql.engine.schedule import Counts
from pql.engine.worker import Learner, State
from pql.nets.actor_critic import StochasticPolicy, bfloat16
from pql.nets.distributions import DiagGaussian, hl_gauss, squashed_gaussian
from pql.nets.embedding import Embedder, EmbeddingCritic
from pql.nets.encoders import Outputs, custom_network, make_input, make_layers, read_specs
from pql.nets.mlp import seeded
from pql.types import Metrics, Obs


class Multipliers(nn.Module):
    """Logarithms of the temperature (``log_alpha``) and of the weight of the KL (``log_beta``), 0-dim."""

    def __init__(self, alpha: float, beta: float):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(alpha).log())
        self.log_beta = nn.Parameter(torch.tensor(beta).log())


class PolicyAndMultipliers(nn.Module):
    """A policy and its multipliers, trained by one optimiser. The policy's parameters come first."""

    def __init__(self, policy: StochasticPolicy, multipliers: Multipliers):
        super().__init__()
        self.policy, self.multipliers = policy, multipliers


@dataclass
class ReppoState(State):
    """State of the learner. ``policy`` and ``multipliers`` are parts of what ``optimizer`` trains."""

    policy: StochasticPolicy
    multipliers: Multipliers
    critic: Flat  # of an EmbeddingCritic
    optimizer: AdamW
    critic_optimizer: AdamW
    progress: Progress

    @property
    def critic_net(self) -> EmbeddingCritic:
        return cast(EmbeddingCritic, self.critic.module)


class ReppoMinibatch(NamedTuple):
    """Rows [B] of a segment."""

    obs: Obs  # [B, ...] normalised
    action: Tensor  # [B, A] in [-1, 1]
    params: Tensor  # [B, 2 A] of the distribution that acted
    target: Tensor  # [B] soft TD(lambda) return
    alive: Tensor  # [B] 0 if terminated, where there is no next embedding; else 1
    mask: Tensor  # [B] 0 or 1
    embedding: Tensor  # [B, F] of the next observation and an action of the policy there


class Evaluated(NamedTuple):
    """Evaluation of all observations of a segment, with one action a' of the policy for each. No gradients."""

    q: Tensor  # [T + 1 + K + 1, N] Q(s', a')
    log_prob: Tensor  # [T + 1 + K + 1, N] log pi(a'|s')
    embedding: Tensor  # [T + 1 + K + 1, N, F]


# -- a tick's minibatches ---------------------------------------------------------------------------------------------


def draw_reppo(state: ReppoState, segment: Segment, settings: ReppoConfig, gen: Generator) -> Iterator[ReppoMinibatch]:
    """Yield a tick's minibatches: compute targets and embeddings once, then shuffle all rows in each epoch."""
    rates = (state.optimizer, settings.policy.lr), (state.critic_optimizer, settings.critic.lr)
    begin_rollout_tick(state.progress, segment, settings.anneal_steps, rates)
    evaluated, rows = evaluate_segment(state, segment, settings, gen), segment.mask.shape[0]
    alpha = state.multipliers.log_alpha.detach().exp()
    row = segment.successor * segment.mask.shape[1] + torch.arange(segment.mask.shape[1], device=segment.mask.device)
    columns = {
        **{f"obs/{k}": v[:rows] for k, v in segment.obs.items()},
        "action": state.policy.dist.action(segment.action),
        "params": segment.params,
        "target": soft_returns(settings, segment, evaluated, alpha),
        "alive": segment.alive,
        "mask": segment.mask,
        "next": row,
    }
    embedding = evaluated.embedding.flatten(0, 1)  # gathered for a minibatch at a time: a copy for all rows is large
    flat = {k: v.flatten(0, 1) for k, v in columns.items()}
    for part in minibatches(flat, settings.epochs, settings.minibatches, 0, gen):
        obs = {k: part.pop(f"obs/{k}") for k in segment.obs}
        yield ReppoMinibatch(obs=obs, embedding=embedding.index_select(0, part.pop("next")), **part)


@torch.no_grad()
def evaluate_segment(state: ReppoState, segment: Segment, settings: ReppoConfig, gen: Generator) -> Evaluated:
    """Draw an action for every observation of a segment and evaluate both. The weights are still those that acted."""

    def evaluate(obs: Obs) -> Tensor:  # rows [R, N, ...] -> [R, N, 2 + F]: value, log-probability, embedding
        mean, log_std = state.policy(obs).chunk(2, -1)
        action, log_prob = squashed_gaussian(mean, log_std, gen)
        with bfloat16(settings.amp, action):
            q, embedding = state.critic_net.value({k: v.flatten(0, 1) for k, v in obs.items()}, action.flatten(0, 1))
        shape = log_prob.shape
        return torch.cat((q.view(*shape, 1), log_prob.unsqueeze(-1), embedding.view(*shape, -1)), -1)

    found = by_parts(evaluate, segment.obs, settings.minibatches)
    return Evaluated(found[..., 0], found[..., 1], found[..., 2:])


def soft_returns(settings: ReppoConfig, segment: Segment, evaluated: Evaluated, alpha: Tensor) -> Tensor:
    """Return soft TD(lambda) targets, [T, N].

    G_t = r_t + discount_t (-alpha log pi(a'|s'_t) + (1 - lambda) Q(s'_t, a') + lambda G_{t+1}), with a' ~ pi(s'_t); at
    the end of a trajectory G_{t+1} is Q(s'_t, a'). ``discount`` is 0 after a termination, for the entropy too.
    """
    discount = settings.gamma * segment.alive
    bonus = -alpha * evaluated.log_prob.gather(0, segment.successor)
    soft = segment._replace(reward=torch.addcmul(segment.reward, discount, bonus))
    return lambda_returns(valued_rows(soft, settings.gamma, evaluated.q), settings.td_lambda)


# -- updates ----------------------------------------------------------------------------------------------------------


def reppo_update(state: ReppoState, batch: ReppoMinibatch, settings: ReppoConfig, gen: Generator) -> Metrics:
    """Take one step of the critic, then one of policy and multipliers. Mutates ``state`` only."""
    share = batch.mask / batch.mask.sum().clamp(min=1)
    return {**embedding_critic_step(state, batch, settings, share), **policy_step(state, batch, settings, share, gen)}


def embedding_critic_step(state: ReppoState, batch: ReppoMinibatch, settings: ReppoConfig, share: Tensor) -> Metrics:
    """Step on the cross-entropy to the target's histogram and the squared error of the predicted next embedding.

    Args:
        share: [B], weight of each row.
    """
    critic = state.critic_net
    with bfloat16(settings.amp, batch.action):
        predicted, logits = critic(batch.obs, batch.action)
    log_probs = logits.log_softmax(-1)
    target = hl_gauss(batch.target, critic.atoms, settings.critic.sigma)
    loss = -(share * (target * log_probs).sum(-1)).sum()
    error = (share * batch.alive * (predicted - batch.embedding).square().mean(-1)).sum()
    norm = state.critic_optimizer.minimize(loss + settings.embedding_coef * error, mask=batch.mask)
    return {
        "loss/critic": loss.detach(),
        "loss/embedding": error.detach(),
        "grad_norm/critic": norm,
        "value/q": (share * (log_probs.detach().exp() @ critic.atoms)).sum(),
    }


def policy_step(
    state: ReppoState, batch: ReppoMinibatch, settings: ReppoConfig, share: Tensor, gen: Generator
) -> Metrics:
    """Step on alpha log pi(a|s) - Q(s, a) in rows within the KL bound and on beta KL in the others; and, with both
    errors held constant, on alpha (entropy - target entropy) - beta (KL - bound).

    Args:
        share: [B], weight of each row.
    """
    params = state.policy(batch.obs)
    mean, log_std = params.chunk(2, -1)
    action, log_prob = squashed_gaussian(mean, log_std, gen)
    with bfloat16(settings.amp, action):
        q, _ = state.critic_net.value(batch.obs, action)
    kl = divergence(state.policy, settings, batch.params, params, gen)
    alpha, beta = state.multipliers.log_alpha.exp(), state.multipliers.log_beta.exp()
    near = kl < settings.kl_bound
    loss = (share * torch.where(near, alpha.detach() * log_prob - q, beta.detach() * kl)).sum()
    entropy, kl = -log_prob.detach(), kl.detach()
    goal = settings.entropy_per_action * action.shape[-1]
    multiplier_loss = (share * (alpha * (entropy - goal) - beta * (kl - settings.kl_bound))).sum()
    norm = state.optimizer.minimize(loss + multiplier_loss, mask=batch.mask)
    return {
        "loss/policy": loss.detach(),
        "grad_norm/policy": norm,
        "policy/entropy": (share * entropy).sum(),
        "policy/kl": (share * kl).sum(),
        "policy/kl_exceeded": (share * ~near).sum(),
        "policy/alpha": alpha.detach(),
        "policy/beta": beta.detach(),
        "policy/lr": state.optimizer.lr,
    }


def divergence(policy: StochasticPolicy, settings: ReppoConfig, old: Tensor, new: Tensor, gen: Generator) -> Tensor:
    """Return KL(old || new) of parameters [B, 2 A], [B]: exact, or estimated from ``kl_samples`` actions per row.

    The tanh is invertible, so the KL of the Gaussians is that of the actions.
    """
    dist, count = policy.dist, settings.kl_samples
    if count is None:
        return dist.kl(old, new)
    raw = dist.sample(old.expand(count, *old.shape), gen)
    return (dist.log_prob(old, raw) - dist.log_prob(new, raw)).mean(0)


# -- wiring -----------------------------------------------------------------------------------------------------------


def check_reppo(config: Config[ReppoConfig], spec: EnvSpec, counts: Counts, device: torch.device) -> int:
    """Check a config against an environment spec. Returns the rollout's rows T.

    Raises:
        ConfigError: discrete actions, an unsupported observation, or a rollout that does not fit into memory.
    """
    check_continuous(config, spec)
    check_obs(config, spec)
    p, size = config.algo, cast(Box, spec.action).size
    embedding = p.critic.hidden[-1] if p.critic.net is None else 0
    check_room("algo.horizon", p.horizon, spec, 2 * size + embedding, device)
    return p.horizon


def make_reppo_policy(config: Config[ReppoConfig], spec: EnvSpec, amp: bool = False) -> StochasticPolicy:
    """Create a freshly initialised policy network. Evaluation, loading and export compute in float32."""
    body, dist = make_body(config, spec, "policy"), DiagGaussian(cast(Box, spec.action).size, squash=True)
    return StochasticPolicy(body, dist, None, amp)


def make_reppo_critic(config: Config[ReppoConfig], spec: EnvSpec) -> EmbeddingCritic:
    """Create a freshly initialised critic."""
    net, size = config.algo.critic, cast(Box, spec.action).size
    atoms, layers = torch.linspace(net.v_min, net.v_max, net.atoms), make_layers(net)
    if net.net is None:
        embedder = Embedder(make_input(config, spec, "critic"), size, layers)
        return EmbeddingCritic(embedder, embedder.size, layers, atoms, net.sigma)
    given = custom_network(config, spec, "critic", probe_embedder)
    with torch.no_grad():
        obs = {k: torch.zeros(2, *s.shape, dtype=s.dtype) for k, s in read_specs(config, spec).items()}
        width = given(obs, torch.zeros(2, size)).shape[-1]
    return EmbeddingCritic(given, width, layers, atoms, net.sigma)


def probe_embedder(network: nn.Module, obs: Obs, action: Tensor) -> Outputs:
    """Return an embedder's output for two rows, with its expected shape [2, F]."""
    return [("forward(obs, action)", network(obs, action), [2, "F"])]


def make_reppo_state(
    config: Config[ReppoConfig], policy: StochasticPolicy, critic: EmbeddingCritic, num_envs: int
) -> ReppoState:
    """Create the learner's state on the networks' device."""
    p, flat = config.algo, Flat(critic, trained=True)
    multipliers = Multipliers(p.alpha, p.beta).to(flat.data.device)
    optimizer = make_adamw(Flat(PolicyAndMultipliers(policy, multipliers), trained=True), p.policy)
    now = Progress(flat.data.device, p.horizon * num_envs)
    return ReppoState(policy, multipliers, flat, optimizer, make_adamw(flat, p.critic), now)


def wire_reppo(setup: Setup[ReppoConfig]) -> Wiring:
    """Create the rollout, its collector and its learner."""
    config, spec, home, p = setup.config, setup.spec, setup.devices["learner"], setup.config.algo
    policy, critic = seeded(
        lambda: (make_reppo_policy(config, spec, p.amp), make_reppo_critic(config, spec)), setup.init_seed
    )
    actor = StochasticActor(copy.deepcopy(policy).to(spec.device), spec)
    norm = make_normalizer(setup)
    rollout = Rollout(spec, norm, setup.rows, policy.dist.params_size, home)
    collector = Collector(setup.env, actor, norm, [rollout], setup.generator("collector"), setup.execution)
    state = make_reppo_state(config, policy.to(home), critic.to(home), spec.num_envs)
    now = state.progress

    def draw(count: int, gen: Generator) -> Iterator[ReppoMinibatch]:
        return draw_reppo(state, rollout.segment(), p, gen)

    gen, size = setup.generator("learner", "v"), sum(w.numel() for w in policy.parameters())
    publishes = {"policy": [state.optimizer.flat.data[:size], now.ticks]}
    learner = Learner("learner", state, reppo_update, p, draw, gen, {}, publishes, trains=("v", "p"), clock=now.ticks)
    pulls = {"policy": [Flat(actor.policy).data, actor.version]}
    return Wiring(collector, pulls, {}, [learner], policy, {"rollout/bootstrap_lost": now.lost})


FAMILY = Family(ReppoConfig, on_policy_counts, check_reppo, wire_reppo, make_reppo_policy)
