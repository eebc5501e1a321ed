"""Command line of ``pql fleet``."""

import argparse
import math
import sys
import time

from pql.engine import deadlines
from pql.engine.interrupt import Interrupt
from pql.errors import ConfigError
from pql.remote.actor import command as actor
from pql.remote.fleet.status import FleetStatus

PERIOD = 0.5  # seconds between looks
MESSAGE = b"\npql fleet: actors leave (at most %d s); Ctrl-C again to quit at once\n" % deadlines.LEAVE
MOST_ACTORS = 10_000


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    actor.add_setup(parser)
    parser.add_argument("--actors", type=int, default=1, help="number of actors; each has --num-envs environments")
    where = "HOST:PORT of the Ray cluster's head; auto: this machine's cluster; local: only this machine"
    parser.add_argument("--ray", metavar="ADDRESS", default="auto", help=where)
    parser.add_argument("--cpus", type=float, default=1.0, help="processors that Ray reserves for each actor")
    parser.set_defaults(patience=None, run=run_fleet)


def run_fleet(args: argparse.Namespace) -> int:
    """Keep ``args.actors`` actors alive until the learner, or a signal, ends it. Returns the exit status."""
    check_fleet(args)
    setup = actor.setup_of(args)
    from pql.remote.fleet.cluster import RayCluster

    cluster = RayCluster(setup, args.ray, args.cpus, say_fleet)
    say_fleet(cluster.words())
    status = FleetStatus(args.actors, args.num_envs, say_fleet)
    try:
        cluster.start(args.actors)
        with Interrupt(MESSAGE) as interrupt:  # after Ray has installed its own handlers
            end = math.inf
            while cluster.acting and time.monotonic() < end:
                reasons = {f"actor {n}: {why}" for n, why in cluster.endings().items() if why is not None}
                if end == math.inf:
                    status.see(cluster.looks(), time.monotonic())
                    if reasons or interrupt.asked or status.error is not None:
                        say_fleet(*sorted(reasons)[:1])
                        end = time.monotonic() + deadlines.LEAVE
                        cluster.leave()
                time.sleep(PERIOD)
    finally:
        cluster.close()
    if status.error is not None:
        raise status.error
    return 130 if interrupt.asked else 0


def check_fleet(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for invalid options."""
    if not 1 <= args.actors <= MOST_ACTORS:
        raise ConfigError("--actors", args.actors, f"a number from 1 up to {MOST_ACTORS}")
    if not 0 < args.cpus < 1e6:
        raise ConfigError("--cpus", f"{args.cpus:g}", "a number above 0")


def say_fleet(*lines: str) -> None:
    for line in lines:
        print(f"pql fleet: {line}", file=sys.stderr, flush=True)
