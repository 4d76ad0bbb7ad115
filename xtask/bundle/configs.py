"""What a configuration is, and what it is made of."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from judges import Reported, by_status

HERE = Path(__file__).resolve().parent
LIMIT_S = 60
# `ranks` of what compares free memory of GPUs, which others there would change.
ALL_PLACES = 1 << 16


class Config:
    """One program to run: its name, command, how its output is judged, and whether it may compile.
    One that `takes` some GPUs only runs beside others; without it alone. `needs`: why it is left
    out. `behind`: the one of its mode that runs just before it, without which it says nothing.
    `limit_s`: the seconds that it may take. `ranks`: processes that share the GPUs."""

    def __init__(
        self,
        name,
        argv,
        judge=None,
        jit=False,
        env=None,
        preload=True,
        needs=None,
        takes=None,
        behind=None,
        limit_s=LIMIT_S,
        ranks=1,
    ):
        self.name, self.argv, self.judge, self.jit = name, argv, judge or by_status, jit
        self.env, self.preload, self.needs, self.takes = env or {}, preload, needs, takes
        self.behind, self.limit_s, self.ranks = behind, limit_s, ranks


def program(name):
    return str(HERE / name)


def tilewire(*words):
    """A command line of the program: words, several in one text, or paths."""
    parts = [word.split() if isinstance(word, str) else [str(word)] for word in words]
    return [program("tilewire"), *(part for some in parts for part in some)]


def ranks_of(n, *argv):
    return [*tilewire("run -n", str(n), "--no-prefix --"), *argv]


def search(*more):
    return os.pathsep.join([os.environ.get("PATH", ""), *more])


def up_to(n, counts):
    return [c for c in counts if c <= n]


def can_watch():
    """Whether calls of the driver go through the interposer."""
    return bool(shutil.which("gcc")) and not IS_BARE


@functools.cache
def doctor_says():
    """What `doctor` says; nothing if it does not come to its end."""
    try:
        argv = tilewire("doctor")
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode in (0, 1) else ""


def why_not(backend, said):
    """Why the program cannot use a backend here, in doctor's words. None if it can, and where
    doctor says nothing of it: then what needs the backend runs, and fails for a reason of its
    own."""
    found = re.search(f"^.{{4}} backend {backend}: (.*)$", said, re.MULTILINE)
    if not found or found[1] == "available":
        return None
    return Reported(f"backend {backend}: {found[1]}")


def devices_of(n):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [d.strip() for d in visible.split(",") if d.strip()]
        if visible
        else [str(i) for i in range(n)]
    )
    return names[:n]


def first_devices(n):
    return ",".join(devices_of(n))


# The driver tells how many there are.
TWO_GPUS = Reported("needs two GPUs")
IS_BARE = "--no-interposer" in sys.argv
NOT_WATCHED = (
    Reported("not watched, as --no-interposer asks") if IS_BARE else "needs gcc, and the interposer"
)
