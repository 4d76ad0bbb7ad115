"""Jobs whose ranks end, differ, fork, or stop in unusual ways. Each test starts its processes."""

import os
import pathlib
import re
import signal
import socket
import tempfile
import time

import pytest
from forks import ask

BEGIN = """
import os, sys, time, threading
import torch, torch.distributed as dist
import tilewire, tilewire.torch as tw
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def begin(**more):
    dist.init_process_group("gloo")
    return tw.init(device="cpu", **{"timeout_s": 60, **more})
"""


def job(size, text, limit=90):
    """Runs a program on `size` ranks: their exit codes and what they printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = dict(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        outs = [pathlib.Path(folder, str(r)) for r in range(size)]
        pids = []
        for r, out in enumerate(outs):
            env = {k: str(v) for k, v in dict(shared, RANK=r, LOCAL_RANK=r).items()}
            pids.append(ask(env=env, out=str(out), text=BEGIN + text))
        codes = [ask(pid=pid, limit=max(0.1, end - time.monotonic())) for pid in pids]
        for pid, code in zip(pids, codes):
            if code is None:
                # With the children that it has forked.
                os.killpg(pid, signal.SIGKILL)
                ask(pid=pid, limit=9)
        texts = [out.read_text(errors="replace") for out in outs]
    if None in codes:
        pytest.fail(f"the job did not end in {limit} s:\n" + "\n".join(texts))
    return list(zip(codes, texts))


def all_good(done):
    for code, out in done:
        assert code == 0, out
    return [out for _, out in done]


def test_a_killed_peer_is_named_within_two_seconds():
    done = job(
        3,
        """
begin()
tw.all_gather(torch.ones(1))
if rank == 1:
    os.kill(os.getpid(), 9)
start = time.monotonic()
try:
    while True:
        tw.all_gather(torch.ones(1))
except tilewire.PeerDead as e:
    print("peer", e.peer, "after", time.monotonic() - start)
    os._exit(0)
""",
    )
    assert done[1][0] == -9
    for code, out in (done[0], done[2]):
        assert code == 0, out
        found = re.search(r"peer (\d+) after ([0-9.]+)", out)
        assert found.group(1) == "1" and float(found.group(2)) < 2.0, out


@pytest.mark.parametrize(
    "other",
    [
        "tw.ag_gemm(torch.ones(8, 8), w)",  # another number of rows: another plan
        "tw.all_gather(x)",  # another operation
        "tw.ag_gemm(torch.ones(3, 8), w)",  # the same plan, other rows
    ],
)
def test_a_rank_that_calls_something_else_is_named_within_five_seconds(other):
    done = job(
        2,
        f"""
begin()
x, w = torch.ones(4, 8), torch.ones(2, 8)
tw.ag_gemm(x, w)
start = time.monotonic()
try:
    if rank == 0:
        tw.ag_gemm(x, w)
    else:
        {other}
    print("no error")
except tilewire.Mismatch as e:
    print("mismatch", time.monotonic() - start < 5, e)
os._exit(0)
""",
    )
    for out in all_good(done):
        assert "mismatch True" in out and "ag_gemm" in out, out


def test_calls_in_a_fork_are_refused_and_the_parent_goes_on():
    done = job(
        2,
        """
w = begin()
tw.all_gather(torch.ones(1))
pid = os.fork()
if pid == 0:
    code = 1
    try:
        tw.all_gather(torch.ones(1))
    except tw.Stale as e:
        code = 0 if "fork" in str(e) else 2
    w.finalize()
    del w
    os._exit(code)  # as multiprocessing does: gloo itself hangs a forked child that exits
_, status = os.waitpid(pid, 0)
print("child", os.waitstatus_to_exitcode(status), tw.all_gather(torch.ones(1)).tolist())
w.finalize()
dist.destroy_process_group()
""",
    )
    for out in all_good(done):
        assert "child 0 [1.0, 1.0]" in out, out


def test_a_fork_of_a_world_without_gloo_exits():
    (out,) = all_good(
        job(
            1,
            """
w = tw.init(device="cpu")
tw.all_gather(torch.ones(1))
pid = os.fork()
if pid == 0:
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
            limit=40,
        )
    )
    assert "child 7" in out, out


def test_a_fork_before_the_first_call_is_as_any_other_process():
    (out,) = all_good(
        job(
            1,
            """
def run():
    with tw.init(device="cpu"):
        return tw.all_gather(torch.ones(1)).tolist()
for name in ("first", "second"):
    pid = os.fork()
    if pid == 0:
        try:
            print(name, run(), flush=True)
        except tw.Stale as e:
            print(name, "stale", e, flush=True)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print("parent", run(), flush=True)
""",
        )
    )
    assert "first [1.0]" in out and out.count("parent [1.0]") == 2, out
    assert "second stale" in out and "before the first call" in out, out


README = pathlib.Path(__file__).parents[2].joinpath("README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_example_of_the_readme():
    (example,) = [e for e in EXAMPLES if "import tilewire.torch" in e]
    before = """
x, w, w2 = (torch.randn(*shape) for shape in ((4, 8), (6, 8), (8, 6)))
x.requires_grad_()
"""
    for out in all_good(job(2, before + example + 'print("z", *z.shape, bool(x.grad.any()))')):
        assert "z 4 8 True" in out, out


DESTROY = "dist.destroy_process_group()"


@pytest.mark.parametrize(
    "end", ["", DESTROY, "w.finalize()", f"w.finalize(); w.finalize(); {DESTROY}"]
)
def test_no_way_to_end_hangs(end):
    all_good(
        job(
            2,
            f"""
w = begin()
x = torch.ones(4, 8, requires_grad=True)
y = tw.ag_gemm(x, torch.ones(2, 8))  # its graph outlives everything
{end}
""",
        )
    )


def test_a_hundred_worlds_in_any_order_of_ends():
    outs = all_good(
        job(
            2,
            """
def used():
    return len(os.listdir("/proc/self/fd")), threading.active_count()
first_world = begin()
for i in range(100):
    group = dist.new_group(backend="gloo")
    w = tw.init(group, device="cpu")
    tw.all_gather(torch.ones(1), group)
    if i % 2:
        dist.destroy_process_group(group); w.finalize()
    else:
        w.finalize(); dist.destroy_process_group(group)
    if i == 9:
        first = used()
print("grew", [b - a for a, b in zip(first, used())])
""",
        )
    )
    for out in outs:
        grew = [int(n) for n in re.search(r"grew \[(-?\d+), (-?\d+)\]", out).groups()]
        assert max(grew) <= 8, out


def test_before_init_after_finalize_and_alone():
    (out,) = all_good(
        job(
            1,
            """
ones = torch.ones
for call in (lambda: tw.all_gather(ones(1)), lambda: tw.ag_gemm(ones(1, 8), ones(2, 8))):
    try:
        call(); print("no error")
    except tw.Stale as e:
        assert "init" in str(e)
with tw.init(device="cpu") as w:  # without torch.distributed
    print(w, tw.all_gather(torch.ones(2)).tolist())
try:
    tw.all_gather(torch.ones(1)); print("no error")
except tw.Stale:
    print("stale")
""",
        )
    )
    assert "no error" not in out and "[1.0, 1.0]" in out and "stale" in out


def test_groups_of_some_ranks():
    outs = all_good(
        job(
            3,
            """
w = begin()
group = dist.new_group([0, 2])
if rank == 1:
    try:
        tw.init(group, device="cpu")
    except tilewire.InvalidArgument as e:
        print("refused", e)
else:
    with tw.init(group, device="cpu") as sub:
        print("sub", sub.rank, tw.all_gather(torch.tensor([float(rank)]), group).tolist())
w.barrier()
w.finalize()
""",
        )
    )
    assert "refused" in outs[1] and "sub 0 [0.0, 2.0]" in outs[0] and "sub 1 [0.0, 2.0]" in outs[2]


def test_two_threads_that_take_turns():
    """Autograd's thread calls operations, too."""
    outs = all_good(
        job(
            2,
            """
w = begin()
turn, seen = threading.Lock(), []
def work(n):
    for i in range(n):
        with turn:
            seen.append(tw.all_gather(torch.ones(1)).sum().item())
a = threading.Thread(target=work, args=(20,)); a.start(); work(20); a.join()
print("sums", set(seen), len(seen))
w.finalize()
""",
        )
    )
    for out in outs:
        assert "sums {2.0} 40" in out


def test_two_threads_with_a_world_each():
    """Nothing orders the calls of one with those of the other."""
    outs = all_good(
        job(
            2,
            """
begin()
worlds = [tw.init(dist.new_group(backend="gloo"), device="cpu", timeout_s=60) for _ in range(2)]
def work(k):
    w = torch.full((2, 8), k + 1.0)
    for i in range(60):
        x = torch.full((3, 8), rank + 10.0 * i, requires_grad=True)
        y = tw.ag_gemm(x, w, worlds[k])
        y.sum().backward()
        want = torch.tensor([10.0 * i] * 3 + [1 + 10.0 * i] * 3) * 8 * (k + 1)
        assert y.shape == (6, 2) and bool((y == want[:, None]).all()), (k, i, y)
        assert bool((x.grad == 4.0 * (k + 1)).all()), (k, i, x.grad)
        time.sleep(0.001 * ((rank + k + i) % 3))
    done.append(k)
done = []
threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
print("done", sorted(done))
""",
        )
    )
    for out in outs:
        assert "done [0, 1]" in out, out


def test_other_threads_run_while_a_call_waits():
    """A call holds no lock of the interpreter: a thread goes on while a peer is late."""
    outs = all_good(
        job(
            2,
            """
w = begin()
count, late = [0], threading.Event()
def work():
    while not late.is_set():
        count[0] += 1; time.sleep(0.01)
t = threading.Thread(target=work)
ones = torch.ones
calls = (lambda: tw.all_gather(ones(1)), lambda: tw.ag_gemm(ones(1, 8), ones(2, 8)))
for call in calls:
    call()
t.start()
for call in calls:
    dist.barrier()
    if rank == 1:
        time.sleep(0.7)
    before, start = count[0], time.monotonic()
    call()
    print("ran" if rank == 1 or count[0] - before > 20 else "stood", time.monotonic() - start)
late.set(); t.join()
""",
        )
    )
    assert outs[0].count("ran") == 2 and "stood" not in outs[0], outs


def test_ranks_that_do_not_come_are_a_timeout_not_a_hang():
    outs = all_good(
        job(
            2,
            """
dist.init_process_group("gloo")
if rank == 0:
    try:
        tw.init(device="cpu", backend="host", timeout_s=-1)
    except tilewire.InvalidArgument as e:
        print("refused", e)
w = tw.init(device="cpu", timeout_s=3)
tw.all_gather(torch.ones(1))
if rank == 0:
    start = time.monotonic()
    try:
        tw.all_gather(torch.ones(1))
    except tilewire.Timeout as e:
        assert isinstance(e, TimeoutError)
        print("timeout", time.monotonic() - start < 9, e.peer)
else:
    time.sleep(7)
os._exit(0)
""",
        )
    )
    assert "refused" in outs[0] and "timeout True 1" in outs[0], outs
