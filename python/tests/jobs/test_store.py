"""A process that serves the store of the process group, and is stopped: its clients must not wait
for it as long as torch does."""

import re

import pytest

from test_jobs import all_good, job

# Rank 0 serves the store and stops; rank 1 meets nobody. It is killed once rank 1 has ended, by a
# shell that reads from a pipe of rank 1's, so that the end of rank 1 is behind a stopped server.
STOP = """
import signal, subprocess
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("server", str(os.getpid()))
    store.get("stop now")
    time.sleep({pause})
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
server = int(store.get("server"))
killer = subprocess.Popen(["sh", "-c", f"read line; kill -KILL {{server}}"], stdin=subprocess.PIPE)
store.set("stop now", "")
while {before}:
    with open(f"/proc/{{server}}/stat") as f:
        if f.read().rsplit(")", 1)[1].split()[0] == "T":
            break
    time.sleep(0.01)
start = time.monotonic()
try:
    tw.init(device="cpu", timeout_s=4)
    print("no error")
except tilewire.Timeout as e:
    print("after", time.monotonic() - start, "rank", e.rank, e.phase, e.message, e.hint)
# The group's own connection is as it was.
os.kill(server, signal.SIGCONT)
print("pid", int(store.get("server")) == server)
os.kill(server, signal.SIGSTOP)
"""


@pytest.mark.parametrize("when, pause", [("before", 0), ("during", 1)])
def test_a_store_whose_server_is_stopped_is_a_timeout_that_names_it(when, pause):
    done = job(2, STOP.format(before=when == "before", pause=pause))
    assert done[0][0] == -9
    (out,) = all_good(done[1:])
    found = re.search(r"after ([0-9.]+) rank 1 rendezvous (.*)", out)
    assert found and 3 < float(found[1]) < 8, out
    silent = {"before": "cannot reach the store at 127.0.0.1", "during": "TCPStore at 127.0.0.1"}
    assert silent[when] in found[2], out
    assert "process that serves the store" in found[2] and "pid True" in out, out
