"""Other processes for ``remote.py``, simulated actors and a bare echo, and a simulator for ``long_runs.py``.

    actors.py crowd ADDRESS COUNT   COUNT actors in one asyncio loop
    actors.py trip ADDRESS ECHO     one actor; for each line on stdin (remote or echo, count) it prints p50 and p10
    actors.py echo ADDRESS          sends every message back

They need only NumPy and grpcio, as on an actor's machine. Each is a separate process because all grpc.aio loops of a
process wake at every message of any loop.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
SAME: dict[str, Any] = {"autoreset": "same_step", "final_obs": "always", "log": [], "info": {}}
PIXELS = {"name": "pixels", "num_envs": ENVS, "obs": {"policy": [[4, *FRAME], "uint8", 4]}, "action": {"n": 6}}
PIXELS |= {"max_episode_steps": 1000, **SAME}


def main(role: str, *words: str) -> int:
    roles: dict[str, Callable[..., None]] = {"crowd": crowd, "trip": trip, "echo": echo}
    roles[role](*words)
    return 0


# -- for the scripts that start these processes -----------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Return the environment of a process that finds this checkout and has one thread."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def puppet(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run one of the processes above until the end of the block, with pipes for lines of text."""
    command = [sys.executable, __file__, *words]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


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


# -- many actors ------------------------------------------------------------------------------------------------------


async def act(address: str, number: int) -> None:
    """Answer a learner's orders until it says goodbye."""
    actor = Frames(number)
    async with grpc.aio.insecure_channel(address, options=OWN) as channel:
        stream = channel.stream_stream(METHOD)(wait_for_ready=True)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(actor.hello)
            await stream.read()  # WELCOME
            while (order := await stream.read()) is not grpc.aio.EOF:
                if not (answer := actor.answer(order)):
                    return
                await stream.write(answer)


def crowd(address: str, count: str) -> None:
    async def every() -> None:
        await asyncio.gather(*(act(address, number) for number in range(int(count))))

    asyncio.run(every())


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
