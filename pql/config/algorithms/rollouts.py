"""Settings of algorithms on rollouts: PPO, A2C, A3C, IMPALA, PQN and REPPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pql.config.algorithms.base import AlgoConfig, check_cutoffs, check_epsilon, check_support, refuse_p_learner
from pql.config.fields import group, like, setting
from pql.config.groups import (
    CentralConfig,
    EpsilonConfig,
    OptionalVtraceConfig,
    RndConfig,
    SymmetryConfig,
    VtraceConfig,
)
from pql.config.networks import (
    PathwiseCriticConfig,
    PathwisePolicyConfig,
    ResidualNetConfig,
    RolloutPolicyConfig,
    StateNetConfig,
)
from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.config.schema import Config


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
        return getattr(self, "epochs", 1)

    @property
    def ratios(self) -> dict[str, float]:
        replicas = getattr(self, "replicas", 1)
        return {"v_per_step": self.passes * replicas * self.minibatches / self.horizon, "p_per_v": 1.0}

    @property
    def whole_sequences(self) -> bool:
        """Return True if minibatches are split by environment instead of by row."""
        return False

    def check_schedule(self, known: Mapping[str, type[AlgoConfig]]) -> None:
        if self.schedule == "concurrent" and not self.on_policy_corrected:
            raise ConfigError("algo.schedule", self.schedule, self.fresh_schedules)
        super().check_schedule(known)

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

    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", low=0, high=1e6, live=True)
    value_coef: float = setting(1.0, "Weight of the value loss.", low=0, high=1e6, live=True)
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
        "adam",
        "Optimiser; rmsprop_tf adds eps under the root, as TensorFlow does.",
        choices=("adam", "rmsprop", "rmsprop_tf"),
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

    family: str = like(AlgoConfig, "family", "ppo")
    schedule: str = like(AlgoConfig, "schedule", "lockstep")
    epochs: int = setting(4, "Passes over a rollout.", low=1, high=1000, replaces=("v_per_step",))
    gae_lambda: float = setting(0.95, "Lambda of GAE.", low=0, high=1, replaces=("n_step",), live=True)
    clip: float | None = setting(
        0.2, "Clip range of the probability ratio; null: the plain policy gradient.", above=0, high=10, live=True
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
        live=True,
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
    symmetry: SymmetryConfig = group(SymmetryConfig, "Training on reflected rows.")
    rnd: RndConfig = group(RndConfig, "Bonus for new states.")

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
        if self.lstm is not None and self.symmetry.used:
            raise ConfigError("algo.lstm", self.lstm, "null with algo.symmetry: reflected rows have no memory")
        if self.lr_schedule == "linear" and self.anneal_steps is None:
            raise ConfigError("algo.anneal_steps", None, "env steps, with algo.lr_schedule=linear")
        for name, value in (("anneal_steps", self.anneal_steps), ("anneal_clip", self.anneal_clip)):
            if value and self.lr_schedule != "linear":
                raise ConfigError(f"algo.{name}", value, "algo.lr_schedule=linear with it")


@dataclass(frozen=True)
class ImpalaConfig(StochasticConfig):
    """IMPALA."""

    family: str = like(AlgoConfig, "family", "impala")
    horizon: int = like(RolloutAlgoConfig, "horizon", 20)
    minibatches: int = like(
        RolloutAlgoConfig,
        "minibatches",
        1,
        doc="Number of minibatches, each of an equal part of the environments; each is one update.",
    )
    trace_lambda: float = setting(
        1.0,
        "Lambda of V-trace: 1: returns up to the end of the rollout; 0: one-step targets.",
        low=0,
        high=1,
        replaces=("n_step",),
        live=True,
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
    value_coef: float = like(
        StochasticConfig, "value_coef", 0.5, doc="Weight of the value loss, which is half the squared error."
    )
    entropy_coef: float = like(StochasticConfig, "entropy_coef", 0.01, replaces=("explore",))
    kl_coef: float = setting(0.0, "Weight of KL(policy that acted || policy).", low=0, high=1e6, live=True)
    shared: bool = like(StochasticConfig, "shared", True)
    optimizer: str = like(StochasticConfig, "optimizer", "rmsprop_tf")
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

    family: str = like(AlgoConfig, "family", "pqn")
    schedule: str = like(AlgoConfig, "schedule", "lockstep")
    horizon: int = like(RolloutAlgoConfig, "horizon", 32)
    epochs: int = like(PpoConfig, "epochs", 2)
    minibatches: int = like(RolloutAlgoConfig, "minibatches", 32)
    q_lambda: float = setting(
        0.65,
        "Lambda of the Q(lambda) return: 0: one-step targets; 1: returns up to the end of the rollout.",
        low=0,
        high=1,
        replaces=("n_step",),
        live=True,
    )
    optimizer: str = setting("radam", "Optimiser.", choices=("radam", "adam"))
    critic: ResidualNetConfig = group(ResidualNetConfig, "Q-network.", replaces=("policy",))
    epsilon: EpsilonConfig = group(EpsilonConfig, "Epsilon-greedy exploration.", replaces=("explore",))

    def check(self, config: "Config") -> None:
        super().check(config)
        check_epsilon(self.epsilon)


@dataclass(frozen=True)
class ReppoConfig(RolloutAlgoConfig):
    """REPPO: a critic of actions and a policy that follows its gradient, on rollouts."""

    schedules: ClassVar[tuple[str, ...]] = ("lockstep",)
    discrete: ClassVar[bool | None] = False

    family: str = like(AlgoConfig, "family", "reppo")
    schedule: str = like(AlgoConfig, "schedule", "lockstep")
    horizon: int = like(RolloutAlgoConfig, "horizon", 128)
    epochs: int = like(PpoConfig, "epochs", 8)
    minibatches: int = like(
        RolloutAlgoConfig,
        "minibatches",
        64,
        doc="Number of equal minibatches of a rollout; each is one update of the critic and one of the policy.",
    )
    td_lambda: float = setting(
        0.95,
        "Lambda of the TD(lambda) return: 0: one-step targets; 1: returns up to the end of the rollout.",
        low=0,
        high=1,
        replaces=("n_step",),
        live=True,
    )
    kl_bound: float = setting(
        0.1, "KL(policy that acted || policy) of a row above which its loss is beta times the KL.", above=0, high=100
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

    def check(self, config: "Config") -> None:
        super().check(config)
        check_support(self.critic)
        if self.critic.net is None and not self.critic.hidden:
            raise ConfigError("algo.critic.hidden", [], "at least one width: the last is the embedding's")
