"""Other processes for ``bench_load.py``: many light actors, clients that are to be refused, and a learner that checks.

    _load.py crowd ADDRESS COUNT      COUNT actors of one environment in one asyncio loop. Commands on stdin: ``count``,
                                      ``measure SECONDS``, ``leave``; each is answered by a line of JSON
    _load.py strangers ADDRESS COUNT  COUNT connections of each of the ``KINDS``; prints a line of JSON
    _load.py learner TALLY WORDS ...  ``pql WORDS ...``; it checks each row of the replay and appends counts to TALLY

``Counting`` is the simulator of real actors: its observations number every row.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from pql.contract import plain
from pql.remote import protocol
from pql.remote.actor.client import OPTIONS

METHOD = f"/{protocol.SERVICE}/{protocol.METHOD}"
OWN = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # a connection for each channel
FACTS = {
    "name": "counting",
    "num_envs": 1,
    "obs": {"policy": [[4], "float32", 1]},
    "action": {"n": 2},
    "max_episode_steps": 50,
    "autoreset": "same_step",
    "final_obs": "always",
    "log": [],
    "info": {},
}
LENGTH = 50  # rows of an episode
KINDS = ("no token", "wrong version", "garbage frame", "no HTTP/2", "no free slot")
AT_ONCE = 64  # connections under way


def main(role: str, *words: str) -> int:
    roles: dict[str, Callable[..., int]] = {"crowd": crowd, "strangers": strangers, "learner": learner}
    return roles[role](*words)


class Counting:
    """Environments whose observation [4] is (life, environment, episode, row), all exact in float32.

    Args:
        life: number of this actor's process; differs between processes.
        pause: seconds of a step.
    """

    def __init__(self, num_envs: int, device: str = "cpu", life: int = 0, pause: float = 0.0):
        records: Any = plain  # declared with tensors where torch is installed
        obs = {"policy": records.ObsSpec((4,), "float32")}
        self.spec = records.EnvSpec(
            "counting", num_envs, obs, records.Discrete(2), device, max_episode_steps=LENGTH, final_obs="always"
        )
        self.pause, self.state = pause, np.zeros((num_envs, 4), np.float32)
        self.state[:, 0], self.state[:, 1] = life, np.arange(num_envs)

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        self.state[:, 2] += 1  # never an episode twice
        self.state[:, 3] = 0
        return {"policy": self.state.copy()}

    def step(self, action: np.ndarray) -> Any:
        records: Any = plain
        time.sleep(self.pause)
        self.state[:, 3] += 1
        final, over = self.state.copy(), self.state[:, 3] >= LENGTH
        self.state[over, 2] += 1
        self.state[over, 3] = 0
        no, obs = np.zeros(len(over), bool), {"policy": self.state.copy()}
        return records.Step(obs, final[:, 3].copy(), no, over, over, {"policy": final}, ~no, ~no, {})

    def close(self) -> None:
        pass


def credentials() -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {os.environ['PQL_TOKEN']}"),)


# -- many actors ------------------------------------------------------------------------------------------------------


class Crowd:
    """Actors in one loop, each a connection of its own.

    Attributes:
        steps: actor -> answers to ACT.
        trips: seconds from an answer to the next action, while ``timing``.
        admitted: seconds from the start until each admission; ``refused``: until each refusal.
    """

    def __init__(self, address: str, count: int):
        self.address, self.count = address, count
        self.steps = [0] * count
        self.trips: list[float] = []
        self.timing = False
        self.admitted: list[float] = []
        self.refused: list[float] = []
        self.codes: Counter[str] = Counter()

    async def act(self, number: int) -> None:
        run_id, layout, started = number + 1, protocol.Layout(FACTS), time.perf_counter()
        sim = Counting(1, life=number)
        async with grpc.aio.insecure_channel(self.address, options=OWN) as channel:
            stream = channel.stream_stream(METHOD)(metadata=credentials(), wait_for_ready=True)
            try:
                await stream.write(protocol.pack_json(protocol.HELLO, run_id, 0, {"spec": FACTS, "role": "train"}))
                if await stream.read() is grpc.aio.EOF:
                    raise_for(await stream.code())
                self.admitted.append(time.perf_counter() - started)
                sent = 0.0
                while (message := await stream.read()) is not grpc.aio.EOF:
                    if self.timing and sent:
                        self.trips.append(time.perf_counter() - sent)
                    asked = protocol.unpack(message)
                    if asked.kind == protocol.BYE:
                        return
                    if asked.kind == protocol.RESET:
                        answer = layout.pack_obs(run_id, asked.seq, sim.reset())
                    else:
                        answer = layout.pack_step(run_id, asked.seq, sim.step(layout.read_action(asked.body)))
                        self.steps[number] += 1
                    sent = time.perf_counter()
                    await stream.write(answer)
            except (grpc.aio.AioRpcError, RefusedError, asyncio.InvalidStateError):
                self.refused.append(time.perf_counter() - started)
                self.codes[(await stream.code()).name] += 1

    def facts(self) -> dict[str, Any]:
        return {
            "admitted": len(self.admitted),
            "last_admitted": max(self.admitted, default=0.0),
            "refused": len(self.refused),
            "last_refused": max(self.refused, default=0.0),
            "codes": dict(self.codes),
            "stepping": sum(steps > 0 for steps in self.steps),
        }

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Count steps and time round trips for ``seconds``."""
        before, start = list(self.steps), time.perf_counter()
        self.trips, self.timing = [], True
        await asyncio.sleep(seconds)
        self.timing, span = False, time.perf_counter() - start
        done = [b - a for a, b in zip(before, self.steps, strict=True) if b]
        trips = np.array(self.trips or [float("nan")]) * 1e3
        return {
            "steps_per_s": sum(done) / span,
            "p50_ms": float(np.percentile(trips, 50)),
            "p99_ms": float(np.percentile(trips, 99)),
            "least": min(done, default=0),
            "mean": float(np.mean(done or [0])),
            "most": max(done, default=0),
        }


class RefusedError(Exception):
    """The learner has closed the stream before WELCOME."""


def raise_for(code: grpc.StatusCode) -> None:
    raise RefusedError(code.name)


def crowd(address: str, count: str) -> int:
    asyncio.run(command(Crowd(address, int(count))))
    return 0


async def command(many: Crowd) -> None:
    """Obey the commands on stdin."""
    actors = [asyncio.create_task(many.act(i)) for i in range(many.count)]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).split():
        if line[0] == b"leave":
            break
        facts = many.facts() if line[0] == b"count" else await many.measure(float(line[1]))
        print(json.dumps(facts), flush=True)
    for actor in actors:
        actor.cancel()
    await asyncio.gather(*actors, return_exceptions=True)


# -- connections that are refused -------------------------------------------------------------------------------------


def strangers(address: str, count: str) -> int:
    print(json.dumps(asyncio.run(knock(address, int(count)))), flush=True)
    return 0


async def knock(address: str, count: int) -> dict[str, Any]:
    """Open ``count`` connections of each kind. Return kind -> outcomes and the times until the refusal, ms."""
    free = asyncio.Semaphore(AT_ONCE)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}

    async def one(kind: str) -> None:
        async with free:
            start = time.perf_counter()
            try:
                async with asyncio.timeout(60):
                    outcome = await (junk(address) if kind == "no HTTP/2" else stranger(address, kind))
            except TimeoutError:
                outcome = "no answer"
            times[kind].append(1e3 * (time.perf_counter() - start))
            outcomes[kind][outcome] += 1

    start = time.perf_counter()
    await asyncio.gather(*(one(kind) for _ in range(count) for kind in KINDS))
    return {
        "seconds": time.perf_counter() - start,
        "outcomes": {kind: dict(counts) for kind, counts in outcomes.items()},
        "p50_ms": {kind: float(np.percentile(v, 50)) for kind, v in times.items()},
        "p99_ms": {kind: float(np.percentile(v, 99)) for kind, v in times.items()},
    }


async def stranger(address: str, kind: str) -> str:
    """Send one wrong HELLO. Return the status with which the stream ends."""
    hello = bytearray(protocol.pack_json(protocol.HELLO, 7, 0, {"spec": FACTS, "role": "train"}))
    if kind == "wrong version":
        hello[4:6] = (protocol.VERSION + 1).to_bytes(2, "little")
    if kind == "garbage frame":
        hello = bytearray(os.urandom(len(hello)))
    shown = () if kind == "no token" else credentials()
    async with grpc.aio.insecure_channel(address, options=OWN) as channel:
        stream = channel.stream_stream(METHOD)(metadata=shown, wait_for_ready=True)
        try:
            await stream.write(bytes(hello))
            await stream.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        if not stream.done():
            return "ADMITTED"
        return str((await stream.code()).name)


async def junk(address: str) -> str:
    """Send bytes that are not HTTP/2. Return ``closed`` once the learner has closed the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"GET / HTTP/1.0\r\n\r\n" + os.urandom(64))
        while await reader.read(4096):
            pass
    except ConnectionError:
        pass
    finally:
        writer.close()
    return "closed"


# -- a learner that checks --------------------------------------------------------------------------------------------


class Checker:
    """Checks each row as it is written into the replay, and that none is there twice.

    Attributes:
        rows: valid rows received; ``torn``: those whose successor does not follow them; ``repeated``: rows that were
            received before, in any column.
    """

    def __init__(self, tally: Path):
        self.tally, self.said = tally.open("a", buffering=1), 0.0
        self.rows = self.torn = self.repeated = 0
        self.newest: dict[tuple[float, float], tuple[float, float]] = {}  # life, environment -> episode, row
        self.lives: Counter[int] = Counter()

    def insert(self, replay: Any, step: Any, columns: Any, arrived: Any) -> None:
        """Check the rows that are about to be written."""
        at = replay.columns if columns is None else columns
        store, n = replay.obs["policy"], replay.num_envs
        before = store[replay.live.head[at] % replay.rows * n + at].numpy()
        after, final = step.obs["policy"].numpy(), step.final_obs["policy"].numpy()
        first, valid = step.first.tolist(), step.valid.tolist()
        for i, here in enumerate([True] * len(at) if arrived is None else arrived.tolist()):
            if here and valid[i]:
                self._row(before[i], final[i] if first[i] else after[i], after[i], first[i])
        if time.monotonic() - self.said > 0.2:
            self.say()

    def _row(self, before: Any, successor: Any, after: Any, first: bool) -> None:
        self.rows += 1
        self.lives[int(before[0])] += 1
        follows = (successor == before + np.array([0, 0, 0, 1], np.float32)).all()
        begins = not first or (after == [before[0], before[1], before[2] + 1, 0]).all()
        self.torn += not (follows and begins)
        who, where = (float(before[0]), float(before[1])), (float(before[2]), float(before[3]))
        self.repeated += who in self.newest and where <= self.newest[who]
        self.newest[who] = where

    def say(self) -> None:
        self.said = time.monotonic()
        facts = {"rows": self.rows, "torn": self.torn, "repeated": self.repeated, "lives": dict(self.lives)}
        print(json.dumps(facts), file=self.tally)


def check_ring(replay: Any) -> dict[str, int]:
    """Count valid rows that can be drawn, rows that are there twice, and rows not followed by their successor."""
    n, heads = replay.num_envs, replay.live.head.tolist()
    seen: Counter[bytes] = Counter()
    torn = 0
    for column, head in enumerate(heads):
        oldest = max(0, head - (replay.rows - replay.guard))
        for row in range(oldest, head):
            cell = row % replay.rows * n + column
            flags = replay.flags[cell : cell + 1].int()
            if not bool(replay.rule("valid", flags)):
                continue
            here = replay.obs["policy"][cell]
            seen[here.numpy().tobytes()] += 1
            if bool(replay.rule("goes on", flags)):
                after = replay.obs["policy"][(row + 1) % replay.rows * n + column]
                torn += int(after[3] != here[3] + 1 or (after[:3] != here[:3]).any())
    return {"ring": len(seen), "ring_repeated": sum(seen.values()) - len(seen), "ring_torn": torn}


def learner(tally: str, *words: str) -> int:
    from pql.cli.main import main as pql
    from pql.data.replay import Replay

    checker = Checker(Path(tally))
    found: list[Any] = []
    original = Replay.insert

    def insert(self: Any, acted: Any, step: Any, columns: Any = None, arrived: Any = None) -> None:
        found[:] = [self]
        checker.insert(self, step, columns, arrived)
        original(self, acted, step, columns, arrived)

    Replay.insert = insert  # type: ignore[method-assign]
    try:
        return pql(list(words))
    finally:
        checker.say()
        if found:
            print(json.dumps(check_ring(found[0])), file=checker.tally)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
