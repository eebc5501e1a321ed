"""gRPC server for remote actors: one thread, one bidirectional stream per actor.

It admits actors, validates their messages and passes them to the ``SlotTable``. It needs no torch.
"""

import asyncio
import ctypes
import hmac
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pql.engine import deadlines
from pql.engine.deadlines import Limit
from pql.engine.placement import keep_freed_memory
from pql.errors import ConfigError
from pql.remote import protocol
from pql.remote.descriptors import connection_limit
from pql.remote.protocol import BYE, LOOPBACK, OBS, RESET, STEP, ProtocolError, unpack
from pql.remote.slot_table import FullError, RemoteActor, SlotTable, TooManyError
from pql.remote.token import CERTIFICATE, KEY, read_file

PINGS = (
    *protocol.KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
# Connections that wait for the server's thread: above the first number some are refused at once, above the second all.
WAITING = (
    ("grpc.server_max_unrequested_time_in_server", int(deadlines.ACCEPT)),
    ("grpc.server.max_pending_requests", 4_096),
    ("grpc.server.max_pending_requests_hard_limit", 8_192),
)
# A client that opens a connection and sends nothing, or has no stream, is closed: it would occupy an open file.
SILENT = (
    ("grpc.server_handshake_timeout_ms", int(1000 * deadlines.HELLO)),
    ("grpc.max_connection_idle_ms", int(1000 * deadlines.HELLO)),
)
OPTIONS = (*PINGS, *WAITING, *SILENT, *protocol.SIZES, ("grpc.so_reuseport", 0))

OFFERED = ("obs", "action", "max_episode_steps", "autoreset", "final_obs", "log")  # must be equal for all actors


class LateError(Exception):
    """An actor exceeded its time limit."""


REFUSALS = {
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    FullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManyError: grpc.StatusCode.OUT_OF_RANGE,
    LateError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class ActorServer:
    """Server for remote actors; listens until closed.

    Args:
        address: ``host:port`` or ``unix:/path``; port 0 takes a free one.
        table: slots for training.
        evaluation: slots for evaluation; None: no evaluation by actors.
        token: access token that actors must send; None: not required (only for addresses on this machine).
        cert, key: PEM files for TLS.
        step_seconds: time limit of a step; an actor that exceeds it is disconnected, even if its machine answers
            pings. The first step and a reset may take ``start_seconds``.
        tell: called with each message for the user.
    Attributes:
        address: the address, with the actual port.
        facts: specification of the first actor.
        known: event that is set once ``facts`` is.
    Raises:
        ConfigError: it cannot listen on the address, other machines can reach it without token and TLS, or this process
            may open too few files.
    """

    def __init__(
        self,
        address: str,
        table: SlotTable,
        evaluation: SlotTable | None = None,
        token: str | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        tell: Callable[[str], None] | None = None,
        step_seconds: float = 20.0,
        start_seconds: float = 600.0,
    ):
        self.step = Limit(step_seconds, "task.kwargs.step_seconds")
        self.start = max(self.step, Limit(start_seconds, "task.kwargs.start_seconds"))
        self.tables: dict[str, SlotTable | None] = {"train": table, "eval": evaluation}
        self.token, self.facts, self.known = token, dict[str, Any](), threading.Event()
        self.tell = tell or say_server
        self._trims = 0  # still to come
        # malloc_trim does not reach the ends of heaps, where large messages would stay. Less would slow down training.
        keep_freed_memory(8 << 20)
        self.credentials = check_safe(address, token, cert, key)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pql-remote-server", daemon=True)
        self._thread.start()
        try:
            self.address = self._on_loop(self._open(address))
        except ConfigError:
            self._stop_loop()
            raise
        except (RuntimeError, OSError) as error:
            self._stop_loop()
            raise ConfigError("listen", address, f"an address that can be listened on ({error})") from error

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(deadlines.SERVER)

    async def _open(self, address: str) -> str:
        slots = sum(table.size for table in self.tables.values() if table is not None)
        most = connection_limit(slots, address)
        if most < slots:
            self.tell(f"at most {most} connections for {slots} slots: the limit of open files is low (ulimit -n)")
        self._server = grpc.aio.server(options=(*OPTIONS, ("grpc.max_allowed_incoming_connections", most)))
        handler = grpc.stream_stream_rpc_method_handler(self._act)  # no serialisers: raw bytes
        service = grpc.method_handlers_generic_handler(protocol.SERVICE, {protocol.METHOD: handler})
        self._server.add_generic_rpc_handlers((service,))
        if self.credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self.credentials)
        await self._server.start()
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    def close(self, why: str = "the run has ended") -> None:
        """Send BYE to every actor and stop listening."""
        if not self._thread.is_alive():
            return
        for table in self.tables.values():
            if table is not None:
                table.end(why)
        with suppress(TimeoutError):  # streams that cannot be ended; the thread is a daemon
            self._on_loop(self._stop())
        self._stop_loop()

    async def _stop(self) -> None:
        await self._server.stop(deadlines.BYE)
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            # they are about to end; cancelling prints a traceback
            _, rest = await asyncio.wait(rest, timeout=deadlines.STREAMS)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    @property
    def alive(self) -> bool:
        """False once its thread has ended, so that no actor's answer can arrive."""
        return self._thread.is_alive()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=deadlines.WORKER)
        self._loop.close()

    # -- one actor ----------------------------------------------------------------------------------------------------

    async def _act(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """Serve one actor's stream from HELLO to its end. An error ends only this stream."""
        await self._check_token(context)
        try:
            await self._converse(context)
            return
        except tuple(REFUSALS) as error:
            status, why = REFUSALS[type(error)], str(error)
        # Here the error is gone, and with it its traceback, which holds the message.
        self._return_memory_soon()
        await context.abort(status, why)

    def _return_memory_soon(self) -> None:
        """Return memory to the system a few times in the next seconds, however many streams are refused meanwhile: gRPC
        frees a message when it closes the connection, on a busy machine seconds later."""
        idle, self._trims = not self._trims, 4
        if idle:
            self._loop.call_later(1.0, self._return_memory)

    def _return_memory(self) -> None:
        return_memory()
        self._trims -= 1
        if self._trims:
            self._loop.call_later(2.0, self._return_memory)

    async def _check_token(self, context: grpc.aio.ServicerContext) -> None:
        if self.token is None:
            return
        shown = next((str(v) for k, v in context.invocation_metadata() or () if k == "authorization"), "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self.token}".encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a wrong token, or none")

    async def _converse(self, context: grpc.aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout(deadlines.HELLO):
                first = await context.read()
        except TimeoutError:
            raise LateError(f"has not introduced itself for {deadlines.HELLO:g} s") from None
        if first is grpc.aio.EOF:
            return
        hello = unpack(first)
        protocol.expect(hello, protocol.HELLO, hello.run_id, 0)
        said = protocol.read_json_frame(hello.body)
        facts, role = protocol.check_facts(said.get("spec") or {}), said.get("role")
        table = self.tables.get(role) if isinstance(role, str) else None
        if table is None:
            raise ProtocolError(f"no slots for the role {role!r}: task.kwargs.eval_envs creates slots for evaluation")
        self._check_alike(facts)
        layout, orders = protocol.Layout(facts), asyncio.Queue[bytes]()
        actor = RemoteActor(hello.run_id, layout, lambda m: self._loop.call_soon_threadsafe(orders.put_nowait, m))
        table.admit(actor)
        self.facts = self.facts or facts
        self.known.set()
        who = f"actor {actor.number} ({context.peer()}, {layout.count} environments{' to evaluate' * (role == 'eval')})"
        self.tell(f"{who} has joined: {table.live} now")
        since = time.monotonic()
        try:
            facts = {"actor": actor.number, "step_seconds": self.step.seconds, "start_seconds": self.start.seconds}
            try:
                async with asyncio.timeout(deadlines.HELLO):
                    await context.write(protocol.pack_json(protocol.WELCOME, actor.run_id, 0, facts))
            except TimeoutError:
                raise LateError(f"has not read the learner's answer for {deadlines.HELLO:g} s") from None
            while await self._exchange(context, table, actor, await orders.get()):
                pass
        except LateError as error:
            self.tell(f"{who} {error}")
            raise
        finally:  # it left, violated the protocol, or lost its connection (this task is then cancelled)
            table.leave(actor)
            self.tell(f"{who} has left after {time.monotonic() - since:.0f} s: {table.live} now")

    async def _exchange(
        self, context: grpc.aio.ServicerContext, table: SlotTable, actor: RemoteActor, order: bytes
    ) -> bool:
        """Send one request and process its answer. Return False at the end of the stream."""
        asked = unpack(order)
        limit = self.start if asked.kind == RESET or not actor.stepped else self.step
        try:
            async with asyncio.timeout(limit.seconds):
                await context.write(order)
                message = await context.read()
        except TimeoutError:
            raise LateError(f"has not answered for {limit.seconds:g} s ({limit.setting})") from None
        if message is grpc.aio.EOF or asked.kind == BYE:
            return False
        frame, kind = unpack(message), OBS if asked.kind == RESET else STEP
        protocol.expect(frame, kind, actor.run_id, asked.seq)
        actor.stepped = actor.stepped or kind == STEP
        read = actor.layout.read_obs if kind == OBS else actor.layout.read_step
        table.answered(actor, read(frame.body))
        return True

    def _check_alike(self, facts: dict[str, Any]) -> None:
        """Raise ``ProtocolError`` if a specification differs from the first actor's."""
        for name in OFFERED:
            new, own = facts[name], self.facts.get(name)
            if self.facts and (new != own or (name == "log" and [*new] != [*own])):  # its order is that of the arrays
                raise ProtocolError(f"{name} of these environments is {new}, of this run's {own}")


def return_memory() -> None:
    """Return freed memory to the system: glibc would keep hundreds of megabytes after refused large messages."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def say_server(line: str) -> None:
    """Print a message to stderr."""
    print(f"pql: {line}", file=sys.stderr, flush=True)


def check_safe(address: str, token: str | None, cert: Path | None, key: Path | None) -> grpc.ServerCredentials | None:
    """Return the TLS credentials, None without TLS. Raises ``ConfigError``: other machines can reach the address and
    token or TLS is missing; or a PEM file is unreadable."""
    if (cert is None) != (key is None):
        raise ConfigError("cert" if cert is None else "key", None, "a file: TLS needs both cert and key")
    if not address.startswith(LOOPBACK):
        for name, given in (("token_file", token), ("cert", cert)):
            if given is None:
                why = f"{address} can be reached from other machines, which requires a token (token_file) and TLS"
                raise ConfigError(name, None, f"a file: {why} (cert, key)")
    if cert is None or key is None:
        return None
    return grpc.ssl_server_credentials(((read_file("key", key, KEY), read_file("cert", cert, CERTIFICATE)),))
