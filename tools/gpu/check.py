"""Check a GPU machine and measure its speed, in independent parts, from a plain checkout.

python tools/gpu/check.py --list                              the parts, their cases and their bounds in seconds
python tools/gpu/check.py [--parts env tests ...] [--out gpu_check]
python tools/gpu/check.py --device cpu --smoke --parts pql    tiny, to test the script itself

Needs torch >= 2.10, numpy, safetensors and, for the tests, pytest; neither this package nor Hydra has to be installed
(docs/results/gpu.md describes how to prepare a bare machine). Every case runs in a separate process, so that a crash
or hang does not affect the next one. Rows are printed and saved immediately, to ``OUT/PART.json``. A part ends within
its bound, under nine minutes; a second call continues with the cases that remain or failed.

Rows, in addition to those of ``bench/learner.py`` (``bench/warp_envs.py`` and ``bench/atari.py`` measure simulators):

concurrent / lockstep    env-steps/s of three streams over one, with CUDA graphs on and off: gain of overlap
graphs on / off          env-steps/s: gain of capturing
captured / eager         env-steps/s of an environment's step in a CUDA graph over the same step launched by the host
host per tick / tick     milliseconds for which the host launches a tick (two ticks from idle, so it never waits for the
                         device), over the time of a tick. Near 1 the host is the bottleneck, far below 1 the device
kernels, launches        per update and per step of the collector: kernels on the device, and host calls that start
                         them (one graph launch starts a whole burst)

Exit status: 0 all cases are done or lack a package; 1 a case failed or remains; 2 no CUDA device.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first CUDA call, as `pql train` does

import argparse
import faulthandler
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # this checkout, installed or not
    sys.path.insert(0, str(ROOT))

from tools.bench.common import machine, options, report  # noqa: E402
from tools.gpu.cases import PARTS, Case, MissingError  # noqa: E402

SCRIPT = __file__
OVER = ("done", "missing")  # statuses that are not run again
Record = dict[str, Any]
Say = Callable[[dict[str, Any]], None]


def run_case(case: Case, say: Say) -> None:
    """Run the case in this process; yield its rows and notes, and last its status."""
    began, ended = time.perf_counter(), {"status": "done"}
    try:
        for found in case.run():
            say({"note": found} if isinstance(found, str) else {"row": found})
    except MissingError as error:
        ended = {"status": "missing", "error": str(error)}
    except Exception as error:
        traceback.print_exc()
        ended = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    say({**ended, "seconds": round(time.perf_counter() - began, 1)})


def run_apart(part: str, name: str, argv: Sequence[str], seconds: float, say: Say) -> None:
    """Run the case in a separate process for at most ``seconds``; findings up to then count."""
    began, ended, rows = time.perf_counter(), "", []
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        command = [sys.executable, SCRIPT, *argv, "--parts", part, "--case", name, "--lines", str(lines)]
        process = subprocess.Popen([*command, "--limit", str(seconds)], start_new_session=True)
        with lines.open() as found:
            while not ended:
                if (status := process.poll()) is not None:
                    ended = f"the process ended with status {status}"
                elif time.perf_counter() - began > seconds:
                    ended = f"not over after {seconds:.0f} s"
                    os.killpg(process.pid, signal.SIGKILL)  # with its children
                    process.wait()
                else:
                    time.sleep(0.05)
                for line in found:
                    rows.append(json.loads(line))
                    say(rows[-1])
    if not any("status" in one for one in rows):
        say({"status": "failed", "error": ended, "seconds": round(time.perf_counter() - began, 1)})


def run_part(part: str, args: argparse.Namespace, argv: Sequence[str]) -> bool:
    """Run all remaining cases within the part's bound. Return whether none remains and none failed."""
    path, limit = Path(args.out) / f"{part}.json", args.limit or PARTS[part].seconds
    before = json.loads(path.read_text())["cases"] if path.exists() and not args.again else {}
    cases: dict[str, Record] = {k: v for k, v in before.items() if v["status"] in OVER}
    deadline, left = time.monotonic() + limit, []
    for case in PARTS[part].cases(args):
        if case.name in cases:
            print(f"{part} {case.name}: {cases[case.name]['status']} before", flush=True)
            continue
        if (seconds := deadline - time.monotonic()) < min(20.0, limit / 4):
            left.append(case.name)
            continue
        record = cases[case.name] = {"status": "begun", "rows": [], "notes": []}

        def say(one: dict[str, Any], record: Record = record) -> None:
            record["rows"] += [one["row"]] if "row" in one else []
            record["notes"] += [one["note"]] if "note" in one else []
            record |= {k: one[k] for k in ("status", "error", "seconds") if k in one}
            if "status" not in one:
                print(one.get("note") or "{name}: {value:.6g} {unit}".format(**one["row"]), flush=True)
            save(path, {"part": part, "machine": machine(), "arguments": list(argv), "cases": cases})

        print(f"-- {part} {case.name}", flush=True)
        if args.here:
            run_case(case, say)
        else:
            run_apart(part, case.name, argv, seconds, say)
        show(part, case.name, record)
    if left:
        print(f"{part}: left for want of time: {', '.join(left)}: run it again", flush=True)
    return not left and all(one["status"] in OVER for one in cases.values())


def show(part: str, name: str, record: Record) -> None:
    if record["rows"]:
        report(record["rows"])
    error = f": {record['error']}" if "error" in record else ""
    print(f"{part} {name}: {record['status']} in {record['seconds']} s{error}", flush=True)


def save(path: Path, data: dict[str, Any]) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(path)


def case_here(args: argparse.Namespace) -> int:
    """Run one case and append its findings to ``args.lines``; print its stacks when its time is nearly over."""
    faulthandler.dump_traceback_later(max(1.0, args.limit - 5), exit=False)
    (part,) = args.parts
    case = next(case for case in PARTS[part].cases(args) if case.name == args.case)
    with Path(args.lines).open("a") as lines:

        def say(one: dict[str, Any]) -> None:
            lines.write(json.dumps(one) + "\n")
            lines.flush()

        run_case(case, say)
    faulthandler.cancel_dump_traceback_later()
    return 0


def print_parts(args: argparse.Namespace) -> None:
    for name in args.parts:
        part = PARTS[name]
        print(f"{name:7} {part.seconds:3.0f} s  {part.about}")
        print(f"               {', '.join(case.name for case in part.cases(args)) or 'nothing on this device'}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, seconds=1.0)
    parser.set_defaults(rounds=5)
    parser.add_argument("--parts", nargs="+", type=lambda text: text.split(","), default=[[*PARTS]], metavar="PART")
    parser.add_argument("--out", default="gpu_check", metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="also repeat finished cases")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[4096, 16384, 65536], help="of the part pql")
    parser.add_argument("--limit", type=float, help="seconds of each part, instead of its own bound")
    parser.add_argument("--processes", type=int, default=4, help="processes of the tests, if pytest-xdist is installed")
    parser.add_argument("--here", action="store_true", help="run cases in this process")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--lines", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parts = [name for names in args.parts for name in names]
    if wrong := [name for name in args.parts if name not in PARTS]:
        parser.error(f"--parts {','.join(wrong)}: expected some of {','.join(PARTS)}")
    if args.smoke:
        args.rounds, args.seconds = 1, 0.02
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        print_parts(args)
        return 0
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device: nothing to check (--device cpu --smoke tries the measuring parts)")
        return 2
    if args.case:
        return case_here(args)
    given = [word for word in (sys.argv[1:] if argv is None else argv) if word != "--again"]
    well = [run_part(part, args, given) for part in args.parts]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
