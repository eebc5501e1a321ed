"""Groups of settings that several algorithms share: exploration, priorities, corrections, replicas."""

from dataclasses import dataclass

from pql.config.fields import like, setting


@dataclass(frozen=True)
class ExploreConfig:
    """Gaussian noise on the actions of a collector."""

    kind: str = setting(
        "mixed",
        "mixed: one sigma per environment, evenly spaced from low to high (PQL); fixed: sigma low everywhere; "
        "redrawn: a new sigma per episode, uniform between low and high (FastTD3); none: nothing is added (a "
        "stochastic policy samples its actions); scaled: a stochastic policy's noise times one factor per "
        "environment, evenly spaced from low to high. A single environment has low.",
        choices=("mixed", "fixed", "redrawn", "none", "scaled"),
    )
    low: float = setting(0.05, "Smallest sigma, or factor.", low=0, high=10)
    high: float = setting(0.8, "Largest sigma, or factor.", low=0, high=10)
    repeat: bool = setting(
        False,
        "Hold each noise vector for k steps, P(k) proportional to k^-2, k <= 16 (FlashSAC); with kind=none or scaled "
        "that of a stochastic policy.",
    )


@dataclass(frozen=True)
class SymmetryConfig:
    """Training on reflected rows, for robots that are the same on their left and right."""

    augment: str = setting(
        "off",
        "half: every row of a batch is reflected with probability 1/2; double: reflected rows are added to it, which "
        "doubles the cost of an update. Statistics of observations count both. The task must declare its symmetry.",
        choices=("off", "half", "double"),
    )
    mirror_coef: float = setting(
        0.0,
        "Weight of the mirror loss, the squared difference between the policy's mean action at a reflected observation "
        "and its reflected mean action.",
        low=0,
        high=1000,
    )

    @property
    def used(self) -> bool:
        """Return True if anything is reflected."""
        return self.augment != "off" or self.mirror_coef > 0


@dataclass(frozen=True)
class RndConfig:
    """Random network distillation: a bonus for new states (Burda et al. 2019)."""

    weight: float = setting(0.0, "Weight of the bonus, in units of the scaled reward; 0: none.", low=0, high=1e6)
    obs: list[str] | None = setting(None, "Observation groups whose novelty counts; null: policy.", when="weight>0")
    outputs: int = setting(16, "Outputs of both networks.", low=1, high=4096, when="weight>0")
    hidden: list[int] = setting([128, 128], "Hidden layers of both networks.", when="weight>0")
    lr: float = setting(1e-3, "Learning rate of the prediction.", above=0, high=1, when="weight>0")
    normalize: bool = setting(True, "Divide bonuses by their running standard deviation.", when="weight>0")
    final: float = setting(1.0, "Factor of the weight after algo.rnd.updates.", low=0, high=1, when="weight>0")
    updates: int = setting(
        100_000, "Updates in which the weight falls linearly to final times itself.", low=1, high=10**9, when="weight>0"
    )


@dataclass(frozen=True)
class EpsilonConfig:
    """Epsilon-greedy exploration."""

    kind: str = setting(
        "annealed",
        "annealed: falls linearly from start to end; decayed: falls exponentially; ladder: a different constant per "
        "environment (Ape-X); fixed: constant at end; none: 0.",
        choices=("annealed", "decayed", "ladder", "fixed", "none"),
    )
    start: float = setting(1.0, "Initial epsilon.", low=0, high=1, when="kind=annealed|decayed")
    end: float = setting(0.1, "Final epsilon.", low=0, high=1, when="kind=annealed|decayed|fixed")
    steps: int = setting(
        1_000_000,
        "Env steps over which epsilon falls from start to end, warm-up excluded; decayed: over which its distance "
        "from end falls to 1 / e.",
        low=1,
        high=10**15,
        when="kind=annealed|decayed",
        ranks="floor",
    )
    until: int | None = setting(
        None,
        "Env steps from which on epsilon is 0, warm-up excluded; null: never.",
        low=1,
        high=10**15,
        when="kind=annealed|decayed|ladder|fixed",
        ranks="floor",
    )
    base: float = setting(
        0.4,
        "Environment i of N uses epsilon = base ** (1 + exponent * i / (N - 1)).",
        above=0,
        high=1,
        when="kind=ladder",
    )
    exponent: float = setting(7.0, "Exponent in the formula of base.", low=0, high=100, when="kind=ladder")


@dataclass(frozen=True)
class PriorityConfig:
    """Prioritised replay (Schaul et al. 2016)."""

    alpha: float = setting(
        0.0, "Rows are sampled in proportion to priority ** alpha; 0: uniform sampling.", low=0, high=10
    )
    beta: float = setting(
        0.4, "Initial exponent of the importance weights, probability ** -beta.", low=0, high=1, when="alpha>0"
    )
    beta_steps: int | None = setting(
        None,
        "Env steps over which beta rises to 1, warm-up excluded; null: constant.",
        low=1,
        high=10**15,
        when="alpha>0",
        ranks="floor",
    )
    initial: str = setting(
        "max",
        "Priority of a new row: max: the largest priority so far; actor: its TD error under the acting network.",
        choices=("max", "actor"),
        when="alpha>0",
    )


@dataclass(frozen=True)
class MunchausenConfig:
    """Munchausen targets (Vieillard et al. 2020)."""

    alpha: float = setting(
        0.0,
        "Weight of the log-policy of the action taken, which is added to the reward; targets are then soft values "
        "instead of maxima; 0: none of both.",
        low=0,
        high=1,
    )
    tau: float = setting(
        0.03, "Temperature of the policy, the softmax of values / tau.", above=0, high=1e6, when="alpha>0"
    )
    clip: float = setting(
        -1.0, "Smallest value of tau times the log-policy in the reward.", low=-1e6, high=0, when="alpha>0"
    )


@dataclass(frozen=True)
class VtraceConfig:
    """Truncated importance weights of V-trace (Espeholt et al. 2018)."""

    rho_bar: float = setting(1.0, "Upper bound of the importance weight of a temporal difference.", above=0, high=1e6)
    c_bar: float = setting(1.0, "Upper bound of the trace coefficients.", low=0, high=1e6)
    pg_rho_bar: float = setting(1.0, "Upper bound of the importance weight in the policy gradient.", above=0, high=1e6)


@dataclass(frozen=True)
class OptionalVtraceConfig(VtraceConfig):
    """V-trace for an algorithm that does not use it by default."""

    enabled: bool = setting(False, "Compute returns and advantages with V-trace, for rollouts from an older policy.")
    rho_bar: float = like(VtraceConfig, "rho_bar", when="enabled")
    c_bar: float = like(VtraceConfig, "c_bar", when="enabled")
    pg_rho_bar: float = like(VtraceConfig, "pg_rho_bar", when="enabled")


@dataclass(frozen=True)
class CentralConfig:
    """Synchronisation of replicas with the central parameters and optimiser moments."""

    order: str = setting(
        "free",
        "Order of pulls and pushes: free: as replicas become ready; turns: round robin, reproducible.",
        choices=("free", "turns"),
        when=".algo.schedule=replicas",
    )
    ticks: int = setting(
        8,
        "Average ticks of each replica per tick of the run; all replicas wait at its end, for logging and saving.",
        low=1,
        high=100_000,
        when=".algo.schedule=replicas",
    )
    chunk: int = setting(
        65_536, "Number of parameters guarded by one lock.", low=1, high=2**40, when=".algo.schedule=replicas"
    )
