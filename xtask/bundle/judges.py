"""What the output of a program says: functions from its status and text to (state, summary)."""

import json
import re


class Reported(str):
    """Why something is left out, as the driver or `doctor` tell it. Of other reasons nobody knows
    whether they hold."""


def by_status(rc, out):
    lines = [line for line in out.splitlines() if line.strip()]
    return ("passed" if rc == 0 else "failed"), (lines[-1][:300] if lines else "")


def by_tests(rc, out):
    """A libtest harness: nothing that ran is no success."""
    found = [line for line in out.splitlines() if line.startswith("test result:")]
    ran = sum(int(line.split(" passed")[0].rsplit(" ", 1)[-1]) for line in found)
    return ("passed" if rc == 0 and ran > 0 else "failed"), (
        found[-1] if found else by_status(rc, out)[1]
    )


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


def rows_but(*parts, why=""):
    """Rows of `verify --json`: none is wrong, and each ran but those whose names end with one of
    `parts`, all of which must be refused for the reason `why`."""

    def judge(rc, out):
        rows = [r for r in rows_of(out) if "wrong" in r]
        wrong = [r for r in rows if r["wrong"]]
        none = [r for r in rows if not r["wrong"] and r.get("unsupported")]
        missing = [r for r in none if not (r["op"].endswith(parts) and why in str(r.get("note")))]
        ran = [r for r in rows if r["op"].endswith(parts) and not r.get("unsupported")]
        text = f"{len(rows)} rows, {len(wrong)} wrong, {len(none)} unsupported"
        for r in (wrong or missing or ran)[:1]:
            text += f"; {r['op']} {r['dtype']} ranks={r['ranks']} {r['shape']}"
            text += f": {str(r.get('note'))[:300]}"
        if not rows:
            text += "; " + by_status(rc, out)[1]
        return (
            "passed"
            if rc == 0 and len(none) < len(rows) and not wrong and not missing and not ran
            else "failed"
        ), text

    return judge


# No configuration may leave out a row: since 2026-11-22 none of those that are run does.
by_rows = rows_but()


def cases_of(out):
    """Lines of symm_checks: what was done, how long it took, and what it found."""
    found = [
        re.match(r"(ok|FAILED) +(\S.*?) +([0-9.]+) ms  (.*)", line) for line in out.splitlines()
    ]
    return [{"case": m[2], "ok": m[1] == "ok", "ms": float(m[3]), "text": m[4]} for m in found if m]


def watched(line, calls):
    """A line with how often cuMulticastCreate was called; `calls` is none where nobody looked. Only
    none at all is good."""
    line["multicast_calls"] = calls
    if calls != 0:
        said = (
            "not watched for cuMulticastCreate"
            if calls is None
            else f"{calls} calls of cuMulticastCreate"
        )
        line["state"], line["summary"] = "failed", f"{said}; {line['summary']}"


def by_doctor(rc, out):
    lines = out.splitlines()
    bad = [line for line in lines if line.startswith("FAIL")]
    good = sum(line.startswith("ok") for line in lines)
    return (
        "passed" if rc == 0 and good else "failed"
    ), f"{good} good, {len(bad)} fail: {' | '.join(bad)[:500]}"


def by_bench(rc, out):
    rows = rows_of(out)
    wrong = [r for r in rows if r.get("wrong")]
    return (
        "passed" if rc == 0 and rows and not wrong else "failed"
    ), f"{len(rows)} rows, {len(wrong)} wrong"


def by_litmus(rc, out):
    """Nothing wrong in any round, and the planted mistakes are seen."""
    rows = [r for r in rows_of(out) if "litmus" in r]
    good = [r for r in rows if r["expect"] == "none wrong"]
    seen = [r["litmus"] for r in rows if r["expect"] != "none wrong" and r["wrong"]]
    text = "; ".join(
        f"{r['litmus']}: {r['wrong']} wrong in {r['rounds']} rounds of {r['us_per_round']} us"
        for r in good
    )
    ok = rc == 0 and good and all(r["ok"] for r in rows)
    return ("passed" if ok else "failed"), f"{text}; seen: {seen}" if rows else by_status(rc, out)[
        1
    ]


def by_trace(num):
    """A timeline with the work of the last steps: a process for each rank, a track for each of its
    streams."""

    def judge(rc, out):
        found, text = re.search(r"(\d+) events", out), by_status(rc, out)[1]
        tracks = next(
            (json.loads(line[7:]) for line in out.splitlines() if line.startswith("tracks ")), {}
        )
        main = [rank for rank, streams in tracks.items() if "main" in streams]
        once = all(len(set(streams)) == len(streams) for streams in tracks.values())
        good = (
            rc == 0 and found and int(found[1]) > 100 and len(tracks) == len(main) == num and once
        )
        return ("passed" if good else "failed"), text

    return judge


# Prints the streams that have work, by rank; a piece of work on no named track ends it.
TRACKS = """import json
events = json.load(open("t.json"))["traceEvents"]
names = [((e["pid"], e["tid"]), e["args"]["name"]) for e in events if e["name"] == "thread_name"]
used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
assert used == {track for track, _ in names} and len(used) == len(names), (used, names)
ranks = [e["pid"] for e in events if e["name"] == "process_name"]
tracks = {rank: [name for (pid, _), name in names if pid == rank] for rank in ranks}
print("tracks", json.dumps(tracks))"""


def by_survivors(num):
    def judge(_rc, out):
        lines = [line for line in out.splitlines() if "ranks go on" in line]
        good = len(lines) == num and all(f"{num} ranks go on" in line for line in lines)
        return ("passed" if good else "failed"), f"{len(lines)} of {num} survivors go on; " + (
            lines or [""]
        )[0][:200]

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
        good = (
            at and rc in (0, 1) and remedy.startswith("->") and all(w in remedy for w in words[1:])
        )
        return (
            "passed" if good else "failed"
        ), f"{lines[at[0]]} {remedy}" if at else f"no {state} of {words[0]}"

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
    return (
        "passed" if state == "passed" and warned else "failed"
    ), f"{text}; {'' if warned else 'not '}warned"


def by_rows_that_say(text):
    def judge(rc, out):
        state, said = by_rows(rc, out)
        told = text in out
        return (
            "passed" if state == "passed" and told else "failed"
        ), f"{said}; {'' if told else 'not '}told: {text}"

    return judge


def by_sanitizer(rc, out):
    found = [line for line in out.splitlines() if "ERROR SUMMARY" in line]
    # Tests that found no device would be clean, too.
    ran = "did not run" not in out and ("running " not in out or by_tests(rc, out)[0] == "passed")
    clean = rc == 0 and ran and found and all(" 0 errors" in line for line in found)
    return ("passed" if clean else "failed"), (
        found[-1].strip() if found else by_status(rc, out)[1]
    )


# Lines of limits.cu (a program that is not ours, put here by whoever has it) and our rows of the
# same: pattern, and (operation, shape) for each group behind the first.
LIMITS = [
    (
        r"CE ring +(\d+) KiB: get \S+ us (\S+) GB/s \| put \S+ us (\S+) GB/s",
        lambda kib: [("get", f"len={int(kib) // 1024}MiB"), ("put", f"len={int(kib) // 1024}MiB")],
    ),
    (
        r"CE all-gather shard +(\d+) MiB, 1 streams: .*push \S+ us (\S+) GB/s",
        lambda s: [("all_gather", f"shard={s}MiB")],
    ),
    (
        r"ld/st ring +(\d+) CTAs: push (\S+) GB/s \| pull (\S+) GB/s",
        lambda c: [("st_put", f"ctas={c} len=256MiB"), ("ld_get", f"ctas={c} len=256MiB")],
    ),
    (
        r"TMA store->next peer +(\d+) CTAs chunk 16384 x8: (\S+) GB/s",
        lambda c: [("bulk_put", BULK.format(c))],
    ),
    (
        r"TMA store->all peers +(\d+) CTAs chunk 14336 x8: (\S+) GB/s",
        lambda c: [("bulk_put_all", BULK.format(c))],
    ),
    (
        r"TMA load from peer, local store +(\d+) CTAs: (\S+) GB/s",
        lambda c: [("bulk_get", BULK.format(c))],
    ),
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
                    found.append(
                        (ratio, f"{op} {shape} {rates[op, shape]:.0f} of {float(theirs):.0f} GB/s")
                    )
    return sorted(found)


def by_ratios(ratios):
    """No rate is far below the other's. Two programs of which no rate is the same have not been
    compared."""
    worst = "; ".join(f"{ratio:.3f} {what}" for ratio, what in ratios[:5])
    state = "passed" if ratios and ratios[0][0] >= 0.95 else "failed"
    return (
        state,
        f"{len(ratios)} rates, lowest: {worst}"
        if ratios
        else "no line of limits.cu is one of ours",
    )


def by_backends(*names):
    """Doctor says of each backend whether it can be used: what it says decides what is left out."""

    def judge(rc, out):
        missing = [
            name for name in names if not re.search(f"^.{{4}} backend {name}: ", out, re.MULTILINE)
        ]
        # A library that is there and does not open: what needs it would be left out, and nobody
        # would know.
        broken = [
            line
            for line in out.splitlines()
            if line.startswith("FAIL") and any(name in line.lower() for name in names)
        ]
        text = (
            f"nothing of {', '.join(missing)}; {by_status(rc, out)[1]}"
            if missing
            else "told of " + ", ".join(names)
        )
        good = rc in (0, 1) and not missing and not broken
        return ("passed" if good else "failed"), f"exit {rc}, {'; '.join([text, *broken])}"

    return judge
