"""Settings of distillation: a student learns the actions of a trained policy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pql.config.algorithms.actor_critics import SequenceConfig
from pql.config.algorithms.base import AlgoConfig, refuse_p_learner
from pql.config.fields import group, like, setting
from pql.config.groups import ExploreConfig
from pql.config.networks import AugmentedEncoderConfig, GaussianPolicyConfig
from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.config.schema import Config


@dataclass(frozen=True)
class DistillConfig(SequenceConfig):
    """Distillation of a teacher into a student (DAgger) for continuous actions."""

    learners: ClassVar[tuple[str, ...]] = ("v",)
    discrete: ClassVar[bool | None] = False

    family: str = like(AlgoConfig, "family", "distill")
    teacher: str | None = setting(None, "Teacher: a run directory, a checkpoint or an export.")
    v_per_step: float = setting(8.0, "Updates per step of all environments.", above=0, high=1000)
    loss: str = setting(
        "mse", "Distance between the student's mean action and the teacher's.", choices=("mse", "huber")
    )
    amp: bool = setting(False, "Run the learner's network in bfloat16 (autocast); collection uses float32.")
    encoder: AugmentedEncoderConfig = group(AugmentedEncoderConfig, "Convolutional encoder of each image observation.")
    policy: GaussianPolicyConfig = group(GaussianPolicyConfig, "Student, with the network of SAC's policies.")
    explore: ExploreConfig = group(ExploreConfig, "Exploration noise.")

    @property
    def policy_family(self) -> str:
        return "sac"

    @property
    def ratios(self) -> dict[str, float]:
        return {"v_per_step": self.v_per_step}

    def check(self, config: "Config") -> None:
        super().check(config)
        refuse_p_learner(config, "the V-learner trains the student (placement.v_learner)")
        if config.replay.prefill is not None:
            raise ConfigError("replay.prefill", config.replay.prefill, "null: a student learns where it acts itself")
        if self.policy.average is not None:
            raise ConfigError("algo.policy.average", self.policy.average, "null: the student itself is evaluated")
        if self.normalize_reward:
            raise ConfigError("algo.normalize_reward", True, "false: rewards are not read")
        if self.policy.encoder == "critic":
            raise ConfigError("algo.policy.encoder", "critic", "own: there is no critic")
        if self.explore.kind == "scaled":
            raise ConfigError("algo.explore.kind", "scaled", "another kind: the student's action has no noise to scale")
