"""What ``pql actor`` does with its words. No Hydra here: an actor's machine has it not."""

import argparse
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from pql.errors import ConfigError


class StopError(Exception):
    """Ctrl-C or SIGTERM came."""


def run(args: argparse.Namespace) -> int:
    """Act until the learner, or a signal, ends it. Returns the exit status."""
    check(args)
    kwargs = keywords(args.overrides)
    try:
        from pql.actor.client import Actor, read_file, say
    except ModuleNotFoundError as error:
        raise ConfigError(
            "command", "actor", f"packages that are installed: pip install grpcio numpy ({error})"
        ) from error
    from pql.actor.sims import make_sim

    token = os.environ.get("PQL_TOKEN") or None
    if args.token_file:
        token = read_file("--token-file", Path(args.token_file)).decode().strip()
    sim = make_sim(args.task, args.num_envs, kwargs)
    ca = None if args.ca is None else Path(args.ca)
    before = {s: signal.signal(s, _stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        Actor(args.connect, sim, args.role, token, ca, args.patience).run()
    except StopError:
        say("stopped")
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sim.close()
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopError


def check(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for options that cannot be."""
    host, _, port = args.connect.rpartition(":")
    if not args.connect.startswith("unix:") and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError("--connect", args.connect, "HOST:PORT or unix:/path, as the learner says it")
    if not 1 <= args.num_envs <= 1_000_000:
        raise ConfigError("--num-envs", args.num_envs, "a number from 1 up to 1000000")
    if args.patience is not None and args.patience <= 0:
        raise ConfigError("--patience", args.patience, "seconds, above 0")


def keywords(words: Sequence[str]) -> dict[str, Any]:
    """``key=value`` words; values are JSON (``null``, ``true``, ``3``, ``[1,2]``) or else text."""
    out = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key.isidentifier() and equals and text):
            raise ConfigError("override", word, "the form key=value, a keyword of the simulator's")
        try:
            out[key] = json.loads(text)
        except ValueError:
            out[key] = text
    return out
