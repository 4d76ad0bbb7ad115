"""ag_gemm, gemm_rs, gemm_ar and their gradients beside dense torch."""

import pytest
import torch
import torch.nn.functional as F
from dense import leaf, product_bound, randn, rows_of, within

import tilewire.torch as tw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def act_of(name):
    return {
        None: lambda z: z,
        "relu": F.relu,
        "gelu": lambda z: F.gelu(z, approximate="tanh"),
        "swiglu": lambda z: F.silu(z[:, : z.shape[1] // 2]) * z[:, z.shape[1] // 2 :],
    }[name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("uneven", [False, True])
def test_ag_gemm_and_its_gradients(world, device, gen, dtype, uneven):
    size, me = world.size, world.rank
    rows = [r + 3 for r in range(size)] if uneven else None
    m = sum(rows) if uneven else 5 * size
    n, k = 24, 40
    spans = rows_of(m, size, rows)
    x, w = randn(gen, m, k, dtype=dtype), randn(gen, size * n, k, dtype=dtype)
    b, dy = randn(gen, size * n), randn(gen, m, size * n, dtype=dtype)
    first, num = spans[me]
    cols = slice(me * n, (me + 1) * n)
    mine = [leaf(x[first : first + num], dtype, device), leaf(w[cols], dtype, device)]
    bias = leaf(b[cols], torch.float32, device)
    y = tw.ag_gemm(mine[0], mine[1], bias=bias, rows=rows)
    within(y, x @ w[cols].t() + b[cols], product_bound(x, w[cols].t(), 1, dtype), "y")
    y.backward(dy[:, cols].to(device, dtype))
    within(
        mine[0].grad,
        (dy @ w)[first : first + num],
        product_bound(dy, w, size, dtype)[first : first + num],
        "dx",
    )
    within(mine[1].grad, dy[:, cols].t() @ x, product_bound(dy[:, cols].t(), x, 1, dtype), "dw")
    db = dy[:, cols].sum(0)
    within(bias.grad, db, 1e-6 * dy[:, cols].abs().sum(0), "dbias")


@pytest.mark.parametrize("act", ["relu", "gelu", "swiglu"])
def test_activations(world, device, gen, act):
    size, me, n, k = world.size, world.rank, 16, 24
    m = 4 * size
    x, w, b = randn(gen, m, k), randn(gen, size, n, k), randn(gen, size, n)
    n_out = n // 2 if act == "swiglu" else n
    dy = randn(gen, size, m, n_out)
    dense = [t.clone().requires_grad_() for t in (x, w, b)]
    total = sum(
        (act_of(act)(dense[0] @ dense[1][r].t() + dense[2][r]) * dy[r]).sum() for r in range(size)
    )
    total.backward()
    own = slice(4 * me, 4 * me + 4)
    mine = [leaf(x[own], torch.float32, device), leaf(w[me], torch.float32, device)]
    bias = leaf(b[me], torch.float32, device)
    y = tw.ag_gemm(*mine, bias=bias, activation=act)
    (y * dy[me].to(device, torch.float32)).sum().backward()
    want = act_of(act)(x @ w[me].t() + b[me])
    torch.testing.assert_close(y.cpu().double(), want, rtol=1e-4, atol=1e-4)
    for got, ref in [
        (mine[0].grad, dense[0].grad[own]),
        (mine[1].grad, dense[1].grad[me]),
        (bias.grad, dense[2].grad[me]),
    ]:
        torch.testing.assert_close(got.cpu().double(), ref, rtol=1e-3, atol=1e-4)


def test_gathered_x_has_a_gradient_of_its_own(world, device, gen):
    """Any subset of the outputs in the loss."""
    size, me, n, k = world.size, world.rank, 8, 16
    m = 3 * size
    x, w = randn(gen, m, k), randn(gen, size * n, k)
    dy, dg = randn(gen, m, size * n), randn(gen, size, m, k)
    own, cols = slice(3 * me, 3 * me + 3), slice(me * n, (me + 1) * n)
    for use_y, use_g in [(True, True), (True, False), (False, True)]:
        mx, mw = leaf(x[own], torch.float32, device), leaf(w[cols], torch.float32, device)
        y, g = tw.ag_gemm(mx, mw, return_gathered=True)
        torch.testing.assert_close(g.cpu().double(), x, rtol=0, atol=0)
        loss, ref = 0.0, torch.zeros(m, k, dtype=torch.float64)
        if use_y:
            loss = loss + (y * dy[:, cols].to(y)).sum()
            ref = ref + dy @ w
        if use_g:
            loss = loss + (g * dg[me].to(g)).sum()
            ref = ref + dg.sum(0)
        loss.backward()
        torch.testing.assert_close(mx.grad.cpu().double(), ref[own], rtol=1e-4, atol=1e-4)
        if use_y:
            want = dy[:, cols].t() @ x
            torch.testing.assert_close(mw.grad.cpu().double(), want, rtol=1e-4, atol=1e-4)
        else:
            assert mw.grad is None


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_one_operand_without_a_gradient(world, device, gen, frozen):
    size, me, n, k = world.size, world.rank, 8, 16
    m = 3 * size
    x, w, dy = randn(gen, m, k), randn(gen, size * n, k), randn(gen, m, size * n)
    own, cols = slice(3 * me, 3 * me + 3), slice(me * n, (me + 1) * n)
    mx, mw = leaf(x[own], torch.float32, device), leaf(w[cols], torch.float32, device)
    (mx if frozen == "x" else mw).requires_grad_(False)
    (tw.ag_gemm(mx, mw) * dy[:, cols].to(device, torch.float32)).sum().backward()
    if frozen == "x":
        got, want = mw.grad, dy[:, cols].t() @ x
    else:
        got, want = mx.grad, (dy @ w)[own]
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)
    assert (mx if frozen == "x" else mw).grad is None


def test_x_that_changes_before_the_backward_pass(world, device, gen):
    """Several ranks keep the gathered x. One rank keeps x itself, and a change is an error."""
    size, me, n, k = world.size, world.rank, 8, 16
    m = 3 * size
    x, w, dy = randn(gen, m, k), randn(gen, size * n, k), randn(gen, m, size * n)
    own, cols = slice(3 * me, 3 * me + 3), slice(me * n, (me + 1) * n)
    mx, mw = leaf(x[own], torch.float32, device), leaf(w[cols], torch.float32, device)
    between = mx * 1.0
    y = tw.ag_gemm(between, mw)
    with torch.no_grad():
        between.mul_(3.0)
    loss = (y * dy[:, cols].to(device, torch.float32)).sum()
    if size == 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    loss.backward()
    want = dy[:, cols].t() @ x
    torch.testing.assert_close(mw.grad.cpu().double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m_per", [4, 3.5])
def test_gemm_rs_and_its_gradients(world, device, gen, dtype, m_per):
    size, me, n, k = world.size, world.rank, 24, 16
    m = int(m_per * size) + (1 if m_per != 4 else 0)
    x, w = randn(gen, m, size * k, dtype=dtype), randn(gen, n, size * k, dtype=dtype)
    b = randn(gen, n)
    dy = randn(gen, m, n, dtype=dtype)
    first, num = rows_of(m, size)[me]
    own, ks = slice(first, first + num), slice(me * k, (me + 1) * k)
    mx, mw = leaf(x[:, ks], dtype, device), leaf(w[:, ks], dtype, device)
    bias = leaf(b, torch.float32, device)
    y = tw.gemm_rs(mx, mw, bias=bias)
    within(y, (x @ w.t() + b)[own], product_bound(x, w.t(), size, dtype)[own], "y")
    y.backward(dy[own].to(device, dtype))
    within(mx.grad, dy @ w[:, ks], product_bound(dy, w[:, ks], 1, dtype), "dx")
    within(mw.grad, dy.t() @ x[:, ks], product_bound(dy.t(), x[:, ks], 1, dtype), "dw")
    within(bias.grad, dy.sum(0), 1e-6 * dy.abs().sum(0), "dbias")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_ar_and_its_gradients(world, device, gen, dtype):
    size, me, m, n, k = world.size, world.rank, 7, 24, 16
    x, w = randn(gen, m, size * k, dtype=dtype), randn(gen, n, size * k, dtype=dtype)
    b = randn(gen, n)
    dy = randn(gen, m, n, dtype=dtype)
    ks = slice(me * k, (me + 1) * k)
    mx, mw = leaf(x[:, ks], dtype, device), leaf(w[:, ks], dtype, device)
    bias = leaf(b, torch.float32, device)
    y = tw.gemm_ar(mx, mw, bias=bias)
    within(y, x @ w.t() + b, product_bound(x, w.t(), size, dtype), "y")
    y.backward(dy.to(device, dtype))
    within(mx.grad, dy @ w[:, ks], product_bound(dy, w[:, ks], 1, dtype), "dx")
    within(mw.grad, dy.t() @ x[:, ks], product_bound(dy.t(), x[:, ks], 1, dtype), "dw")
    within(bias.grad, dy.sum(0), 1e-6 * dy.abs().sum(0), "dbias")


def test_views_inner_dimensions_and_expanded_gradients(world, device, gen):
    """A weight [k, n] that is transposed, rows with inner dimensions, a gradient of stride 0."""
    size, me, n, k = world.size, world.rank, 8, 16
    x, w = randn(gen, 2 * size, 3, k), randn(gen, k, size * n)
    own, cols = slice(2 * me, 2 * me + 2), slice(me * n, (me + 1) * n)
    mx, mw = leaf(x[own], torch.float32, device), leaf(w[:, cols], torch.float32, device)
    y = tw.ag_gemm(mx, mw.t())
    assert y.shape == (2 * size, 3, n)
    torch.testing.assert_close(y.cpu().double(), x @ w[:, cols], rtol=1e-4, atol=1e-4)
    y.sum().backward()
    ones = torch.ones(2 * size, 3, size * n, dtype=torch.float64)
    torch.testing.assert_close(mx.grad.cpu().double(), (ones @ w.t())[own], rtol=1e-4, atol=1e-4)
    ref = torch.einsum("abk,abn->kn", x, ones[..., cols])
    torch.testing.assert_close(mw.grad.cpu().double(), ref, rtol=1e-4, atol=1e-4)
    z = tw.gemm_rs(y.detach(), w[:, cols].to(device, torch.float32))
    ref = sum((x @ w[:, c * n : c * n + n]) @ w[:, c * n : c * n + n].t() for c in range(size))
    assert z.shape == (2, 3, k)
    torch.testing.assert_close(z.cpu().double(), ref[own], rtol=1e-3, atol=1e-3)


def test_two_backwards_over_a_retained_graph(world, device, gen):
    size, me = world.size, world.rank
    x, w = randn(gen, 2 * size, 8), randn(gen, 4 * size, 8)
    mx = leaf(x[2 * me : 2 * me + 2], torch.float32, device)
    mw = leaf(w[4 * me : 4 * me + 4], torch.float32, device)
    y = tw.ag_gemm(mx, mw).square().sum()
    y.backward(retain_graph=True)
    once = mx.grad.clone(), mw.grad.clone()
    y.backward()
    assert torch.equal(mx.grad, 2 * once[0]) and torch.equal(mw.grad, 2 * once[1])


def test_second_derivatives_are_refused(world, device, gen):
    x = leaf(randn(gen, 2, 8), torch.float32, device)
    w = leaf(randn(gen, 4, 8), torch.float32, device)
    y = tw.ag_gemm(x, w)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


# One and two ranks show it; each rank of four would compile on two cores.
INDUCTOR = pytest.param("inductor", marks=pytest.mark.needs(most_ranks=2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_compiled_whole_with_changing_rows(world, device, gen, backend):
    size, me, n, k = world.size, world.rank, 8, 16

    def block(x, w1, w2):
        return tw.gemm_rs(torch.relu(tw.ag_gemm(x, w1)), w2)

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    for rows in (2, 5):
        x = randn(gen, rows * size, k)
        w1, w2 = randn(gen, n, k), randn(gen, k, n)
        args = [leaf(x[rows * me : rows * me + rows], torch.float32, device)]
        args += [leaf(w, torch.float32, device) for w in (w1, w2)]
        again = [a.detach().clone().requires_grad_() for a in args]
        y, z = block(*args), compiled(*again)
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
        y.sum().backward()
        z.sum().backward()
        for a, b in zip(args, again):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_autocast_takes_its_type(world, device, gen):
    x = leaf(randn(gen, 2, 8), torch.float32, device)
    w = leaf(randn(gen, 4, 8), torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = tw.ag_gemm(x, w)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32 and w.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(world, device, gen, reentrant):
    x, w = randn(gen, 2, 8), randn(gen, 4, 8)
    grads = []
    for recompute in (False, True):
        mx, mw = leaf(x, torch.float32, device), leaf(w, torch.float32, device)
        f = lambda a, b: torch.tanh(tw.ag_gemm(a, b))  # noqa: E731
        if recompute:
            y = torch.utils.checkpoint.checkpoint(f, mx, mw, use_reentrant=reentrant)
        else:
            y = f(mx, mw)
        y.sum().backward()
        grads.append((mx.grad, mw.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("algo", ["fused", "pipelined", "ring", "sequential"])
def test_algorithms_agree_bit_for_bit_on_integers(world, device, gen, algo):
    """Integers that every partial sum holds: no rounding, so any order gives the same bits."""
    if device.type == "cuda" and algo == "fused":
        pytest.skip("no fused kernel on GPUs yet")
    size, me = world.size, world.rank
    x = torch.randint(-4, 5, (4 * size, 16), generator=gen).to(device, torch.bfloat16)
    w = torch.randint(-2, 3, (8, 16), generator=gen).to(device, torch.bfloat16)
    own = slice(4 * me, 4 * me + 4)
    y = tw.ag_gemm(x[own], w, algo=algo)
    assert torch.equal(y.cpu().double(), (x.cpu().double() @ w.cpu().double().t()))
    algo = None if algo == "ring" else algo
    z = tw.gemm_rs(y[:, :4].contiguous(), w[:, :4].contiguous(), algo=algo)
    ref = size * (y[:, :4].cpu().double() @ w[:, :4].cpu().double().t())
    torch.testing.assert_close(z.cpu().double(), ref[own], rtol=2**-7, atol=0)
