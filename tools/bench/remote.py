"""Remote actors against the same environments in this process, and their protocol against a bare echo of the same
bytes.

All traffic uses a unix socket. Actors are separate processes, without torch unless their simulator needs it.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pql.contract.env import make_env
from pql.remote.env import Remote
from tools.bench.actors import ENVS, ask, environment, puppet, wait
from tools.bench.common import Row, alternate, compare, options, report


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="steps of every environment per round")
    parser.add_argument("--actors", type=int, default=64, help="largest number of simulated actors")
    parser.add_argument("--game", default="pong", help="an Atari game")
    args = parser.parse_args(argv)
    args.consoles = 32  # of an actor
    if args.smoke:
        args.rounds, args.steps, args.actors, args.consoles = 1, 4, 2, 2
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rows += stepping(folder, args)
        rows += round_trips(folder, args)
        rows += ceiling(folder, args)
    report(rows, args.json)
    return 0


def stepping(folder: str, args: argparse.Namespace) -> list[Row]:
    """Compare 2 actors of 32 consoles each with the same 64 consoles here in two groups: random actions, no learner."""
    address, count = f"unix:{folder}/step", args.consoles
    command = [sys.executable, "-m", "pql", "actor", "--connect", address, "--task", "atari", f"--num-envs={count}"]
    command += [f"game={args.game}", "threads=1"]
    actors = [subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment()) for _ in range(2)]
    remote = Remote(2 * count, listen=address, groups=2)
    local: Any = make_env("atari", 2 * count, game=args.game, groups=2, threads=1)
    wait(lambda: remote.table.live == 2, 120, "both actors are connected")
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
    name = f"env steps: 2 actors of {count} / {2 * count} in this process"
    return [compare(name, "1/s", rates["remote"], rates["local"])]


def alternating(env: Any, receive: Callable[[int], Any]) -> Callable[[int], float]:
    """Step both groups by turns, one always under way. Return transitions per second."""
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


def round_trips(folder: str, args: argparse.Namespace) -> list[Row]:
    """Compare the time from an actor's message of 32 frames to its actions with the same bytes through a bare echo.

    The actor and the echo's client are one other process; the echo is a third. With other load on the machine, the
    median includes the time for which threads wait for a core; the 10 % quantile shows the work per message.
    """
    address, bare, count = f"unix:{folder}/trip", f"unix:{folder}/echo", max(10, args.steps)
    with puppet("echo", bare), puppet("trip", address, bare) as client:
        env, stop = Remote(ENVS, listen=address, wait=0.0), threading.Event()
        env.table.reset(0)
        thread = threading.Thread(target=answer, args=(env, lambda _: stop.is_set()), daemon=True)
        thread.start()

        times: dict[str, list[list[float]]] = {"remote": [], "echo": []}
        for _ in range(args.rounds + 1):
            for which, rounds in times.items():
                rounds.append([float(word) for word in ask(client, f"{which} {count}").split()])
        stop.set()
        thread.join(5)
        env.close()
    mine, theirs = (list(zip(*times[which][1:], strict=True)) for which in ("remote", "echo"))  # all but the first
    names = ("p50 round trip, 32 frames / bare echo", "p10 round trip, 32 frames / bare echo")
    return [compare(name, "ms", list(a), list(b)) for name, a, b in zip(names, mine, theirs, strict=True)]


def answer(env: Remote, over: Callable[[int], bool]) -> int:
    """Send the same actions to every actor as soon as it has answered. Return the number of messages."""
    action, done = torch.zeros(env.spec.num_envs, dtype=torch.int64), 0
    while not over(done):
        for group in range(env.spec.groups):
            ids, _ = env.answers(group)
            if len(ids):
                env.send(action[: len(ids)], ids)
                done += len(ids) // ENVS
    return done


def ceiling(folder: str, args: argparse.Namespace) -> list[Row]:
    """Measure a server that only answers: frames per second and processor time per message.

    Simulated actors of 32 environments run in one other process and share the machine's cores.
    """
    rows, most = [], args.actors
    base: dict[str, list[float]] = {}
    for count in sorted({1, 2, 4, 16, 64} & set(range(1, most)) | {most}):
        rates, costs = flood(f"unix:{folder}/c{count}", count, args)
        base = base or {"rates": rates, "costs": costs}
        rows += [
            compare(f"server, {count} actors of {ENVS} pixels environments / 1", "1/s", rates, base["rates"]),
            compare(f"server, {count} actors: processor time a message / 1", "ms", costs, base["costs"]),
        ]
    return rows


def flood(address: str, count: int, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Let ``count`` actors step as fast as they are answered.

    Return, for each round, transitions per second and this process's milliseconds of processor time per message.
    """
    rates, costs, messages = [], [], max(4 * count, args.steps * 2)
    with puppet("crowd", address, str(count)):
        env = Remote(count * ENVS, listen=address, wait=0.0, groups=1 if count == 1 else 2)
        wait(lambda: env.table.live == count, 120, "all actors are connected")
        env.table.reset(0)
        for turn in range(args.rounds + 1):
            start, cpu = time.perf_counter(), time.process_time()
            done = answer(env, lambda done: done >= messages)
            if turn > 0:
                rates.append(done * ENVS / (time.perf_counter() - start))
                costs.append(1e3 * (time.process_time() - cpu) / done)
        env.close()
    return rates, costs


if __name__ == "__main__":
    sys.exit(main())
