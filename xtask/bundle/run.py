"""Runs the programs of this folder on GPUs: see run.sh."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benches import bench
from configs import HERE, LIMIT_S, devices_of, first_devices, program
from drills import drill
from evidence import EVIDENCE, HELP, Before, Evidence, rows_in, units_of
from faults import faults
from judges import Reported, against_limits, by_litmus, by_ratios, cases_of, rows_of, watched
from modes import conformance, smoke

# What evidence keeps of the output of each configuration that failed.
LOG_BYTES = 20_000
MODES = {
    "smoke": smoke,
    "conformance": conformance,
    "faults": faults,
    "drill": drill,
    "bench": bench,
}


def leftovers(name):
    """Processes of this folder's programs that are still there and were begun for the configuration
    `name`."""
    mine = {}
    for exe in Path("/proc").glob("[0-9]*/exe"):
        try:
            target = os.readlink(exe)
            theirs = (exe.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if target.startswith(f"{HERE}/") and f"TW_RUN_CONFIG={name}".encode() in theirs:
            mine[exe.parent.name] = target
    return mine


def topology():
    """What the driver shows, or why nothing: tests that find no GPU pass, and would mean
    nothing."""
    try:
        done = subprocess.run(
            [program("tilewire"), "topo", "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        return (
            (json.loads(done.stdout), None)
            if done.returncode == 0
            else ({"gpus": []}, done.stderr.strip())
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        return {"gpus": []}, f"tilewire topo: {e}"


def text_of(path):
    return path.read_text().strip() if path.exists() else ""


def where(found, n):
    """What every line says: the commit that the programs are of, GPUs, driver."""
    driver = re.search(r" (\d+\.\d+(\.\d+)?) ", text_of(Path("/proc/driver/nvidia/version")))
    names = sorted({gpu["name"] for gpu in found["gpus"][:n]})
    return {
        "commit": text_of(HERE / "commit") or None,
        "gpu": ", ".join(names) or None,
        "driver": driver and driver[1],
    }


class Pool:
    """GPUs for configurations that run beside each other, with places for so many on each."""

    def __init__(self, devices, places=1):
        self.free, self.changed = dict.fromkeys(devices, places), threading.Condition()
        self.asked, self.served = 0, 0

    def take(self, num, each=1):
        """So many GPUs, with so many places of each."""
        with self.changed:
            # Who comes first is served first: whoever gives GPUs back would else take them again.
            turn, self.asked = self.asked, self.asked + 1
            self.changed.wait_for(lambda: turn == self.served and self.with_places(each) >= num)
            self.served += 1
            self.changed.notify_all()
            mine = sorted(self.free, key=lambda device: -self.free[device])[:num]
            self.add(mine, -each)
            return mine

    def with_places(self, each):
        return sum(places >= each for places in self.free.values())

    def add(self, devices, places):
        for device in devices:
            self.free[device] += places

    def give(self, mine, each=1):
        with self.changed:
            self.add(mine, each)
            self.changed.notify_all()


class Runner:
    """Runs configurations. With `few_files`, of their output only the end of what failed stays, in
    one file."""

    def __init__(self, out, n, interpose, place, few_files=False):
        self.n, self.place = n, place
        self.cache = tempfile.mkdtemp(prefix="tilewire-run-")
        self.results = out / "results.jsonl"
        self.logs = (Path(self.cache) if few_files else out) / "logs"
        self.failed_logs = out / "failed-logs.txt" if few_files else None
        for folder in [out, self.logs]:
            folder.mkdir(parents=True, exist_ok=True)
        self.count = {"passed": 0, "failed": 0, "skipped": 0}
        # The line of each configuration that has run.
        self.lines = {}
        self.interpose = interpose
        self.preload = self.interposer() if interpose else None
        # What limits.cu and our links have said, once each has run.
        self.limits, self.links = None, None
        # Left out for a reason that nobody has reported.
        self.unreported = []
        self.noting = threading.Lock()

    def interposer(self):
        """A library that makes cuMulticastCreate fail; none without a compiler to make it with, and
        then no configuration that it should watch passes."""
        gcc, lib = shutil.which("gcc"), Path(self.cache) / "nomulticast.so"
        if not gcc:
            print(
                "gcc is not there, so nothing watches for cuMulticastCreate: install it, "
                "or give --no-interposer",
                flush=True,
            )
            return None
        argv = [gcc, "-shared", "-fPIC", "-O1", "-o", str(lib), str(HERE / "nomulticast.c"), "-ldl"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if done.returncode:
            print("the multicast interposer does not compile:\n" + done.stderr, flush=True)
            return None
        return str(lib)

    def environment(self, c, log, name, devices):
        visible = ",".join(devices) if devices else first_devices(self.n)
        env = dict(
            os.environ,
            CUDA_VISIBLE_DEVICES=visible,
            TILEWIRE_CACHE_DIR=self.cache,
            TW_RUN_CONFIG=name,
        )
        # Every kernel of the operations must be among the files of this folder.
        env["TILEWIRE_JIT"] = "auto" if c.jit else "off"
        if c.preload and self.preload:
            calls = log.with_suffix(".calls")
            shutil.rmtree(calls, ignore_errors=True)
            calls.mkdir()
            env["LD_PRELOAD"] = self.preload
            env["TW_MULTICAST_LOG"] = str(log)
            env["TW_CALLS_DIR"] = str(calls)
        env.update(c.env)
        return env

    def beside(self, configs, is_late):
        """Runs configurations that take some of the GPUs, as many at once as there are GPUs for.
        Those that there was no time for."""
        pool, late = Pool(devices_of(self.n)), []

        def one(mode, c):
            mine = pool.take(c.takes)
            try:
                if is_late():
                    late.append(f"{mode}/{c.name}")
                else:
                    self.run(mode, c, mine)
            finally:
                pool.give(mine)

        with ThreadPoolExecutor(max_workers=self.n) as threads:
            for done in [threads.submit(one, mode, c) for mode, c in configs]:
                done.result()
        return late

    def run(self, mode, c, devices=None, beside=False):
        """`beside`: others run on the same GPUs meanwhile, so it has twice its time."""
        limit_s = c.limit_s * (2 if beside else 1)
        start, name = time.monotonic(), f"{mode}/{c.name}"
        multicast = Path(self.cache) / (name.replace("/", "-") + ".multicast")
        if c.needs:
            rc, state, summary = None, "skipped", c.needs
            if mode == "conformance" and self.n > 1 and not isinstance(c.needs, Reported):
                self.unreported.append(name)
        else:
            # Of an earlier try.
            multicast.unlink(missing_ok=True)
            argv = ["timeout", "-k", "5", str(limit_s), *c.argv]
            log = self.logs / (name.replace("/", "-") + ".txt")
            # A file, not a pipe: nobody who keeps it open keeps us waiting.
            with log.open("wb") as f:
                rc = subprocess.run(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=f,
                    stderr=subprocess.STDOUT,
                    cwd=self.cache,
                    env=self.environment(c, multicast, name, devices),
                    check=False,
                ).returncode
            out = log.read_text(errors="replace")
            state, summary = c.judge(rc, out)
            # A program that a signal ended may give the same code: only time tells.
            if rc in (124, 137) and time.monotonic() - start >= limit_s:
                state, summary = "failed", f"ended after {limit_s} s: " + summary
            left = self.settle(name)
            if left:
                state, summary = "failed", f"left behind: {left}; " + summary
        line = {
            "config": name,
            "gpus": self.n,
            "state": state,
            "rc": rc,
            "seconds": round(time.monotonic() - start, 2),
            "summary": summary,
            "command": shlex.join(c.argv).replace(f"{HERE}/", "./"),
        }
        if c.preload and self.interpose and not c.needs:
            seen = multicast.read_text().split() if multicast.exists() else []
            watched(line, seen.count("cuMulticastCreate") if "loaded" in seen else None)
        # Litmus tests have figures, too.
        if not c.needs and (mode == "bench" or c.judge is by_litmus):
            line["rows"] = rows_of(out) + cases_of(out)
            self.limits = out if c.name == "limits" else self.limits
            self.links = line["rows"] if c.name == f"links-{self.n}" else self.links
        if isinstance(c.needs, Reported):
            line["reported"] = True
        if beside:
            line["beside"] = True
        self.note(line)
        if self.failed_logs and not c.needs:
            self.put_away(log, line)

    def put_away(self, log, line):
        """Keeps the end of the output of what failed, and no file of it."""
        if line["state"] == "failed":
            end = log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
            with self.noting, self.failed_logs.open("a") as f:
                f.write(f"== {line['config']}: {line['summary'][:500]}\n{end}\n")
        log.unlink()

    def settle(self, name):
        """What is left of a program a second after its end."""
        for _ in range(20):
            left = leftovers(name)
            if not left:
                break
            time.sleep(0.05)
        return left

    def compare(self):
        """A line that says how far our links are from limits.cu."""
        if self.links is None:
            return
        if self.limits is None:
            print("links: limits.cu did not run beside them, and nothing is compared", flush=True)
            return
        state, summary = by_ratios(against_limits(self.limits, self.links))
        self.note(
            {
                "config": "bench/against-limits",
                "gpus": self.n,
                "state": state,
                "rc": None,
                "seconds": 0.0,
                "summary": summary,
            }
        )

    def note(self, line):
        line = {**line, "summary": " ".join(line["summary"].split()), **self.place}
        state, name, summary = line["state"], line["config"], line["summary"]
        with self.noting:
            self.count[state] += 1
            self.lines[name] = line
            with self.results.open("a") as f:
                f.write(json.dumps(line) + "\n")
            print(f"{state:<8} {line['seconds']:>6.1f} s  {name:<48} {summary}", flush=True)


def arguments():
    p = argparse.ArgumentParser(
        prog="run.sh", epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("mode", choices=[*MODES, "all", "evidence"])
    p.add_argument("n", nargs="?", type=int, help="GPUs to use, from the first on")
    p.add_argument(
        "--only", action="append", default=[], help="only configurations whose name contains this"
    )
    p.add_argument(
        "--skip", action="append", default=[], help="no configurations whose name contains this"
    )
    p.add_argument(
        "--no-interposer", action="store_true", help="do not preload what counts cuMulticastCreate"
    )
    p.add_argument(
        "--for",
        type=float,
        dest="seconds",
        default=float("inf"),
        help="begin nothing after so many seconds",
    )
    p.add_argument(
        "--done",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="evidence: results.jsonl of an earlier call, which is not run again; any number",
    )
    p.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="J",
        help="evidence: configurations that share a GPU where nothing is timed (1); what fails so"
        " runs again alone",
    )
    p.add_argument(
        "--list", action="store_true", help="print the configurations instead of running them"
    )
    a = p.parse_args()
    if a.done and a.mode != "evidence":
        p.error("--done is for evidence")
    if a.jobs < 1 or (a.jobs > 1 and a.mode != "evidence"):
        p.error("--jobs is for evidence, and at least 1")
    return a


def wanted_of(a, n):
    """Mode and configuration of all that the arguments ask for."""
    modes = {"all": list(MODES), "evidence": EVIDENCE}.get(a.mode, [a.mode])
    return [
        (m, c)
        for m in modes
        for c in MODES[m](n)
        if (not a.only or any(part in f"{m}/{c.name}" for part in a.only))
        and not any(part in f"{m}/{c.name}" for part in a.skip)
    ]


def evidence(a, n, place, start):
    """Status of a call of evidence, or with --list what is to be run."""
    out = Path(os.environ.get("OUT") or ".").resolve()
    if not a.list and (out / "results.jsonl").exists():
        print(f"{out}/results.jsonl is there: evidence writes a new one. Give another OUT")
        return 2
    try:
        rows = rows_in(a.done)
    except OSError as e:
        print(f"--done: {e}")
        return 2
    before = Before(rows, text_of(HERE / "commit"), n, not a.no_interposer)
    units = units_of(wanted_of(a, n), before)
    if a.list:
        to_run = [u for again in [False, True] for u in units if u.failed() == again]
        for mode, c in (pair for u in to_run if u.is_new() for pair in u.configs):
            print(f"{mode}/{c.name}")
        return 0
    runner = Runner(out, n, not a.no_interposer, place, few_files=True)
    try:
        found = Evidence(runner, units, before, start + a.seconds, a.jobs)
        found.run(Pool)
    finally:
        shutil.rmtree(runner.cache, ignore_errors=True)
    return found.say()


def main():
    start, a = time.monotonic(), arguments()
    n, place = a.n or 8, {}
    if not a.list:
        found, why = topology()
        have = len(found["gpus"])
        n = have if a.n is None else a.n
        if why or not 1 <= n <= have:
            print(f"{why or f'{n} GPUs asked for, the driver shows {have}'}\n0 passed, 1 failed")
            return 2
        place = where(found, n)
    if a.mode == "evidence":
        return evidence(a, n, place, start)
    wanted = wanted_of(a, n)
    if a.list:
        for mode, c in wanted:
            print(f"{mode}/{c.name}")
        return 0
    return run_all(a, wanted, n, place)


def run_all(a, wanted, n, place):
    """Runs configurations; the status."""
    out = Path(os.environ.get("OUT") or ".").resolve()
    runner = Runner(out, n, not a.no_interposer, place)
    try:
        start = time.monotonic()

        def is_late():
            return time.monotonic() - start > a.seconds

        # Large ones first, so that no GPUs are left over at the end.
        some = sorted((w for w in wanted if w[1].takes), key=lambda w: -w[1].takes)
        late = runner.beside(some, is_late)
        for mode, c in (w for w in wanted if not w[1].takes):
            if is_late():
                late.append(f"{mode}/{c.name}")
            else:
                runner.run(mode, c)
        runner.compare()
    finally:
        shutil.rmtree(runner.cache, ignore_errors=True)
    if late:
        print(f"{len(late)} not begun: {' '.join(late)}")
    skipped = f", {runner.count['skipped']} skipped" if runner.count["skipped"] else ""
    print(f"{runner.count['passed']} passed, {runner.count['failed']} failed{skipped}")
    if runner.unreported:
        print(
            f"{len(runner.unreported)} of conformance left out (name them with --skip, if they are"
            f" to be): {' '.join(runner.unreported)}"
        )
    count = runner.count
    bad = late or runner.unreported or count["failed"] or not count["passed"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
