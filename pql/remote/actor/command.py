"""Command line of ``pql actor``. It does not use Hydra, which actors' machines need not have."""

import argparse
import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from pql.engine.watchdog import Watchdog
from pql.errors import ConfigError
from pql.remote.token import CERTIFICATE, read_file, read_token

if TYPE_CHECKING:
    from pql.remote.actor.client import ActorClient


class StopError(Exception):
    """Ctrl-C or SIGTERM was received."""


@dataclass(frozen=True)
class ActorOptions:
    """Settings of an actor, with the contents of files, so that they can be sent to another machine."""

    connect: str
    task: str
    num_envs: int
    kwargs: Mapping[str, Any]
    role: str = "train"
    token: str | None = field(default=None, repr=False)
    ca: bytes | None = field(default=None, repr=False)
    patience: float | None = None


def add_actor_options(parser: argparse.ArgumentParser) -> None:
    add_setup(parser)
    parser.add_argument("--patience", type=float, metavar="SECONDS", help="give up without a learner (default: never)")
    parser.set_defaults(run=run_actor)


def add_setup(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ActorOptions``, which ``pql actor`` and ``pql fleet`` share."""
    parser.add_argument("--connect", metavar="HOST:PORT", required=True, help="address of pql train task=remote")
    parser.add_argument("--task", metavar="NAME", required=True)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--role", choices=("train", "eval"), default="train", help="eval: only for evaluation")
    parser.add_argument("--token-file", metavar="FILE", help="access token of the learner (or: PQL_TOKEN)")
    parser.add_argument("--ca", metavar="FILE", help="certificate that signed the learner's; enables TLS")
    parser.add_argument("overrides", nargs="*", help="keyword arguments of the simulator: key=value")


def run_actor(args: argparse.Namespace) -> int:
    """Run an actor until the learner or a signal ends it. Return the exit status."""
    actor = make_actor_client(setup_of(args))
    before = {s: signal.signal(s, _stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Watchdog():
            actor.run()
    except StopError:
        actor.tell("stopped")
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        actor.sim.close()
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopError


def setup_of(args: argparse.Namespace) -> ActorOptions:
    """Check the options and read their files. Raises ``ConfigError``: an invalid option or an unreadable file."""
    check_setup(args)
    token = read_token("--token-file", args.token_file)
    ca = None if args.ca is None else read_file("--ca", args.ca, CERTIFICATE)
    kwargs = keywords(args.overrides)
    return ActorOptions(args.connect, args.task, args.num_envs, kwargs, args.role, token, ca, args.patience)


def make_actor_client(
    setup: ActorOptions, tell: Callable[[str], None] | None = None, leave: threading.Event | None = None
) -> "ActorClient":
    """Build the simulator and its actor. ``tell`` and ``leave`` are passed to the actor. Raises ``ConfigError``: no
    such simulator, or packages are missing."""
    try:
        from pql.remote.actor.client import ActorClient
    except ModuleNotFoundError as error:
        needed = f"packages that are installed: pip install grpcio numpy ({error})"
        raise ConfigError("command", "actor", needed) from error
    from pql.remote.actor.sims import make_sim

    sim = make_sim(setup.task, setup.num_envs, setup.kwargs)
    return ActorClient(setup.connect, sim, setup.role, setup.token, setup.ca, setup.patience, tell, leave)


def check_setup(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for invalid options."""
    host, _, port = args.connect.rpartition(":")
    if not args.connect.startswith("unix:") and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError("--connect", args.connect, "HOST:PORT or unix:/path, as the learner prints it")
    if not 1 <= args.num_envs <= 1_000_000:
        raise ConfigError("--num-envs", args.num_envs, "a number from 1 up to 1000000")
    if args.patience is not None and args.patience <= 0:
        raise ConfigError("--patience", args.patience, "seconds, above 0")


def keywords(words: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` arguments; a value is JSON (``null``, ``true``, ``3``, ``[1,2]``), or else text."""
    out = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key.isidentifier() and equals and text):
            raise ConfigError("override", word, "the form key=value, with a keyword of the simulator")
        try:
            out[key] = json.loads(text)
        except ValueError:
            out[key] = text
    return out
