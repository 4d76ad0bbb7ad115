"""The configurations of `drill`: random harm to jobs whose ranks share a GPU."""

import re

from configs import Config, program

# The kinds of harm that `xtask drill --gpu` knows, and seconds in which cases of each begin: the
# last one needs its time, too.
HARMS = {"kill": 30, "stop": 25, "pause": 15, "meeting": 12, "launcher": 20, "full": 12}
HARMS |= {"stranger": 15, "damage": 20, "restart": 15}


def by_drill(rc, out):
    """Counts of verdicts, and the first that is wrong."""
    counts = re.findall(r"^\d+ cases: .*$", out, re.MULTILINE)
    wrong = re.findall(r"^wrong: .*$", out, re.MULTILINE)
    slowest = re.findall(r"slowest end ([0-9.]+) s", out)
    text = "; ".join([*counts[:1], *(f"slowest end {s} s" for s in slowest[:1]), *wrong[:1]])
    return ("passed" if rc == 0 and counts else "failed"), text or "the drill does not end"


def drill(n):
    """All kinds of harm, whose seed each prints. The GPU is the first one: `n` ranks or more
    would share it in any case."""
    for harm, seconds in HARMS.items():
        argv = [program("xtask"), "drill", "--gpu", "--program", program("tilewire")]
        argv += ["--harm", harm, "--seconds", str(seconds)]
        # Processes that are killed write no logs of calls.
        yield Config(harm, argv, by_drill, jit=True, preload=False)
