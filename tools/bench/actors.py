"""Other processes for ``remote.py`` and ``load.py``: simulated actors, a bare echo, and clients that are to be refused.

    actors.py crowd KIND ADDRESS COUNT   COUNT actors of KIND (pixels, counting) in one asyncio loop. Commands on stdin:
                                         ``count``, ``measure SECONDS``, ``leave``; each is answered by a line of JSON
    actors.py strangers ADDRESS COUNT    COUNT connections of each of the ``KINDS``; prints a line of JSON
    actors.py trip ADDRESS ECHO          one actor; for each line on stdin (remote or echo, count) it prints p50 and p10
    actors.py echo ADDRESS               sends every message back

They need only NumPy and grpcio, as on an actor's machine. Each is a separate process because all grpc.aio loops of a
process wake at every message of any loop.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from pql.contract import plain
from pql.remote import protocol
from pql.remote.actor.client import OPTIONS

METHOD = f"/{protocol.SERVICE}/{protocol.METHOD}"
OWN = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # a connection for each channel
ENVS, FRAME = 32, (84, 84)  # of an actor of pixels
LENGTH = 50  # rows of an episode of ``Counting``
KINDS = ("no token", "wrong version", "garbage frame", "no HTTP/2", "no free slot")
AT_ONCE = 64  # connections under way
SAME: dict[str, Any] = {"autoreset": "same_step", "final_obs": "always", "log": [], "info": {}}
PIXELS = {"name": "pixels", "num_envs": ENVS, "obs": {"policy": [[4, *FRAME], "uint8", 4]}, "action": {"n": 6}}
PIXELS |= {"max_episode_steps": 1000, **SAME}
FACTS = {"name": "counting", "num_envs": 1, "obs": {"policy": [[4], "float32", 1]}, "action": {"n": 2}}
FACTS |= {"max_episode_steps": LENGTH, **SAME}


def main(role: str, *words: str) -> int:
    roles: dict[str, Callable[..., None]] = {"crowd": crowd, "strangers": strangers, "trip": trip, "echo": echo}
    roles[role](*words)
    return 0


# -- for the scripts that start these processes -----------------------------------------------------------------------


def environment(token: str = "") -> dict[str, str]:
    """Return the environment of a process that finds this checkout and has one thread."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**found, "PQL_TOKEN": token} if token else found


@contextmanager
def running(command: Sequence[str], token: str = "", **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a process until the end of the block."""
    with subprocess.Popen(command, env=environment(token), **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def puppet(*words: str, token: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start one of the processes above, with pipes for lines of text."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with running([sys.executable, __file__, *words], token, **pipes) as process:
        yield process


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    """Send a line, if there is one; return the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        print(line, file=process.stdin, flush=True)
    return process.stdout.readline()


def wait(true: Callable[[], Any], seconds: float, what: str) -> Any:
    """Return the first true value of ``true()``.

    Raises:
        TimeoutError: none within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not (value := true()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
    return value


# -- what an actor says -----------------------------------------------------------------------------------------------


class Frames:
    """Messages of an actor whose steps cost nothing: they are always the same, so they are packed once."""

    def __init__(self, number: int):
        self.run_id, layout = number + 1, protocol.Layout(PIXELS)
        obs = {"policy": np.random.default_rng(0).integers(0, 255, (ENVS, *FRAME), np.uint8)}
        no, zero = np.zeros(ENVS, bool), np.zeros(ENVS, np.float32)
        records: Any = plain
        step = layout.pack_step(0, 0, records.Step(obs, zero, no, no, no, obs, ~no, ~no, {}))
        self.hello = protocol.pack_json(protocol.HELLO, self.run_id, 0, {"spec": PIXELS, "role": "train"})
        self.bodies = {
            protocol.RESET: layout.pack_obs(0, 0, obs)[protocol.HEADER.size :],
            protocol.ACT: step[protocol.HEADER.size :],
        }

    def answer(self, order: bytes) -> bytes:
        """Return the answer to an order; nothing to the last one."""
        asked = protocol.unpack(order)
        if asked.kind == protocol.BYE:
            return b""
        kind = protocol.OBS if asked.kind == protocol.RESET else protocol.STEP
        return protocol.pack(kind, self.run_id, asked.seq, self.bodies[asked.kind])


class Counting:
    """Environments whose observation [4] is (life, environment, episode, row), all exact in float32.

    Args:
        life: number of this actor's process; differs between processes.
        pause: seconds of a step.
    """

    def __init__(self, num_envs: int, device: str = "cpu", life: int = 0, pause: float = 0.0):
        records: Any = plain  # declared with tensors where torch is installed
        spaces = {"policy": records.ObsSpec((4,), "float32")}, records.Discrete(2)
        limits = {"max_episode_steps": LENGTH, "final_obs": "always"}
        self.spec = records.EnvSpec("counting", num_envs, *spaces, device, **limits)
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


class Numbers:
    """Messages of an actor of one environment of ``Counting``."""

    def __init__(self, number: int):
        self.run_id, self.layout, self.sim = number + 1, protocol.Layout(FACTS), Counting(1, life=number)
        self.hello = protocol.pack_json(protocol.HELLO, self.run_id, 0, {"spec": FACTS, "role": "train"})

    def answer(self, order: bytes) -> bytes:
        """Return the answer to an order; nothing to the last one."""
        asked = protocol.unpack(order)
        if asked.kind == protocol.BYE:
            return b""
        if asked.kind == protocol.RESET:
            return self.layout.pack_obs(self.run_id, asked.seq, self.sim.reset())
        return self.layout.pack_step(self.run_id, asked.seq, self.sim.step(self.layout.read_action(asked.body)))


# -- many actors ------------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """The learner has closed the stream before WELCOME."""


class Crowd:
    """Actors in one loop, each a connection of its own.

    Attributes:
        steps: actor -> answers to ACT.
        trips: seconds from an answer to the next action, while ``timing``.
        admitted: seconds from the start until each admission; ``refused``: until each refusal.
    """

    def __init__(self, kind: str, address: str, count: int):
        self.kind: Callable[[int], Any] = {"pixels": Frames, "counting": Numbers}[kind]
        self.address = address
        self.steps, self.timing = [-1] * count, False  # the first answer is that to RESET
        self.trips: list[float] = []
        self.admitted: list[float] = []
        self.refused: list[float] = []
        self.codes: Counter[str] = Counter()

    async def act(self, number: int) -> None:
        actor, started, sent = self.kind(number), time.perf_counter(), 0.0
        async with grpc.aio.insecure_channel(self.address, options=OWN) as channel:
            stream = channel.stream_stream(METHOD)(metadata=credentials(), wait_for_ready=True)
            try:
                await stream.write(actor.hello)
                if await stream.read() is grpc.aio.EOF:
                    raise RefusedError
                self.admitted.append(time.perf_counter() - started)
                while (order := await stream.read()) is not grpc.aio.EOF:
                    if self.timing and sent:
                        self.trips.append(time.perf_counter() - sent)
                    if not (answer := actor.answer(order)):
                        return
                    self.steps[number] += 1
                    sent = time.perf_counter()
                    await stream.write(answer)
            except (grpc.aio.AioRpcError, RefusedError, asyncio.InvalidStateError):
                self.refused.append(time.perf_counter() - started)
                self.codes[(await stream.code()).name] += 1

    def facts(self) -> dict[str, Any]:
        out: dict[str, Any] = {"codes": dict(self.codes), "stepping": sum(steps > 0 for steps in self.steps)}
        for name, times in (("admitted", self.admitted), ("refused", self.refused)):
            out |= {name: len(times), f"last_{name}": max(times, default=0.0)}
        return out

    async def measure(self, seconds: float) -> dict[str, Any]:
        """Count steps and time round trips for ``seconds``."""
        before, start = list(self.steps), time.perf_counter()
        self.trips, self.timing = [], True
        await asyncio.sleep(seconds)
        self.timing, span = False, time.perf_counter() - start
        done = [b - a for a, b in zip(before, self.steps, strict=True) if b > 0]
        p50, p99 = np.percentile(np.array(self.trips or [float("nan")]) * 1e3, (50, 99))
        spread = {"least": min(done, default=0), "mean": float(np.mean(done or [0])), "most": max(done, default=0)}
        return {"steps_per_s": sum(done) / span, "p50_ms": float(p50), "p99_ms": float(p99), **spread}


def credentials() -> tuple[tuple[str, str], ...]:
    token = os.environ.get("PQL_TOKEN")
    return (("authorization", f"Bearer {token}"),) if token else ()


def crowd(kind: str, address: str, count: str) -> None:
    asyncio.run(command(Crowd(kind, address, int(count))))


async def command(many: Crowd) -> None:
    """Obey the commands on stdin."""
    actors = [asyncio.create_task(many.act(i)) for i in range(len(many.steps))]
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


def strangers(address: str, count: str) -> None:
    print(json.dumps(asyncio.run(knock(address, int(count)))), flush=True)


async def knock(address: str, count: int) -> dict[str, Any]:
    """Open ``count`` connections of each kind. Return kind -> outcomes and the times until the refusal, ms."""
    free, start = asyncio.Semaphore(AT_ONCE), time.perf_counter()
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

    await asyncio.gather(*(one(kind) for _ in range(count) for kind in KINDS))
    found: dict[str, Any] = {"outcomes": {kind: dict(counts) for kind, counts in outcomes.items()}}
    for q in (50, 99):
        found[f"p{q}_ms"] = {kind: float(np.percentile(v, q)) for kind, v in times.items()}
    return {"seconds": time.perf_counter() - start, **found}


async def stranger(address: str, kind: str) -> str:
    """Send one wrong HELLO. Return the status with which the stream ends."""
    hello = bytearray(protocol.pack_json(protocol.HELLO, 7, 0, {"spec": FACTS, "role": "train"}))
    if kind == "wrong version":
        hello[4:6] = (protocol.VERSION + 1).to_bytes(2, "little")
    if kind == "garbage frame":
        hello = bytearray(os.urandom(len(hello)))
    async with grpc.aio.insecure_channel(address, options=OWN) as channel:
        metadata = () if kind == "no token" else credentials()
        stream = channel.stream_stream(METHOD)(metadata=metadata, wait_for_ready=True)
        try:
            await stream.write(bytes(hello))
            await stream.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return str((await stream.code()).name) if stream.done() else "ADMITTED"


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


# -- one actor, timed, and the bare echo ------------------------------------------------------------------------------


class Stream:
    """Bidirectional stream as ``pql actor`` opens it; it waits for a server."""

    def __init__(self, address: str, method: str):
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.channel = grpc.insecure_channel(address, options=OWN)
        self.stream = self.channel.stream_stream(method)(iter(self.outbox.get, None), wait_for_ready=True)

    def __call__(self, message: bytes) -> bytes:
        self.outbox.put(message)
        return next(self.stream)


def trip(address: str, bare: str) -> None:
    actor, far, lines = Stream(address, METHOD), Stream(bare, "/Echo/Echo"), Frames(0)
    actor(lines.hello)
    order = next(actor.stream)
    frames = lines.answer(actor(lines.answer(order)))
    for line in sys.stdin:
        which, count = line.split()
        times = []
        for _ in range(int(count)):
            start = time.perf_counter()
            heard = actor(frames) if which == "remote" else far(frames)
            times.append(1e3 * (time.perf_counter() - start))
            if which == "remote":
                frames = lines.answer(heard)  # packed outside the timed part
        print(statistics.median(times), sorted(times)[len(times) // 10], flush=True)


def echo(address: str) -> None:
    async def answer(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def serve() -> None:
        server = grpc.aio.server(options=OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"Echo": handler}),))
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
