"""A learner's side and actors in one process, for tests of their protocol."""

import threading
import time
from contextlib import contextmanager

import grpc
import numpy as np

from pql.remote import protocol
from pql.remote.actor.client import ActorClient
from pql.remote.env import Remote
from pql.remote.process.far_build import describe_simulator


def quiet(line):
    """Ignore a log line."""


def wait_until(true, seconds=20.0):
    """Wait until ``true()``; return the time it took."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds, "it did not come to pass"
        time.sleep(0.005)
    return time.monotonic() - start


class Late:
    """A simulator each of whose steps takes ``delay`` with probability ``share``."""

    def __init__(self, sim, share, delay, seed=0):
        self.sim, self.spec, self.share, self.delay = sim, sim.spec, share, delay
        self.random = np.random.RandomState(seed)

    def reset(self, seed=None):
        return self.sim.reset(seed)

    def step(self, action):
        if self.random.rand() < self.share:
            time.sleep(self.delay)
        return self.sim.step(action)

    def close(self):
        self.sim.close()


@contextmanager
def acting(address, *sims, **more):
    """Run an actor thread for each simulator. Yields the error of each, by number, once it has ended."""
    ended = {}

    def act(i, sim):
        try:
            ActorClient(address, sim, tell=quiet, **more).run()
            ended[i] = None
        except Exception as error:
            ended[i] = error

    threads = [threading.Thread(target=act, args=(i, sim), daemon=True) for i, sim in enumerate(sims)]
    for thread in threads:
        thread.start()
    yield ended
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def remote(address, sims, num_envs, join=True, **kwargs):
    """Create a ``Remote`` with actors of ``sims``, all of which have joined."""
    with acting(address, *sims) as ended:
        env = Remote(num_envs, listen=address, **kwargs)
        env.ended = ended
        try:
            wait_until(lambda: env.table.live == len(sims))
            yield env
        finally:
            env.close()


class Raw:
    """A scripted actor: sends the given frames on one stream."""

    def __init__(self, address, credentials=None, token=None):
        from queue import SimpleQueue

        self.outbox = SimpleQueue()
        self.channel = grpc.insecure_channel(address)
        call = self.channel.stream_stream(f"/{protocol.SERVICE}/{protocol.METHOD}")
        self.stream = call(iter(self.outbox.get, None))

    def say(self, message):
        self.outbox.put(message)

    def hear(self):
        return protocol.unpack(next(self.stream))

    def hello(self, sim, run_id=1, **more):
        self.say(
            protocol.pack_json(
                protocol.HELLO, run_id, 0, {"spec": describe_simulator(sim.spec), "role": "train"} | more
            )
        )

    def refusal(self):
        """Return the (status, reason) with which the stream ends."""
        try:
            for _ in self.stream:
                pass
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError("the stream ended without a word")

    def close(self):
        self.outbox.put(None)
        self.stream.cancel()
        self.channel.close()
