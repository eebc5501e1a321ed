"""Settings of networks: layers, optimisers, critics, policies, encoders."""

from dataclasses import dataclass

from pql.config.fields import like, setting

ACTIVATIONS = ("relu", "elu", "silu", "tanh")


@dataclass(frozen=True)
class TrainedNetConfig:
    """A network's hidden layers, its input and its optimiser."""

    hidden: list[int] = setting([512, 256, 128], "Widths of the hidden layers.", weights="policy")
    activation: str = setting("elu", "Activation function.", choices=ACTIVATIONS, weights="policy")
    layer_norm: bool = setting(False, "LayerNorm before each activation.", weights="policy")
    obs: list[str] | None = setting(
        None,
        "Observation groups to read; null: the group of the network's name (policy, critic), else policy.",
        weights="policy",
    )
    net: str | None = setting(
        None,
        "Network class that replaces the MLP: module:Class, or a name in the entry-point group pql.nets.",
        weights="policy",
    )
    lr: float = setting(5e-4, "Learning rate.", above=0, high=1, live=True)
    eps: float | None = setting(
        None,
        "The optimiser's epsilon, added to the root of the mean squared gradient; null: the optimiser's default.",
        above=0,
        high=1,
    )
    weight_decay: float = setting(0.01, "Decoupled weight decay (AdamW).", low=0, high=1, live=True)
    grad_clip: float | None = setting(0.5, "Largest gradient norm; null: no clipping.", above=0, high=1e9)
    beta1: float = setting(0.9, "Decay of the running mean of gradients (Adam).", low=0, high=0.9999)
    beta2: float = setting(0.999, "Decay of the running mean of squared gradients (Adam).", low=0, high=0.999999)


@dataclass(frozen=True)
class ResidualConfig:
    """Residual blocks in place of an MLP."""

    trunk: str = setting(
        "mlp",
        "mlp; residual: a residual block for each entry of hidden, all of one width (SimBa).",
        choices=("mlp", "residual"),
        when="net=null",
        weights="policy",
    )
    norm: str = setting(
        "layer", "Normalisation in residual blocks.", choices=("layer", "rms"), when="trunk=residual", weights="policy"
    )


@dataclass(frozen=True)
class StateNetConfig(ResidualConfig):
    """A value network without an optimiser of its own."""

    hidden: list[int] = like(TrainedNetConfig, "hidden")
    activation: str = like(TrainedNetConfig, "activation")
    layer_norm: bool = like(TrainedNetConfig, "layer_norm")
    obs: list[str] | None = like(TrainedNetConfig, "obs")
    net: str | None = like(TrainedNetConfig, "net")


@dataclass(frozen=True)
class ResidualNetConfig(TrainedNetConfig, ResidualConfig):
    """A network with its own optimiser, an MLP or residual blocks."""


@dataclass(frozen=True)
class TrunkConfig:
    """A network's architecture and initial weights."""

    trunk: str = like(
        ResidualConfig,
        "trunk",
        doc="mlp; residual: a residual block for each entry of hidden, all of one width (SimBa; with batch_norm that "
        "of FlashSAC); sphere: a hyperspherical block for each, with unit_weights (SimbaV2).",
        choices=("mlp", "residual", "sphere"),
    )
    norm: str = like(ResidualConfig, "norm", doc="Normalisation in residual blocks without batch_norm.")
    batch_norm: bool = setting(
        False,
        "BatchNorm of the input and after each linear layer but the last, in place of other normalisations; critics "
        "normalise both states of a transition as one batch (CrossQ, XQC, FlashSAC).",
        when="trunk=mlp|residual",
        weights="policy",
    )
    unit_weights: str = setting(
        "none",
        "Weights scaled after each step: linear: those of each output of a linear layer to norm 1 (XQC); all: also "
        "gains and biases of BatchNorm and RMSNorm to norm sqrt(size) (FlashSAC).",
        choices=("none", "linear", "all"),
        when="net=null",
    )
    init: str = setting(
        "default",
        "Initial weights, also of an encoder without blocks: torch's default, or orthogonal with gain 1 and biases of "
        "0.",
        choices=("default", "orthogonal"),
        when="net=null",
    )
    head: str = setting(
        "default",
        "Initial weights of the output layer: default (as init), zero, or small: N(0, 0.01).",
        choices=("default", "zero", "small"),
        when="unit_weights=none",
    )

    @property
    def projected(self) -> str:
        """Return the weights that are scaled after each step."""
        return "linear" if self.trunk == "sphere" and self.unit_weights == "none" else self.unit_weights


@dataclass(frozen=True)
class ValueNetConfig(TrainedNetConfig, ResidualConfig):
    """A Q-network whose optimiser need not be Adam."""

    weight_decay: float = like(TrainedNetConfig, "weight_decay", when=".algo.optimizer=adam")
    beta1: float = like(TrainedNetConfig, "beta1", when=".algo.optimizer=adam")
    beta2: float = like(TrainedNetConfig, "beta2", when=".algo.optimizer=adam")


@dataclass(frozen=True)
class RolloutPolicyConfig(ValueNetConfig):
    """A policy whose optimiser also trains the value network."""

    lr: float = like(ValueNetConfig, "lr", doc="Learning rate of policy and value network.", replaces=("critic.lr",))
    eps: float | None = like(ValueNetConfig, "eps", replaces=("critic.eps",))
    weight_decay: float = like(ValueNetConfig, "weight_decay", replaces=("critic.weight_decay",))
    grad_clip: float | None = like(ValueNetConfig, "grad_clip", replaces=("critic.grad_clip",))
    beta1: float = like(ValueNetConfig, "beta1", replaces=("critic.beta1",))
    beta2: float = like(ValueNetConfig, "beta2", replaces=("critic.beta2",))


@dataclass(frozen=True)
class CategoricalConfig:
    """A categorical critic (C51; Bellemare et al. 2017) and its targets."""

    atoms: int | None = setting(
        None, "Atoms of a categorical critic (C51); null: scalar values.", low=2, high=1001, weights="critic"
    )
    v_min: float = setting(-10.0, "Smallest atom.", when="atoms", weights="critic")
    v_max: float = setting(10.0, "Largest atom.", when="atoms", weights="critic")
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


@dataclass(frozen=True)
class QuantileNetConfig(CategoricalConfig, TrainedNetConfig, ResidualConfig):
    """A Q-network that may predict quantiles (IQN; Dabney et al. 2018)."""

    weight_decay: float = like(ValueNetConfig, "weight_decay")
    beta1: float = like(ValueNetConfig, "beta1")
    beta2: float = like(ValueNetConfig, "beta2")
    quantiles: int | None = setting(
        None,
        "Quantiles per row and update of an implicit quantile network (IQN), drawn for predictions and targets alike; "
        "the policy averages as many fixed ones; null: scalar values or atoms.",
        low=1,
        high=1024,
        weights="policy",
    )
    cosines: int = setting(
        64, "Cosines in which a quantile is embedded.", low=1, high=4096, when="quantiles", weights="policy"
    )


@dataclass(frozen=True)
class CriticConfig(CategoricalConfig, TrainedNetConfig, TrunkConfig):
    """An ensemble of critics with target networks."""

    ensemble: int = setting(2, "Critics, evaluated as one batched network.", low=1, high=100, weights="critic")
    target: str = setting(
        "min",
        "The ensemble's target: min: the smallest value (categorical: the distribution with the lowest mean); "
        "projected: the distribution whose mean is the lowest after the projection to the atoms (FastTD3); mean: the "
        "mean of all; own: each critic has its own.",
        choices=("min", "projected", "mean", "own"),
    )
    subset: int | None = setting(
        None,
        "Critics drawn at random for the target of each update (REDQ; Chen et al. 2021); null: all.",
        low=1,
        high=100,
        when="target=min|projected|mean",
    )
    tau: float = setting(
        0.05, "Weight of the critic in an update of the target network (Polyak averaging).", above=0, high=1, live=True
    )
    target_every: int = setting(
        1, "Critic updates per update of the target network; TD3: 1 / p_per_v.", low=1, high=10**6
    )


@dataclass(frozen=True)
class NormConfig:
    """Normalisation in an MLP."""

    layer_norm: bool = like(TrainedNetConfig, "layer_norm", True, doc="Normalisation before each activation.")
    norm: str = like(ResidualConfig, "norm", "rms", doc="Kind of normalisation.", when="layer_norm")


@dataclass(frozen=True)
class PathwisePolicyConfig(NormConfig, TrainedNetConfig):
    """A Gaussian policy with a tanh, trained on rollouts by the gradient of a critic (REPPO)."""

    hidden: list[int] = like(TrainedNetConfig, "hidden", [512, 512])
    activation: str = like(TrainedNetConfig, "activation", "silu")
    lr: float = like(TrainedNetConfig, "lr", 3e-4, doc="Learning rate of the policy and of both multipliers.")


@dataclass(frozen=True)
class PathwiseCriticConfig(NormConfig, TrainedNetConfig):
    """A categorical critic that also predicts the next embedding (REPPO)."""

    hidden: list[int] = like(
        TrainedNetConfig,
        "hidden",
        [512, 512],
        doc="Widths of the layers up to the embedding, which is the last one; the value and the prediction of the next "
        "embedding have one hidden layer of its width each.",
    )
    activation: str = like(TrainedNetConfig, "activation", "silu")
    lr: float = like(TrainedNetConfig, "lr", 3e-4)
    atoms: int = like(CategoricalConfig, "atoms", 201, doc="Number of atoms.")
    v_min: float = like(CategoricalConfig, "v_min", -50.0, when="")
    v_max: float = like(CategoricalConfig, "v_max", 150.0, when="")
    sigma: float = like(
        CategoricalConfig,
        "sigma",
        doc="Standard deviation of the targets' histograms (HL-Gauss), in distances between atoms.",
        when="",
    )


@dataclass(frozen=True)
class ClimbingPolicyConfig(TrainedNetConfig, TrunkConfig):
    """A policy that is trained to maximise a critic."""

    reduce: str = setting("min", "Reduction over the ensemble in the policy's loss.", choices=("min", "mean", "first"))
    encoder: str = setting(
        "own",
        "Encoder of images: own; critic: that of the critics, which they alone train.",
        choices=("own", "critic"),
        when="net=null",
        weights="policy",
    )
    average: float | None = setting(
        None,
        "Weight of the policy in an update of its running average (Polyak averaging), which is evaluated, saved and "
        "exported in its place; null: no average.",
        above=0,
        high=1,
    )


@dataclass(frozen=True)
class DeterministicPolicyConfig(ClimbingPolicyConfig):
    """A tanh policy, with or without a target network."""

    target: bool = setting(False, "Target policy for the critic's targets (TD3); false: the policy itself (PQL).")
    tau: float = setting(
        0.05,
        "Weight of the policy in an update of the target policy (Polyak averaging).",
        above=0,
        high=1,
        when="target",
        live=True,
    )
    saturation_penalty: float = setting(
        0.0, "Weight in the policy's loss of the mean squared pre-tanh output.", low=0, high=1e3, live=True
    )


@dataclass(frozen=True)
class GaussianPolicyConfig(ClimbingPolicyConfig):
    """A Gaussian policy with a tanh."""

    log_std: str = setting(
        "tanh",
        "How the network's output becomes the log standard deviation: tanh: mapped into its range, which keeps a "
        "gradient at both ends; clip: clipped to it (XQC).",
        choices=("tanh", "clip"),
        when="net=null",
        weights="policy",
    )
    log_std_min: float = setting(
        -5.0, "Smallest log standard deviation.", low=-20, high=2, when="net=null", weights="policy"
    )
    log_std_max: float = setting(
        2.0, "Largest log standard deviation.", low=-20, high=2, when="net=null", weights="policy"
    )


@dataclass(frozen=True)
class EncoderConfig:
    """Convolutional encoder of each image observation."""

    kind: str = setting(
        "small",
        "small, squint (arXiv 2602.21203), nature (Mnih et al. 2015), resnet (Espeholt et al. 2018) or hadamax (Kooi "
        "et al. 2025).",
        choices=("small", "squint", "nature", "resnet", "hadamax"),
        weights="policy",
    )
    channels: list[int] | None = setting(
        None, "Channels of each convolution (resnet: of each section); null: the default of the kind.", weights="policy"
    )
    features: int | None = setting(
        None,
        "Output features per image; null: the default of the kind (small 128, squint 50, nature 512, resnet 256, "
        "hadamax 512); 0: the flattened last convolution.",
        low=0,
        high=65536,
        weights="policy",
    )
    layer_norm: bool = setting(
        False,
        "LayerNorm over the channels after each convolution and over the output features; not with kind=resnet, and "
        "always with kind=hadamax.",
        weights="policy",
    )
    pool: int | None = setting(
        None,
        "Side of the feature map to which an adaptive max pooling reduces the last one; null: no such pooling.",
        low=1,
        high=1024,
        when="kind=resnet",
        weights="policy",
    )
    size: int | None = setting(
        None,
        "Side to which images are reduced before the first convolution, by averages over areas; null: full size. A "
        "replay stores images of bytes at this size.",
        low=1,
        high=4096,
        weights="policy",
    )


@dataclass(frozen=True)
class AugmentedEncoderConfig(EncoderConfig):
    """Encoder that is trained on augmented images."""

    shift: int = setting(
        0,
        "Pixels by which the images of a sampled row are shifted at most, in both directions; borders are repeated "
        "(DrQ-v2). With size, pixels of the reduced images.",
        low=0,
        high=4096,
    )
    jitter: float = setting(
        0.0,
        "Brightness and contrast of the images of a sampled row are multiplied by factors from 1 - jitter to 1 + "
        "jitter.",
        low=0,
        high=1,
    )


@dataclass(frozen=True)
class ValueEncoderConfig(EncoderConfig):
    """Encoder of a network whose target network is a copy, not an average."""

    spectral_norm: bool = setting(
        False,
        "Divide the weights of each convolution in a residual block by their largest singular value (Miyato et al. "
        "2018).",
        when="kind=resnet",
        weights="policy",
    )
