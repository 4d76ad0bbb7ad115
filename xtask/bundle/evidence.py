"""`run.sh evidence`: all that says how tilewire does on GPUs, over as many calls as it takes."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

from configs import LIMIT_S, devices_of
from judges import Reported

# In this order; litmus tests are among the configurations of conformance, links and rates among
# those of bench.
PARTS = ["conformance", "faults", "drill", "litmus", "links", "rates"]
# Those whose configurations may share GPUs with others: nothing of them is timed.
UNTIMED = ["conformance", "faults", "drill"]
EVIDENCE = ["conformance", "faults", "drill", "bench"]
AGAINST = "bench/against-limits"
HELP = """\
evidence runs conformance, faults, drill, litmus, links and rates (all that bench has), over as many
calls as it takes. A call that ends at --for says what is left; the next one, given the results of
those before it with --done, goes on there:
  OUT=a run.sh evidence 2 --for 500
  OUT=b run.sh evidence 2 --for 500 --done a/results.jsonl
A row of --done counts if it is of this commit and of as many GPUs. What passed is not run again,
unless nobody watched it for cuMulticastCreate and this call would. What was left out, as the driver
or doctor reported, stays out while they say so. What failed runs again, after all the rest. Nothing
counts where the commit is unknown or `-dirty`: its name is that of other trees, too.
Rows of any commit tell how long a configuration takes. Within a part the longest is first; none is
begun that takes longer than --for leaves, and one of unknown length may run a minute beyond it
(some have two). With --jobs J each GPU is shared by up to J configurations of conformance, faults
and drill, or by so many ranks where a configuration's share a GPU. Their rows then have `beside`,
and they have twice as long; what fails so runs again at the end, alone, and that row counts. Of
what is timed each GPU has one at a time.
$OUT gets results.jsonl (rows of this call alone; it must not be there yet), evidence.json (a
summary by part, of all calls) and, if something failed, failed-logs.txt (the last 20 kB of each).
"""


def part_of(name):
    if name.startswith("conformance/litmus-"):
        return "litmus"
    if name.startswith(("bench/links", "bench/limits", AGAINST)):
        return "links"
    mode = name.split("/")[0]
    return "rates" if mode == "bench" else mode


def rows_in(paths):
    """Rows of earlier calls, in their order. A line that a call had no time to end says nothing."""
    rows = []
    for path in paths:
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and {"config", "gpus", "state", "seconds"} <= row.keys():
                rows.append(row)
    return rows


class Before:
    """What the rows of earlier calls say: the last of each configuration, and seconds."""

    def __init__(self, rows, commit, n, watches):
        self.n, self.watches = n, watches
        self.last, self.seconds, self.failures = {}, {}, set()
        known = commit and not commit.endswith("-dirty")
        for row in rows:
            name, gpus, state = row["config"], row["gpus"], row["state"]
            # Those of a failure are a limit, or an early end; beside others all take longer.
            alone = state == "passed" and not row.get("beside")
            for key in [(gpus, name), name]:
                if alone or (state != "skipped" and key not in self.seconds):
                    self.seconds[key] = row["seconds"]
            if known and row.get("commit") == commit and gpus == n:
                self.last[name] = row
                if state == "failed":
                    self.failures.add(name)

    def passed(self, name, preload):
        row = self.last.get(name, {})
        seen = not (preload and self.watches) or row.get("multicast_calls") == 0
        return row.get("state") == "passed" and seen

    def failed(self, name):
        return self.last.get(name, {}).get("state") == "failed"

    def expected(self, name):
        return self.seconds.get((self.n, name), self.seconds.get(name))


class Unit:
    """Configurations that run one behind the other in one call; mostly there is one."""

    def __init__(self, mode, c, before):
        self.configs, self.before, self.takes = [(mode, c)], before, c.takes
        self.part = part_of(f"{mode}/{c.name}")

    def named(self):
        """Name of each line that it leaves, and its configuration. The comparison with limits.cu
        has none."""
        lines = [(f"{mode}/{c.name}", c) for mode, c in self.configs]
        ran = [c.name for _, c in self.configs if not c.needs]
        compares = "limits" in ran and any(name.startswith("links-") for name in ran)
        return [*lines, (AGAINST, None)] if compares else lines

    def is_open(self):
        """Whether something of it has not passed yet that can run here."""
        lines = [(name, c) for name, c in self.named() if not (c and c.needs)]
        return not all(self.before.passed(name, bool(c and c.preload)) for name, c in lines)

    def is_new(self):
        """Whether rows of earlier calls lack one of it, also where it cannot run."""
        rows = self.before.last
        return self.is_open() or not all(name in rows for name, _ in self.named())

    def failed(self):
        return any(self.before.failed(name) for name, _ in self.named())

    def ranks_of_each(self, gpus):
        """Places that it takes of each GPU: processes that share one take turns, and with many
        beside them reach their limit."""
        return max(-(-c.ranks // gpus) for _, c in self.configs)

    def expected(self):
        """Seconds, as far as they are known; none if nothing is."""
        each = [self.before.expected(name) for name, _ in self.named()]
        known = [seconds for seconds in each if seconds is not None]
        return sum(known) if known else None


def units_of(wanted, before):
    """By parts. A configuration that is to run `behind` another is of no use without it."""
    units = {}
    for mode, c in wanted:
        unit = units.get(f"{mode}/{c.behind}") if c.behind else None
        if unit:
            unit.configs.append((mode, c))
        units[f"{mode}/{c.name}"] = unit or Unit(mode, c, before)
    one_each = {id(unit): unit for unit in units.values()}.values()
    return sorted(one_each, key=lambda u: PARTS.index(u.part))


def first_ones(units):
    """Within a part: large ones first, so that no GPUs are left over at the end; then the longest.
    What is not known may take as long as anything may."""

    def key(u):
        seconds = u.expected()
        return -(u.takes or 0), -(LIMIT_S if seconds is None else seconds)

    return sorted(units, key=key)


class Evidence:
    def __init__(self, runner, units, before, end, jobs=1):
        self.runner, self.units, self.before, self.end = runner, units, before, end
        self.jobs, self.failed_once = jobs, set()
        self.file = runner.results.with_name("evidence.json")

    def fits(self, unit):
        left = self.end - time.monotonic()
        return left > 0 and (unit.expected() or 0) <= left

    def picked(self, units):
        """Units in turn, each the first that there is time for."""
        while True:
            unit = next((u for u in units if self.fits(u)), None)
            if unit is None:
                return
            units.remove(unit)
            yield unit

    def run(self, pool_of):
        for unit in self.units:
            # What cannot run here takes no time, and is said once.
            for mode, c in unit.configs:
                row = self.before.last.get(f"{mode}/{c.name}", {})
                if c.needs and not (isinstance(c.needs, Reported) and row.get("reported")):
                    self.runner.run(mode, c)
        self.note()
        for again in [False, True]:
            for part in PARTS:
                now = [u for u in self.units if u.part == part and u.is_open()]
                now = [u for u in now if (u.failed() or self.failed_beside(u)) == again]
                places = self.jobs if part in UNTIMED and not again else 1
                pool = pool_of(devices_of(self.runner.n), places)
                self.at_once(first_ones(now), pool, places, alone=again)
        self.runner.compare()
        self.note()

    def failed_beside(self, unit):
        """Whether something of it failed in this call while others ran on its GPUs."""
        rows = [self.runner.lines.get(name, {}) for name, _ in unit.named()]
        return any(row.get("state") == "failed" and row.get("beside") for row in rows)

    def at_once(self, units, pool, places, alone):
        """Runs units, as many at once as the GPUs have places for, or one at a time."""

        def one(unit, mine, each):
            try:
                self.one(unit, mine[: unit.takes] if unit.takes else None, places > 1)
            finally:
                pool.give(mine, each)

        with ThreadPoolExecutor(max_workers=self.runner.n * places) as threads:
            begun = []
            for unit in self.picked(units):
                each = min(places, unit.ranks_of_each(self.runner.n))
                mine = pool.take(self.runner.n if alone else unit.takes or self.runner.n, each)
                # It has waited for them meanwhile; those behind it may be shorter.
                if self.fits(unit):
                    begun.append(threads.submit(one, unit, mine, each))
                else:
                    pool.give(mine, each)
            for done in begun:
                done.result()

    def one(self, unit, mine, beside):
        for mode, c in unit.configs:
            if not c.needs:
                self.runner.run(mode, c, mine, beside)
                name = f"{mode}/{c.name}"
                if self.runner.lines[name]["state"] == "failed":
                    self.failed_once.add(name)
        self.note()

    def note(self):
        """Writes the summary anew each time: whoever ends this call may do so without a word."""
        with self.runner.noting:
            new = self.file.with_suffix(".new")
            new.write_text(json.dumps(self.summary(), indent=1) + "\n")
            os.replace(new, self.file)

    def states(self, unit):
        """Each line of a unit: name, state, and the row that says so. `left` is what has none that
        counts; `unreported` those left out for a reason that neither driver nor doctor gives."""
        for name, c in unit.named():
            row = self.runner.lines.get(name)
            if c and c.needs:
                state = "skipped" if isinstance(c.needs, Reported) else "unreported"
                row = row or {"summary": c.needs}
            elif row is None:
                row = self.before.last.get(name, {})
                counts = self.before.passed(name, bool(c and c.preload)) or self.before.failed(name)
                state = row["state"] if counts else "left"
            else:
                state = row["state"]
            yield name, state, row

    def summary(self):
        """By part: numbers, names, and what is left."""
        parts, machines, again = {}, set(), []
        for unit in self.units:
            part = parts.setdefault(
                unit.part,
                {
                    "passed": 0,
                    "passed_before": 0,
                    "skipped": {},
                    "unreported": {},
                    "failed": {},
                    "left": [],
                    "left_s": 0.0,
                    "left_unknown": 0,
                },
            )
            for name, state, row in self.states(unit):
                if state == "passed":
                    part["passed"] += 1
                    part["passed_before"] += name not in self.runner.lines
                    if name in self.before.failures | self.failed_once:
                        again.append(name)
                elif state == "left":
                    seconds = self.before.expected(name)
                    part["left"].append(name)
                    part["left_s"] = round(part["left_s"] + (seconds or 0), 2)
                    part["left_unknown"] += seconds is None
                else:
                    part[state][name] = row["summary"]
                if state in ("passed", "failed"):
                    machines.add(f"{row.get('gpu')}, driver {row.get('driver')}")
        bad = any(part["failed"] or part["left"] for part in parts.values())
        return {
            **self.runner.place,
            "gpus": self.runner.n,
            "complete": not bad,
            "machines": sorted(machines),
            "failed_before_they_passed": again,
            "parts": parts,
        }

    def say(self):
        """Prints done, failed and left; the status of the call."""
        found = self.summary()
        parts = found["parts"].values()
        passed, before = (sum(p[key] for p in parts) for key in ["passed", "passed_before"])
        skipped, unreported, failed = (
            [name for p in parts for name in p[key]] for key in ["skipped", "unreported", "failed"]
        )
        left = [name for p in parts for name in p["left"]]
        left_out = f"{len(skipped)} left out, as reported"
        print(f"done: {passed} passed, {before} of them before; {left_out}")
        again = found["failed_before_they_passed"]
        if again:
            print(f"passed, but failed before: {len(again)} {' '.join(again)}")
        if unreported:
            names = f"{len(unreported)} {' '.join(unreported)}"
            print(f"left out, for no reason that was reported: {names}")
        print(f"failed: {len(failed)} {' '.join(failed)}".rstrip())
        seconds, unknown = (sum(p[key] for p in parts) for key in ["left_s", "left_unknown"])
        length = f"{seconds:.0f} s expected, {unknown} of unknown length: " if left else ""
        print(f"left: {len(left)} {length}{' '.join(left)}".rstrip())
        return 1 if not found["complete"] or self.runner.unreported else 0
