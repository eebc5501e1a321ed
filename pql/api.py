"""The command line's verbs for Python: a train here and a ``pql train`` there make the same run.

Nothing here imports torch before it is needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.env import VecEnv
    from pql.rundir import Summary
    from pql.session import Callbacks

NAMES_A_TASK = ("task", "task.name", "task.id", "task.game", "task.live")


def train(
    *overrides: str | Mapping[str, Any],
    env: "VecEnv | None" = None,
    callbacks: "Callbacks" = (),
    quiet: bool = False,
) -> "Summary":
    """Train with the command line's overrides: ``pql.train("task=halfcheetah", "budget.seconds=60")``.

    Ctrl-C ends the run after its tick and saves it, as on the command line.

    Args:
        overrides: ``"key=value"``, or dicts, nested or dotted: ``{"task": "halfcheetah", "budget": {"seconds": 60}}``.
        env: a live ``VecEnv`` to train on instead of a task; ``num_envs`` and ``device`` are then its own. It is
            evaluated once, after training, and stays open.
        callbacks: one or several, called as ``callback(session, row)`` with every row of metrics;
            ``session.stop = True`` ends the run.
        quiet: nothing on the console.
    Returns:
        the run's ``Summary`` (``return_mean``, ``run_dir``, ``checkpoint``, ...).
    Raises:
        ConfigError: an override, or the environment, cannot work.
        RunError: the run failed after it started.
    """
    from pql.compose import compose, words_of
    from pql.session import Session

    words = words_of(overrides)
    if env is not None:
        words = words_for(env, words)
    return Session(compose(words), env=env, callbacks=callbacks, quiet=quiet, overrides=words).train()


def resume(
    run_dir: str | Path,
    *overrides: str | Mapping[str, Any],
    env: "VecEnv | None" = None,
    callbacks: "Callbacks" = (),
    quiet: bool = False,
) -> "Summary":
    """Go on with a run, as ``pql resume``: ``pql.resume("runs/x", "budget.seconds=600")``.

    Args:
        overrides: of ``budget``, ``eval``, ``logger``, ``checkpoint`` and ``replay.save``; the rest stays as it was.
        env: the live environment, where the run was made on one.
    Raises:
        ConfigError: no run there, nothing to resume from, or an override that would make it another run.
        RunError: the run failed.
    """
    from pql.compose import resume_config, words_of
    from pql.env import check_protocol
    from pql.session import Session

    words = words_of(overrides)
    config = resume_config(Path(run_dir).expanduser(), words)
    if env is not None:
        check_protocol(env)
    session = Session(config, env=env, callbacks=callbacks, quiet=quiet, resume=True, overrides=words)
    return session.train()


def evaluate(
    path: str | Path,
    episodes: int = 16,
    num_envs: int = 16,
    seed: int = 0,
    device: str = "cpu",
    epsilon: float | None = None,
) -> dict[str, Any]:
    """Play whole episodes with the policy of a run, checkpoint or export, as ``pql eval``. Writes nothing.

    Args:
        epsilon: share of random actions, where they are discrete; None: as in the run's own evaluations.
    Returns:
        ``return_mean``, ``return_median``, ``return_iqm``, ``return_std``, ``length_mean``, ``success`` (where the task
        defines it), ``returns`` and ``lengths`` of the single episodes, and what was asked for.
    Raises:
        ConfigError: no policy there, a damaged one, or a number out of range.
    """
    from pql.validate import EPISODES, RANGES, check_range, resolve_device

    for key, value, limits in (
        ("num_envs", num_envs, RANGES["eval.num_envs"]), ("episodes", episodes, EPISODES),
        ("seed", seed, RANGES["seed"]), ("epsilon", epsilon, RANGES["eval.epsilon"]),
    ):  # fmt: skip
        check_range(key, value, limits)
    device = resolve_device(device)
    from pql.evaluation import evaluate_saved

    return evaluate_saved(Path(path).expanduser(), num_envs, episodes, seed, device, epsilon)


def words_for(env: "VecEnv", words: list[str]) -> list[str]:
    """The overrides of a run on a live environment.

    Raises:
        ConfigError: a task beside it, or an object of another interface.
    """
    from pql.env import check_protocol
    from pql.world import world

    if clash := [w for w in words if w.partition("=")[0] in NAMES_A_TASK]:
        raise ConfigError("task", clash[0].partition("=")[2], "no task beside env=, which is trained on instead")
    check_protocol(env)
    spec = env.spec
    own = ["task=env", f"task.name={spec.name}", "task.live=true", f"num_envs={spec.num_envs * world().size}"]
    return [*own, f"device={spec.device}", *words, f"placement.collector={spec.device}"]
