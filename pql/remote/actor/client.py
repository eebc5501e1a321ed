"""Actor: steps its environments at the learner's requests over one stream, and reconnects when the stream breaks.

The learner holds all other state: policy, exploration, recurrent state, episode statistics. The loss of an actor costs
one step of each of its environments, and a new actor can replace it.
"""

import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import grpc
import numpy as np

from pql.engine import deadlines
from pql.engine.deadlines import Limit
from pql.engine.watchdog import watching
from pql.errors import ConfigError, RunError, printable
from pql.remote import protocol
from pql.remote.process.far_build import answer_fault, describe_simulator
from pql.remote.protocol import ACT, BYE, LOOPBACK, RESET, WELCOME, Frame, ProtocolError, newest_frames, read_json_frame

BACKOFF = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2_000))
OPTIONS = (*protocol.KEEPALIVE, *protocol.SIZES, *BACKOFF)
LIMITS = ("step_seconds", "start_seconds")  # sent by the learner in WELCOME
FIRST_DELAY, LONGEST_DELAY = 0.25, 8.0  # seconds between attempts
FINAL = {  # status codes after which retrying is useless -> the option at fault
    grpc.StatusCode.UNAUTHENTICATED: "--token-file",
    grpc.StatusCode.INVALID_ARGUMENT: "--task",
    grpc.StatusCode.UNIMPLEMENTED: "--connect",
    grpc.StatusCode.OUT_OF_RANGE: "--num-envs",
}


class Simulator(Protocol):
    """K environments: ``pql.contract.env.VecEnv`` with NumPy arrays [K, ...] instead of tensors."""

    @property
    def spec(self) -> Any: ...
    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]: ...
    def step(self, action: np.ndarray) -> Any: ...
    def close(self) -> None: ...


class EndedError(Exception):
    """The stream ended; the actor may reconnect. The message holds the reason."""


class ActorClient:
    """Actor that steps ``sim`` for the learner at ``address`` until the learner ends the run.

    Args:
        role: ``train``, or ``eval`` for evaluation episodes only.
        token: access token of the learner; None: it requires none.
        ca: PEM certificate of the authority that signed the learner's; None: no TLS.
        patience: seconds without a learner after which it gives up; None: never.
        tell: called with each message for the user.
        leave: set by another thread to make the actor leave at the learner's next request.
    Attributes:
        steps: steps so far, per environment.
        admitted: number of admissions by a learner.
        connected: True while a learner has admitted it.
    """

    def __init__(
        self,
        address: str,
        sim: Simulator,
        role: str = "train",
        token: str | None = None,
        ca: bytes | None = None,
        patience: float | None = None,
        tell: Callable[[str], None] | None = None,
        leave: threading.Event | None = None,
    ):
        self.address, self.sim, self.role, self.token = address, sim, role, token
        self.patience, self.tell, self.leave = patience, tell or say_actor, leave or threading.Event()
        self.facts = describe_simulator(sim.spec)
        for group in self.facts["obs"].values():
            group[1] = "float32" if group[1].startswith("float") else group[1]  # the library uses float32 throughout
        self.layout = protocol.Layout(self.facts)
        self.stacks = {k: protocol.frames_sent(s.shape, s.stack) for k, s in sim.spec.obs.items()}
        self.credentials = None if ca is None else grpc.ssl_channel_credentials(ca)
        if token is not None and ca is None and not address.startswith(LOOPBACK):
            raise ConfigError("--ca", None, "a file: a token is not sent to another machine without TLS")
        self.steps, self.admitted, self.connected = 0, 0, False
        self.limits: dict[str, Limit] = {}
        self.stepped = False  # since the last admission
        self._alone_since = time.monotonic()  # without a learner

    def run(self) -> str | None:
        """Connect, and reconnect, until the learner ends the run. Return its reason; None if the actor has left.

        Raises:
            ConfigError: the learner rejects this actor permanently.
            RunError: no learner within ``patience`` seconds, or its messages are invalid.
        """
        self._alone_since = time.monotonic()
        attempt = 0
        while not self.leave.is_set():
            before, admitted = self.steps, self.admitted
            try:
                why = self._connect()
                self.tell("left" if why is None else f"done: {why}")
                return why
            except EndedError as error:
                reason = str(error)
            except ProtocolError as error:
                raise RunError(f"an invalid message from the learner at {self.address}: {error}") from error
            now = time.monotonic()
            if self.steps > before:
                attempt = 0
            if self.admitted > admitted:
                self._alone_since = now
            if self.patience is not None and now - self._alone_since > self.patience:
                raise RunError(f"no learner at {self.address} for {self.patience:g} s: {reason}")
            # Jitter: actors that lost the same learner should not reconnect at the same moment.
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0)
            attempt += 1
            self.tell(f"{reason}; next attempt at {self.address} in {delay:.1f} s")
            self.leave.wait(delay)
        return None

    def _connect(self) -> str | None:
        """Run one stream to its end. Return the learner's reason; None if the actor has left."""
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        with self._channel() as channel:
            show = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
            call = channel.stream_stream(f"/{protocol.SERVICE}/{protocol.METHOD}")
            stream = call(iter(outbox.get, None), metadata=show)
            inbox: SimpleQueue[Any] = SimpleQueue()
            # gRPC limits the time of a whole stream, a queue that of each message.
            threading.Thread(target=read_all, args=(stream, inbox), name="pql-actor-reader", daemon=True).start()
            try:
                return self._serve(inbox, outbox)
            finally:
                self.connected = False
                outbox.put(None)
                stream.cancel()

    def _channel(self) -> grpc.Channel:
        if self.credentials is None:
            return grpc.insecure_channel(self.address, options=OPTIONS)
        return grpc.secure_channel(self.address, self.credentials, options=OPTIONS)

    def _serve(self, inbox: "SimpleQueue[Any]", outbox: "SimpleQueue[bytes | None]") -> str | None:
        """Answer the learner's requests."""
        run_id = int.from_bytes(os.urandom(8), "little")  # new for each connection, so that old frames are rejected
        outbox.put(protocol.pack_json(protocol.HELLO, run_id, 0, {"spec": self.facts, "role": self.role}))
        while (message := self._next(inbox)) is not None:
            frame = protocol.unpack(message)
            if frame.run_id != run_id:
                raise ProtocolError("an answer to another actor")
            if frame.kind == BYE:
                return str(read_json_frame(frame.body).get("reason"))
            if frame.kind == WELCOME:
                self.connected = True
                self.admitted += 1
                self._welcome(read_json_frame(frame.body))
            elif self.leave.is_set():
                return None  # the learner has taken its last answer before this request
            else:
                outbox.put(self._obey(frame))
        raise EndedError("the learner has closed the stream")

    def _next(self, inbox: "SimpleQueue[Any]") -> bytes | None:
        """Return the learner's next message; None at the end of the stream."""
        left = math.inf if self.patience is None else self._alone_since + self.patience - time.monotonic()
        seconds = deadlines.ORDER if self.connected else min(deadlines.WELCOME, max(deadlines.LOOK, left))
        try:
            message = inbox.get(timeout=seconds)
        except Empty:
            what = "sent no request" if self.connected else "not answered this actor"
            raise EndedError(f"the learner has {what} for {round(seconds, 1):g} s") from None
        if isinstance(message, grpc.RpcError):
            raise self._ended(message) from message
        return message

    def _welcome(self, said: Mapping[str, Any]) -> None:
        """Read WELCOME: the actor's number and the learner's time limits, which the watchdog here also applies."""
        given = {k: v for k in LIMITS if isinstance(v := said.get(k), int | float) and v > 0}
        self.limits = {k: Limit(float(v), f"task.kwargs.{k} of the learner") for k, v in given.items()}
        self.stepped = False
        self.tell(f"connected to {self.address} as actor {said.get('actor')}")

    def _watching(self, limit: str) -> AbstractContextManager[Any]:
        """Let a running watchdog end this process if the simulator hangs, so that a supervisor can restart it."""
        if limit not in self.limits:
            return nullcontext()
        return watching(f"the simulator {self.facts['name']}", self.limits[limit])

    def _obey(self, frame: Frame) -> bytes:
        if frame.kind == RESET:
            with self._watching("start_seconds"):
                obs = self.sim.reset(protocol.read_seed(frame.body))
            self._check("reset", obs)
            return self.layout.pack_obs(frame.run_id, frame.seq, newest_frames(obs, self.stacks))
        if frame.kind != ACT:
            raise ProtocolError(f"an unexpected request of kind {frame.kind}")
        with self._watching("step_seconds" if self.stepped else "start_seconds"):
            step = self.sim.step(self.layout.read_action(frame.body))
        if not self.stepped:
            self._check("step", step)
        self.steps, self.stepped = self.steps + 1, True
        obs, final = newest_frames(step.obs, self.stacks), newest_frames(step.final_obs, self.stacks)
        return self.layout.pack_step(frame.run_id, frame.seq, step._replace(obs=obs, final_obs=final))

    def _check(self, method: str, answer: Any) -> None:
        if fault := answer_fault(method, answer, self.sim.spec):
            raise ConfigError("--task", self.facts["name"], fault)

    def _ended(self, error: Any) -> Exception:
        """Convert the error of a broken stream: ``EndedError`` to retry, ``ConfigError`` to give up."""
        code, why = error.code(), error.details()
        if code in FINAL:
            value = {
                "--token-file": self.token and "...",
                "--task": self.facts["name"],
                "--connect": self.address,
                "--num-envs": self.facts["num_envs"],
            }.get(FINAL[code])
            return ConfigError(FINAL[code], value, f"a value that the learner at {self.address} accepts: {why}")
        return EndedError(f"{code.name.lower().replace('_', ' ')}: {str(why).rpartition(': ')[2]}")


def read_all(stream: Any, inbox: "SimpleQueue[Any]") -> None:
    """Put the messages of a stream into ``inbox``, and at its end the error, or None."""
    try:
        for message in stream:
            inbox.put(message)
        inbox.put(None)
    except grpc.RpcError as error:
        inbox.put(error)


def say_actor(line: str) -> None:
    print(f"pql actor: {printable(line)}", file=sys.stderr, flush=True)
