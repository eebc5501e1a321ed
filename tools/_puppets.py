"""Other processes for ``bench_remote.py``: simulated actors that cost no simulation time, and a bare echo.

They need only NumPy and grpcio, as on an actor's machine. Each is a separate process because all grpc.aio loops of a
process wake at every message of any loop.

    _puppets.py trip ADDRESS ECHO     one actor; for each line on stdin (remote or echo, count) it prints p50 and p10
    _puppets.py crowd ADDRESS COUNT   COUNT actors that answer at once, until the learner's BYE
    _puppets.py echo ADDRESS          sends every message back
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc
import numpy as np

from pql.remote import protocol
from pql.remote.actor.client import OPTIONS

ENVS, FRAME = 32, (84, 84)
PIXELS = {
    "name": "pixels",
    "num_envs": ENVS,
    "obs": {"policy": [[4, *FRAME], "uint8", 4]},
    "action": {"n": 6},
    "max_episode_steps": 1000,
    "autoreset": "same_step",
    "final_obs": "always",
    "log": [],
    "info": {},
}
ACT = f"/{protocol.SERVICE}/{protocol.METHOD}"
OWN = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # a connection for each channel


def main(role: str, *words: str) -> int:
    roles: dict[str, Callable[..., None]] = {"trip": trip, "crowd": crowd, "echo": echo}
    roles[role](*words)
    return 0


class Row(NamedTuple):
    """A step, in the fields that ``protocol.Layout.pack_step`` reads."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    final_obs: Any
    final_ok: Any
    valid: Any
    log: dict[str, Any]


class Lines:
    """Messages of a simulated actor. Its steps are always the same, so they are packed once."""

    def __init__(self, run_id: int):
        self.run_id, layout = run_id, protocol.Layout(PIXELS)
        obs = {"policy": np.random.default_rng(0).integers(0, 255, (ENVS, *FRAME), np.uint8)}
        no, zero = np.zeros(ENVS, bool), np.zeros(ENVS, np.float32)
        step = layout.pack_step(0, 0, Row(obs, zero, no, no, no, obs, ~no, ~no, {}))
        self.hello = protocol.pack_json(protocol.HELLO, run_id, 0, {"spec": PIXELS, "role": "train"})
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


# -- one actor, timed -------------------------------------------------------------------------------------------------


class Stream:
    """Bidirectional stream as ``pql actor`` opens it; it waits for a server."""

    def __init__(self, address: str, method: str):
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.channel = grpc.insecure_channel(address, options=OWN)
        call = self.channel.stream_stream(method)
        self.stream = call(iter(self.outbox.get, None), wait_for_ready=True)

    def __call__(self, message: bytes) -> bytes:
        self.outbox.put(message)
        return next(self.stream)


def trip(address: str, bare: str) -> None:
    actor, far, lines = Stream(address, ACT), Stream(bare, "/Echo/Echo"), Lines(1)
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


# -- many actors ------------------------------------------------------------------------------------------------------


def crowd(address: str, count: str) -> None:
    async def act(number: int) -> None:
        lines = Lines(number)
        async with grpc.aio.insecure_channel(address, options=OWN) as channel:
            stream = channel.stream_stream(ACT)(wait_for_ready=True)
            await stream.write(lines.hello)
            await stream.read()
            while answer := lines.answer(await stream.read()):
                await stream.write(answer)

    async def everybody() -> None:
        await asyncio.gather(*map(act, range(int(count))))

    asyncio.run(everybody())


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
