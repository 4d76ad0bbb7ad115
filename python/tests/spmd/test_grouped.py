"""grouped_gemm and its gradients beside a loop over the experts."""

import pytest
import torch
from dense import leaf, product_bound, randn, within

import tilewire
import tilewire.torch as tw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def dense(x, w, b, splits):
    y = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    at = 0
    for e, n in enumerate(splits):
        y[at : at + n] = x[at : at + n] @ w[e].t() + b[e]
        at += n
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("splits", [[3, 0, 5, 2], [0, 0, 0, 0], [12, 0, 0, 0]], ids=str)
def test_grouped_gemm_and_its_gradients(device, gen, dtype, packed, splits):
    rows, n, k, groups = 12, 24, 16, len(splits)
    x, w = randn(gen, rows, k, dtype=dtype), randn(gen, groups, n, k, dtype=dtype)
    b, dy = randn(gen, groups, n), randn(gen, rows, n, dtype=dtype)
    mx, mb = leaf(x, dtype, device), leaf(b, torch.float32, device)
    mw = leaf(w, dtype, device) if packed else [leaf(e, dtype, device) for e in w]
    m = torch.tensor(splits, device=device)
    y = tw.grouped_gemm(mx, mw, m, bias=mb)
    used = sum(splits)
    wt = w.abs().amax(0).t()
    within(y, dense(x, w, b, splits), product_bound(x, wt, 1, dtype), "y")
    assert not y[used:].any()
    y.backward(dy.to(device, dtype))
    at = 0
    for e, num in enumerate(splits):
        xe, de = x[at : at + num], dy[at : at + num]
        dw = mw.grad[e] if packed else mw[e].grad
        bound = product_bound(de.t(), xe, 1, dtype) if num else torch.zeros(n, k)
        within(mx.grad[at : at + num], de @ w[e], product_bound(de, w[e], 1, dtype), "dx")
        within(dw, de.t() @ xe, bound, "dw")
        within(mb.grad[e], de.sum(0), 1e-6 * de.abs().sum(0), "dbias")
        at += num
    assert not mx.grad[used:].any()


def test_gradients_are_added_to_where_the_mask_says(device, gen):
    x, w, dy = randn(gen, 6, 8), randn(gen, 3, 4, 8), randn(gen, 6, 4)
    mx, mw = leaf(x, torch.float32, device), [leaf(e, torch.float32, device) for e in w]
    mains = [torch.full((4, 8), 2.0, device=device) for _ in range(3)]
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8, device=device)
    m = torch.tensor([2, 2, 2], dtype=torch.int32, device=device)
    y = tw.grouped_gemm(mx, mw, m, out=mains, wgrad_accumulation_mask=mask)
    y.backward(dy.to(y))
    for e in range(3):
        ref = dy[2 * e : 2 * e + 2].t() @ x[2 * e : 2 * e + 2] + (0.0 if e == 1 else 2.0)
        torch.testing.assert_close(mains[e].cpu().double(), ref, rtol=1e-5, atol=1e-5)
        assert mw[e].grad is None


def test_what_does_not_fit_is_refused(device):
    x, w = torch.randn(4, 8, device=device), torch.randn(2, 4, 8, device=device)
    m = torch.tensor([2, 2], device=device)
    for bad in (
        lambda: tw.grouped_gemm(x, w, m[:1]),
        lambda: tw.grouped_gemm(x, w, m.float()),
        lambda: tw.grouped_gemm(x, w[:, :, :4], m),
        lambda: tw.grouped_gemm(x[0], w, m),
        lambda: tw.grouped_gemm(x, w, m, wgrad_accumulation_mask=m),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
    if device.type == "cpu":
        for splits in ([3, 2], [-1, 2]):
            with pytest.raises(tilewire.InvalidArgument, match="split"):
                tw.grouped_gemm(x, w, torch.tensor(splits))
        tw.grouped_gemm(x, w, m)  # and the plan goes on


def test_compiled(device, gen):
    x = leaf(randn(gen, 6, 8), torch.float32, device)
    w = leaf(randn(gen, 2, 4, 8), torch.float32, device)
    m = torch.tensor([2, 3], device=device)

    def loss(x, w, m):
        return tw.grouped_gemm(x, w, m).square().sum()

    f = torch.compile(loss, fullgraph=True, backend="aot_eager")
    f(x, w, m).backward()
    got = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    tw.grouped_gemm(x, w, m).square().sum().backward()
    torch.testing.assert_close(got, (x.grad, w.grad))
