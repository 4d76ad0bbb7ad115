"""Memory that lacks, under a limit of the address space: an exception, and no abort."""

from test_jobs import all_good, job

LIMITS = """
import resource

def under(more, call):
    \"\"\"The exception of `call` with so many bytes of addresses beyond those in use.\"\"\"
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        call()
    except Exception as e:
        return e
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

def typed(what, e):
    good = isinstance(e, tilewire.Exhausted) and isinstance(e, MemoryError) and e.hint
    print("typed" if good else "not typed", what, repr(e))
"""


def test_memory_that_lacks_for_a_call_is_exhausted_and_the_process_goes_on():
    # What torch allocates for results fits; what the call widens to f32, or computes in, does not.
    done = job(
        1,
        LIMITS
        + """
wide = torch.ones(8192, 4096, dtype=torch.bfloat16)
w = torch.ones(1, 16, 4096, dtype=torch.bfloat16)
splits = torch.tensor([8192])
q = torch.ones(2048, 64, 128, requires_grad=True)
attend = lambda: tw.attention(q, q, q, window=(3, 0))
y = attend()
world = tw.init(device="cpu")
few, tall = torch.ones(8192, 2), torch.ones(2048, 2)
calls = {
    "quantize": (80, lambda: tw.quantize(wide)),
    "grouped_gemm": (80, lambda: tw.grouped_gemm(wide, w, splits)),
    "attention": (100, attend),
    "attention_bwd": (100 + 3 * 64, lambda: torch.autograd.grad(y.sum(), q, retain_graph=True)),
    "gemm_ar": (100, lambda: tw.gemm_ar(few, tall)),
    "ag_gemm": (100, lambda: tw.ag_gemm(few, tall)),
}
for what, (mib, call) in calls.items():
    # Its threads and its plan are there before the limit.
    call()
    typed(what, under(mib << 20, call))
    if what in ("gemm_ar", "ag_gemm"):
        # An error inside a collective ends its world.
        world.finalize()
        world = tw.init(device="cpu")
    call()
typed("heap", under(1 << 30, lambda: tw.init(device="cpu", heap_bytes=2 << 30)))
tw.init(device="cpu", heap_bytes=2 << 30).finalize()
""",
    )
    (out,) = all_good(done)
    assert out.count("typed ") == 7 and "not typed" not in out, out


def test_memory_that_one_rank_lacks_ends_the_team():
    done = job(
        2,
        LIMITS
        + """
begin()
x = torch.ones(2 * 8192, 2048, dtype=torch.bfloat16)
tw.reduce_scatter(x)
call = lambda: tw.reduce_scatter(x)
try:
    if rank == 1:
        typed("reduce_scatter", under(60 << 20, call))
        # The team is over: this is its error again.
        call()
    # The first one may have all that it needs of the peer.
    call()
    call()
except tilewire.Error as e:
    print("then", type(e).__name__, e)
""",
    )
    first, second = all_good(done)
    assert "typed reduce_scatter" in second and "not typed" not in second, second
    assert "then Exhausted" in second, second
    assert "then Aborted" in first and "rank 1 aborted the team" in first, first
