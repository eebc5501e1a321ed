"""Actors that are admitted and then answer with garbage of the largest size, in a process of their own.

    python attackers.py ADDRESS SEED COUNT BYTES SPECIFICATION

All connect, print "ready", wait for a line, and attack at once; each then prints the size of its message and the
status with which its stream has ended.
"""

import json
import os
import random
import sys
import threading
from queue import SimpleQueue

import grpc

from pql.remote import protocol

KINDS = ("noise", "zeros", "brackets")


def garbage(kind: str, run_id: int, seq: int, size: int) -> bytes:
    """Return a message of ``size`` bytes: noise; else zeros or brackets behind a correct header."""
    if kind == "noise":
        return (os.urandom(1 << 16) * (1 + (size >> 16)))[:size]
    return protocol.pack(
        protocol.OBS, run_id, seq, (b"[" if kind == "brackets" else b"\0") * (size - protocol.HEADER.size)
    )


def join(address: str, number: int, spec: dict) -> tuple[SimpleQueue, grpc.Call, int]:
    outbox: SimpleQueue = SimpleQueue()
    channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
    stream = channel.stream_stream(f"/{protocol.SERVICE}/{protocol.METHOD}")(iter(outbox.get, None))
    outbox.put(protocol.pack_json(protocol.HELLO, number, 0, {"spec": spec, "role": "train"}))
    assert protocol.unpack(next(stream)).kind == protocol.WELCOME
    return outbox, stream, protocol.unpack(next(stream)).seq


def attack(peer: tuple[SimpleQueue, grpc.Call, int], number: int, kind: str, size: int) -> None:
    outbox, stream, seq = peer
    outbox.put(garbage(kind, number, seq, size))
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        sys.stdout.write(f"{size} {error.code().name}\n")  # one write: print would let the threads mix their parts
    outbox.put(None)


def main(address: str, seed: str, count: str, largest: str, spec: str) -> None:
    rng = random.Random(int(seed))
    peers = [join(address, i + 1, json.loads(spec)) for i in range(int(count))]
    print("ready", flush=True)
    sys.stdin.readline()
    for i, peer in enumerate(peers):
        size = int(largest) + (rng.random() < 0.25)  # may be more than the transport takes
        threading.Thread(target=attack, args=(peer, i + 1, KINDS[(i + int(seed)) % 3], size)).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
