"""Remote actors against the same environments in this process, and the wire against a bare echo of the same bytes.

    python tools/bench_remote.py --json rows.json

Everything goes over a unix socket. Actors are processes of their own, without torch unless their simulator needs it.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc
import numpy as np
import torch
from _bench import alternate, compare, report

from pql import wire
from pql.actor.client import OPTIONS
from pql.env import make_env
from pql.envs.remote import Remote

FRAMES = (84, 84)
PIXELS = {
    "name": "pixels", "num_envs": 32, "obs": {"policy": [[4, *FRAMES], "uint8", 4]}, "action": {"n": 6},
    "max_episode_steps": 1000, "autoreset": "same_step", "final_obs": "always", "log": [], "info": {},
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of every environment, a round")
    parser.add_argument("--actors", type=int, default=64, help="most simulated actors at once")
    parser.add_argument("--game", default="pong", help="a game of ale_py's")
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run at all?")
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        return be_client(*args.client)
    if args.smoke:
        args.rounds, args.steps, args.actors = 1, 4, 2
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rows += stepping(folder, args)
        rows += round_trips(folder, args)
        rows += ceiling(folder, args)
    report(rows, args.json)
    return 0


# -- frames per second ------------------------------------------------------------------------------------------------


def stepping(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """2 actors of 32 consoles each, and the same 64 consoles here in two groups: random actions, no learner."""
    address = f"unix:{folder}/step"
    words = [sys.executable, "-m", "pql.main", "actor", "--connect", address, "--task", "atari", "--num-envs", "32"]
    actors = [subprocess.Popen([*words, f"game={args.game}", "threads=1"], stderr=subprocess.DEVNULL) for _ in range(2)]
    remote = Remote(64, listen=address, groups=2)
    local: Any = make_env("atari", 64, game=args.game, groups=2, threads=1)
    wait(lambda: remote.hall.live == 2)
    try:
        for env in (remote, local):
            env.reset(0)
        steps = {"remote": alternating(remote, remote.answers), "local": alternating(local, lambda group: local.recv())}
        rates = alternate({k: partial(step, args.steps) for k, step in steps.items()}, args.rounds)
    finally:
        remote.close()
        local.close()
        for actor in actors:
            actor.wait(10)
    return [compare("env steps: 2 actors of 32 / 64 in this process", "1/s", rates["remote"], rates["local"])]


def alternating(env: Any, receive: Callable[[int], Any]) -> Callable[[int], float]:
    """Steps both groups by turns, one always under way. Returns transitions per second."""
    ids = torch.arange(env.spec.num_envs).chunk(2)
    action = torch.zeros(len(ids[0]), dtype=torch.int64)

    def run(steps: int) -> float:
        start, done = time.perf_counter(), [0, 0]
        for group in (0, 1):
            env.send(action, ids[group])
        while sum(done) < 2 * steps:
            for group in (0, 1):
                if done[group] < steps:
                    took = receive(group)[0]
                    done[group] += len(took) > 0
                    if len(took) and done[group] < steps:
                        env.send(action, took)
        return 2 * steps * len(ids[0]) / (time.perf_counter() - start)

    return run


# -- one round trip ---------------------------------------------------------------------------------------------------


def round_trips(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """p50 of an actor's message of 32 frames until it has its actions, and of the same bytes through a bare echo.

    The actor, and who talks to the echo, are one other process.
    """
    address, bare, count = f"unix:{folder}/trip", f"unix:{folder}/echo", max(10, args.steps)
    words = [sys.executable, __file__, "--client", address, bare]
    with Echo(bare), subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        env, stop = Remote(32, listen=address, wait=0.0), threading.Event()
        env.hall.reset(0)
        thread = threading.Thread(target=serve, args=(env, stop), daemon=True)
        thread.start()

        def ask(which: str) -> float:
            assert client.stdin is not None
            assert client.stdout is not None
            print(which, count, file=client.stdin, flush=True)
            return float(client.stdout.readline())

        rates = alternate({which: lambda which=which: ask(which) for which in ("remote", "echo")}, args.rounds)
        client.kill()
        stop.set()
        thread.join(5)
        env.close()
    return [compare("p50 round trip, 32 frames / bare echo", "ms", rates["remote"], rates["echo"])]


def be_client(address: str, bare: str) -> int:
    """Measure what each line on stdin names."""
    actor = knock(address, PIXELS)
    actor.begin()
    echo = EchoClient(bare)
    calls = {"remote": actor.step, "echo": lambda: echo.send(actor.message)}
    for line in sys.stdin:
        which, count = line.split()
        print(p50(calls[which], int(count)), flush=True)
    return 0


def serve(env: Remote, stop: threading.Event) -> None:
    """Answer every actor at once, with the same actions."""
    action = torch.zeros(env.spec.num_envs, dtype=torch.int64)
    groups = range(env.spec.groups)
    while not stop.is_set():
        for group in groups:
            ids, _ = env.answers(group)
            if len(ids):
                env.send(action[: len(ids)], ids)


def p50(call: Callable[[], None], count: int) -> float:
    """Median, in milliseconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


class Said:
    """A message, ready to be sent again and again: an actor whose simulator takes no time at all."""

    def __init__(self, address: str, facts: dict[str, Any]):
        self.layout, self.outbox, self.run_id = wire.Layout(facts), SimpleQueue[bytes | None](), id(self)
        k = facts["num_envs"]
        self.obs = {"policy": np.random.default_rng(0).integers(0, 255, (k, *FRAMES), np.uint8)}
        self.channel = grpc.insecure_channel(address, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
        self.stream = self.channel.stream_stream(f"/{wire.SERVICE}/{wire.METHOD}")(iter(self.outbox.get, None))
        self.outbox.put(wire.pack_json(wire.HELLO, self.run_id, 0, {"spec": facts, "role": "train"}))
        next(self.stream)
        no = np.zeros(k, bool)
        zero = np.zeros(k, np.float32)
        self.row = Row(self.obs, zero, no, no, no, self.obs, ~no, ~no, {})
        self.message = self.layout.pack_step(self.run_id, 0, self.row)

    def begin(self) -> None:
        """Answer the order for first observations, and wait for the first actions."""
        order = wire.unpack(next(self.stream))
        self.outbox.put(self.layout.pack_obs(self.run_id, order.seq, self.obs))
        self.seq = wire.unpack(next(self.stream)).seq

    def step(self) -> None:
        self.send_now()
        self.seq = wire.unpack(next(self.stream)).seq

    def send_now(self) -> None:
        size = len(self.message) - wire.HEADER.size
        head = wire.HEADER.pack(wire.MAGIC, wire.VERSION, wire.STEP, 0, self.run_id, self.seq, size, 0)
        self.outbox.put(head + self.message[32:])

    def close(self) -> None:
        self.outbox.put(None)
        self.stream.cancel()
        self.channel.close()


class Row(NamedTuple):
    """A step, as ``wire.Layout.pack_step`` wants it."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    first: Any
    final_obs: Any
    final_ok: Any
    valid: Any
    log: dict[str, Any]


def knock(address: str, facts: dict[str, Any]) -> Said:
    """An actor, as soon as there is a learner."""
    while True:
        try:
            return Said(address, facts)
        except grpc.RpcError:
            time.sleep(0.1)


class Puppet:
    """``count`` such actors, and the learner's side."""

    def __init__(self, address: str, count: int, envs: int = 32):
        facts, self.actors = {**PIXELS, "num_envs": envs}, list[Said]()
        first = threading.Thread(target=lambda: self.actors.append(knock(address, facts)))
        first.start()
        self.env = Remote(count * envs, listen=address, wait=0.0, groups=1 if count == 1 else 2)
        first.join()
        self.actors += [Said(address, facts) for _ in range(count - 1)]
        self.env.hall.reset(0)

    def __enter__(self) -> "Puppet":
        with futures.ThreadPoolExecutor(len(self.actors)) as pool:
            begun = [pool.submit(actor.begin) for actor in self.actors]
            action = torch.zeros(self.env.spec.num_envs, dtype=torch.int64)
            while not all(f.done() for f in begun):
                for group in range(self.env.spec.groups):
                    ids, _ = self.env.answers(group)
                    if len(ids):
                        self.env.send(action[: len(ids)], ids)
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            actor.close()
        self.env.close()


class Echo:
    """A bare gRPC server that sends back what it gets."""

    def __init__(self, address: str):
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def echo(_: Any, context: Any) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(message)

        async def begin() -> None:
            self.server = grpc.aio.server(options=OPTIONS)
            handler = grpc.stream_stream_rpc_method_handler(echo)
            self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"Echo": handler}),))
            self.server.add_insecure_port(address)
            await self.server.start()
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self.loop)
            self.loop.create_task(begin())
            self.loop.run_forever()

        threading.Thread(target=run, daemon=True).start()
        ready.wait()

    def __enter__(self) -> "Echo":
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(None), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)


class EchoClient:
    def __init__(self, address: str):
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.channel = grpc.insecure_channel(address, options=OPTIONS)
        self.stream = self.channel.stream_stream("/Echo/Echo")(iter(self.outbox.get, None))

    def send(self, message: bytes) -> None:
        self.outbox.put(message)
        next(self.stream)


# -- the server's ceiling ---------------------------------------------------------------------------------------------


def ceiling(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Frames per second of a learner's side that does nothing but answer, by simulated actors of 32 environments.

    The actors are threads of this process, and share its processors: what is left for the server is less than with
    actors elsewhere.
    """
    rows, most = [], args.actors
    baseline: list[float] | None = None
    for count in sorted({1, 2, 4, 16, 64} & set(range(1, most)) | {most}):
        with Puppet(f"unix:{folder}/c{count}", count) as puppet:
            work = partial(flood, puppet, max(2, args.steps * 2 // count))
            rates = alternate({"frames": work}, args.rounds)["frames"]
        baseline = baseline or rates
        rows.append(compare(f"server, {count} actors of 32 pixels environments", "1/s", rates, baseline))
    return rows


def flood(puppet: Puppet, steps: int) -> float:
    """Every actor makes ``steps`` steps as fast as it is answered. Returns transitions per second."""
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(puppet.env, stop), daemon=True)
    thread.start()
    start = time.perf_counter()
    with futures.ThreadPoolExecutor(len(puppet.actors)) as pool:
        list(pool.map(lambda actor: [actor.step() for _ in range(steps)], puppet.actors))
    rate = puppet.env.spec.num_envs * steps / (time.perf_counter() - start)
    stop.set()
    thread.join(5)
    return rate


def wait(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.05)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
