"""Load and restarts of a learner with remote actors, on the loopback.

    python tools/bench/load.py --json load.json                 10, 100 and 1,000 actors, 10,000 refused connections
    python tools/bench/load.py --restarts --minutes 30          learner and actors are killed and started again

The learner is ``pql train task=remote algo=dqn`` with a tiny network. The actors of the first form are light, many in
one process that speaks the real protocol; those of the second are ``pql actor`` processes. Every row that the learner
receives in the second form is checked: rows of a trajectory are numbered.
"""

import json
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tools.bench.actors import KINDS, ask, environment, puppet, running, wait
from tools.bench.common import json_lines, machine, options, save

CHECKED = Path(__file__).resolve().with_name("checked_learner.py")
LEARNER = [
    *("algo=dqn", "scale=cpu", "device=cpu", "seed=1", "algo.critic.hidden=[16]", "algo.batch_size=32"),
    *("algo.warmup_steps=8", "budget.seconds=100000", "budget.env_steps=null", "eval.every_seconds=null"),
    *("eval.final=false", "logger.every_seconds=1", "logger=none"),
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--refused", type=int, default=10_000, help="connections that are refused, of all kinds")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement")
    parser.add_argument("--restarts", action="store_true", help="kill and restart both sides instead")
    parser.add_argument("--minutes", type=float, default=60.0, help="with --restarts: for that long")
    parser.add_argument("--seed", type=int, default=0, help="with --restarts: of the moments")
    parser.add_argument("--pause", type=float, nargs=2, default=(2.0, 20.0), help="with --restarts: between kills")
    args = parser.parse_args(argv)
    if args.smoke:
        args.actors, args.refused, args.seconds, args.minutes, args.pause = [2], 5, 1.0, 0.2, (0.5, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        if args.restarts:
            results: Any = restarts(Path(folder), args.minutes * 60, args.seed, tuple(args.pause))
        else:
            results = [
                load(Path(folder), count, args.refused if count == max(args.actors) else 0, args.seconds)
                for count in args.actors
            ]
    save({"machine": machine(), "results": results}, args.json)
    return 0


def free_address() -> str:
    """Return an address whose port no outgoing connection is given: a learner that restarts would find it taken."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise OSError("no free port")


def footprint(pid: int) -> dict[str, float]:
    """Return memory (MiB), open files and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in status if line.startswith(("VmRSS", "Threads"))}
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"rss_mib": int(fields["VmRSS"]) / 1024, "files": files, "threads": int(fields["Threads"])}


class Learner:
    """A learner with ``count`` slots, and its log."""

    process: subprocess.Popen[Any]

    def __init__(self, folder: Path, count: int, address: str):
        self.count, self.address, self.token = count, address, secrets.token_hex(8)
        self.file = folder / f"learner-{count}.log"
        words = ["task=remote", f"num_envs={count}", f"task.kwargs.listen={address}", f"run_dir={folder}/run-{count}"]
        words += [f"replay.capacity={count * 512}", f"algo.target_period={count * 16}", "checkpoint.every_seconds=null"]
        self.command = [sys.executable, "-m", "pql", "train", *words, *LEARNER]

    def crowd(self, count: int) -> Any:
        return puppet("crowd", "counting", self.address, str(count), token=self.token)

    def until(self, true: Callable[[], Any], seconds: float, what: str) -> None:
        """Wait for ``true()``.

        Raises:
            RuntimeError: the learner has ended.
        """
        wait(lambda: true() or self.process.poll() is not None, seconds, what)
        if self.process.poll() is not None:
            raise RuntimeError(self.file.read_text()[-2000:])


def load(folder: Path, count: int, refused: int, seconds: float) -> dict[str, Any]:
    """Measure a learner with ``count`` slots: one permanent actor, then a crowd that is a tenth too many.

    Args:
        refused: connections that are refused while the admitted actors step.
        seconds: length of each measurement.
    """
    learner = Learner(folder, count, free_address())
    out: dict[str, Any] = {"actors": count}
    with learner.file.open("w") as log, running(learner.command, learner.token, stdout=log, stderr=log) as process:
        learner.process = process
        learner.until(lambda: reachable(learner.address), 180, "the learner listens")
        with learner.crowd(1) as first:
            learner.until(lambda: told(first, "count")["stepping"], 200, "the first actor steps")
            out |= {"one": told(first, f"measure {min(seconds, 5)}"), "before": footprint(process.pid)}
            out |= crowded(learner, refused, seconds)
            time.sleep(min(seconds, 5))
            out |= {"again": told(first, f"measure {min(seconds, 5)}"), "after": footprint(process.pid)}
        out["alive"] = process.poll() is None
        process.send_signal(signal.SIGTERM)
        out["status"] = process.wait(120)
    text = learner.file.read_text()
    out["tracebacks"] = text.count("Traceback")
    print(json.dumps(out), flush=True)
    if out["tracebacks"] or not out["alive"]:
        print(text[-3000:], file=sys.stderr)
    return out


def told(crowd: Any, line: str) -> dict[str, Any]:
    return json.loads(ask(crowd, line))


def crowded(learner: Learner, refused: int, seconds: float) -> dict[str, Any]:
    """Fill the learner's slots and try to connect a tenth more; measure all of them."""
    count, extra, start = learner.count, max(1, learner.count // 10), time.perf_counter()
    out: dict[str, Any] = {"too_many": extra}
    with learner.crowd(count - 1 + extra) as crowd:

        def settled() -> bool:
            found = told(crowd, "count")
            return bool(found["admitted"] >= count - 1 and found["refused"] >= extra)

        wait(settled, 240, "all are admitted or refused")
        out |= {"admission_s": time.perf_counter() - start, "admission": told(crowd, "count")}
        wait(lambda: told(crowd, "count")["stepping"] >= count - 1, 200, "all step")
        out |= {"load": told(crowd, f"measure {seconds}"), "loaded": footprint(learner.process.pid)}
        if refused:
            out |= refusals(learner, crowd, refused, seconds)
        ask(crowd, "count")
    return out


def refusals(learner: Learner, crowd: Any, refused: int, seconds: float) -> dict[str, Any]:
    """Refuse ``refused`` connections while the crowd steps."""
    with puppet("strangers", learner.address, str(refused // len(KINDS)), token=learner.token) as strangers:
        out = {"during": told(crowd, f"measure {seconds}"), "refusals": json.loads(ask(strangers))}
    time.sleep(min(seconds, 2))
    return out | {"refused": footprint(learner.process.pid)}


def reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


class Restarts:
    """A learner and actors whose processes are killed and started again.

    Attributes:
        back: for ``learner`` and ``actor``, seconds from each start until its first row arrives.
    """

    def __init__(self, folder: Path, actors: int = 8):
        self.folder, self.address, self.token = folder, free_address(), secrets.token_hex(8)
        self.run, self.count = folder / "run", actors
        self.life, self.sitting = 0, 0
        self.actors: dict[int, subprocess.Popen[Any]] = {}
        self.back: dict[str, list[float]] = {"learner": [], "actor": []}
        self.learner: subprocess.Popen[Any] | None = None
        self.log = (folder / "log").open("w+")

    def start_learner(self) -> None:
        self.sitting += 1
        fresh = not any(self.run.glob("checkpoints/tick-*"))
        if fresh and self.run.exists():
            self.run = self.folder / f"run-{self.sitting}"  # killed before its first resume point
        words = [
            *("train", "task=remote", f"num_envs={self.count}", f"task.kwargs.listen={self.address}"),
            *(f"run_dir={self.run}", *LEARNER, "replay.capacity=160000", "checkpoint.every_seconds=2"),
        ]
        command = words if fresh else ["resume", str(self.run)]
        with self.said().open("w") as log:
            self.learner = self._start([sys.executable, str(CHECKED), str(self.tally(self.sitting)), *command], log)

    def start_actor(self) -> int:
        self.life += 1
        words = ["actor", "--connect", self.address, "--task", "tools.bench.actors:Counting", "--num-envs", "1"]
        command = [sys.executable, "-m", "pql", *words, f"life={self.life}", "pause=0.01"]
        self.actors[self.life] = self._start(command, self.log)
        return self.life

    def _start(self, command: list[str], log: IO[str]) -> subprocess.Popen[Any]:
        return subprocess.Popen(command, env=environment(self.token), stdout=log, stderr=log)

    def said(self) -> Path:
        """Return the file with the newest learner's output."""
        return self.folder / f"learner-{self.sitting}.log"

    def tally(self, sitting: int) -> Path:
        return self.folder / f"tally-{sitting}"

    def read(self, sitting: int) -> list[dict[str, Any]]:
        """Return the complete lines of a learner's tally."""
        return json_lines(self.tally(sitting))

    def rows(self) -> int:
        return int(next((one["rows"] for one in reversed(self.read(self.sitting)) if "rows" in one), 0))

    def met(self) -> set[int]:
        """Return the lives whose rows this learner has received."""
        lives: dict[str, int] = next((one["lives"] for one in reversed(self.read(self.sitting)) if "lives" in one), {})
        return {int(k) for k in lives}

    def until_back(self, kind: str, true: Callable[[], bool]) -> None:
        start = time.monotonic()
        wait(lambda: true() or self.ended(), 240, f"the {kind} is back")
        if status := self.ended():
            raise RuntimeError(f"the learner ended with status {status}")
        self.back[kind].append(time.monotonic() - start)

    def ended(self) -> int | None:
        """Return the learner's exit status, if it is not 0."""
        return self.learner.poll() if self.learner is not None else None

    def close(self) -> None:
        for process in (*self.actors.values(), self.learner):
            if process is not None:
                process.kill()
                process.wait()
        self.log.close()


def restarts(folder: Path, seconds: float, seed: int, pause: tuple[float, float]) -> dict[str, Any]:
    """Kill learner and actors by turns, at random moments, for ``seconds``; then end the run and count.

    Args:
        pause: range of the seconds between being back at work and the next kill.
    """
    both, rng, kills = Restarts(folder), random.Random(seed), {"learner": 0, "actor": 0}
    began = time.monotonic()
    try:
        both.start_learner()
        for _ in range(both.count):
            both.start_actor()
        wait(lambda: len(both.met()) == both.count, 240, "all actors step")
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            time.sleep(rng.uniform(*pause))
            kind = "learner" if kills["learner"] <= kills["actor"] else "actor"
            kills[kind] += 1
            if kind == "learner":
                assert both.learner is not None
                both.learner.kill()
                both.learner.wait()
                both.start_learner()
                both.until_back(kind, lambda: both.rows() > 0)
            else:
                life = rng.choice(sorted(both.actors))
                both.actors[life].kill()
                both.actors.pop(life).wait()
                new = both.start_actor()
                both.until_back(kind, lambda new=new: new in both.met())  # type: ignore[misc]
        wait(lambda: set(both.actors) <= both.met(), 200, "all actors step at the end")
        assert both.learner is not None
        both.learner.send_signal(signal.SIGTERM)
        status = both.learner.wait(120)
        left = [actor.wait(120) for actor in both.actors.values()]
        out = counted(both) | {"restarts": kills, "status": status, "actors": left, "back_s": both.back}
        out["seconds"] = time.monotonic() - began
        both.log.seek(0)
        logs = (both.log.read(), *(path.read_text() for path in folder.glob("learner-*.log")))
        out["tracebacks"] = sum(text.count("Traceback") for text in logs)
    except BaseException:
        print(f"after {(time.monotonic() - began) / 60:.1f} min: {kills} restarts, {counted(both)}", file=sys.stderr)
        print(both.said().read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        both.close()
    print(json.dumps(out), flush=True)
    return out


def counted(both: Restarts) -> dict[str, int]:
    """Add the counts of all learners; rows received after the last line of a killed learner are not included."""
    out = {"rows": 0, "torn": 0, "repeated": 0, "ring": 0, "ring_torn": 0, "ring_repeated": 0}
    for sitting in range(1, both.sitting + 1):
        lines = both.read(sitting)
        totals = [one for one in lines if "rows" in one][-1:] + [one for one in lines if "ring" in one]
        for one in totals:
            for name in out.keys() & one.keys():
                out[name] += one[name]
    return out


if __name__ == "__main__":
    sys.exit(main())
