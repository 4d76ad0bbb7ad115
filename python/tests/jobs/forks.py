"""Starts ranks as forks of one process that has imported torch, which takes three seconds of a
processor each time. A rank runs its program as that process's own, and ends as programs do."""

import atexit
import functools
import json
import os
import subprocess
import sys
import time


def wait(pid, limit):
    """The exit code of a child, as subprocess has it; None if it does not end in `limit` s."""
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def serve():
    """Answers requests, one a line, until there are no more. In a child: returns its program."""
    for line in sys.stdin:
        ask = json.loads(line)
        if "pid" in ask:
            answer = wait(ask["pid"], ask["limit"])
        else:
            answer = os.fork()
            if answer == 0:
                os.setsid()
                out = os.open(ask["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                null = os.open(os.devnull, os.O_RDONLY)
                for here, there in ((null, 0), (out, 1), (out, 2)):
                    os.dup2(here, there)
                os.close(null)
                os.close(out)
                os.environ.update(ask["env"])
                return ask["text"]
        print(json.dumps(answer), flush=True)
    sys.exit()


@functools.cache
def server():
    """The process that forks, which ends with this one."""
    words = [sys.executable, "-u", __file__]
    # As torchrun does; torch reads it at its import.
    env = dict(os.environ, OMP_NUM_THREADS="1")
    pipe = subprocess.PIPE
    p = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1)
    atexit.register(p.kill)
    return p


def ask(**what):
    p = server()
    p.stdin.write(json.dumps(what) + "\n")
    answer = p.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process that forks has ended: {p.wait()}")
    return json.loads(answer)


if __name__ == "__main__":
    import tilewire.torch  # noqa: F401

    # What a fork would lose.
    assert len(os.listdir("/proc/self/task")) == 1
    exec(compile(serve(), "rank", "exec"))
