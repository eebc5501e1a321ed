"""Groups of settings that several algorithms share: networks, exploration, priorities, corrections, replicas."""

from dataclasses import dataclass

from pql.config.fields import setting

ACTIVATIONS = ("relu", "elu", "silu", "tanh")


@dataclass(frozen=True)
class NetConfig:
    """A network's hidden layers and its input."""

    hidden: list[int] = setting([512, 256, 128], "Widths of the hidden layers.", weights="policy")
    activation: str = setting("elu", "Activation function.", choices=ACTIVATIONS, weights="policy")
    layer_norm: bool = setting(False, "LayerNorm before each activation.", weights="policy")
    obs: list[str] | None = setting(
        None, "Observation groups that it reads; null: its own (policy, critic), else policy.", weights="policy"
    )
    net: str | None = setting(
        None, "module:Class, or a name of the entry-point group pql.nets, instead of an MLP.", weights="policy"
    )


@dataclass(frozen=True)
class TrainedNetConfig(NetConfig):
    """A network with an optimiser of its own."""

    lr: float = setting(5e-4, "Learning rate.", above=0, high=1)
    eps: float | None = setting(
        None, "Added to the root of the mean squared gradient; null: the optimiser's default.", above=0, high=1
    )
    weight_decay: float = setting(0.01, "Decoupled weight decay (AdamW).", low=0, high=1)
    grad_clip: float | None = setting(0.5, "Largest gradient norm; null: no clipping.", above=0, high=1e9)


@dataclass(frozen=True)
class AdamConfig:
    """Further settings of an Adam optimiser."""

    beta1: float = setting(0.9, "Decay of the running mean of gradients (Adam).", low=0, high=0.9999)
    beta2: float = setting(0.999, "Decay of the running mean of squared gradients (Adam).", low=0, high=0.999999)


@dataclass(frozen=True)
class InitConfig:
    """Initial weights."""

    init: str = setting(
        "default",
        "Initial weights: torch's default, or orthogonal with gain 1 and biases of 0.",
        choices=("default", "orthogonal"),
        when="net=null",
    )
    head: str = setting(
        "default",
        "Initial weights of the output layer: default (as init), zero, or small: N(0, 0.01).",
        choices=("default", "zero", "small"),
        when="net=null",
    )


@dataclass(frozen=True)
class RolloutPolicyConfig(TrainedNetConfig):
    """A policy whose optimiser trains the value, too."""

    lr: float = setting(5e-4, "Learning rate of policy and value.", above=0, high=1, replaces=("critic.lr",))
    eps: float | None = setting(
        None,
        "Added to the root of the mean squared gradient; null: the optimiser's default.",
        above=0,
        high=1,
        replaces=("critic.eps",),
    )
    weight_decay: float = setting(
        0.01,
        "Decoupled weight decay (AdamW).",
        low=0,
        high=1,
        when=".algo.optimizer=adam",
        replaces=("critic.weight_decay",),
    )
    grad_clip: float | None = setting(
        0.5, "Largest gradient norm; null: no clipping.", above=0, high=1e9, replaces=("critic.grad_clip",)
    )


@dataclass(frozen=True)
class DistributionalNetConfig(TrainedNetConfig):
    """A network of values that may be categorical (C51; Bellemare et al. 2017)."""

    atoms: int | None = setting(
        None, "Atoms of a categorical critic (C51); null: scalar values.", low=2, high=1001, weights="critic"
    )
    v_min: float = setting(-10.0, "Smallest atom.", when="atoms", weights="critic")
    v_max: float = setting(10.0, "Largest atom.", when="atoms", weights="critic")


@dataclass(frozen=True)
class CriticConfig(DistributionalNetConfig, AdamConfig, InitConfig):
    """An ensemble of critics with target networks."""

    loss: str = setting(
        "c51",
        "Target of a categorical critic: c51: the projected distribution; hl_gauss: a histogram of a Gaussian around "
        "the target's mean (Imani & White 2018).",
        choices=("c51", "hl_gauss"),
        when="atoms",
    )
    sigma: float = setting(
        0.75, "Standard deviation of hl_gauss, in distances between atoms.", above=0, high=100, when="loss=hl_gauss"
    )
    ensemble: int = setting(2, "Critics, evaluated as one batched network.", low=1, high=100, weights="critic")
    target: str = setting(
        "min",
        "The ensemble's target: min: the smallest value (categorical: the distribution with the lowest mean); mean: "
        "the mean of all; own: each critic has its own.",
        choices=("min", "mean", "own"),
    )
    subset: int | None = setting(
        None,
        "Critics drawn at random for the target of each update (REDQ; Chen et al. 2021); null: all.",
        low=1,
        high=100,
        when="target=min|mean",
    )
    tau: float = setting(0.05, "Step of the target network towards the critic when it moves.", above=0, high=1)
    target_every: int = setting(
        1, "Critic updates between moves of the target network; TD3: 1 / p_per_v.", low=1, high=10**6
    )


@dataclass(frozen=True)
class ClimbingPolicyConfig(TrainedNetConfig, AdamConfig, InitConfig):
    """A policy that is trained to maximise a critic."""

    reduce: str = setting("min", "The ensemble's value in the policy's loss.", choices=("min", "mean", "first"))


@dataclass(frozen=True)
class DeterministicPolicyConfig(ClimbingPolicyConfig):
    """A tanh policy, with or without a target network."""

    target: bool = setting(False, "Target policy for the critic's targets (TD3); false: the policy itself (PQL).")
    tau: float = setting(0.05, "Step of the target policy towards the policy.", above=0, high=1, when="target")
    saturation_penalty: float = setting(
        0.0, "Weight of the mean square of the tanh's input in the policy's loss.", low=0, high=1e3
    )


@dataclass(frozen=True)
class GaussianPolicyConfig(ClimbingPolicyConfig):
    """A Gaussian policy with a tanh."""

    log_std_min: float = setting(
        -5.0, "Smallest log standard deviation.", low=-20, high=2, when="net=null", weights="policy"
    )
    log_std_max: float = setting(
        2.0, "Largest log standard deviation.", low=-20, high=2, when="net=null", weights="policy"
    )


@dataclass(frozen=True)
class EncoderConfig:
    """Network of each image observation."""

    kind: str = setting(
        "small",
        "small, nature (Mnih et al. 2015) or resnet (Espeholt et al. 2018).",
        choices=("small", "nature", "resnet"),
        weights="policy",
    )
    channels: list[int] | None = setting(
        None, "Channels of the convolutions (of resnet's sections); null: the kind's own.", weights="policy"
    )
    features: int | None = setting(
        None,
        "Features of each image; null: the kind's own (128, 512, 256); 0: all of the last convolution.",
        low=0,
        high=65536,
        weights="policy",
    )
    layer_norm: bool = setting(
        False,
        "LayerNorm over channels after each convolution, and over features; not with kind=resnet.",
        weights="policy",
    )


@dataclass(frozen=True)
class ExploreConfig:
    """Gaussian noise on the actions of a collector."""

    kind: str = setting(
        "mixed",
        "mixed: a sigma for each environment, evenly from low to high (PQL); fixed: low everywhere; "
        "redrawn: uniform between low and high for each episode (FastTD3); none.",
        choices=("mixed", "fixed", "redrawn", "none"),
    )
    low: float = setting(0.05, "Smallest sigma.", low=0, high=10)
    high: float = setting(0.8, "Largest sigma.", low=0, high=10)
    repeat: bool = setting(
        False,
        "Hold each noise vector for k steps, P(k) proportional to k^-2, k <= 16 (FlashSAC); with kind=none that of a "
        "stochastic policy.",
    )


@dataclass(frozen=True)
class EpsilonConfig:
    """Share of random actions (epsilon-greedy)."""

    kind: str = setting(
        "annealed",
        "annealed: linearly from start to end; ladder: another epsilon for each environment (Ape-X); "
        "fixed: end; none: 0.",
        choices=("annealed", "ladder", "fixed", "none"),
    )
    start: float = setting(1.0, "Epsilon at first.", low=0, high=1, when="kind=annealed")
    end: float = setting(0.1, "Epsilon in the end.", low=0, high=1, when="kind=annealed|fixed")
    steps: int = setting(
        1_000_000,
        "Env steps from start to end, warm-up not counted.",
        low=1,
        high=10**15,
        when="kind=annealed",
        ranks="floor",
    )
    base: float = setting(
        0.4, "Environment i of N has base ** (1 + exponent * i / (N - 1)).", above=0, high=1, when="kind=ladder"
    )
    exponent: float = setting(7.0, "See base.", low=0, high=100, when="kind=ladder")


@dataclass(frozen=True)
class PriorityConfig:
    """Prioritised replay (Schaul et al. 2016)."""

    alpha: float = setting(0.0, "Rows are drawn in proportion to priority ** alpha; 0: uniformly.", low=0, high=10)
    beta: float = setting(0.4, "Importance weights are probability ** -beta, at first.", low=0, high=1, when="alpha>0")
    beta_steps: int | None = setting(
        None,
        "Env steps over which beta rises to 1, warm-up not counted; null: it stays.",
        low=1,
        high=10**15,
        when="alpha>0",
        ranks="floor",
    )
    initial: str = setting(
        "max",
        "Priority of a new row: max: the largest so far; actor: its TD error when it was acted.",
        choices=("max", "actor"),
        when="alpha>0",
    )


@dataclass(frozen=True)
class VtraceConfig:
    """Truncated importance weights of V-trace (Espeholt et al. 2018)."""

    rho_bar: float = setting(1.0, "Largest weight of a temporal difference.", above=0, high=1e6)
    c_bar: float = setting(1.0, "Largest factor of a trace.", low=0, high=1e6)
    pg_rho_bar: float = setting(1.0, "Largest weight in the policy gradient.", above=0, high=1e6)


@dataclass(frozen=True)
class OptionalVtraceConfig(VtraceConfig):
    """V-trace where an algorithm does without it by default."""

    enabled: bool = setting(False, "Returns and advantages by V-trace, for rollouts of an older policy.")
    rho_bar: float = setting(1.0, "Largest weight of a temporal difference.", above=0, high=1e6, when="enabled")
    c_bar: float = setting(1.0, "Largest factor of a trace.", low=0, high=1e6, when="enabled")
    pg_rho_bar: float = setting(1.0, "Largest weight in the policy gradient.", above=0, high=1e6, when="enabled")


@dataclass(frozen=True)
class CentralConfig:
    """How replicas share parameters and moments."""

    order: str = setting(
        "free",
        "Order of pulls and pushes: free: as replicas are ready; turns: one after the other, reproducible.",
        choices=("free", "turns"),
        when=".algo.schedule=replicas",
    )
    ticks: int = setting(
        8,
        "Ticks of every replica (on average) in a tick of the run, after which all wait: to log, to save.",
        low=1,
        high=100_000,
        when=".algo.schedule=replicas",
    )
    chunk: int = setting(65_536, "Parameters under one lock.", low=1, high=2**40, when=".algo.schedule=replicas")
