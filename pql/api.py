"""Python functions for the commands: ``pql.train`` and ``pql train`` with the same settings make the same run.

torch is imported only when needed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pql.errors import ConfigError

if TYPE_CHECKING:
    from pql.contract.env import EnvSpec, VecEnv
    from pql.run.driven import Driven
    from pql.run.session import Callbacks, Session
    from pql.run.store.run_dir import Summary

NAMES_A_TASK = ("task", "task.name", "task.id", "task.game", "task.live")


def train(
    *overrides: str | Mapping[str, Any], env: "VecEnv | None" = None, callbacks: "Callbacks" = (), quiet: bool = False
) -> "Summary":
    """Train with the overrides of the command line: ``pql.train("task=halfcheetah", "budget.seconds=60")``.

    Ctrl-C ends the run after its tick and saves it, as on the command line.

    Args:
        overrides: ``"key=value"``, or dicts, nested or dotted: ``{"task": "halfcheetah", "budget": {"seconds": 60}}``.
        env: a live ``VecEnv``, or ``gymnasium.vector.VectorEnv``, to train on instead of a task; it determines
            ``num_envs`` and ``device``. It is evaluated once, after training, and stays open.
        callbacks: one or several, called as ``callback(session, row)`` with every row of metrics;
            ``session.stop = True`` ends the run.
        quiet: print nothing.
    Returns:
        the run's ``Summary`` (``return_mean``, ``run_dir``, ``checkpoint``, ...).
    Raises:
        ConfigError: an invalid override, a callback that is no function, or an unsupported environment.
        RunError: the run failed after it started.
    """
    from pql.config.compose import words_of

    words = words_of(overrides)
    if env is not None:
        from pql.contract.env import adapted

        env = adapted(env)
    return launch(words if env is None else words_for(env, words), env=env, callbacks=callbacks, quiet=quiet)


def drive(
    *overrides: str | Mapping[str, Any],
    spec: "EnvSpec",
    run_dir: str | Path | None = None,
    state: Mapping[str, Any] | None = None,
    continues: bool = False,
    **options: Any,
) -> "Driven":
    """Train in a loop of your own, which steps the environments: ``run.begin(obs)``, then ``run.feed(step)``.

    For the loop of another library (``pql.lab``) or of a robot. The run learns, logs and saves as in :func:`train`; it
    is not evaluated, because the environments are yours (``pql eval`` evaluates its checkpoints). Its budget is
    unlimited by default.

    Args:
        overrides: as for :func:`train`.
        spec: of the environments. Its device is the run's.
        run_dir: of a run to resume; None: a new one (whose directory is the setting ``run_dir``).
        state: output of ``Driven.state`` that a new run begins with.
        continues: the environments are in the state in which the run was saved; else their episodes begin again.
        options: ``callbacks``, ``quiet`` and ``trust``, as for :func:`resume`.
    Returns:
        the run, built and waiting for ``begin``.
    Raises:
        ConfigError: an invalid override, or one that needs environments of its own (``eval.final``).
    """
    from functools import partial

    from pql.config.compose import words_of
    from pql.config.files import expanded
    from pql.run.driven import Driven, FedSession

    if unknown := options.keys() - {"callbacks", "quiet", "trust"}:
        raise TypeError(f"drive() has no argument {unknown.pop()!r}: callbacks, quiet or trust")
    run, words = Driven(spec, continues), words_of(overrides)
    if run_dir is None:
        words = driven_words(run.env, words)
    kind = partial(FedSession, link=run.link, state=state)
    where = None if run_dir is None else expanded("run", run_dir)
    return run.open(partial(launch, words, where, kind=kind, env=run.env, **options))


def resume(
    run_dir: str | Path,
    *overrides: str | Mapping[str, Any],
    env: "VecEnv | None" = None,
    callbacks: "Callbacks" = (),
    quiet: bool = False,
    trust: bool = False,
) -> "Summary":
    """Continue a run, as ``pql resume`` does: ``pql.resume("runs/x", "budget.seconds=600")``.

    Args:
        overrides: of ``budget``, ``eval``, ``logger``, ``checkpoint`` and ``replay.save``; other settings stay.
        env: the live environment, if the run was made on one.
        trust: run the code, programs and paths that the run's settings name (docs/security.md).
    Raises:
        ConfigError: no run there, nothing to resume from, or an override that would make it another run.
        RunError: the run failed.
    """
    from pql.config.compose import words_of
    from pql.config.files import expanded

    if env is not None:
        from pql.contract.env import adapted, check_protocol

        check_protocol(env := adapted(env))
    return launch(words_of(overrides), expanded("run", run_dir), quiet, trust, env=env, callbacks=callbacks)


def evaluate(
    path: str | Path,
    episodes: int = 16,
    num_envs: int = 16,
    seed: int = 0,
    device: str = "cpu",
    epsilon: float | None = None,
    trust: bool = False,
    max_steps: int | None = None,
) -> dict[str, Any]:
    """Evaluate the policy of a run, checkpoint or export on whole episodes, as ``pql eval`` does. Writes nothing.

    Args:
        epsilon: share of random actions, if they are discrete; None: as in the run's evaluations.
        trust: accept a file that names code, a program or a path (docs/security.md).
        max_steps: steps after which an episode is cut; None: as in the run's evaluations.
    Returns:
        ``return_mean``, ``return_median``, ``return_iqm``, ``return_std``, ``length_mean``, ``success`` (if the task
        defines it), ``returns`` and ``lengths`` of the single episodes, and the arguments.
    Raises:
        ConfigError: no policy there, a damaged one, or a number out of range.
    """
    from pql.config.files import expanded
    from pql.run.evaluation import EvaluationPlan, evaluate_saved

    plan = EvaluationPlan(num_envs, episodes, seed, device, epsilon, trust, max_steps)
    return evaluate_saved(expanded("run", path), plan)


def report(
    run: str | Path,
    out: str | Path | None = None,
    x: str = "seconds",
    thresholds: Sequence[float] = (),
    at: Sequence[float] = (),
) -> dict[str, Any]:
    """Write a page about one run, as ``pql report`` does. Needs the extra ``report``.

    Args:
        out: the page's folder; None: ``report`` in the run directory.
        x: the x axis: ``seconds``, ``env_steps`` or ``updates``.
        thresholds: returns; the page lists when each was reached.
        at: positions on the x axis; the page lists the return at each.
    Returns:
        the numbers on the page, and ``page``, the path of its HTML file.
    Raises:
        ConfigError: not a run, a run without metrics, an unknown axis, a threshold or position that is not a number, or
            a folder that cannot be written.
    """
    return _page([run], out, single=True, x=x, thresholds=thresholds, at=at)


def compare(
    *runs: str | Path,
    out: str | Path | None = None,
    x: str = "seconds",
    thresholds: Sequence[float] = (),
    references: str | Path | None = None,
    at: Sequence[float] = (),
) -> dict[str, Any]:
    """Write a page that compares runs, as ``pql compare`` does: ``pql.compare("runs", x="env_steps")``.

    Args:
        runs: run directories, or folders of runs.
        out: the page's folder; None: ``comparison`` in the working directory.
        x, thresholds, at: as for :func:`report`; so are results and errors.
        references: a file of returns that count as 0 and 1 (``docs/compare.md``).
    """
    return _page(runs, out, x=x, thresholds=thresholds, references=references, at=at)


def _page(runs: Sequence[str | Path], out: str | Path | None, single: bool = False, **options: Any) -> dict[str, Any]:
    from pql.reports import PageOptions, write

    if not runs:
        raise ConfigError("run", None, "run directories")
    page, numbers = write([str(run) for run in runs], out, PageOptions(**options), single)
    return {"page": str(page), **numbers}


def launch(
    words: list[str],
    run_dir: Path | None = None,
    quiet: bool = False,
    trust: bool = False,
    kind: "Callable[..., Session] | None" = None,
    **options: Any,
) -> "Summary":
    """Print what the run will do, then import torch (seconds on a busy machine), and run.

    Args:
        words: overrides of the command line.
        run_dir: of the run to resume; None: a new one.
        trust: run code that the settings of a resumed run name, as ``--trust`` does.
        kind: makes the session; None: ``Session``.
        options: of ``Session``.
    """
    from pql.config.compose import compose
    from pql.config.validate import likely_device, resolve_device
    from pql.contract.registry import check_name
    from pql.engine.world import world
    from pql.run.callbacks import as_callbacks
    from pql.run.log.console import announced, opening
    from pql.run.resume import resume_config
    from pql.run.store import run_dir as rundir
    from pql.run.store.claim import claim as claim_run

    options["callbacks"] = as_callbacks(options.get("callbacks", ()))
    resume, alone = run_dir is not None, world().size == 1
    speaks = not quiet and not world().rank
    if run_dir is not None and speaks and rundir.holds_run(run_dir):
        print(f"resumes {run_dir}", flush=True)  # its settings are in a checkpoint, which needs torch
    with ExitStack() as opened:
        claim = None  # of several processes: they agree on a directory first, which needs torch
        if run_dir is not None and alone and rundir.holds_run(run_dir):  # before another process may write settings
            claim = opened.enter_context(claim_run(run_dir))
        config = compose(words, likely_device) if run_dir is None else resume_config(run_dir, words, trust)
        device = likely_device(config.device)
        if not (config.task.live or config.task.process.python or config.task.remote):
            check_name(config.task.name)
        if claim is None and alone:
            claim = opened.enter_context(rundir.claim_directory(config, resume))
        where = None if claim is None or resume else claim.path
        console = announced(config, where) if speaks else None
        if console:
            opened.callback(console.close)
        with console.doing("loading") if console else nullcontext():
            from pql.run.session import Session

            # A driver without a GPU that torch can use is known only now.
            if not resume and resolve_device(config.device) != device:
                config = compose(words)
                if console:
                    console.say(opening(config, where))
        options |= {"console": console, "claim": claim, "resume": resume, "overrides": words, "quiet": quiet}
        return (kind or Session)(config, **options).train()


def driven_words(env: "VecEnv", words: list[str]) -> list[str]:
    """Return the overrides of a run that its caller steps. Raises ``ConfigError`` as :func:`words_for`."""
    return words_for(env, ["eval.final=false", "eval.every_seconds=null", "budget.seconds=1e9", *words])


def words_for(env: "VecEnv", words: list[str]) -> list[str]:
    """Return the overrides of a run on a live environment.

    Raises:
        ConfigError: a task is given as well, or the object has another interface.
    """
    from pql.contract.env import check_protocol
    from pql.engine.world import world

    if clash := [w for w in words if w.partition("=")[0] in NAMES_A_TASK]:
        raise ConfigError("task", clash[0].partition("=")[2], "no task together with env=, which is trained on instead")
    check_protocol(env)
    spec = env.spec
    own = ["task=env", f"task.name={spec.name}", "task.live=true", f"num_envs={spec.num_envs * world().size}"]
    return [*own, f"device={spec.device}", *words, f"placement.collector={spec.device}"]
