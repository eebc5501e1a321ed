"""Start of a run, new or resumed: its directory, its parts after their warm-up, its log and its evaluations."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pql.collect.prefill import prefill
from pql.config import Config, from_dict
from pql.config.compose import changed_live
from pql.config.files import expanded
from pql.contract.env import VecEnv
from pql.contract.optional import Resumable, stage_of, supports
from pql.contract.spec_json import spec_to_dict
from pql.engine import crash
from pql.engine.deadlines import start_limit
from pql.engine.watchdog import Watchdog, watching
from pql.errors import ConfigError, RunError, first_line
from pql.run.build import build
from pql.run.components import Parts
from pql.run.environment import in_play
from pql.run.episodes import limit_note
from pql.run.flight_recorder import dumping
from pql.run.guard import short_of_memory
from pql.run.log import sinks as log
from pql.run.log.closing import few_rollouts
from pql.run.log.console import announced
from pql.run.policy import check_finite, init_from, load_weights
from pql.run.store import checkpoint, own
from pql.run.store import run_dir as rundir
from pql.run.store.archive import Archive
from pql.run.store.claim import Claim
from pql.run.store.manifest import check_storable

if TYPE_CHECKING:
    from pql.run.session import Session

REPLAY = "collector/replay/"  # names of the stored rows in a resume point
AGREE_EVERY = 32  # warm-up steps between checks of all ranks for its end


def open_run(session: "Session", opened: ExitStack, quiet: bool, overrides: Sequence[str], claim: Claim | None) -> None:
    """Give ``session`` its directory, parts, log and evaluations; ``opened`` closes them."""
    config, ranks, resume = session.config, session.ranks, session.resumed
    log.check_logger(config)
    check_storable(config)
    opened.callback(ranks.close)
    opened.enter_context(Watchdog(session.interrupt))
    held = ranks.by_first(lambda: session.hold(opened.enter_context(claim or rundir.claim_directory(config, resume))))
    session.run_dir, session.checkpoints = held, held / "checkpoints"
    session.archive = Archive(config, ranks, session.run_dir, session.claim, overrides, session.warn)
    opened.callback(session.archive.close)
    if session.console is None and ranks.first and not quiet:
        session.console = announced(config, session.run_dir)
    if session.console:
        opened.callback(session.console.close)
    _make_parts(session, opened)
    if not resume:
        _begin(session, overrides)
    given = session.state
    whole = given is not None and any(k.startswith(REPLAY) for k in given["tensors"])
    ticks = _continue(session) if resume or whole else 0
    resumed_at = session.env_steps if resume else None
    session.ready = _warm_up(session, ticks)
    if ranks.first:
        session.sinks = log.make_sinks(config, session.run_dir, session.console, resumed_at)
    opened.callback(session.close_sinks)
    if resume and ranks.first:
        rundir.amend_config(session.run_dir, config, overrides)  # after metrics.jsonl could be written
    session.evaluations.open(opened)
    ranks.check_same(session.parts)
    rundir.check_shared(session.run_dir)


def _make_parts(session: "Session", opened: ExitStack) -> None:
    """Build simulators, networks and workers, ready for the first reset."""
    config = session.config
    with session.doing("building the simulator and the networks"):
        with watching(f"building {config.task.title}", start_limit(config.placement)):
            session.parts = parts = _build(session.ranks.share, session.given_env)
        opened.callback(parts.close, session.given_env is None)
        check_storable(config, spec_to_dict(parts.env.spec))
        session.evaluations.check()
        session.ranks.connect(parts)
    if session.console:
        session.console.progress.now = session.now
    with session.doing("compiling", parts.preparation):
        parts.prepare()


def _build(config: Config, env: VecEnv | None) -> Parts:
    try:
        return build(config, env)
    except ConfigError as error:
        named = {k: f"task.{k}" for k in ("id", "game", "model") if getattr(config.task, k)}
        free = {k: f"task.{group}.{k}" for group in ("kwargs", "remote") for k in getattr(config.task, group)}
        given = {**free, **named}
        if error.value is None and config.task.by_actors:  # what is to be given, too
            group = "remote" if config.task.remote else "kwargs"
            given |= {k: f"task.{group}.{k}" for k in ("token_file", "cert", "key")}
        if error.setting in given:  # as given by the user
            raise ConfigError(given[error.setting], error.value, error.allowed) from error
        raise
    except (RuntimeError, MemoryError) as error:
        if short_of_memory(error):
            less = "algo.policy.hidden, algo.critic.hidden, replay.capacity or num_envs"
            raise RunError(f"too little memory for this run: choose smaller {less} ({first_line(error)})") from None
        raise


def _reset(session: "Session") -> None:
    with session.doing("resetting the simulator"):
        session.parts.start(session.env_steps)


def _begin(session: "Session", overrides: Sequence[str]) -> None:
    """Prepare a new run: first observations, initial weights, prefilled data and the run directory."""
    config, ranks, parts = session.config, session.ranks, session.parts
    _reset(session)
    if config.init_from:
        init_from(parts, expanded("init_from", config.init_from))
    if session.state is not None:
        load_weights(parts, session.state["tensors"], session.state["manifest"], "state")
    if config.replay.prefill:
        with session.doing(f"reading {config.replay.prefill}"):
            taken = prefill(parts.collector, config.replay.prefill, ranks.rank, ranks.size)
        session.prefilled = sum(ranks.every(taken))
    ranks.spread(parts)
    if ranks.first:
        rundir.create_run_dir(session.run_dir, config, overrides)
        own.record(session.run_dir, config)
        crash.name_run(session.run_dir, rundir.command("resume", session.run_dir.absolute(), config))


def _continue(session: "Session") -> int:
    """Start from the newest intact resume point; return its ticks."""
    parts = session.parts
    with session.doing("loading the resume point"):
        if session.state is not None and not session.resumed:
            tensors, manifest = session.state["tensors"], session.state["manifest"]
        else:
            tensors, manifest = session.ranks.resume_point(session.checkpoints)
        check_finite(tensors, manifest)
        parts.check_sources(manifest.get("sources", {}))
        counters = manifest["counters"]
        parts.load_counters(counters)
    _reset(session)
    with session.doing("loading the resume point"):
        state = parts.state_dict()
        if session.resumed and (new := changed_live(from_dict(manifest["config"]), session.config)):
            session.say(f"changed: {', '.join(new)}")
            if any(name.endswith("lr") for name in new):  # saved with the optimisers
                tensors |= {k: v for k, v in checkpoint.flatten(state).items() if k.rpartition("/")[2] == "lr"}
        parts.load_state_dict(checkpoint.unflatten(tensors, state))
        session.seconds = counters["seconds"]
        if not supports(parts.env, Resumable):
            stage = ", ".join(f"{k.removeprefix('stage/')} {v:,g}" for k, v in stage_of(parts.env).items())
            session.warn(
                "this simulator cannot restore its state: episodes begin again, so the run continues with other bits"
                + (f"; its curriculum continues at {stage}" if stage else "")
            )
        best = session.checkpoints / "best"
        if best.exists():  # stored separately: an evaluation after the resume point may have improved it
            try:
                session.evaluations.best = checkpoint.load(best)[1].get("return_mean", session.best)
            except checkpoint.CorruptCheckpointError as error:
                session.warn(f"{error}; the next evaluation replaces it")
    return int(counters["ticks"])


def _warm_up(session: "Session", ticks: int) -> bool:
    """Run the rest of the warm-up; tick ``ticks`` is next. Return True unless the budget ended it."""
    config, parts, ranks = session.config, session.parts, session.ranks
    steps, start, before = config.algo.warmup_steps, time.perf_counter(), session.seconds
    total = steps * config.num_envs

    def going() -> bool:
        session.seconds = before + time.perf_counter() - start
        wanted = bool(session.to_end())
        if ranks.size == 1:
            return not wanted
        # Ranks must end it at the same step, so they wait for each other; rarely, for speed.
        return parts.collector.steps % AGREE_EVERY > 0 or not any(ranks.every(wanted))

    ready = True
    with dumping(session.run_dir, parts, ranks.rank):
        if ticks == 0:
            with session.doing("warm-up", lambda: f"{session.env_steps:,} of {total:,} random env steps"):
                ready = parts.warm_up(steps, going)
        if ready:
            parts.begin(ticks)
    if ticks == 0:
        session.seconds = before + time.perf_counter() - start
        if ready and (note := few_rollouts(config, session.seconds)):
            session.say(note)
    return ready


def say_notes(session: "Session") -> None:
    """Report what a user should know at the start of the run."""
    config, parts = session.config, session.parts
    if session.prefilled:
        session.say(f"replay starts with {session.prefilled:,} transitions of {config.replay.prefill}")
    if not parts.schedule.reproducible:
        session.say("replicas run free: the same seed would give other bits (algo.central.order=turns repeats them)")
    if names := parts.compiled():
        session.say(f"compiled: {', '.join(names)}")
    wanted = config.eval.final or config.eval.every_seconds is not None
    if wanted and (note := limit_note(parts.env.spec, config.eval.max_steps)):
        session.say(note)
    if (one := session.evaluations.evaluator) and in_play(config, one.env.spec):
        session.say("evaluations have the simulator's configuration for play (eval.play=false: the one for training)")
    if session.resumed:
        session.say(f"resumed at tick {parts.schedule.ticks:,}, {session.env_steps:,} env steps")
