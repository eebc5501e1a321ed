"""Settings that all algorithms or all algorithms on a replay have, and checks that several families share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pql.config.fields import group, setting
from pql.config.groups import EpsilonConfig, VtraceConfig
from pql.config.networks import CategoricalConfig, EncoderConfig, PathwiseCriticConfig
from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.config.schema import Config

COUNTABLE = 2**24  # steps; optimisers count them in float32


@dataclass(frozen=True)
class AlgoConfig:
    """Settings common to all algorithms; the record of a family inherits from this class.

    Attributes:
        data: source of batches: "replay", "sequences" (of a replay) or "rollout".
        schedules: supported schedules.
        learners: workers other than the collector.
        discrete: supported actions: True: discrete, False: continuous, None: both.
        demonstrated: batches may have a share of demonstrations.
    """

    data: ClassVar[str]
    schedules: ClassVar[tuple[str, ...]] = ("concurrent", "lockstep")
    learners: ClassVar[tuple[str, ...]] = ("learner",)
    discrete: ClassVar[bool | None] = None
    demonstrated: ClassVar[bool] = False

    name: str = setting("", "Name of the preset.")
    family: str = setting("", "Family of update functions.", weights="policy")
    schedule: str = setting(
        "concurrent",
        "concurrent: collector and learners run at the same time; lockstep: one after the other; replicas: several "
        "learners on shared parameters.",
        choices=("concurrent", "lockstep", "replicas"),
    )
    gamma: float = setting(0.99, "Discount factor.", low=0, high=1, live=True)
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
    def policy_family(self) -> str:
        """Return the family whose policy network this algorithm trains."""
        return self.family

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

    def check_schedule(self, known: Mapping[str, type["AlgoConfig"]]) -> None:
        """Raise ``ConfigError`` for a schedule that the algorithm cannot run under. ``known``: records of all families,
        for the message."""
        if self.schedule not in self.schedules:
            allowed = " or ".join(self.schedules)
            others = ", ".join(name for name, record in known.items() if self.schedule in record.schedules)
            allowed = f"{allowed} with algo={self.name}; only {others} can have {self.schedule}"
            raise ConfigError("algo.schedule", self.schedule, allowed)

    def check(self, config: "Config") -> None:
        """Raise ``ConfigError`` if settings are incompatible."""
        if config.replay.demo_keys and config.replay.demos is None:
            raise ConfigError(
                "replay.demo_keys", config.replay.demo_keys, "replay.demos with it; nothing else reads it"
            )
        if config.replay.demos is not None and not self.demonstrated:
            allowed = f"null: for off-policy actor-critics (pql, sac, ...), not algo={self.name}; see replay.prefill"
            raise ConfigError("replay.demos", config.replay.demos, allowed)
        for name in ("policy", "critic"):
            net: Any = getattr(self, name, None)
            blocks = getattr(net, "trunk", "mlp") != "mlp"
            if blocks and net.net is None and len({*net.hidden}) != 1:
                one = "one width for all residual blocks, such as [256,256]"
                raise ConfigError(f"algo.{name}.hidden", net.hidden, one)


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


def check_support(critic: CategoricalConfig | PathwiseCriticConfig) -> None:
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
