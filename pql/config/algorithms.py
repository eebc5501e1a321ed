"""Settings of the built-in algorithms: one record per family of update functions.

A record also declares the properties of its family that validation, reports and the command line use. This module does
not import torch: the command line checks settings before it loads torch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pql.config.fields import group, setting
from pql.config.groups import (
    AugmentedEncoderConfig,
    CentralConfig,
    ClimbingPolicyConfig,
    CriticConfig,
    DeterministicPolicyConfig,
    DistributionalNetConfig,
    EncoderConfig,
    EpsilonConfig,
    ExploreConfig,
    GaussianPolicyConfig,
    MunchausenConfig,
    OptionalVtraceConfig,
    PathwiseCriticConfig,
    PathwisePolicyConfig,
    PriorityConfig,
    QuantileNetConfig,
    ResidualConfig,
    ResidualNetConfig,
    RolloutPolicyConfig,
    StateNetConfig,
    ValueEncoderConfig,
    ValueNetConfig,
    VtraceConfig,
)
from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.config.schema import Config

OPTIMIZERS = ("adam", "rmsprop", "rmsprop_tf")
COUNTABLE = 2**24  # steps; optimisers count them in float32


def schedule_setting(default: str) -> Any:
    """The setting ``algo.schedule``."""
    doc = "concurrent: collector and learners run at the same time; lockstep: one after the other; "
    return setting(
        default,
        doc + "replicas: several learners on shared parameters.",
        choices=("concurrent", "lockstep", "replicas"),
    )


@dataclass(frozen=True)
class AlgoConfig:
    """Settings common to all algorithms; the record of a family inherits from this class.

    Attributes:
        data: source of batches: "replay", "sequences" (of a replay) or "rollout".
        schedules: supported schedules.
        learners: workers other than the collector.
        discrete: supported actions: True: discrete, False: continuous, None: both.
    """

    data: ClassVar[str]
    schedules: ClassVar[tuple[str, ...]] = ("concurrent", "lockstep")
    learners: ClassVar[tuple[str, ...]] = ("learner",)
    discrete: ClassVar[bool | None] = None

    name: str = setting("", "Name of the preset.")
    family: str = setting("", "Family of update functions.", weights="policy")
    schedule: str = schedule_setting("concurrent")
    gamma: float = setting(0.99, "Discount factor.", low=0, high=1)
    warmup_steps: int = setting(32, "Random steps of every environment before learning.", low=0, high=10**9)
    normalize_obs: bool = setting(
        True, "Normalise observations with their running mean and variance.", weights="policy"
    )
    normalize_integers: bool = setting(
        True,
        "Treat observations of integers, bytes and booleans like floats, images of bytes excepted; false: networks get "
        "them as they are, for embeddings.",
        weights="policy",
    )
    reward_scale: float = setting(
        1.0,
        "Constant factor on rewards, in addition to task.reward_scale, for algorithms that assume a range of returns.",
    )
    normalize_reward: bool = setting(
        False,
        "Divide rewards by the running standard deviation of returns; off-policy actor-critics then ignore "
        "task.reward_scale.",
    )
    return_cap: float | None = setting(
        None,
        "Rewards are also scaled so that the largest return so far is at most this, before the constant factors on "
        "rewards (FlashSAC: 5). null: no cap.",
        above=0,
        high=1e9,
        when="normalize_reward",
    )
    encoder: EncoderConfig = group(EncoderConfig, "Convolutional encoder of each image observation.")

    @property
    def on_policy_corrected(self) -> bool:
        """Return True if rollouts are corrected for the behaviour policy."""
        return False

    @property
    def needs_last_action(self) -> bool:
        """Return True if observations include the last action and reward."""
        return False

    @property
    def ratios(self) -> dict[str, float]:
        """Requested update ratios, by the name of their counter."""
        return {}

    def check_schedule(self) -> None:
        """Raise ``ConfigError`` for a schedule that the algorithm cannot run under."""
        if self.schedule not in self.schedules:
            allowed = " or ".join(self.schedules)
            others = ", ".join(name for name, record in RECORDS.items() if self.schedule in record.schedules)
            allowed = f"{allowed} with algo={self.name}; only {others} can have {self.schedule}"
            raise ConfigError("algo.schedule", self.schedule, allowed)

    def check(self, config: "Config") -> None:
        """Raise ``ConfigError`` if settings are incompatible."""
        for name in ("policy", "critic"):
            net: Any = getattr(self, name, None)
            blocks = isinstance(net, ResidualConfig) and net.trunk != "mlp"
            if blocks and net.net is None and len({*net.hidden}) != 1:
                one = "one width for all residual blocks, such as [256,256]"
                raise ConfigError(f"algo.{name}.hidden", net.hidden, one)


# -- replay -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayAlgoConfig(AlgoConfig):
    """An algorithm that learns from a replay."""

    data: ClassVar[str] = "replay"

    batch_size: int = setting(8192, "Transitions per update.", low=1, high=2**24, ranks="divide")
    n_step: int = setting(3, "Number of rewards in an n-step return.", low=1, high=100)
    lr_schedule: str = setting(
        "constant",
        "Learning rates of all networks: constant; cosine or linear: they fall to lr_final times their value within "
        "lr_updates.",
        choices=("constant", "cosine", "linear"),
    )
    lr_updates: int = setting(
        1_000_000,
        "Updates of the critic (or Q-network) within which they fall; of the policy: see lr_clock. Optimisers count up "
        "to 2^24.",
        low=1,
        high=COUNTABLE,
        when="lr_schedule=cosine|linear",
    )
    lr_final: float = setting(
        0.5, "Factor of the learning rates from then on.", low=0, high=1, when="lr_schedule=cosine|linear"
    )

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.warmup_steps < 1:
            raise ConfigError("algo.warmup_steps", self.warmup_steps, "at least 1: updates need something to sample")
        if self.batch_size > config.replay.capacity:
            allowed = f"at most replay.capacity={config.replay.capacity}"
            raise ConfigError("algo.batch_size", self.batch_size, allowed)


@dataclass(frozen=True)
class ActorCriticConfig(ReplayAlgoConfig):
    """An off-policy actor-critic with a V-learner and a P-learner, for continuous actions."""

    learners: ClassVar[tuple[str, ...]] = ("v", "p")
    discrete: ClassVar[bool | None] = False

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

    @property
    def ratios(self) -> dict[str, float]:
        return {"v_per_step": self.v_per_step, "p_per_v": self.p_per_v}

    def clocked(self, per_update: float) -> float:
        """Return the steps per update of the learning-rate schedule's clock of a network with ``per_update`` steps per
        critic update."""
        return per_update if self.lr_clock == "critic" else 1.0

    def check(self, config: "Config") -> None:
        super().check(config)
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

    family: str = setting("ddpg", "Family of update functions.", weights="policy")
    policy: DeterministicPolicyConfig = group(DeterministicPolicyConfig, "Policy.")
    smoothing: float = setting(0.8, "Standard deviation of the noise on target actions (TD3).", low=0, high=10)
    smoothing_clip: float = setting(0.2, "Bound at which that noise is clipped (TD3).", low=0, high=2)

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.explore.kind == "scaled":
            allowed = f"another kind with algo={self.name}: its policy has no noise of its own to scale"
            raise ConfigError("algo.explore.kind", self.explore.kind, allowed)


@dataclass(frozen=True)
class SacConfig(ActorCriticConfig):
    """SAC(n)."""

    family: str = setting("sac", "Family of update functions.", weights="policy")
    alpha: float = setting(1.0, "Initial temperature.", above=0, high=100)
    auto_alpha: bool = setting(True, "Learn the temperature.")
    alpha_lr: float = setting(0.005, "Learning rate of the temperature.", above=0, high=1, when="auto_alpha")
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


# -- values of discrete actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DuelingConfig(ReplayAlgoConfig):
    """Q-learning of discrete actions from a replay."""

    learners: ClassVar[tuple[str, ...]] = ("v",)
    discrete: ClassVar[bool | None] = True

    schedule: str = schedule_setting("lockstep")
    double: bool = setting(
        False, "Double DQN: the online network selects the action that the target network evaluates."
    )
    dueling: bool = setting(
        False,
        "Separate streams for value and advantages, which share all layers except the last hidden one.",
        weights="policy",
    )
    shared_grad: float = setting(1.0, "Factor on the gradient of both streams into the shared layers.", above=0, high=1)
    huber: float | None = setting(
        1.0,
        "TD error above which the Huber loss is linear; priorities are clipped to it; null: squared loss, no clipping.",
        above=0,
        high=1e6,
    )
    target_period: int = setting(
        10_000,
        "Env steps between copies of the weights to the target network.",
        low=1,
        high=10**12,
        ranks="divide",
        replaces=("critic.tau", "critic.target_every"),
    )
    optimizer: str = setting("adam", "Optimiser.", choices=("adam", "rmsprop"))
    rms_decay: float = setting(
        0.95, "Decay of the running mean of squared gradients.", low=0, high=1, when="optimizer=rmsprop"
    )
    amp: bool = setting(
        False,
        "Run the learner's networks, but their last layers, in bfloat16 (autocast); collection uses float32.",
    )
    encoder: ValueEncoderConfig = group(ValueEncoderConfig, "Convolutional encoder of each image observation.")
    critic: ValueNetConfig = group(ValueNetConfig, "Q-network.", replaces=("policy",))
    epsilon: EpsilonConfig = group(EpsilonConfig, "Epsilon-greedy exploration.", replaces=("explore",))
    priority: PriorityConfig = group(PriorityConfig, "Prioritised replay.")

    def check(self, config: "Config") -> None:
        super().check(config)
        refuse_p_learner(config, "the V-learner's network is the policy (placement.v_learner)")
        if self.shared_grad != 1 and not self.dueling:
            raise ConfigError("algo.shared_grad", self.shared_grad, "1, or algo.dueling=true with it")
        if self.critic.net is not None and self.amp:
            raise ConfigError("algo.amp", True, f"false with the custom network algo.critic.net={self.critic.net}")
        if self.lr_schedule != "constant" and self.optimizer != "adam":
            raise ConfigError("algo.lr_schedule", self.lr_schedule, "constant, or algo.optimizer=adam with it")
        check_epsilon(self.epsilon)


@dataclass(frozen=True)
class DqnConfig(DuelingConfig):
    """DQN, C51, Rainbow, Ape-X and BTR."""

    family: str = setting("dqn", "Family of update functions.", weights="policy")
    v_per_step: float = setting(8.0, "Updates per step of all environments.", above=0, high=1000)
    noisy: float | None = setting(
        None, "Initial noise (sigma_0) of noisy layers; null: ordinary layers.", above=0, high=10, weights="policy"
    )
    huber: float | None = setting(
        1.0,
        "TD error above which the Huber loss is linear; priorities are clipped to it; null: squared loss, no clipping.",
        above=0,
        high=1e6,
        when="critic.atoms=null",
    )
    critic: QuantileNetConfig = group(QuantileNetConfig, "Q-network.", replaces=("policy",))
    munchausen: MunchausenConfig = group(MunchausenConfig, "Munchausen targets.")

    @property
    def ratios(self) -> dict[str, float]:
        return {"v_per_step": self.v_per_step}

    def check(self, config: "Config") -> None:
        super().check(config)
        check_support(self.critic)
        self._check_distribution()
        soft, atoms = self.munchausen.alpha > 0, self.critic.atoms is not None
        if soft and atoms:
            raise ConfigError("algo.munchausen.alpha", self.munchausen.alpha, "0 with algo.critic.atoms")
        if soft and self.double:
            raise ConfigError("algo.double", True, "false with algo.munchausen.alpha: soft targets choose no action")

    def _check_distribution(self) -> None:
        atoms, quantiles = self.critic.atoms is not None, self.critic.quantiles is not None
        if atoms and quantiles:
            raise ConfigError("algo.critic.quantiles", self.critic.quantiles, "null with algo.critic.atoms")
        if quantiles and self.huber is None:
            raise ConfigError("algo.huber", None, "a number with algo.critic.quantiles")
        if self.priority.initial == "actor" and (atoms or quantiles):
            kind, what = ("atoms", "divergences") if atoms else ("quantiles", "errors of all quantiles")
            raise ConfigError(
                "algo.priority.initial",
                "actor",
                f"max with algo.critic.{kind}: there priorities are {what}, which the values when acted do not give",
            )


@dataclass(frozen=True)
class R2d2Config(DuelingConfig):
    """R2D2: a recurrent DQN on prioritised sequences."""

    data: ClassVar[str] = "sequences"

    family: str = setting("r2d2", "Family of update functions.", weights="policy")
    lstm: int = setting(
        512,
        "Units of the LSTM between the observation and the layers of critic.hidden.",
        low=1,
        high=100_000,
        weights="policy",
    )
    length: int = setting(80, "Rows of a sequence that enter the loss.", low=1, high=100_000)
    burn_in: int = setting(40, "Rows before those, which only warm up the LSTM state.", low=0, high=100_000)
    period: int = setting(
        40, "Rows between the starts of sequences; LSTM states are stored only at these.", low=1, high=100_000
    )
    replay_ratio: float = setting(
        1.0,
        "Rows trained on per row collected, burn-in excluded; kept exactly.",
        above=0,
        high=1e6,
        replaces=("v_per_step",),
    )
    eta: float = setting(
        0.9, "Priority of a sequence: eta * (largest TD error) + (1 - eta) * (mean TD error).", low=0, high=1
    )
    rescale: float | None = setting(
        1e-3,
        "Epsilon of the value rescaling h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x; null: no rescaling.",
        above=0,
        high=1,
    )
    stored_state: bool = setting(
        True, "Start sequences from the stored LSTM state of the collector; false: from zeros."
    )
    feedback: bool = setting(True, "Give the network the last action and reward as inputs, too.", weights="policy")

    @property
    def needs_last_action(self) -> bool:
        return self.feedback

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.period > self.length:
            raise ConfigError("algo.period", self.period, f"at most algo.length={self.length}: no row is left out")
        rows = self.burn_in + self.length + self.n_step
        if self.warmup_steps < rows:
            raise ConfigError("algo.warmup_steps", self.warmup_steps, f"at least {rows}, the rows of a sequence")


# -- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutAlgoConfig(AlgoConfig):
    """An algorithm that learns from rollouts of one tick."""

    data: ClassVar[str] = "rollout"

    horizon: int = setting(16, "Steps of every environment per tick, the length of a rollout.", low=1, high=100_000)
    minibatches: int = setting(
        2,
        "Number of equal minibatches of a rollout; each is one update.",
        low=1,
        high=100_000,
        replaces=("batch_size",),
    )
    anneal_steps: int | None = setting(
        None,
        "Env steps over which the learning rate falls linearly to 0, warm-up excluded; null: constant.",
        low=1,
        high=10**15,
        ranks="floor",
        replaces=("lr_schedule", "lr_updates", "lr_final"),
    )
    amp: bool = setting(False, "Run networks in bfloat16 (autocast), in collection, too; evaluations use float32.")

    @property
    def passes(self) -> int:
        """Number of updates that use each row."""
        return 1

    @property
    def ratios(self) -> dict[str, float]:
        replicas = getattr(self, "replicas", 1)
        return {"v_per_step": self.passes * replicas * self.minibatches / self.horizon, "p_per_v": 1.0}

    @property
    def whole_sequences(self) -> bool:
        """Return True if minibatches are split by environment instead of by row."""
        return False

    def check_schedule(self) -> None:
        if self.schedule == "concurrent" and not self.on_policy_corrected:
            raise ConfigError("algo.schedule", self.schedule, self.fresh_schedules)
        super().check_schedule()

    def check(self, config: "Config") -> None:
        for name, given, unset in (
            ("replay.prefill", config.replay.prefill, None),
            ("replay.save", config.replay.save, False),
        ):
            if given != unset:
                shown = "null" if unset is None else "false"
                raise ConfigError(name, given, f"{shown}: for off-policy algorithms alone, not algo={self.name}")
        super().check(config)
        refuse_p_learner(config, "one learner trains policy and value, and placement.v_learner places it")
        size, unit = config.num_envs // config.replicas, f"num_envs={config.num_envs}"
        unit += f" / algo.replicas={config.replicas}" if config.replicas > 1 else ""
        if not self.whole_sequences:
            size, unit = size * self.horizon, f"{unit} x algo.horizon={self.horizon} rows"
        if size % self.minibatches:
            parts = [d for d in range(1, min(size, 1000) + 1) if size % d == 0]
            near = min(parts, key=lambda d: abs(d - self.minibatches))
            raise ConfigError("algo.minibatches", self.minibatches, f"a divisor of {unit}, such as {near}")

    @property
    def fresh_schedules(self) -> str:
        """Text of an error message: the schedules under which rollouts are on-policy."""
        return f"lockstep: {self.name} learns from what its policy did"


@dataclass(frozen=True)
class StochasticConfig(RolloutAlgoConfig):
    """A stochastic policy and a value network, trained on rollouts by one optimiser."""

    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", low=0, high=1e6)
    value_coef: float = setting(1.0, "Weight of the value loss.", low=0, high=1e6)
    squash: bool = setting(
        False,
        "Continuous actions only: true: tanh of a Gaussian; false: a Gaussian clamped to [-1, 1].",
        weights="policy",
    )
    init_std: float = setting(
        1.0, "Initial standard deviation of the Gaussian policy.", above=0, high=100, replaces=("explore",)
    )
    shared: bool = setting(False, "The value head reads the policy's last hidden layer.", weights="policy")
    lstm: int | None = setting(
        None, "Units of an LSTM before the hidden layers; null: no LSTM.", low=1, high=100_000, weights="policy"
    )
    optimizer: str = setting(
        "adam", "Optimiser; rmsprop_tf adds eps under the root, as TensorFlow does.", choices=OPTIMIZERS
    )
    policy: RolloutPolicyConfig = group(RolloutPolicyConfig, "Policy, and the settings of the shared optimiser.")
    critic: StateNetConfig = group(StateNetConfig, "Value network.")

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.shared and self.critic.net:
            raise ConfigError("algo.critic.net", self.critic.net, "null: algo.shared takes the policy's layers")


@dataclass(frozen=True)
class PpoConfig(StochasticConfig):
    """PPO and A2C; with replicas, asynchronous PPO and A3C."""

    schedules: ClassVar[tuple[str, ...]] = ("concurrent", "lockstep", "replicas")

    family: str = setting("ppo", "Family of update functions.", weights="policy")
    schedule: str = schedule_setting("lockstep")
    epochs: int = setting(4, "Passes over a rollout.", low=1, high=1000, replaces=("v_per_step",))
    gae_lambda: float = setting(0.95, "Lambda of GAE.", low=0, high=1, replaces=("n_step",))
    clip: float | None = setting(
        0.2, "Clip range of the probability ratio; null: the plain policy gradient.", above=0, high=10
    )
    value_clip: float | None = setting(
        None,
        "Clip range of the value's change within a tick, in units of normalised values; null: no clipping.",
        above=0,
        high=1e6,
    )
    normalize_advantage: bool = setting(True, "Normalise advantages over the whole rollout.")
    normalize_value: bool = setting(
        True,
        "Normalise the critic's targets with the running mean and standard deviation of returns.",
        weights="critic",
    )
    lr_schedule: str = setting(
        "adaptive",
        "adaptive: from the KL divergence (kl_target); fixed; linear: falls to 0 over anneal_steps.",
        choices=("adaptive", "fixed", "linear"),
    )
    kl_target: float = setting(
        0.01,
        "Target of the mean KL divergence for the adaptive learning rate.",
        above=0,
        high=100,
        when="lr_schedule=adaptive",
    )
    kl_stop: float | None = setting(
        None,
        "KL divergence above which the remaining updates of the tick are skipped; null: none are.",
        above=0,
        high=100,
    )
    anneal_clip: bool = setting(False, "With lr_schedule=linear: anneal the clip range with the learning rate.")
    vtrace: OptionalVtraceConfig = group(OptionalVtraceConfig, "V-trace correction of rollouts from an older policy.")
    replicas: int = setting(
        1, "Number of learners on shared parameters, each with an equal part of the environments.", low=1, high=1024
    )
    central: CentralConfig = group(CentralConfig, "Synchronisation of replicas.")

    @property
    def passes(self) -> int:
        return self.epochs

    @property
    def on_policy_corrected(self) -> bool:
        return self.vtrace.enabled

    @property
    def whole_sequences(self) -> bool:
        return self.lstm is not None

    @property
    def fresh_schedules(self) -> str:
        what = f"lockstep or replicas: {self.name} learns from what its policy did"
        return f"{what} (algo.vtrace.enabled=true: from what an older one did)"

    def check(self, config: "Config") -> None:
        super().check(config)
        check_cutoffs(self.vtrace)
        if self.lstm is not None and (self.policy.net or self.critic.net):
            raise ConfigError("algo.lstm", self.lstm, "null: networks from elsewhere (algo.*.net) have no memory here")
        if self.lr_schedule == "linear" and self.anneal_steps is None:
            raise ConfigError("algo.anneal_steps", None, "env steps, with algo.lr_schedule=linear")
        for name, value in (("anneal_steps", self.anneal_steps), ("anneal_clip", self.anneal_clip)):
            if value and self.lr_schedule != "linear":
                raise ConfigError(f"algo.{name}", value, "algo.lr_schedule=linear with it")


@dataclass(frozen=True)
class ImpalaConfig(StochasticConfig):
    """IMPALA."""

    family: str = setting("impala", "Family of update functions.", weights="policy")
    horizon: int = setting(20, "Steps of every environment per tick, the length of a rollout.", low=1, high=100_000)
    minibatches: int = setting(
        1,
        "Number of minibatches, each of an equal part of the environments; each is one update.",
        low=1,
        high=100_000,
        replaces=("batch_size",),
    )
    trace_lambda: float = setting(
        1.0,
        "Lambda of V-trace: 1: returns up to the end of the rollout; 0: one-step targets.",
        low=0,
        high=1,
        replaces=("n_step",),
    )
    correction: str = setting(
        "vtrace",
        "Off-policy correction: vtrace; one_step: importance weights in the policy gradient only; none.",
        choices=("vtrace", "one_step", "none"),
    )
    reduce: str = setting(
        "sum",
        "Reduction of losses over the rows of a minibatch. The two need different learning rates.",
        choices=("sum", "mean"),
    )
    value_coef: float = setting(0.5, "Weight of the value loss, which is half the squared error.", low=0, high=1e6)
    entropy_coef: float = setting(0.01, "Weight of the entropy bonus.", low=0, high=1e6, replaces=("explore",))
    kl_coef: float = setting(0.0, "Weight of KL(policy that acted || policy).", low=0, high=1e6)
    shared: bool = setting(True, "The value head reads the policy's last hidden layer.", weights="policy")
    optimizer: str = setting(
        "rmsprop_tf", "Optimiser; rmsprop_tf adds eps under the root, as TensorFlow does.", choices=OPTIMIZERS
    )
    vtrace: VtraceConfig = group(VtraceConfig, "Truncated importance weights.")

    @property
    def on_policy_corrected(self) -> bool:
        return True

    @property
    def whole_sequences(self) -> bool:
        return True

    def check(self, config: "Config") -> None:
        super().check(config)
        check_cutoffs(self.vtrace)
        if self.lstm is not None and not self.shared:
            raise ConfigError("algo.shared", False, "true with algo.lstm: policy and value share a memory")
        if self.lstm is not None and self.policy.net:
            raise ConfigError("algo.lstm", self.lstm, "null: a network from elsewhere (algo.policy.net) has none")


@dataclass(frozen=True)
class PqnConfig(RolloutAlgoConfig):
    """PQN: Q(lambda) on rollouts, without replay or target network."""

    schedules: ClassVar[tuple[str, ...]] = ("lockstep",)
    discrete: ClassVar[bool | None] = True

    family: str = setting("pqn", "Family of update functions.", weights="policy")
    schedule: str = schedule_setting("lockstep")
    horizon: int = setting(32, "Steps of every environment per tick, the length of a rollout.", low=1, high=100_000)
    epochs: int = setting(2, "Passes over a rollout.", low=1, high=1000, replaces=("v_per_step",))
    minibatches: int = setting(
        32,
        "Number of equal minibatches of a rollout; each is one update.",
        low=1,
        high=100_000,
        replaces=("batch_size",),
    )
    q_lambda: float = setting(
        0.65,
        "Lambda of the Q(lambda) return: 0: one-step targets; 1: returns up to the end of the rollout.",
        low=0,
        high=1,
        replaces=("n_step",),
    )
    optimizer: str = setting("radam", "Optimiser.", choices=("radam", "adam"))
    critic: ResidualNetConfig = group(ResidualNetConfig, "Q-network.", replaces=("policy",))
    epsilon: EpsilonConfig = group(EpsilonConfig, "Epsilon-greedy exploration.", replaces=("explore",))

    @property
    def passes(self) -> int:
        return self.epochs

    def check(self, config: "Config") -> None:
        super().check(config)
        check_epsilon(self.epsilon)


@dataclass(frozen=True)
class ReppoConfig(RolloutAlgoConfig):
    """REPPO: a critic of actions and a policy that follows its gradient, on rollouts."""

    schedules: ClassVar[tuple[str, ...]] = ("lockstep",)
    discrete: ClassVar[bool | None] = False

    family: str = setting("reppo", "Family of update functions.", weights="policy")
    schedule: str = schedule_setting("lockstep")
    horizon: int = setting(128, "Steps of every environment per tick, the length of a rollout.", low=1, high=100_000)
    epochs: int = setting(8, "Passes over a rollout.", low=1, high=1000, replaces=("v_per_step",))
    minibatches: int = setting(
        64,
        "Number of equal minibatches of a rollout; each is one update of the critic and one of the policy.",
        low=1,
        high=100_000,
        replaces=("batch_size",),
    )
    td_lambda: float = setting(
        0.95,
        "Lambda of the TD(lambda) return: 0: one-step targets; 1: returns up to the end of the rollout.",
        low=0,
        high=1,
        replaces=("n_step",),
    )
    kl_bound: float = setting(
        0.1,
        "KL(policy that acted || policy) of a row above which its loss is beta times the KL.",
        above=0,
        high=100,
    )
    kl_samples: int | None = setting(
        None, "Actions that estimate the KL of a row; null: the exact KL.", low=1, high=1000
    )
    beta: float = setting(0.01, "Initial weight of the KL where it exceeds kl_bound.", above=0, high=100)
    alpha: float = setting(0.01, "Initial temperature, the weight of the entropy.", above=0, high=100)
    entropy_per_action: float = setting(
        -0.5, "Target entropy per dimension of the action.", low=-10, high=1.5, replaces=("explore",)
    )
    embedding_coef: float = setting(
        1.0, "Weight of the squared error of predicted next embeddings in the critic's loss.", low=0, high=1e6
    )
    policy: PathwisePolicyConfig = group(PathwisePolicyConfig, "Policy.")
    critic: PathwiseCriticConfig = group(PathwiseCriticConfig, "Critic.")

    @property
    def passes(self) -> int:
        return self.epochs

    def check(self, config: "Config") -> None:
        super().check(config)
        check_support(self.critic)
        if self.critic.net is None and not self.critic.hidden:
            raise ConfigError("algo.critic.hidden", [], "at least one width: the last is the embedding's")


RECORDS: dict[str, type[AlgoConfig]] = {
    record.family: record
    for record in (DdpgConfig, SacConfig, DqnConfig, R2d2Config, PpoConfig, ImpalaConfig, PqnConfig, ReppoConfig)
}
"""Records of the built-in families, by name."""


# -- checks that several share ----------------------------------------------------------------------------------------


def check_support(critic: DistributionalNetConfig) -> None:
    """Raise ``ConfigError`` for an empty support of a categorical critic."""
    if critic.v_min >= critic.v_max:
        raise ConfigError("algo.critic.v_min", critic.v_min, f"below algo.critic.v_max={critic.v_max:g}")


def check_epsilon(epsilon: EpsilonConfig) -> None:
    """Raise ``ConfigError`` for an epsilon that would rise."""
    if epsilon.kind in ("annealed", "decayed") and epsilon.start < epsilon.end:
        raise ConfigError("algo.epsilon.start", epsilon.start, f"at least algo.epsilon.end={epsilon.end:g}")


def check_cutoffs(vtrace: VtraceConfig) -> None:
    """Raise ``ConfigError`` for a trace that is cut later than its temporal differences."""
    if vtrace.c_bar > vtrace.rho_bar:
        raise ConfigError("algo.vtrace.c_bar", vtrace.c_bar, f"at most algo.vtrace.rho_bar={vtrace.rho_bar:g}")


def refuse_p_learner(config: "Config", why: str) -> None:
    """Raise ``ConfigError`` if a P-learner is placed for an algorithm without one."""
    place: Any = config.placement.p_learner
    if place is not None:
        raise ConfigError("placement.p_learner", place, f"null: {why}")
