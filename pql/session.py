"""A run: its directory, budget, log, evaluations, checkpoints and callbacks around the tick."""

import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pql import checkpoint, log
from pql.build import Parts, build, build_env, seeds
from pql.config import Config, from_dict, resolve_device, to_dict
from pql.env import VecEnv
from pql.errors import ConfigError, RunError
from pql.evaluate import (
    Evaluation,
    Evaluator,
    Policy,
    find_checkpoint,
    fresh_policy,
    load_policy_tensors,
    run_episodes,
    spec_to_dict,
)  # fmt: skip

Callback = Callable[["Session", log.Row], None]


@dataclass(frozen=True)
class Summary:
    """What a finished run came to; ``summary.json`` holds the same fields."""

    run_dir: str
    return_mean: float | None
    return_iqm: float | None
    episodes: int
    seconds: float
    env_steps: int
    updates_v: int
    updates_p: int
    checkpoint: str
    interrupted: bool = False


class Session:
    """One run, new or resumed.

    Args:
        config: checked by ``config.validate``.
        env: a live environment to train on instead of the task's; it is also the one evaluated, after training.
        callbacks: called as ``callback(session, row)`` with every row of metrics; set ``session.stop`` to end the run.
        quiet: nothing on the console.
        resume: continue the run in ``config.run_dir`` from its newest intact resume point.
    """

    def __init__(
        self,
        config: Config,
        env: VecEnv | None = None,
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
        resume: bool = False,
    ):
        self.config, self.callbacks, self.given_env = config, list(callbacks), env
        self.run_dir = run_directory(config)
        if not resume and (self.run_dir / "config.yaml").exists():
            raise ConfigError(
                "run_dir", self.run_dir, f"a new folder; to go on with this run: pql resume {self.run_dir}"
            )
        self.parts: Parts = build(config, env)
        self.stop = False
        self.interrupted = False
        self.seconds = 0.0  # of training, earlier sittings included
        self.best = float("-inf")
        self.last_eval: Evaluation | None = None
        self.checkpoints = self.run_dir / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if not resume:
            write_run_files(self.run_dir, config)
        self.sinks = make_sinks(config, self.run_dir, quiet)
        self.console = next((s for s in self.sinks.sinks if isinstance(s, log.Console)), None)
        self.parts.prepare()
        self._start(resume)
        self._window = self._counters()

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, resume: bool) -> None:
        parts, warmup = self.parts, self.config.algo.warmup_steps
        parts.collector.start(seeds(self.config.seed)["env"])
        self.warmup_steps = warmup
        if resume:
            tensors, manifest, path = checkpoint.newest(self.checkpoints)
            parts.load_state_dict(checkpoint.unflatten(tensors, parts.state_dict()), manifest["counters"]["ticks"])
            self._load_counters(manifest["counters"])
            self.say(f"resumed from {path}")
            return
        if self.config.init_from:
            self._init_from(Path(self.config.init_from))
        parts.collector.warm_up(warmup)
        parts.begin()

    def _init_from(self, source: Path) -> None:
        """Start from another run's weights: policy and statistics, and critics where the checkpoint has them."""
        path = find_checkpoint(source)
        tensors, manifest = checkpoint.load(path)
        parts = self.parts
        if manifest["spec"] != spec_to_dict(parts.env.spec) | {"name": manifest["spec"]["name"]}:
            raise ConfigError("init_from", source, "a run on the same observations and actions")
        try:
            policy = fresh_policy(self.config, parts.env.spec, torch.device("cpu"))
            load_policy_tensors(policy, tensors)
            for worker, learner in parts.learners.items():
                prefix = f"learners/{worker}/state"
                state = learner.state.state_dict()
                if any(k.startswith(prefix) for k in tensors):
                    learner.state.load_state_dict(checkpoint.unflatten(tensors, state, prefix))
            parts.policy.load_state_dict(policy.net.state_dict())
            own = parts.collector.normalizer
            own.load_state_dict({**own.state_dict(), **policy.norm.state_dict()})
        except (RuntimeError, ConfigError) as error:
            raise ConfigError("init_from", source, f"a run with the same networks ({error})") from error

    def _counters(self) -> dict[str, float]:
        jobs, parts = self.parts.jobs, self.parts
        return {
            "ticks": parts.schedule.ticks, "steps": parts.collector.steps, "v": jobs["v"].updates,
            "p": jobs["p"].updates, "seconds": self.seconds, "best": self.best,
            **{f"busy_{k}": w.busy for k, w in parts.workers.items()},
        }  # fmt: skip

    def _load_counters(self, saved: dict[str, float]) -> None:
        self.parts.collector.steps = int(saved["steps"])
        self.parts.jobs["v"].updates, self.parts.jobs["p"].updates = int(saved["v"]), int(saved["p"])
        self.seconds, self.best = saved["seconds"], saved["best"] if saved["best"] is not None else float("-inf")

    @property
    def env_steps(self) -> int:
        """Transitions so far, all environments together, warm-up included."""
        return self.parts.collector.steps * self.parts.env.spec.num_envs

    def say(self, text: str) -> None:
        if self.console:
            self.console.say(text)

    # -- the loop -------------------------------------------------------------------------------------------------

    def train(self) -> Summary:
        """Run until the budget ends, a callback or Ctrl-C stops it; then evaluate, save and sum up."""
        executor = self.parts.schedule.executor
        evaluator = self._make_evaluator()
        with interruptible(self):
            try:
                self._loop(evaluator)
                self._collect_evaluation(evaluator, wait=True)
                self.save()
                return self._finish(evaluator)
            finally:
                executor.close()
                if evaluator:
                    evaluator.close()
                self.sinks.close()
                if self.given_env is None:
                    self.parts.env.close()

    def _loop(self, evaluator: Evaluator | None) -> None:
        config, schedule = self.config, self.parts.schedule
        begun, before = time.perf_counter(), self.seconds
        every = {"log": config.logger.every_seconds, "eval": config.eval.every_seconds if evaluator else None,
                 "save": config.checkpoint.every_seconds}  # fmt: skip
        due = {k: before + v for k, v in every.items() if v is not None}
        pending: log.Pending | None = None
        while not self._over():
            schedule.tick()
            self.seconds = before + time.perf_counter() - begun
            if pending and pending.ready():
                self._write(pending.collect())
                pending = None
            for what in [k for k, t in due.items() if self.seconds >= t]:
                due[what] = self.seconds + (every[what] or 0.0)
                if what == "log" and pending is None:
                    pending = self._drain()
                elif what == "eval" and evaluator:
                    self._request_evaluation(evaluator)
                elif what == "save":
                    self.save()
            if evaluator:
                self._collect_evaluation(evaluator)
        if pending:
            self._write(pending.collect())
        self._write(self._drain().collect())

    def _over(self) -> bool:
        budget = self.config.budget
        reached = budget.target_return is not None and self.last_eval is not None and (
            self.last_eval.mean >= budget.target_return
        )  # fmt: skip
        return (
            self.stop
            or reached
            or (budget.seconds is not None and self.seconds >= budget.seconds)
            or (budget.env_steps is not None and self.env_steps >= budget.env_steps)
        )

    # -- logging --------------------------------------------------------------------------------------------------

    def _drain(self) -> log.Pending:
        """Assemble a row of everything since the last one; device values arrive later."""
        parts, now, last = self.parts, self._counters(), self._window
        self._window = now
        span = max(now["seconds"] - last["seconds"], 1e-9)
        n = parts.env.spec.num_envs
        learning_steps = now["steps"] - self.warmup_steps
        row: log.Row = {
            "time/seconds": now["seconds"],
            "steps/env": self.env_steps,
            "updates/v": now["v"],
            "updates/p": now["p"],
            "ratio/v_per_step": now["v"] / max(1, learning_steps),
            "ratio/p_per_v": now["p"] / max(1, now["v"]),
            "lag/policy_ticks": parts.schedule.lag,
            "throughput/env_steps_per_s": (now["steps"] - last["steps"]) * n / span,
            "throughput/updates_per_s": (now["v"] + now["p"] - last["v"] - last["p"]) / span,
            **{f"busy/{k}": (now[f"busy_{k}"] - last[f"busy_{k}"]) / span for k in parts.workers},
            **log.memory(parts.env.spec.device),
        }
        with parts.schedule.executor.exclusive():
            values = parts.collector.episodes.drain()
            for job in parts.jobs.values():
                values |= job.metrics.drain()
            values["replay/bootstrap_lost"] = parts.cursors["v"].lost.clone()
            return log.Pending(values, row)

    def _write(self, row: log.Row) -> None:
        if row.get("train/episodes") == 0:  # nothing ended in this window: no means to tell
            row = {k: v for k, v in row.items() if not k.startswith(("train/", "episode/"))}
        self.sinks.write(row)
        for callback in self.callbacks:
            callback(self, row)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _make_evaluator(self) -> Evaluator | None:
        spec = self.parts.env.spec
        if self.given_env is not None or spec.single_instance:
            return None  # there is no second simulator; the final evaluation borrows this one
        if self.config.eval.every_seconds is None and not self.config.eval.final:
            return None
        env = build_env(self.config, self.config.eval.num_envs)
        return Evaluator(env, fresh_policy(self.config, spec, env.spec.device), seeds(self.config.seed)["eval"])

    def _policy_tensors(self) -> list[Tensor]:
        return [*self.parts.policy.module.parameters(), *self._policy_norm()]

    def _policy_norm(self) -> list[Tensor]:
        norm = self.parts.collector.normalizer
        used = [getattr(norm, f"{w}_policy") for w in ("scale", "shift")] if "policy" in norm.moments else []
        return [*used, norm.reward_scale]

    def _request_evaluation(self, evaluator: Evaluator) -> None:
        counters = {"time/seconds": self.seconds, "steps/env": self.env_steps}
        with self.parts.schedule.executor.exclusive():
            evaluator.request(self._policy_tensors(), counters)

    def _collect_evaluation(self, evaluator: Evaluator | None, wait: bool = False) -> None:
        if evaluator is None:
            return
        if wait:
            evaluator.wait()
        while not evaluator.results.empty():
            counters, result = evaluator.results.get()
            if isinstance(result, BaseException):
                raise RunError(f"the evaluator failed: {type(result).__name__}: {result}") from result
            self._record(counters, result, evaluator.dropped, evaluator.policy)

    def _record(self, counters: log.Row, result: Evaluation, dropped: int, policy: Policy) -> None:
        self.last_eval = result
        lengths = sum(result.lengths) / len(result.lengths)
        self._write({
            **counters, "eval/return_mean": result.mean, "eval/return_iqm": result.iqm, "eval/length_mean": lengths,
            "eval/dropped": float(dropped),
        })  # fmt: skip
        if result.mean > self.best:
            self.best = result.mean
            self._save_policy("best", policy.state_dict(), {"return_mean": result.mean, **counters})

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _manifest(self, kind: str, extra: dict[str, Any]) -> dict[str, Any]:
        spec = spec_to_dict(self.parts.env.spec)
        return {"kind": kind, "config": to_dict(self.config), "spec": spec, **extra}

    def _save_policy(self, name: str, state: dict[str, Any], extra: dict[str, Any]) -> None:
        self._guarded(lambda: checkpoint.save(self.checkpoints / name, state, self._manifest("policy", extra)))

    def save(self) -> None:
        """Write a resume point and the current policy."""
        parts = self.parts
        counters = {k: v for k, v in self._counters().items() if not k.startswith("busy_")}
        counters["best"] = self.best if self.best > float("-inf") else None  # type: ignore[assignment]
        path = self.checkpoints / f"tick-{parts.schedule.ticks:012d}"
        with parts.schedule.executor.exclusive():
            norm = parts.collector.normalizer.state_dict()
            known = fresh_policy(self.config, parts.env.spec, torch.device("cpu")).norm.state_dict()
            policy = {"policy": parts.policy.state_dict(), "norm": {k: norm[k] for k in known}}
            self._save_policy("last", policy, {"counters": counters})
            if self.config.checkpoint.replay:
                manifest = self._manifest("resume", {"counters": counters})
                self._guarded(lambda: checkpoint.save(path, parts.state_dict(), manifest))
        checkpoint.rotate(self.checkpoints, self.config.checkpoint.keep)

    def _guarded(self, write: Callable[[], None]) -> None:
        """A full disk must not end a run: earlier checkpoints stay, and the user is told."""
        try:
            write()
        except OSError as error:
            self.say(f"warning: checkpoint not written, the run goes on: {error}")

    # -- the end --------------------------------------------------------------------------------------------------

    def _finish(self, evaluator: Evaluator | None) -> Summary:
        result = None
        if self.config.eval.final and not self.interrupted:
            result = self._final_evaluation(evaluator)
        jobs, steps = self.parts.jobs, self.env_steps
        summary = Summary(
            str(self.run_dir), result.mean if result else None, result.iqm if result else None,
            len(result.returns) if result else 0, self.seconds, steps, jobs["v"].updates, jobs["p"].updates,
            str(self.checkpoints / "last"), self.interrupted,
        )  # fmt: skip
        text = json.dumps(dataclasses.asdict(summary), indent=1)
        (self.run_dir / "summary.json").write_text(text + "\n")
        if self.console:
            self.console.close()
        self.say(closing_words(self, summary))
        return summary

    def _final_evaluation(self, evaluator: Evaluator | None) -> Evaluation:
        counters = {"time/seconds": self.seconds, "steps/env": float(self.env_steps)}
        if evaluator:
            evaluator.request(self._policy_tensors(), counters)
            self._collect_evaluation(evaluator, wait=True)
            assert self.last_eval is not None
            return self.last_eval
        policy = fresh_policy(self.config, self.parts.env.spec, self.parts.env.spec.device)
        torch._foreach_copy_([t.data for t in policy.tensors()], self._policy_tensors())
        result = run_episodes(self.parts.env, policy, seeds(self.config.seed)["eval"])
        self._record(counters, result, 0, policy)
        return result


def closing_words(session: Session, summary: Summary) -> str:
    """The last lines of a run: what came out, what bounded it, where it is, what to type next."""
    parts, run = session.parts, summary.run_dir
    busy = {k: w.busy for k, w in parts.workers.items()}
    bound = max(busy, key=lambda k: busy[k])
    advice = {
        "collector": "fewer environments or a faster simulator would speed it up; more updates per step would be free",
        "v": "a smaller critic or batch, fewer updates per step or more threads for v would speed it up",
        "p": "a smaller policy or batch, or fewer policy updates per critic update would speed it up",
    }[bound]
    shares = ", ".join(f"{k} {v / max(session.seconds, 1e-9):.0%}" for k, v in busy.items())
    score = "not evaluated" if summary.return_mean is None else (
        f"return {summary.return_mean:,.1f} (IQM {summary.return_iqm:,.1f}) over {summary.episodes} episodes"
    )  # fmt: skip
    head = "interrupted, saved" if summary.interrupted else "done"
    return "\n".join([
        f"{head}: {score}",
        f"{summary.seconds:,.0f} s, {summary.env_steps:,} env steps, {summary.updates_v:,} critic and "
        f"{summary.updates_p:,} policy updates",
        f"the tick is bounded by {bound} (busy: {shares}): {advice}",
        f"run: {run}",
        f"policy: {summary.checkpoint}",
        f"next: pql eval {run}   |   pql resume {run} budget.seconds={2 * max(summary.seconds, 1):.0f}",
    ])  # fmt: skip


def run_directory(config: Config) -> Path:
    """``config.run_dir``, or a new one below ``runs``."""
    if config.run_dir:
        return Path(config.run_dir)
    return Path("runs") / f"{config.task.name}-{config.algo.name}-s{config.seed}-{log.stamp()}"


def write_run_files(run_dir: Path, config: Config) -> None:
    """config.yaml, git.json and env.json: what it takes to know later what was run."""
    import yaml

    (run_dir / "config.yaml").write_text(yaml.safe_dump(to_dict(config), sort_keys=False))
    (run_dir / "git.json").write_text(json.dumps(git_state(), indent=1))
    device = resolve_device(config.device)
    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    facts = {
        "argv": sys.argv, "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform(),
        "cpus": os.cpu_count(), "device": device, "gpu": gpu,
    }  # fmt: skip
    (run_dir / "env.json").write_text(json.dumps(facts, indent=1))


def read_config(run_dir: Path) -> dict[str, Any]:
    """A run's saved config, as plain dicts.

    Raises:
        ConfigError: no run there.
    """
    import yaml

    path = run_dir / "config.yaml"
    if not path.exists():
        raise ConfigError("run", run_dir, "a run directory (with config.yaml)")
    return yaml.safe_load(path.read_text())


def git_state() -> dict[str, Any]:
    """Commit and cleanliness of the source tree, where it is a git checkout."""

    def git(*args: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", "-C", str(here), *args], capture_output=True, text=True, timeout=5, check=True
        ).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def make_sinks(config: Config, run_dir: Path, quiet: bool) -> log.Sinks:
    """metrics.jsonl and the console always (unless quiet), plus the chosen logger."""
    sinks: list[log.Sink] = [log.Jsonl(run_dir / "metrics.jsonl")]
    if config.logger.kind == "tensorboard":
        try:
            sinks.append(log.TensorBoard(run_dir / "tensorboard"))
        except ModuleNotFoundError as error:
            raise ConfigError("logger", "tensorboard", "the package: pip install 'pql[tensorboard]'") from error
    elif config.logger.kind == "wandb":
        sinks.append(log.Wandb(run_dir, config.logger.project, config.logger.mode, to_dict(config)))
    if not quiet:
        budget = {k: float(v) for k, v in to_dict(config.budget).items() if v is not None}
        sinks.append(log.Console(f"{config.algo.name} on {config.task.name}", budget))
    return log.Sinks(sinks)


@contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """Ctrl-C or SIGTERM: end after the tick and save. A second Ctrl-C: leave at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: Any) -> None:
        if session.interrupted and signum == signal.SIGINT:
            os._exit(130)
        session.stop = session.interrupted = True
        session.say("stopping after this tick and saving; Ctrl-C again to leave at once")

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, h in previous.items():
            signal.signal(s, h)


RESUMABLE = ("budget", "eval", "logger", "checkpoint")


def resume_config(run_dir: Path, overrides: Sequence[str]) -> Config:
    """A run's config with ``overrides`` of its budget, evaluation, logger or checkpoints.

    Raises:
        ConfigError: no run there, or an override that would make it another run.
    """
    from omegaconf import OmegaConf

    from pql.config import validate

    data = read_config(run_dir)
    for override in overrides:
        if override.partition(".")[0] not in RESUMABLE:
            key, _, value = override.partition("=")
            raise ConfigError(key, value, f"one of {', '.join(f'{g}.*' for g in RESUMABLE)}: the rest stays as it was")
    merged = OmegaConf.merge(data, OmegaConf.from_dotlist(list(overrides)))
    config = from_dict(OmegaConf.to_container(merged))  # type: ignore[arg-type]
    return validate(dataclasses.replace(config, run_dir=str(run_dir)))
