"""Runs pytest on N ranks: `python tests/run.py N [pytest arguments]`.

Each rank is a process with the variables that torchrun would set. Prints what rank 0 says, and of
the others what failed; all of them end when one has failed for a while, or after the limit.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time

LIMIT_S = float(os.environ.get("TW_TEST_LIMIT_S", 400))
# What the others may take to end once a rank has failed.
GRACE_S = 20


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start(rank, size, port, args, out):
    env = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        OMP_NUM_THREADS="1",
    )
    flags = ["-O"] if not __debug__ else []
    command = [sys.executable, *flags, "-m", "pytest", "-p", "no:cacheprovider", *args]
    return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)


def main():
    size, args = int(sys.argv[1]), sys.argv[2:]
    port = free_port()
    outs = [tempfile.TemporaryFile() for _ in range(size)]
    ranks = [start(r, size, port, args, outs[r]) for r in range(size)]
    end = time.monotonic() + LIMIT_S
    failed = False
    while any(p.poll() is None for p in ranks) and time.monotonic() < end:
        if not failed and any(p.poll() not in (None, 0) for p in ranks):
            failed, end = True, min(end, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    late = [r for r, p in enumerate(ranks) if p.poll() is None]
    for r in late:
        ranks[r].kill()
        ranks[r].wait()
    for r, p in enumerate(ranks):
        if r == 0 or p.returncode != 0:
            outs[r].seek(0)
            text = outs[r].read().decode(errors="replace")
            killed = " (killed: late)" * (r in late)
            print(f"-- rank {r} of {size}, exit code {p.returncode}{killed}")
            print(text if p.returncode else text.strip().splitlines()[-1])
    if any(p.returncode for p in ranks):
        print(f"exit codes of the ranks: {[p.returncode for p in ranks]}")
    return int(bool(late) or any(p.returncode for p in ranks))


if __name__ == "__main__":
    sys.exit(main())
