"""Runs the programs of this folder on GPUs: see run.sh."""

import argparse
import functools
import importlib.util
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

HERE = Path(__file__).resolve().parent
LIMIT_S = 60
CASES = ["put_signal_wait", "put_flag", "get_after_signal", "barrier", "graph_replay", "growth",
         "timeout_and_reform", "abort_and_reform"]
# Operations of `verify` that share a configuration, which must end in a minute; others have one together.
GROUPS = {"moves": ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "quant", "permute"],
          "products": ["gemm", "grouped_gemm", "ag_gemm", "gemm_rs", "gemm_ar", "bulk"], "ep": ["ep"],
          "attention": ["attention", "cp_attention"], "nccl": ["nccl"]}
TEAM_TESTS = {"replays": "replays_with", "silent": "is_named_and_outputs", "left": "left_in_any"}
TEAM_TESTS_NCCL = {"replays": "replays_by_nccl", "silent": "named_by_nccl"}
# Operations of the team tests that share a process: an error of the device ends only that.
TEAM_OPS = ["0-5", "6-13", "14-17", "18-20", "21-24", "25-29", "30-39"]
TEAM_OPS_NCCL = ["40-45", "46-54"]
# The same under a sanitizer, where eight of them take a minute.
SANITIZED_OPS = ["0-5", "6-9", "10-13", "14-17", "18-20", "21-24", "25-27", "28-29", "30-34", "35-39"]
# By `nvshmem`, of ranks that share a GPU: eight have time for `ep` alone.
NVSHMEM_OPS = {"moves": "all_gather,reduce_scatter,all_reduce,all_to_all", "ep": "ep", "fused": "ag_gemm,gemm_rs,gemm_ar,bulk",
               "cp_attention": "cp_attention"}
# Operations whose rank is stopped, a set of processes for some of them; and those whose rank is killed, each with its own.
STOPPED_OPS = ["0-5", "6-14", "15-24", "25-31", "32-39"]
KILLED_OPS = ["0-5", "6-14", "15-18", "19-20"]
# Tests of `gpu` that a sanitizer looks at: a minute each.
SANITIZED_TESTS = ["grouped_gemm::passes_of_bf16", "grouped_gemm::passes_of_fp8", "grouped_gemm::bad_splits", "layers::",
                   "attention::attention_of_packed", "attention::attention_of_fp8"]
LITMUS = ["bulk_store_flag", "copy_push_flag", "counter_flag", "credit"]
TIMINGS = ["signal, in one kernel", "signal + wait, eager", "signal + wait, graph", "put bandwidth", "cost of a flag",
           "1000 graph replays", "hundred heaps"]


class Told(str):
    """Why something is left out, as the driver or `doctor` tell it. Of other reasons nobody knows whether they hold."""


class Config:
    """One program to run: its name, command, how its output is judged, and whether it may compile. One that `takes` some
    GPUs only runs beside others; without it alone. `needs`: why it is left out."""

    def __init__(self, name, argv, judge=None, jit=False, env=None, preload=True, needs=None, takes=None):
        self.name, self.argv, self.judge, self.jit = name, argv, judge or by_status, jit
        self.env, self.preload, self.needs, self.takes = env or {}, preload, needs, takes


def program(name):
    return str(HERE / name)


def ranks_of(n, *argv):
    return [program("tilewire"), "run", "-n", str(n), "--no-prefix", "--", *argv]


def search(*more):
    return os.pathsep.join([os.environ.get("PATH", ""), *more])


def up_to(n, counts):
    return [c for c in counts if c <= n]


# The driver tells how many there are.
TWO_GPUS = Told("needs two GPUs")
IS_BARE = "--no-interposer" in sys.argv
NOT_WATCHED = Told("not watched, as --no-interposer asks") if IS_BARE else "needs gcc, and the interposer"


# What a run says of itself: (state, summary).


def by_status(rc, out):
    lines = [line for line in out.splitlines() if line.strip()]
    return ("passed" if rc == 0 else "failed"), (lines[-1][:300] if lines else "")


def by_tests(rc, out):
    """A libtest harness: nothing that ran is no success."""
    found = [line for line in out.splitlines() if line.startswith("test result:")]
    ran = sum(int(line.split(" passed")[0].rsplit(" ", 1)[-1]) for line in found)
    return ("passed" if rc == 0 and ran > 0 else "failed"), (found[-1] if found else by_status(rc, out)[1])


def by_launches(rc, out):
    """Without what it counts with, it says that it did not run."""
    state, text = by_tests(rc, out)
    return ("failed", "nothing was counted") if "did not run" in out else (state, text)


def rows_of(out):
    rows = []
    for line in out.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                pass
    return rows


def rows_but(*lacking):
    """Rows of `verify --json`: none is wrong, and each ran but those of the operations `lacking`, which the backend may not
    have there. By a name that begins so: `nccl/`."""
    def judge(rc, out):
        rows = [r for r in rows_of(out) if "wrong" in r]
        wrong = [r for r in rows if r["wrong"]]
        none = [r for r in rows if not r["wrong"] and r.get("unsupported")]
        missing = [r for r in none if not r["op"].startswith(lacking)]
        text = f"{len(rows)} rows, {len(wrong)} wrong, {len(none)} unsupported"
        for r in (wrong or missing)[:1]:
            text += f"; {r['op']} {r['dtype']} ranks={r['ranks']} {r['shape']}: {str(r.get('note'))[:300]}"
        if not rows:
            text += "; " + by_status(rc, out)[1]
        return ("passed" if rc == 0 and len(none) < len(rows) and not wrong and not missing else "failed"), text
    return judge


# No configuration may leave out a row: since 2026-11-22 none of those that are run does.
by_rows = rows_but()


def cases_of(out):
    """Lines of symm_checks: what was done, how long it took, and what it found."""
    found = [re.match(r"(ok|FAILED) +(\S.*?) +([0-9.]+) ms  (.*)", line) for line in out.splitlines()]
    return [{"case": m[2], "ok": m[1] == "ok", "ms": float(m[3]), "text": m[4]} for m in found if m]


def watched(line, calls):
    """A line with how often cuMulticastCreate was called; `calls` is none where nobody looked. Only none at all is good."""
    line["multicast_calls"] = calls
    if calls != 0:
        said = "not watched for cuMulticastCreate" if calls is None else f"{calls} calls of cuMulticastCreate"
        line["state"], line["summary"] = "failed", f"{said}; {line['summary']}"


def by_doctor(rc, out):
    lines = out.splitlines()
    bad = [line for line in lines if line.startswith("FAIL")]
    good = sum(line.startswith("ok") for line in lines)
    return ("passed" if rc == 0 and good else "failed"), f"{good} good, {len(bad)} fail: {' | '.join(bad)[:500]}"


def by_bench(rc, out):
    rows = rows_of(out)
    wrong = [r for r in rows if r.get("wrong")]
    return ("passed" if rc == 0 and rows and not wrong else "failed"), f"{len(rows)} rows, {len(wrong)} wrong"


def by_litmus(rc, out):
    """Nothing wrong in any round, and the planted mistakes are seen."""
    rows = [r for r in rows_of(out) if "litmus" in r]
    good = [r for r in rows if r["expect"] == "none wrong"]
    seen = [r["litmus"] for r in rows if r["expect"] != "none wrong" and r["wrong"]]
    text = "; ".join(f"{r['litmus']}: {r['wrong']} wrong in {r['rounds']} rounds of {r['us_per_round']} us" for r in good)
    ok = rc == 0 and good and all(r["ok"] for r in rows)
    return ("passed" if ok else "failed"), f"{text}; seen: {seen}" if rows else by_status(rc, out)[1]


def by_trace(num):
    """A timeline with the work of the last steps: a process for each rank, a track for each of its streams."""
    def judge(rc, out):
        found, text = re.search(r"(\d+) events", out), by_status(rc, out)[1]
        tracks = next((json.loads(line[7:]) for line in out.splitlines() if line.startswith("tracks ")), {})
        main = [rank for rank, streams in tracks.items() if "main" in streams]
        once = all(len(set(streams)) == len(streams) for streams in tracks.values())
        good = rc == 0 and found and int(found[1]) > 100 and len(tracks) == len(main) == num and once
        return ("passed" if good else "failed"), text
    return judge


# Prints the streams that have work, by rank; a piece of work on no named track ends it.
TRACKS = """import json
events = json.load(open("t.json"))["traceEvents"]
names = [((e["pid"], e["tid"]), e["args"]["name"]) for e in events if e["name"] == "thread_name"]
used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
assert used == {track for track, _ in names} and len(used) == len(names), (used, names)
ranks = [e["pid"] for e in events if e["name"] == "process_name"]
print("tracks", json.dumps({rank: [name for (pid, _), name in names if pid == rank] for rank in ranks}))"""


def by_survivors(num):
    def judge(_rc, out):
        lines = [line for line in out.splitlines() if "ranks go on" in line]
        good = len(lines) == num and all(f"{num} ranks go on" in line for line in lines)
        return ("passed" if good else "failed"), f"{len(lines)} of {num} survivors go on; " + (lines or [""])[0][:200]
    return judge


def by_ran(rc, out):
    """Tests of which none says that it did not run."""
    state, text = by_tests(rc, out)
    not_run = next((line for line in out.splitlines() if "did not run" in line), None)
    return ("failed", f"{not_run}; {text}") if not_run else (state, text)


def by_refusal(rc, out):
    """An error that says what to do, and no panic."""
    good = rc in (1, 2) and "hint" in out and "panicked" not in out
    lines = [line for line in out.splitlines() if "error" in line]
    return ("passed" if good else "failed"), (lines or [by_status(rc, out)[1]])[0][:300]


def by_hint(*words):
    """A failure whose text has each of the words, and a hint: what to do."""
    def judge(rc, out):
        missing = [w for w in ("hint", *words) if w not in out]
        line = next((line for line in out.splitlines() if words[0] in line), by_status(rc, out)[1])
        good = rc in (1, 2) and not missing and "panicked" not in out
        return ("passed" if good else "failed"), f"exit {rc}, without {missing}: {line[:300]}"
    return judge


def by_finding(state, *words):
    """A finding of `doctor` in this state that has the first word, and what to do about it."""
    def judge(rc, out):
        lines = out.splitlines()
        at = [i for i, line in enumerate(lines[:-1]) if line.startswith(state) and words[0] in line]
        remedy = lines[at[0] + 1].strip() if at else ""
        good = at and rc in (0, 1) and remedy.startswith("->") and all(w in remedy for w in words[1:])
        return ("passed" if good else "failed"), f"{lines[at[0]]} {remedy}" if at else f"no {state} of {words[0]}"
    return judge


def by_either(rc, out):
    """It works, or it says what to do."""
    rows = by_rows(rc, out)
    return rows if rows[0] == "passed" else by_refusal(rc, out)


def by_warning(word):
    def judge(rc, out):
        lines = out.splitlines()
        at = [i for i, line in enumerate(lines) if line.startswith("warn") and word in line]
        good = rc == 0 and at and lines[at[0] + 1].lstrip().startswith("->")
        return ("passed" if good else "failed"), (lines[at[0]] if at else f"no warning of {word}")
    return judge


def by_shared_gpu(rc, out):
    """Right, and warned of."""
    state, text = by_rows(rc, out)
    warned = "share the GPU" in out
    return ("passed" if state == "passed" and warned else "failed"), f"{text}; {'' if warned else 'not '}warned"


def by_rows_that_say(text):
    def judge(rc, out):
        state, said = by_rows(rc, out)
        told = text in out
        return ("passed" if state == "passed" and told else "failed"), f"{said}; {'' if told else 'not '}told: {text}"
    return judge


def by_sanitizer(rc, out):
    found = [line for line in out.splitlines() if "ERROR SUMMARY" in line]
    # Tests that found no device would be clean, too.
    ran = "did not run" not in out and ("running " not in out or by_tests(rc, out)[0] == "passed")
    clean = rc == 0 and ran and found and all(" 0 errors" in line for line in found)
    return ("passed" if clean else "failed"), (found[-1].strip() if found else by_status(rc, out)[1])


# Lines of limits.cu (a program that is not ours, put here by whoever has it) and our rows of the same: pattern, and
# (operation, shape) for each group behind the first.
LIMITS = [
    (r"CE ring +(\d+) KiB: get \S+ us (\S+) GB/s \| put \S+ us (\S+) GB/s",
     lambda kib: [("get", f"len={int(kib) // 1024}MiB"), ("put", f"len={int(kib) // 1024}MiB")]),
    (r"CE all-gather shard +(\d+) MiB, 1 streams: .*push \S+ us (\S+) GB/s", lambda s: [("all_gather", f"shard={s}MiB")]),
    (r"ld/st ring +(\d+) CTAs: push (\S+) GB/s \| pull (\S+) GB/s",
     lambda c: [("st_put", f"ctas={c} len=256MiB"), ("ld_get", f"ctas={c} len=256MiB")]),
    (r"TMA store->next peer +(\d+) CTAs chunk 16384 x8: (\S+) GB/s", lambda c: [("bulk_put", BULK.format(c))]),
    (r"TMA store->all peers +(\d+) CTAs chunk 14336 x8: (\S+) GB/s", lambda c: [("bulk_put_all", BULK.format(c))]),
    (r"TMA load from peer, local store +(\d+) CTAs: (\S+) GB/s", lambda c: [("bulk_get", BULK.format(c))]),
]
BULK = "ctas={} chunk=16KiB len=256MiB"


def by_limits(rc, out):
    return ("passed" if rc == 0 and "CE ring" in out else "failed"), by_status(rc, out)[1]


def against_limits(text, rows):
    """Our rates over those of limits.cu: [(ratio, what)], the lowest first."""
    rates = {}
    for r in rows:
        words = str(r.get("note")).split(" GB/s")
        if len(words) == 2:
            rates[r["op"].removeprefix("links/"), r["shape"]] = float(words[0])
    found = []
    for pattern, names in LIMITS:
        for m in re.finditer(pattern, text):
            for (op, shape), theirs in zip(names(m[1]), m.groups()[1:]):
                if (op, shape) in rates and float(theirs) > 0:
                    ratio = rates[op, shape] / float(theirs)
                    found.append((ratio, f"{op} {shape} {rates[op, shape]:.0f} of {float(theirs):.0f} GB/s"))
    return sorted(found)


def by_ratios(ratios):
    """No rate is far below the other's. Two programs of which no rate is the same have not been compared."""
    worst = "; ".join(f"{ratio:.3f} {what}" for ratio, what in ratios[:5])
    state = "passed" if ratios and ratios[0][0] >= 0.95 else "failed"
    return state, f"{len(ratios)} rates, lowest: {worst}" if ratios else "no line of limits.cu is one of ours"


def leftovers(name):
    """Processes of this folder's programs that are still there and were begun for the configuration `name`."""
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


# Modes


def smoke(n):
    yield Config("doctor", [program("tilewire"), "doctor"], by_doctor, jit=True)
    yield Config("topo", [program("tilewire"), "topo"], jit=True)
    yield Config("kernels-list", [program("tilewire"), "kernels", "list"])
    tiny = ["--backend", "vmm", "--json", "--op", "gemm", "--shape", "m=64,n=64,k=64"]
    yield Config("verify-tiny", [program("tilewire"), "verify", "--ranks", "1", *tiny], by_rows)
    if n > 1:
        gather = ["--backend", "vmm", "--json", "--op", "all_gather"]
        yield Config("verify-tiny-2", [program("tilewire"), "verify", "--ranks", "2", *gather], by_rows)


def verify_groups():
    """The operations that the program knows, by group; GROUPS where there is no program, to list configurations."""
    try:
        argv = [program("tilewire"), "verify", "--op", "?"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except OSError:
        return GROUPS
    text = done.stderr.split("one of ", 1)
    known = [w.strip() for w in text[1].splitlines()[0].split(",")] if len(text) == 2 else []
    groups = {name: [op for op in ops if op in known] for name, ops in GROUPS.items()}
    groups["others"] = [op for op in known if not any(op in ops for ops in GROUPS.values())]
    return {name: ops for name, ops in groups.items() if ops} if known else GROUPS


@functools.cache
def doctor_says():
    """What `doctor` says; nothing if it does not come to its end."""
    try:
        argv = [program("tilewire"), "doctor"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode in (0, 1) else ""


def why_not(backend, said):
    """Why the program cannot use a backend here, in doctor's words. None if it can, and where doctor says nothing of it: then
    what needs the backend runs, and fails for a reason of its own."""
    found = re.search(f"^.{{4}} backend {backend}: (.*)$", said, re.MULTILINE)
    return None if not found or found[1] == "available" else Told(f"backend {backend}: {found[1]}")


def by_backends(*names):
    """Doctor says of each backend whether it can be used: what it says decides what is left out."""
    def judge(rc, out):
        missing = [name for name in names if not re.search(f"^.{{4}} backend {name}: ", out, re.MULTILINE)]
        # A library that is there and does not open: what needs it would be left out, and nobody would know.
        broken = [line for line in out.splitlines() if line.startswith("FAIL") and any(name in line.lower() for name in names)]
        text = f"nothing of {', '.join(missing)}; {by_status(rc, out)[1]}" if missing else "told of " + ", ".join(names)
        good = rc in (0, 1) and not missing and not broken
        return ("passed" if good else "failed"), f"exit {rc}, {'; '.join([text, *broken])}"
    return judge


def conformance(n):
    tests = program("conformance")
    yield Config("one-sided-threads-1", [tests, "vmm_alone"], by_tests, takes=1)
    if n > 1:
        threads = ["--test-threads", "1", "--nocapture"]
        yield Config("one-sided-threads-vmm", [tests, "vmm_threads::", *threads], by_ran)
        yield Config("one-sided-threads-nccl", [tests, "nccl_threads::", *threads], by_ran, needs=why_not("nccl", doctor_says()))
    for ranks in up_to(n, [2, 3, 4, 5, 8]):
        yield Config(f"one-sided-processes-{ranks}", ranks_of(ranks, program("symm_checks"), *CASES))
    if n > 1:
        yield Config("backends", [program("tilewire"), "doctor"], by_backends("nvshmem", "nccl"), jit=True)
    # A process for each rank, and more than one GPU of them.
    needs = why_not("nvshmem", doctor_says()) if n > 1 else TWO_GPUS
    for ranks in up_to(n, [2, 4, 8]) or [2]:
        yield Config(f"one-sided-nvshmem-{ranks}", ranks_of(ranks, program("symm_checks"), "nvshmem"), needs=needs)
    for i, ops in enumerate(["all_gather,reduce_scatter,ag_gemm,gemm_rs", "all_reduce,all_to_all,gemm_ar,ep", "cp_attention,bulk"]):
        moves = [program("tilewire"), "verify", "--backend", "nvshmem", "--json", "--op", ops]
        yield Config(f"verify-nvshmem-{i}", ranks_of(2, *moves), by_rows, i == 2, needs=needs)
    # Of more than two ranks NVSHMEM may map the parts in uneven steps.
    for ranks in up_to(n, [4, 8]):
        moves = [program("tilewire"), "verify", "--backend", "nvshmem", "--json", "--op", "all_reduce,all_to_all,ep"]
        yield Config(f"verify-nvshmem-ranks-{ranks}", ranks_of(ranks, *moves), by_rows, needs=needs)
    # The communicator of a caller's, and NCCL's own puts, are with that backend.
    two = why_not("nccl", doctor_says()) if n > 1 else TWO_GPUS
    yield Config("one-sided-nccl-2", ranks_of(2, program("symm_checks"), "nccl"), needs=two)
    for i, ops in enumerate(["all_gather,reduce_scatter,all_reduce", "all_to_all,ag_gemm,gemm_rs,gemm_ar", "ep"]):
        moves = [program("tilewire"), "verify", "--backend", "nccl", "--json", "--op", ops]
        yield Config(f"verify-nccl-{i}", [*moves, "--ranks", "2"], by_rows, needs=two)
    steps = ["train", "--task", "copy", "--steps", "5", "--backend"]
    yield Config("train-nccl", [program("tilewire"), *steps, "nccl", "--ranks", "2"], jit=True, needs=two)
    yield Config("train-nvshmem", ranks_of(2, program("tilewire"), *steps, "nvshmem"), jit=True, needs=needs)
    for backend in ["nccl", "nvshmem"]:
        argv = [program("tilewire"), "verify", "--json", "--dtype", "bf16", "--ranks", "1", "--backend", backend, "--op", "all_gather,gemm_rs,ep"]
        yield Config(f"verify-{backend}-alone", argv, by_rows, needs=why_not(backend, doctor_says()))
    for part in LITMUS:
        yield Config(f"litmus-{part}", [program("symm_checks"), "litmus", part], by_litmus, needs=None if n > 1 else TWO_GPUS)
    # Attention, also through NCCL, has a kernel for each pair of head dimensions: the rare ones are compiled.
    yield Config("ops", [program("gpu"), "--skip", "attention", "--skip", "emulated"], by_tests, takes=1)
    yield Config("ops-attention", [program("gpu"), "attention"], by_tests, jit=True, takes=1)
    # With the interposer, it and `gpu` count what launches ask of the driver.
    more = None if n > 1 else TWO_GPUS
    launches = more or (None if can_watch() else NOT_WATCHED)
    for ops, needs in [*((ops, launches) for ops in TEAM_OPS), *((ops, launches or two) for ops in TEAM_OPS_NCCL)]:
        argv = [program("gpu_team"), "launches_neither", "--nocapture"]
        env = {"TW_TEAM_OPS": ops}
        yield Config(f"launch-calls-{ops}", argv, by_launches, jit=True, needs=needs, env=env, takes=2 if n > 2 else None)
    for test in sorted(HERE.glob("gpu_*")):
        if test.name not in ("symm_checks", "gpu_team"):
            # Silence takes its time: `faults` has it.
            argv = [str(test), "--test-threads", "1", "--skip", "that_is_silent"]
            yield Config(f"ops-{test.name}", argv, by_tests, jit=True)
    for name, part in TEAM_TESTS.items():
        for ops in TEAM_OPS:
            argv = [program("gpu_team"), part, "--nocapture"]
            yield Config(f"ops-gpu_team-{name}-{ops}", argv, by_ran, jit=True, env={"TW_TEAM_OPS": ops}, needs=more)
    for name, part in TEAM_TESTS_NCCL.items():
        yield Config(f"ops-gpu_team-nccl-{name}", [program("gpu_team"), part, "--nocapture"], by_ran, jit=True, needs=two)
    # GPUs as if they did not reach each other.
    yield Config("ops-gpu_team-dropped", [program("gpu_team"), "dropped_plans", "--nocapture"], by_ran, jit=True, needs=more)
    yield Config("ops-gpu_team-far", [program("gpu_team"), "far_gpus", "--nocapture"], by_ran, jit=True, needs=two)
    # Sizes, a zero copy into a product, two backends in one process; heaps left in any order are above.
    heaps = [program("gpu_team"), "heaps::", "--skip", "left_in_any", "--nocapture"]
    yield Config("ops-gpu_team-heaps", heaps, by_ran, jit=True, needs=two)
    yield Config("device", [program("device"), "cuda", "--nocapture"], by_ran, jit=True)
    for name, ops in verify_groups().items():
        flags = ["verify", "--backend", "vmm", "--json", "--op", ",".join(ops)]
        for ranks in up_to(n, [1, 2, 4, 8]):
            if name == "nccl" and ranks == 1:
                continue
            threads, takes = [program("tilewire"), *flags, "--ranks", str(ranks)], ranks if ranks < n else None
            lacks, compiles = two if name == "nccl" else None, name in ["attention", "nccl"]
            yield Config(f"verify-threads-{ranks}-{name}", threads, by_rows, compiles, takes=takes, needs=lacks)
            if ranks > 1:
                processes = ranks_of(ranks, program("tilewire"), *flags)
                yield Config(f"verify-processes-{ranks}-{name}", processes, by_rows, compiles, takes=takes, needs=lacks)
    yield from sharing(n)
    ranks = max(up_to(n, [1, 2, 4, 8]))
    train = f'"$0" train --backend vmm --task copy --steps 5 --ranks {ranks} --trace t.json && "$0" trace t.json --html t.html'
    argv = ["bash", "-c", f'{train} && python3 -c "$1"', program("tilewire"), TRACKS]
    yield Config(f"train-trace-{ranks}", argv, by_trace(ranks), jit=True)
    yield from sanitized(n)


def sharing(n):
    """More ranks than GPUs: processes whose kernels take turns. What many ranks do is seen, not in which order a link brings it."""
    # The program is asked once.
    groups, nvshmem = verify_groups(), why_not("nvshmem", doctor_says())
    for ranks in [r for r in [2, 4, 8] if r > n]:
        yield Config(f"one-sided-nvshmem-shared-{ranks}", ranks_of(ranks, program("symm_checks"), "nvshmem"), needs=nvshmem)
        for name, ops in NVSHMEM_OPS.items() if ranks < 8 else [("ep", "ep")]:
            flags = ["verify", "--backend", "nvshmem", "--json", "--timeout-s", "40", "--op", ops]
            processes = ranks_of(ranks, program("tilewire"), *flags)
            yield Config(f"verify-nvshmem-shared-{ranks}-{name}", processes, by_shared_gpu, name == "cp_attention", needs=nvshmem)
        yield Config(f"one-sided-shared-{ranks}", ranks_of(ranks, program("symm_checks"), *CASES))
        # Eight that take turns need more than a minute for a whole group.
        parts = {op: [op] for ops in groups.values() for op in ops} if ranks == 8 else groups
        for name, ops in parts.items():
            flags = ["verify", "--backend", "vmm", "--json", "--timeout-s", "40", "--op", ",".join(ops)]
            if name != "nccl":
                yield Config(f"verify-shared-{ranks}-{name}", ranks_of(ranks, program("tilewire"), *flags), by_shared_gpu, "attention" in name)
        steps = ["train", "--backend", "vmm", "--task", "copy", "--steps", "5", "--timeout-s", "40"]
        yield Config(f"train-shared-{ranks}", ranks_of(ranks, program("tilewire"), *steps), jit=True)


def sanitized(n):
    places = search("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
    sanitizer = shutil.which("compute-sanitizer", path=places)
    # GPUs, ranks, operation: ranks that share a GPU are virtual ones.
    small = [(1, 1, op) for op in ["gemm", "quant", "permute"]] + [(1, 2, op) for op in ["all_gather", "ep"]]
    small += [(2, 2, op) for op in ["all_gather", "reduce_scatter", "ep"]]
    for tool in ["memcheck", "synccheck"]:
        for devices, ranks, op in small:
            if devices > n:
                continue
            name = f"{tool}-{devices}{'-virtual' if ranks > devices else ''}-{op}"
            verify = [program("tilewire"), "verify", "--backend", "vmm", "--op", op, "--dtype", "bf16", "--timeout-s", "50"]
            verify += ["--shape", "m=64,n=64,k=64"] if op == "gemm" else []
            # Ranks of one process share the queues of a GPU: a kernel that waits may stand before the one that it waits for.
            verify = ranks_of(ranks, *verify) if ranks > devices else [*verify, "--ranks", str(ranks)]
            argv = [sanitizer or "compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "99", *verify]
            # Kernels that are loaded while a rank on the same GPU waits would wait for it.
            env = {"CUDA_MODULE_LOADING": "EAGER"}
            yield Config(name, argv, by_sanitizer, preload=False, env=env, takes=devices,
                         needs=None if sanitizer else "compute-sanitizer is not there")
        # Operations of one rank, against the oracle. Replays are a matter of speed and bits, not of memory.
        for part in SANITIZED_TESTS:
            argv = [sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "99", program("gpu"), part]
            yield Config(f"{tool}-1-{part.strip(':').replace('::', '-')}", [*argv, "--nocapture", "--skip", "replay"], by_sanitizer,
                         jit=True, preload=False, takes=1, needs=None if sanitizer else "compute-sanitizer is not there")
        # Every operation of a team, once.
        for ops in SANITIZED_OPS if n > 1 else []:
            argv = [sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "99", program("gpu_team")]
            env = {"CUDA_MODULE_LOADING": "EAGER", "TW_TEAM_OPS": ops}
            yield Config(f"{tool}-2-team-{ops}", [*argv, "every_operation_computes", "--nocapture"], by_sanitizer, jit=True, preload=False, env=env,
                         takes=2, needs=None if sanitizer else "compute-sanitizer is not there")


def can_watch():
    """Whether calls of the driver go through the interposer."""
    return bool(shutil.which("gcc")) and not IS_BARE


def bad_input(n):
    """Places that are not as they should be: each works, or says what to do."""
    verify = [program("tilewire"), "verify", "--backend", "vmm", "--json", "--op", "all_gather", "--dtype", "bf16"]
    devices = first_devices(n).split(",")
    # Numbers that are no power of two. Where there are fewer GPUs, ranks share them: as processes, whose kernels take
    # turns, so that one that waits keeps none of another from being loaded or run.
    for ranks in [3, 5, 6, 7]:
        shared = by_rows if ranks <= n else by_shared_gpu
        if ranks <= n:
            yield Config(f"ranks-{ranks}", [*verify, "--ranks", str(ranks)], by_rows)
        for op in ODD_WORLDS:
            argv = [program("tilewire"), "verify", "--backend", "vmm", "--json", "--op", op, "--dtype", "bf16", "--timeout-s", "40"]
            yield Config(f"ranks-{ranks}-{op}", ranks_of(ranks, *argv), shared, jit=op == "cp_attention")
    if n > 1:
        turned = {"CUDA_VISIBLE_DEVICES": ",".join(reversed(devices))}
        yield Config("devices-permuted", [*verify, "--ranks", str(n)], by_rows, env=turned)
        processes = ranks_of(n, *verify)
        yield Config("devices-permuted-processes", processes, by_rows, env=turned)
        each = f'export CUDA_VISIBLE_DEVICES=$(echo {first_devices(n)} | cut -d, -f$((RANK + 1))); exec "$@"'
        yield Config("one-device-visible-to-each", ranks_of(n, "bash", "-c", each, "bash", *verify), by_rows)
    one = {"CUDA_VISIBLE_DEVICES": devices[0]}
    yield Config("two-ranks-on-one-gpu", [*verify, "--ranks", "2"], by_shared_gpu, env=one)
    yield Config("no-device", [*verify, "--ranks", "1"], by_refusal, env={"CUDA_VISIBLE_DEVICES": ""})
    few = ["bash", "-c", 'ulimit -n 20; exec "$@"', "bash", *verify, "--ranks", "1"]
    yield Config("few-descriptors", few, by_either, preload=False)
    # Away from the kernels that were built, so that the cache is asked.
    compiled = ["bash", "-c", AWAY, "bash", program("tilewire"), *verify[1:], "--ranks", "1"]
    yield Config("cache-not-writable", compiled, by_rows_that_say("compiled in every run"), jit=True)
    off = {name: "1" for name in ["NCCL_NVLS_ENABLE"]} | {name: "0" for name in ["NVSHMEM_DISABLE_NVLS"]}
    # NVRTC that cannot be loaded: the program is away from the kernels that were built, and has to compile.
    alone = ["bash", "-c", ALONE, "bash", program("tilewire"), *verify[1:], "--ranks", "1"]
    yield Config("nvrtc-broken", alone, by_hint("nvrtc", "pip install nvidia-cuda-nvrtc"), jit=True)
    yield from worse(n, verify)
    # Without the variables: what needs none works, and a library that would use multicast is not opened.
    bare = ["env", *[word for name in NO_MULTICAST for word in ("-u", name)]]
    yield Config("multicast-not-set", [*bare, *verify, "--ranks", str(min(n, 2))], by_rows)
    nccl = [program("tilewire"), "verify", "--json", "--backend", "nccl", "--op", "all_gather", "--dtype", "bf16"]
    yield Config("multicast-not-set-nccl", [*bare, *nccl, "--ranks", str(min(n, 2))], by_hint("NCCL", "NCCL_NVLS_ENABLE=0"))
    train = [program("tilewire"), "train", "--backend", "vmm", "--task", "copy", "--steps", "2", "--ranks", str(min(n, 2))]
    yield Config("multicast-not-set-train", [*bare, *train], jit=True)
    yield Config("multicast-not-off", [program("tilewire"), "doctor"], by_warning("NVLink multicast"), env=off, jit=True)


# One of each family.
ODD_WORLDS = ["all_gather", "gemm_rs", "ep", "cp_attention"]
# A copy of the program without the folder of kernels, and no folder for those that it compiles.
AWAY = 'mkdir -p away && cp "$1" away/tilewire && cd away || exit 9; shift; exec env TILEWIRE_CACHE_DIR=/proc/none ./tilewire "$@"'
# The same, where the first NVRTC that is found is no library.
ALONE = """mkdir -p alone/broken/lib64 && echo none > alone/broken/lib64/libnvrtc.so.13 && cp "$1" alone/tilewire && cd alone || exit 9
shift
exec env -u VIRTUAL_ENV -u CONDA_PREFIX HOME="$PWD" PATH=/none CUDA_HOME="$PWD/broken" TILEWIRE_CACHE_DIR="$PWD/cache" ./tilewire "$@\""""
NO_MULTICAST = ["NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "CUBLASMP_DISABLE_MULTICAST"]


def worse(n, verify):
    """A machine that the interposer makes worse than it is. CUDA's codes: 1 a bad value, 217 no peers, 800 not permitted,
    801 not supported."""
    gcc = None if can_watch() else NOT_WATCHED
    two, doctor = [*verify, "--ranks", "2"], [program("tilewire"), "doctor"]
    share = "cuMemExportToShareableHandle"
    take = "cuMemImportFromShareableHandle"
    far = ("do not reach each other", "nccl")
    # Name, environment, what `verify` on two ranks says, and what `doctor` does.
    for name, env, said, found in [
            ("old-driver", {"TW_DRIVER_VERSION": "12000"}, ("too old", "580"), ("warn", "too old", "580")),
            ("old-gpu", {"TW_COMPUTE_CAPABILITY": "75"}, ("too old", "CUDA_VISIBLE_DEVICES"),
             ("warn", "older than sm_80", "CUDA_VISIBLE_DEVICES")),
            ("no-peers", {"TW_NO_PEERS": "217"}, far if n > 1 else ("cuMemSetAccess", "topo -p2p"), ("warn", "peer access", "topo -p2p")),
            ("no-export", {"TW_FAIL": f"{share}=800"}, (share, "--gpus all"), ("FAIL", "sharing memory", "--gpus all")),
            ("no-export-at-all", {"TW_FAIL": f"{share}=801"}, (share, "--gpus all"), None),
            ("no-import", {"TW_FAIL": f"{take}=800"}, (take, "--gpus all"), ("FAIL", "sharing memory", "--gpus all")),
            ("no-import-value", {"TW_FAIL": f"{take}=1"}, (take, "--gpus all"), None)]:
        yield Config(f"{name}-verify", two, by_hint(*said), env=env, needs=gcc)
        if found and (n > 1 or name != "no-peers"):
            yield Config(f"{name}-doctor", doctor, by_finding(*found), env=env, jit=True, needs=gcc)


    # As on sm_86, sm_89 and sm_120: other tiles, or the plain kernels.
    attention = [program("tilewire"), "verify", "--backend", "vmm", "--json", "--op", "attention", "--ranks", "1"]
    yield Config("little-shared-memory", attention, by_rows, jit=True, env={"TW_SHARED_BYTES": "101376"}, takes=1, needs=gcc)
    # Through NCCL it works.
    if n > 1:
        nccl = ["verify", "--backend", "vmm", "--json", "--op", "nccl", "--dtype", "bf16", "--ranks", "2"]
        yield Config("no-peers-nccl", [program("tilewire"), *nccl], by_rows, jit=True, env={"TW_NO_PEERS": "217"},
                     needs=gcc or why_not("nccl", doctor_says()))


def faults(n):
    yield from bad_input(n)
    spike = program("symm_checks")
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    # Where there are fewer GPUs, ranks share them.
    for ranks in [2, 4]:
        many = ranks if ranks <= n else f"shared-{ranks}"
        for extra, tag in [({}, ""), (one, "-one-connection")]:
            for case in ["timeout", "abort"]:
                yield Config(f"{case}-{many}{tag}", ranks_of(ranks, spike, case), env=extra)
            # The launcher ends the ranks that are left when one fails: they ignore that.
            stay = ["bash", "-c", f'trap "" TERM; exec "{spike}" killed']
            yield Config(f"killed-{many}{tag}", ranks_of(ranks, *stay), by_survivors(ranks - 1), env=extra)
            yield Config(f"after-{many}{tag}", ranks_of(ranks, spike, "put_signal_wait"), env=extra)
        yield Config(f"leaks-{many}", ranks_of(ranks, spike, "hundred heaps"))
    orders = [program("gpu_team"), "--test-threads", "1", "--nocapture"]
    if n > 1:
        yield Config("parked-between", [*orders, "stops_between"], by_ran, jit=True)
        argv = [program("gpu_team"), "a_rank_without_memory", "--nocapture"]
        yield Config("lacking-memory", argv, by_ran, jit=True, needs=None if can_watch() else NOT_WATCHED)
        yield Config("parked-copies", [*orders, "copies_hang"], by_ran, jit=True)
        yield Config("opposite-orders", [*orders, "opposite_orders"], by_ran, jit=True)
        # The streams of a device are one queue then: ranks must launch in one order.
        yield Config("one-order-one-connection", [*orders, "one_order"], by_ran, jit=True, env=one)
    # Two that share a GPU are threads: their kernels run beside each other.
    for part in ["before", "behind"]:
        argv = [program("gpu_model"), f"that_is_silent_{part}", "--nocapture"]
        for ranks in up_to(n, [2, 4]) or [2]:
            many = ranks if ranks <= n else f"shared-{ranks}"
            yield Config(f"silent-in-training-{part}-{many}", argv, by_ran, jit=True, env={"TW_GRID_RANKS": str(ranks)})
    # Ranks are processes, at least three: the rest is a team. Two GPUs are shared, and one by four.
    some = {"TW_RANKS": "4"} if n < 2 else {}
    for ops in STOPPED_OPS:
        yield Config(f"stopped-in-{ops}", [*orders, "a_stopped_process"], by_ran, jit=True,
                     env={"TW_TEAM_OPS": ops, **some})
    for ops in KILLED_OPS:
        for way, test in [("killed", "a_killed_process"), ("left", "a_process_that_leaves")]:
            yield Config(f"{way}-in-{ops}", [*orders, test], by_ran, jit=True, env={"TW_TEAM_OPS": ops, **some})
    if n < 2:
        yield Config("peers", [], needs=TWO_GPUS)


def train_rates(ranks):
    # Any text will do: what is learned is not what is measured.
    train = [program("tilewire"), "train", "--backend", "vmm", "--preset", "h200", "--data", str(HERE / "run.py"),
             "--ranks", str(ranks), "--layers", "1", "--steps", "20", "--metrics", "train.jsonl"]
    # Its rows behind what it says on the way, not among that.
    argv = ["bash", "-c", '"$@" && cat train.jsonl', "bash", *train]
    return Config(f"train-{ranks}", argv, by_bench, jit=True)


@functools.cache
def no_torch():
    """Why torch cannot be asked."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not there"
    ask = "import torch; torch._grouped_mm; torch.zeros(1, device='cuda')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return None if done.returncode == 0 else f"torch: {done.stderr.strip().splitlines()[-1:]}"


def bench_of_one():
    """One GPU, and what torch makes of the same shapes."""
    for rates in ["layers", "gemm", "attention"]:
        yield Config(f"rates-{rates}", [program("rates"), rates], by_bench, jit=True)
    needs = no_torch()
    for rates in ["gemm", "attention"]:
        yield Config(f"rates-torch-{rates}", ["python3", str(HERE / "torch_rates.py"), rates], by_bench, preload=False,
                     needs=needs)
    yield train_rates(1)


def bench(n):
    yield from bench_of_one()
    if n < 2:
        yield Config("links", [], needs=TWO_GPUS)
        return
    limits = HERE / "limits.cu"
    if limits.exists():
        nvcc = shutil.which("nvcc", path=search("/usr/local/cuda/bin"))
        needs = None if nvcc else "nvcc is not there"
        build = [nvcc or "nvcc", "-O3", "-std=c++20", "-arch=sm_90a", "-o", "limits", str(limits), "-lcublas"]
        yield Config("limits-build", build, preload=False, needs=needs)
        yield Config("limits", ["./limits", str(n)], by_limits, preload=False, needs=needs)
    for ranks in sorted({2, n}):
        links = [program("tilewire"), "bench", "links", "--json", "--ranks", str(ranks)]
        yield Config(f"links-{ranks}", links, by_bench)
    for ranks in sorted({n, 8}):
        yield Config(f"rendezvous-{ranks}", ranks_of(ranks, program("symm_checks"), "rendezvous"), jit=True)
    for part in TIMINGS:
        name = "spike-" + "-".join(part.replace(",", "").replace("+ ", "").split())
        yield Config(name, [program("symm_checks"), part], jit=True)
    yield train_rates(n)
    for op in ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ep_dispatch", "ep_combine", "ep_dispatch_bwd",
               "ep_combine_bwd"]:
        argv = [program("tilewire"), "bench", "--backend", "vmm", "--dtype", "bf16", "--json", "--op", op]
        yield Config(f"op-{op}", [*argv, "--ranks", str(n)], by_bench)
    # Expert parallelism: fewer multiprocessors, rows that come straight to where they stay, a step of inference.
    few = ["--tokens", "128", "--align", "16"]
    for op, name, flags in [("ep_dispatch", "16", ["--sms", "16"]), ("ep_combine", "16", ["--sms", "16"]),
                            ("ep_dispatch", "zero_copy", ["--zero-copy"]),
                            ("ep_dispatch", "zero_copy-16", ["--zero-copy", "--sms", "16"]),
                            ("ep_dispatch", "rank_major-16", ["--layout", "rank-major", "--sms", "16"]),
                            ("ep_dispatch", "rank_major-zero_copy", ["--layout", "rank-major", "--zero-copy"]),
                            ("ep_dispatch", "rank_major-zero_copy-16", ["--layout", "rank-major", "--zero-copy", "--sms", "16"]),
                            ("ep_dispatch_bwd", "16", ["--sms", "16"]),
                            ("ep_dispatch_bwd", "rank_major-16", ["--layout", "rank-major", "--sms", "16"]),
                            ("ep_combine_bwd", "16", ["--sms", "16"]),
                            ("ep_combine_bwd", "zero_copy-16", ["--zero-copy", "--sms", "16"]),
                            ("ep_dispatch", "few", [*few, "--zero-copy"]), ("ep_combine", "few", few)]:
        argv = [program("tilewire"), "bench", "--backend", "vmm", "--dtype", "bf16", "--json", "--op", op]
        yield Config(f"op-{op}-{name}", [*argv, *flags, "--ranks", str(n)], by_bench)
    cube = ["--m", "8192", "--n", "8192", "--k", "8192"]
    for op, shape in [("gemm", cube), ("ag_gemm", cube), ("gemm_rs", cube), ("gemm_ar", cube),
                      ("cp_attention", ["--m", "16384"])]:
        argv = [program("tilewire"), "bench", "--backend", "vmm", "--dtype", "bf16", "--json", "--iters", "9", "--op", op]
        yield Config(f"op-{op}", [*argv, *shape, "--ranks", str(n)], by_bench)


MODES = {"smoke": smoke, "conformance": conformance, "faults": faults, "bench": bench}


# Running


def topology():
    """What the driver shows, or why nothing: tests that find no GPU pass, and would mean nothing."""
    try:
        done = subprocess.run([program("tilewire"), "topo", "--json"], capture_output=True, text=True, check=False,
                              timeout=LIMIT_S)
        return (json.loads(done.stdout), None) if done.returncode == 0 else ({"gpus": []}, done.stderr.strip())
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        return {"gpus": []}, f"tilewire topo: {e}"


def text_of(path):
    return path.read_text().strip() if path.exists() else ""


def where(found, n):
    """What every line says: the commit that the programs are of, GPUs, driver."""
    driver = re.search(r" (\d+\.\d+(\.\d+)?) ", text_of(Path("/proc/driver/nvidia/version")))
    names = sorted({gpu["name"] for gpu in found["gpus"][:n]})
    return {"commit": text_of(HERE / "commit") or None, "gpu": ", ".join(names) or None, "driver": driver and driver[1]}


def devices_of(n):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [d.strip() for d in visible.split(",") if d.strip()] if visible else [str(i) for i in range(n)]
    return names[:n]


def first_devices(n):
    return ",".join(devices_of(n))


class Pool:
    """GPUs for configurations that run beside each other."""

    def __init__(self, devices):
        self.free, self.changed = list(devices), threading.Condition()
        self.asked, self.served = 0, 0

    def take(self, num):
        with self.changed:
            # Who comes first is served first: whoever gives GPUs back would else take them again.
            turn, self.asked = self.asked, self.asked + 1
            self.changed.wait_for(lambda: turn == self.served and len(self.free) >= num)
            self.served += 1
            self.changed.notify_all()
            mine, self.free = self.free[:num], self.free[num:]
            return mine

    def give(self, mine):
        with self.changed:
            self.free += mine
            self.changed.notify_all()


class Runner:
    def __init__(self, out, n, interpose, place):
        self.n, self.place = n, place
        self.results, self.logs = out / "results.jsonl", out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.count = {"passed": 0, "failed": 0, "skipped": 0}
        self.cache = tempfile.mkdtemp(prefix="tilewire-run-")
        self.interpose = interpose
        self.preload = self.interposer() if interpose else None
        # What limits.cu and our links have said, once each has run.
        self.limits, self.links = None, None
        # Left out for a reason that nobody has told.
        self.untold = []
        self.noting = threading.Lock()

    def interposer(self):
        """A library that makes cuMulticastCreate fail; none without a compiler to make it with, and then no configuration that
        it should watch passes."""
        gcc, lib = shutil.which("gcc"), Path(self.cache) / "nomulticast.so"
        if not gcc:
            print("gcc is not there, so nothing watches for cuMulticastCreate: install it, or give --no-interposer", flush=True)
            return None
        argv = [gcc, "-shared", "-fPIC", "-O1", "-o", str(lib), str(HERE / "nomulticast.c"), "-ldl"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if done.returncode:
            print("the multicast interposer does not compile:\n" + done.stderr, flush=True)
            return None
        return str(lib)

    def environment(self, c, log, name, devices):
        visible = ",".join(devices) if devices else first_devices(self.n)
        env = dict(os.environ, CUDA_VISIBLE_DEVICES=visible, TILEWIRE_CACHE_DIR=self.cache, TW_RUN_CONFIG=name)
        # Every kernel of the operations must be among the files of this folder.
        env["TILEWIRE_JIT"] = "auto" if c.jit else "off"
        if c.preload and self.preload:
            calls = log.with_suffix(".calls")
            calls.mkdir(exist_ok=True)
            env["LD_PRELOAD"] = self.preload
            env["TW_MULTICAST_LOG"] = str(log)
            env["TW_CALLS_DIR"] = str(calls)
        env.update(c.env)
        return env

    def beside(self, configs, is_late):
        """Runs configurations that take some of the GPUs, as many at once as there are GPUs for. Those that there was no
        time for."""
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

    def run(self, mode, c, devices=None):
        start, name = time.monotonic(), f"{mode}/{c.name}"
        multicast = Path(self.cache) / (name.replace("/", "-") + ".multicast")
        if c.needs:
            rc, state, summary = None, "skipped", c.needs
            if mode == "conformance" and self.n > 1 and not isinstance(c.needs, Told):
                self.untold.append(name)
        else:
            argv = ["timeout", "-k", "5", str(LIMIT_S), *c.argv]
            log = self.logs / (name.replace("/", "-") + ".txt")
            # A file, not a pipe: nobody who keeps it open keeps us waiting.
            with log.open("wb") as f:
                rc = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT, cwd=self.cache,
                                    env=self.environment(c, multicast, name, devices), check=False).returncode
            out = log.read_text(errors="replace")
            state, summary = c.judge(rc, out)
            # A program that a signal ended may give the same code: only time tells.
            if rc in (124, 137) and time.monotonic() - start >= LIMIT_S:
                state, summary = "failed", f"ended after {LIMIT_S} s: " + summary
            left = self.settle(name)
            if left:
                state, summary = "failed", f"left behind: {left}; " + summary
        line = {"config": name, "gpus": self.n, "state": state, "rc": rc,
                "seconds": round(time.monotonic() - start, 2), "summary": summary, "command": shlex.join(c.argv).replace(f"{HERE}/", "./")}
        if c.preload and self.interpose and not c.needs:
            seen = multicast.read_text().split() if multicast.exists() else []
            watched(line, seen.count("cuMulticastCreate") if "loaded" in seen else None)
        # Litmus tests have figures, too.
        if not c.needs and (mode == "bench" or c.judge is by_litmus):
            line["rows"] = rows_of(out) + cases_of(out)
            self.limits = out if c.name == "limits" else self.limits
            self.links = line["rows"] if c.name == f"links-{self.n}" else self.links
        self.note(line)

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
        if self.limits is None or self.links is None:
            return
        state, summary = by_ratios(against_limits(self.limits, self.links))
        self.note({"config": "bench/against-limits", "gpus": self.n, "state": state, "rc": None, "seconds": 0.0,
                   "summary": summary})

    def note(self, line):
        line = {**line, "summary": " ".join(line["summary"].split()), **self.place}
        state, name, summary = line["state"], line["config"], line["summary"]
        with self.noting:
            self.count[state] += 1
            with self.results.open("a") as f:
                f.write(json.dumps(line) + "\n")
            print(f"{state:<8} {line['seconds']:>6.1f} s  {name:<48} {summary}", flush=True)


def main():
    p = argparse.ArgumentParser(prog="run.sh")
    p.add_argument("mode", choices=[*MODES, "all"])
    p.add_argument("n", nargs="?", type=int, help="GPUs to use, from the first on")
    p.add_argument("--only", action="append", default=[], help="only configurations whose name contains this")
    p.add_argument("--skip", action="append", default=[], help="no configurations whose name contains this")
    p.add_argument("--no-interposer", action="store_true", help="do not preload what counts cuMulticastCreate")
    p.add_argument("--for", type=float, dest="seconds", default=float("inf"), help="begin nothing after so many seconds")
    p.add_argument("--list", action="store_true", help="print the configurations instead of running them")
    a = p.parse_args()
    n = a.n
    if not a.list:
        found, why = topology()
        have = len(found["gpus"])
        n = have if n is None else n
        if why or not 1 <= n <= have:
            print(f"{why or f'{n} GPUs asked for, the driver shows {have}'}\n0 passed, 1 failed")
            return 2
    modes = list(MODES) if a.mode == "all" else [a.mode]
    wanted = [(m, c) for m in modes for c in MODES[m](n or 8)
              if (not a.only or any(part in f"{m}/{c.name}" for part in a.only))
              and not any(part in f"{m}/{c.name}" for part in a.skip)]
    if a.list:
        for mode, c in wanted:
            print(f"{mode}/{c.name}")
        return 0
    runner = Runner(Path(os.environ.get("OUT") or ".").resolve(), n, not a.no_interposer, where(found, n))
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
    if runner.untold:
        print(f"{len(runner.untold)} of conformance left out (name them with --skip, if they are to be): {' '.join(runner.untold)}")
    return 1 if late or runner.untold or runner.count["failed"] or not runner.count["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
