"""Settings of Q-learning from a replay: of transitions (DQN and its successors) and of sequences (R2D2)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pql.config.algorithms.base import AlgoConfig, ReplayAlgoConfig, check_epsilon, check_support, refuse_p_learner
from pql.config.fields import group, like, setting
from pql.config.groups import EpsilonConfig, MunchausenConfig, PriorityConfig
from pql.config.networks import QuantileNetConfig, TrainedNetConfig, ValueEncoderConfig, ValueNetConfig
from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.config.schema import Config


@dataclass(frozen=True)
class DuelingConfig(ReplayAlgoConfig):
    """Q-learning of discrete actions from a replay."""

    learners: ClassVar[tuple[str, ...]] = ("v",)
    discrete: ClassVar[bool | None] = True

    schedule: str = like(AlgoConfig, "schedule", "lockstep")
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
        False, "Run the learner's networks, but their last layers, in bfloat16 (autocast); collection uses float32."
    )
    encoder: ValueEncoderConfig = group(ValueEncoderConfig, "Convolutional encoder of each image observation.")
    critic: TrainedNetConfig = group(TrainedNetConfig, "Q-network.", replaces=("policy",))
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

    family: str = like(AlgoConfig, "family", "dqn")
    v_per_step: float = setting(8.0, "Updates per step of all environments.", above=0, high=1000)
    noisy: float | None = setting(
        None, "Initial noise (sigma_0) of noisy layers; null: ordinary layers.", above=0, high=10, weights="policy"
    )
    huber: float | None = like(DuelingConfig, "huber", when="critic.atoms=null")
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

    family: str = like(AlgoConfig, "family", "r2d2")
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
    critic: ValueNetConfig = group(ValueNetConfig, "Q-network.", replaces=("policy",))

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
