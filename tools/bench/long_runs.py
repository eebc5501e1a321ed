"""Runs of many hours, in minutes: counters past 2^31, memory slope, many sessions in one process, chains of resumes.

    python tools/bench/long_runs.py --json long.json
    python tools/bench/long_runs.py --only sessions --sessions 50

Simulators are tensors only, so env steps cost next to nothing. Each part runs in a process of its own.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pql.config.compose import compose
from pql.run.log import sinks
from pql.run.resume import resume_config
from pql.run.session import Session
from pql.run.store import checkpoint
from tools.bench.common import machine, options, save

EDGE = 2**31
OFF_POLICY = ("task=pendulum", "algo=pql", "algo.batch_size=32", "algo.warmup_steps=8", "replay.capacity=512")
ON_POLICY = ("task=pendulum", "algo=ppo")
REMOTE = ("task=remote", "algo=dqn", "algo.batch_size=32", "algo.warmup_steps=8", "replay.capacity=512")
COMMON = (
    *("scale=cpu", "device=cpu", "num_envs=8", "seed=3", "algo.critic.hidden=[16]", "logger=none"),
    *("budget.seconds=null", "eval.every_seconds=null", "eval.final=false", "checkpoint.every_seconds=null"),
    "placement.executor=inline",
)
KINDS = {"off-policy": OFF_POLICY, "on-policy": ON_POLICY, "remote": REMOTE}
TICKS = 3  # of a session, or between two resumes


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--only", choices=[*PARTS], nargs="+", default=[*PARTS])
    parser.add_argument("--minutes", type=float, default=10.0, help="of each measurement of the memory")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--resumes", type=int, default=200)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.smoke:
        args.minutes, args.sessions, args.resumes = 0.2, 4, 2
    if args.here:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(PARTS[args.only[0]](Path(folder), args)))
        return 0
    results = {}
    given = [f"--{k}={getattr(args, k)}" for k in ("minutes", "sessions", "resumes")]
    for part in args.only:
        command = [sys.executable, __file__, "--here", "--only", part, *given]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[part] = json.loads(done.stdout.splitlines()[-1])
        print(part, json.dumps(results[part]), flush=True)
    save({"machine": machine(), "results": results}, args.json)
    return 0


def words(folder: Path, kind: Sequence[str], *more: str) -> list[str]:
    hidden = [] if "algo=dqn" in kind else ["algo.policy.hidden=[16]"]
    return [*COMMON, *kind, *hidden, f"run_dir={folder}", *more]


def opened(overrides: Sequence[str], **options: Any) -> Session:
    return Session(compose(overrides), quiet=True, overrides=overrides, **options)


def advance(parts: Any, env_steps: int, ticks: int) -> None:
    """Set the counters of an off-policy run between two ticks as if ``env_steps`` transitions had been collected.

    The ring's contents stay: its heads grow by a multiple of its rows.
    """
    collector = parts.collector
    store = collector.stores[0]
    more = max(0, env_steps // collector.env.spec.num_envs - int(collector.steps)) // store.rows * store.rows
    collector.stepper.steps += more
    for replay in collector.stores:
        replay.live.head += more
    for job in parts.jobs.values():
        job.updates += EDGE
        clock = getattr(job.learner.state, "clock", None)
        if clock is not None:
            clock.updates += EDGE
    parts.begin(ticks)


def crossed(folder: Path, ticks: int = 40) -> dict[str, Any]:
    """Run the same ticks near 0 and across 2^31 env steps per environment and in all, ticks and updates.

    Returns:
        counters before and after, whether weights and ring are bit for bit equal, and the size of the metrics.
    """
    hashes: list[str] = []
    out: dict[str, Any] = {}
    start = EDGE - ticks // 2
    for name in ("near", "far"):
        session = opened(words(folder / name, OFF_POLICY, f"budget.env_steps={10**15}", "logger.every_seconds=1e6"))
        parts: Any = session.parts
        for _ in range(80):  # the ring is full: its length does not change any more
            parts.schedule.tick()
        collector = parts.collector
        rows, near = collector.stores[0].rows, int(collector.steps)
        # Below the edge by less than the ticks to come: the multiple of the ring's rows leaves up to one turn.
        ahead = EDGE - (near + max(0, start - rows - near) // rows * rows) + ticks // 2
        if name == "far":
            advance(parts, (start - rows) * collector.env.spec.num_envs, start)
            out |= {"steps_before": int(collector.steps), "ticks_before": parts.schedule.ticks}
        for _ in range(math.ceil(ahead / parts.counts.horizon)):
            parts.schedule.tick()
        hashes.append(content(parts))
        if name == "far":
            row = session._drain().collect()
            out |= {
                "steps_after": int(collector.steps),
                "ticks_after": parts.schedule.ticks,
                "updates_after": parts.updates()["v"],
                "env_steps": session.env_steps,
                "logged": row["steps/env"],
                "finite": all(math.isfinite(v) for v in row.values()),
            }
            session.save()
            out["saved"] = sorted(session.checkpoints.glob("tick-*"))[-1].name
        session.closing.close()
    return out | {"equal": hashes[0] == hashes[1], "wrapped": ahead / rows}


def content(parts: Any) -> str:
    """Return a hash of everything that the next tick depends on, except the heads of the ring."""
    digest = hashlib.sha256()
    state = checkpoint.flatten(parts.state_dict())
    for name, value in sorted(state.items()):
        if not name.endswith("/head"):
            digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def rss() -> float:
    """Return this process's resident memory, MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the least-squares slope of (minute, MB) and half of its 95 % interval.

    The interval takes the residuals as independent, which a sawtooth of allocations is not: it is too narrow then.
    """
    x, y = (torch.tensor(v, dtype=torch.float64) for v in zip(*points, strict=True))
    dx = x - x.mean()
    rise = float((dx * y).sum() / (dx**2).sum())
    rest = y - y.mean() - rise * dx
    error = float((rest**2).sum() / max(1, len(x) - 2) / (dx**2).sum()) ** 0.5
    return rise, 1.96 * error


def grown(folder: Path, kind: str, seconds: float) -> dict[str, float]:
    """Train for ``seconds``; the first third is warm-up. Return slope and interval in MB/min."""
    folder.mkdir()
    points: list[tuple[float, float]] = []
    start = time.monotonic()

    def look(session: Session, row: Any) -> None:
        now = time.monotonic() - start
        if now > seconds / 3:
            points.append((now / 60, rss()))
        session.stop = session.stop or now > seconds

    more = [f"task.kwargs.listen=unix:{folder}/s"] if kind == "remote" else []
    more += [f"budget.env_steps={10**12}", f"logger.every_seconds={seconds / 300}"]
    with acting(f"unix:{folder}/s") if kind == "remote" else contextlib.nullcontext():
        session = opened(words(folder / "run", KINDS[kind], *more), callbacks=look)
        session.train()
    rise, half = slope(points)
    ticks = session.parts.schedule.ticks
    return {"mb_per_min": rise, "interval": half, "points": len(points), "ticks": ticks, "mb": points[-1][1]}


@contextlib.contextmanager
def acting(address: str) -> Any:
    """Run an actor of four environments in a thread."""
    from pql.remote.actor.client import ActorClient
    from tools.bench.actors import Counting

    client = ActorClient(address, Counting(4), tell=lambda line: None)
    thread = threading.Thread(target=client.run, daemon=True)
    thread.start()
    yield
    client.leave.set()
    thread.join(20)


def many_sessions(folder: Path, count: int, warm: int = 10) -> dict[str, Any]:
    """Open and close ``count`` runs of ``TICKS`` ticks in this process, off-policy and on-policy by turns.

    Returns:
        MB per session after ``warm`` of them; threads and open files more than after the first ``warm``.
    """
    points, before = [], (0, 0)
    for i in range(warm + count):
        kind, steps = ((OFF_POLICY, 8 * (8 + TICKS)), (ON_POLICY, 256))[i % 2]
        opened(words(folder / f"run{i}", kind, f"budget.env_steps={steps}")).train()
        if i % 10 == 9:
            gc.collect()
        if i == warm - 1:
            before = held()
        if i >= warm:
            points.append((float(i - warm), rss()))
    (rise, half), (threads, files) = slope(points), held()
    out = {"sessions": count, "mb_per_session": rise, "interval": half}
    out |= {"first_mb": points[0][1], "last_mb": points[-1][1]}
    return out | {"threads": threads - before[0], "files": files - before[1]}


def held() -> tuple[int, int]:
    """Return the number of this process's threads and open files."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@mock.patch.object(sinks, "PART", 16 << 10)
def chain(folder: Path, count: int) -> dict[str, Any]:
    """Resume a run ``count`` times for ``TICKS`` ticks each, and train one without interruption for as many.

    The interval between rows of metrics.jsonl doubles with every 16 KB instead of 32 MB.
    """
    first, each = 8 * (8 + TICKS), 8 * TICKS
    total = first + count * each
    opened(words(folder / "whole", OFF_POLICY, f"budget.env_steps={total}")).train()
    opened(words(folder / "parts", OFF_POLICY, f"budget.env_steps={first}")).train()
    for i in range(count):
        overrides = (f"budget.env_steps={first + (i + 1) * each}",)
        config = resume_config(folder / "parts", overrides)
        Session(config, resume=True, quiet=True, overrides=overrides).train()
    manifests = [newest(folder / name) for name in ("whole", "parts")]
    rows = [(folder / name / "metrics.jsonl").stat().st_size for name in ("whole", "parts")]
    return {
        "resumes": count,
        "ticks": [m["counters"]["ticks"] for m in manifests],
        "equal": manifests[0]["sha256"] == manifests[1]["sha256"],
        "sha256": manifests[1]["sha256"],
        "metrics_bytes": rows,
        "metrics_interval": sinks.stretch(folder / "parts"),  # times the configured one
        "points": len(list((folder / "parts" / "checkpoints").glob("tick-*"))),
    }


def newest(run: Path) -> dict[str, Any]:
    """Return the manifest of the newest resume point."""
    return checkpoint.load(sorted((run / "checkpoints").glob("tick-*"))[-1])[1]


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "boundaries": lambda folder, args: crossed(folder),
    "memory": lambda folder, args: {kind: grown(folder / kind, kind, args.minutes * 60) for kind in KINDS},
    "sessions": lambda folder, args: many_sessions(folder, args.sessions),
    "resumes": lambda folder, args: chain(folder, args.resumes),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
