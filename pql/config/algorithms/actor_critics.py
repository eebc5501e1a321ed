"""Settings of off-policy actor-critics, which learn from a replay: DDPG, TD3, PQL, SAC and their recipes."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pql.config.algorithms.base import COUNTABLE, AlgoConfig, ReplayAlgoConfig, check_support
from pql.config.algorithms.rollouts import StochasticConfig
from pql.config.algorithms.values import R2d2Config
from pql.config.fields import group, like, setting
from pql.config.groups import ExploreConfig, RndConfig, SymmetryConfig
from pql.config.networks import (
    AugmentedEncoderConfig,
    ClimbingPolicyConfig,
    CriticConfig,
    DeterministicPolicyConfig,
    GaussianPolicyConfig,
)
from pql.errors import ConfigError, show

if TYPE_CHECKING:
    from pql.config.schema import Config


WITHOUT_MEMORY = {
    "algo.policy.net": None,
    "algo.policy.encoder": "own",
    "algo.encoder.shift": 0,  # states are stored of images as they are
    "algo.encoder.jitter": 0,
    "algo.symmetry.augment": "off",  # reflected rows have no states
    "algo.symmetry.mirror_coef": 0,
    "replay.demos": None,  # nor have recorded ones
}
"""The only values of settings that a memory allows."""


@dataclass(frozen=True)
class SequenceConfig(ReplayAlgoConfig):
    """An off-policy algorithm for continuous actions whose policy may have a memory; updates are on sequences then."""

    lstm: int | None = like(
        StochasticConfig,
        "lstm",
        doc="Units of a recurrent layer before the policy's hidden layers; null: none. Updates are on sequences then, "
        "batch_size / length of them.",
    )
    cell: str = setting("lstm", "Kind of that layer.", choices=("lstm", "gru"), when="lstm", weights="policy")
    length: int = like(R2d2Config, "length", 16, when="lstm")
    burn_in: int = like(R2d2Config, "burn_in", 8, doc="Rows before those, which only warm up the states.", when="lstm")
    period: int = like(
        R2d2Config, "period", 8, doc="Rows between the starts of sequences; states are stored at these.", when="lstm"
    )
    stored_state: bool = like(
        R2d2Config, "stored_state", doc="Policies begin sequences with the collector's state, not zeros.", when="lstm"
    )

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.lstm is not None:
            self._check_memory(config)

    def _check_memory(self, config: "Config") -> None:
        for name, value in WITHOUT_MEMORY.items():
            have: Any = config
            for word in name.split("."):
                have = getattr(have, word, value)  # an algorithm may lack the setting
            if have != value:
                raise ConfigError(name, have, f"{show(value)} with algo.lstm")
        if self.period > self.length:
            raise ConfigError("algo.period", self.period, f"at most algo.length={self.length}: no row is left out")
        if self.batch_size % self.length:
            near = max(1, round(self.batch_size / self.length)) * self.length
            allowed = f"a multiple of algo.length={self.length}, such as {near}"
            raise ConfigError("algo.batch_size", self.batch_size, allowed)
        if self.warmup_steps < (rows := self.burn_in + self.length + self.n_step):
            allowed = f"at least {rows} with algo.lstm, the rows of a sequence"
            raise ConfigError("algo.warmup_steps", self.warmup_steps, allowed)


@dataclass(frozen=True)
class ActorCriticConfig(SequenceConfig):
    """An off-policy actor-critic with a V-learner and a P-learner, for continuous actions."""

    learners: ClassVar[tuple[str, ...]] = ("v", "p")
    discrete: ClassVar[bool | None] = False
    demonstrated: ClassVar[bool] = True

    critic_memory: bool | None = setting(
        None,
        "Critics have a recurrent layer of their own, over observations and actions; null: unless they read groups "
        "that the policy does not.",
        when="lstm",
        weights="critic",
    )
    v_per_step: float = setting(
        8.0,
        "Critic updates per step of all environments (beta_a:v of the PQL paper is 1 : v_per_step).",
        above=0,
        high=1000,
    )
    p_per_v: float = setting(0.5, "Policy updates per critic update (beta_p:v of the PQL paper).", above=0, high=1000)
    lr_clock: str = setting(
        "critic",
        "Updates by which the learning rates of policy and temperature fall: critic: its updates, so that all rates "
        "end together; own: their own, so that with p_per_v below 1 they fall more slowly (FlashSAC, XQC).",
        choices=("critic", "own"),
        when="lr_schedule=cosine|linear",
    )
    amp: bool = setting(False, "Run the learners' networks in bfloat16 (autocast); collection uses float32.")
    encoder: AugmentedEncoderConfig = group(AugmentedEncoderConfig, "Convolutional encoder of each image observation.")
    critic: CriticConfig = group(CriticConfig, "Critics.")
    policy: ClimbingPolicyConfig = group(ClimbingPolicyConfig, "Policy.")
    explore: ExploreConfig = group(ExploreConfig, "Exploration noise.")
    symmetry: SymmetryConfig = group(SymmetryConfig, "Training on reflected rows.")
    rnd: RndConfig = group(RndConfig, "Bonus for new states.")

    @property
    def ratios(self) -> dict[str, float]:
        return {"v_per_step": self.v_per_step, "p_per_v": self.p_per_v}

    def clocked(self, per_update: float) -> float:
        """Return the steps per update of the learning-rate schedule's clock of a network with ``per_update`` steps per
        critic update."""
        return per_update if self.lr_clock == "critic" else 1.0

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.critic_memory and self.critic.net is not None:
            allowed = f"false or null with the custom network algo.critic.net={self.critic.net}"
            raise ConfigError("algo.critic_memory", True, allowed)
        check_support(self.critic)
        if self.critic.target == "projected" and (self.critic.atoms is None or self.critic.loss != "c51"):
            allowed = "min, which is the same without algo.critic.atoms and algo.critic.loss=c51"
            raise ConfigError("algo.critic.target", "projected", allowed)
        for name in ("policy", "critic"):
            net = getattr(self, name)
            if net.net is not None and self.amp:
                raise ConfigError("algo.amp", True, f"false with the custom network algo.{name}.net={net.net}")
            if net.net is not None and self.policy.encoder == "critic":
                custom = f"own with the custom network algo.{name}.net={net.net}"
                raise ConfigError("algo.policy.encoder", "critic", custom)
        if self.lr_schedule != "constant" and self.lr_updates * self.p_per_v > COUNTABLE:
            most = int(COUNTABLE / self.p_per_v)
            allowed = f"at most {most} with algo.p_per_v={self.p_per_v:g}: optimisers count up to 2^24"
            raise ConfigError("algo.lr_updates", self.lr_updates, allowed)
        if self.critic.subset is not None and self.critic.subset > self.critic.ensemble:
            allowed = f"at most algo.critic.ensemble={self.critic.ensemble}"
            raise ConfigError("algo.critic.subset", self.critic.subset, allowed)
        if self.explore.kind in ("mixed", "redrawn", "scaled") and self.explore.low > self.explore.high:
            raise ConfigError("algo.explore.low", self.explore.low, f"at most algo.explore.high={self.explore.high:g}")


@dataclass(frozen=True)
class DdpgConfig(ActorCriticConfig):
    """DDPG(n), TD3 and PQL."""

    family: str = like(AlgoConfig, "family", "ddpg")
    policy: DeterministicPolicyConfig = group(DeterministicPolicyConfig, "Policy.")
    smoothing: float = setting(
        0.8, "Standard deviation of the noise on target actions (TD3).", low=0, high=10, live=True
    )
    smoothing_clip: float = setting(0.2, "Bound at which that noise is clipped (TD3).", low=0, high=2, live=True)

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.explore.kind == "scaled":
            allowed = f"another kind with algo={self.name}: its policy has no noise of its own to scale"
            raise ConfigError("algo.explore.kind", self.explore.kind, allowed)


@dataclass(frozen=True)
class SacConfig(ActorCriticConfig):
    """SAC(n)."""

    family: str = like(AlgoConfig, "family", "sac")
    alpha: float = setting(1.0, "Initial temperature.", above=0, high=100)
    auto_alpha: bool = setting(True, "Learn the temperature.")
    alpha_lr: float = setting(0.005, "Learning rate of the temperature.", above=0, high=1, when="auto_alpha", live=True)
    alpha_updates: str = setting(
        "policy",
        "Updates that include one of the temperature: policy, with its entropy at the sampled states; critic, at their "
        "successors (FastSAC).",
        choices=("policy", "critic"),
        when="auto_alpha",
    )
    alpha_loss: str = setting(
        "log",
        "Loss of the temperature: its logarithm (log) or itself (exp) times entropy minus target entropy.",
        choices=("log", "exp"),
        when="auto_alpha",
    )
    target_entropy: float | None = setting(
        None,
        "Target entropy of the temperature's loss; null: entropy_per_action times A, the action dimension.",
        when="auto_alpha",
    )
    entropy_per_action: float = setting(
        -1.0, "Target entropy per dimension of the action.", low=-10, high=1.5, when="target_entropy=null"
    )
    target_sigma: float | None = setting(
        None,
        "Target entropy per dimension as that of a Gaussian with this standard deviation (FlashSAC), instead of "
        "entropy_per_action.",
        above=0,
        high=10,
        when="target_entropy=null",
    )
    entropy_unit: str = setting(
        "unit",
        "Unit of the actions whose log-density and entropy enter all targets and losses: unit: [-1, 1]; action: that "
        "of the simulator's bounds (FastSAC). Both are the same for bounds of +-1.",
        choices=("unit", "action"),
    )
    policy: GaussianPolicyConfig = group(GaussianPolicyConfig, "Policy.")

    def check(self, config: "Config") -> None:
        super().check(config)
        net = self.policy
        if net.log_std_min >= net.log_std_max:
            below = f"below algo.policy.log_std_max={net.log_std_max:g}"
            raise ConfigError("algo.policy.log_std_min", net.log_std_min, below)

    def entropy_goal(self, size: int) -> float:
        """Return the target entropy for ``size`` dimensions of the action."""
        if self.target_entropy is not None:
            return self.target_entropy
        if self.target_sigma is not None:
            return 0.5 * size * math.log(2 * math.pi * math.e * self.target_sigma**2)
        return self.entropy_per_action * size
