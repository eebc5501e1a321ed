"""Is this GPU machine right, and how fast is it? In parts that each stand alone, from a plain checkout.

python tools/gpu_check.py --list                              the parts, their cases and their bounds in seconds
python tools/gpu_check.py [--parts env tests ...] [--out gpu_check]
python tools/gpu_check.py --device cpu --smoke --parts pql    tiny, to test the script itself

Needs torch >= 2.10, numpy, safetensors and, for the tests, pytest; nothing has to be installed from here, Hydra neither
(docs/gpu.md says how to bring what a bare machine lacks). Every case runs in a process of its own, so that neither a
crash nor a hang reaches the next one; ``--here`` runs them in this process. Rows are printed and saved as they come, to
``OUT/PART.json``. A part ends within its bound, under nine minutes; run it again and it goes on with the cases that are
left, or that failed. ``--again`` does all of them anew.

Rows, beside those of the benchmarks that are called (``bench_learner``, ``bench_atari``, ``bench_warp``):

concurrent / lockstep    env-steps/s of three streams over one, with CUDA graphs on and off: what overlap is worth
graphs on / off          env-steps/s: what capturing is worth
captured / eager         env-steps/s of an environment's step in a CUDA graph over the same step launched by the host
host per tick / tick     milliseconds in which the host launches a tick (two ticks from idle, so it never waits for the
                         device), over the time of a tick. Near 1 the host bounds the tick, far below it the device does
kernels, launches        per update and per step of the collector: kernels that run on the device, and calls by which
                         the host starts them (one graph launch starts a whole burst)

Exit status: 0 all cases are done, or lack a package; 1 one failed or is left; 2 no CUDA device.
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

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tools"):  # this checkout, installed or not
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from _bench import machine, report  # noqa: E402
from _gpu_cases import PARTS, Case, MissingError  # noqa: E402

SCRIPT = __file__
OVER = ("done", "missing")  # what is not run again
Record = dict[str, Any]
Say = Callable[[dict[str, Any]], None]


def run_case(case: Case, say: Say) -> None:
    """Run it here, and say what it finds: rows, notes, and last how it ended."""
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
    """The same in a process of its own, which gets so many seconds; what it has found by then counts."""
    began, ended, told = time.perf_counter(), "", []
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
                    os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
                    process.wait()
                else:
                    time.sleep(0.05)
                for line in found:
                    told.append(json.loads(line))
                    say(told[-1])
    if not any("status" in one for one in told):
        say({"status": "failed", "error": ended, "seconds": round(time.perf_counter() - began, 1)})


def run_part(part: str, args: argparse.Namespace, argv: Sequence[str]) -> bool:
    """All cases that are left, within the part's bound. Returns whether none is left and none failed."""
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
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(path)


def case_here(args: argparse.Namespace) -> int:
    """One case, whose findings are appended to ``args.lines``; its stacks are printed when its time is nearly over."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", type=lambda text: text.split(","), default=[[*PARTS]], metavar="PART")
    parser.add_argument("--out", default="gpu_check", metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[4096, 16384, 65536], help="of the part pql")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--limit", type=float, help="seconds of each part, instead of its own bound")
    parser.add_argument("--processes", type=int, default=4, help="of the tests, where pytest-xdist is installed")
    parser.add_argument("--here", action="store_true", help="cases in this process")
    parser.add_argument("--smoke", action="store_true", help="tiny and quick, to test the script itself")
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
