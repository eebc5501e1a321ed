"""Two processes as the ranks of one run, for the tests; each calls the functions that a test names."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 250.0  # seconds; on a busy machine importing torch alone is slow


class Pair:
    """``pair(f, x)`` calls ``f(x)`` in both and returns both results, by rank; it raises an error of either."""

    def __init__(self, size: int = 2):
        context = multiprocessing.get_context("forkserver")  # does slow imports once, for all pairs
        context.set_forkserver_preload(["torch", "pql.run.session", "pql.algos.ppo"])
        port, self.pipes, self.processes = free_port(), [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        results = self.outcomes(function, *args)
        for rank, (error, result) in enumerate(results):
            assert error is None, f"rank {rank}:\n{result}"
        return [result for _, result in results]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[str | None, Any]]:
        """Return by rank: (None, result), or (the error's type, its traceback and message)."""
        self.ask(function, *args)
        return [self.answer(rank) for rank in range(len(self.pipes))]

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call in both."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))

    def answer(self, rank: int) -> tuple[str | None, Any]:
        """Wait for the outcome of a call, as ``outcomes`` returns it."""
        if not self.pipes[rank].poll(PATIENCE):
            return ("Hang", f"no answer in {PATIENCE:.0f} s")
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join(5)
            return ("Exit", self.processes[rank].exitcode)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # the processes see the end and exit
        for process in self.processes:
            process.join(10)
            process.kill()


@contextmanager
def pair(size: int = 2) -> Iterator[Pair]:
    both = Pair(size)
    try:
        yield both
    finally:
        both.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def place(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a process."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {**{k: str(v) for k, v in names.items()}, "MASTER_ADDR": "127.0.0.1"}


def _serve(pipe: Any, rank: int, size: int, port: int) -> None:
    os.environ.update(place(rank, size, port))
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (None, function(*args))
        except BaseException as error:
            answer = (type(error).__name__, f"{traceback.format_exc()}\n{error}")
        pipe.send_bytes(pickle.dumps(answer))
