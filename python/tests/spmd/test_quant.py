"""FP8 tensors: codes and scales, and the operations that take them."""

import pytest
import torch
from dense import product_bound, randn, within

import tilewire
import tilewire.torch as tw

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def scales_of(x, recipe, dtype, pow2):
    """The definition, block by block: what each element is divided by."""
    rows, cols = x.shape
    high = {"tensor": rows, "block1x128": 1, "block128x128": 128, "mx1x32": 1}[recipe]
    wide = {"tensor": cols, "block1x128": 128, "block128x128": 128, "mx1x32": 32}[recipe]
    out = torch.empty_like(x)
    for i in range(0, rows, high):
        for j in range(0, cols, wide):
            block = x[i : i + high, j : j + wide]
            amax = block.abs().max()
            s = (amax / LARGEST[dtype]).float()
            if recipe == "mx1x32" or pow2:
                s = torch.exp2(torch.ceil(torch.log2(amax.double() / LARGEST[dtype]))).float()
            out[i : i + high, j : j + wide] = s if amax else 1.0
    return out


def expanded(q):
    """Scales of each element."""
    rows, cols = q.shape
    s = q.scales.float().cpu()
    if q.recipe == "tensor":
        return s.expand(rows, cols)
    wide = 32 if q.recipe == "mx1x32" else 128
    high = 128 if q.recipe == "block128x128" else 1
    return s.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :cols]


def value(q):
    """What it stands for, in f64 on the CPU."""
    return q.data.cpu().float().double() * expanded(q).double()


@pytest.mark.parametrize("recipe", ["tensor", "block1x128", "block128x128", "mx1x32"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("src", [torch.float32, torch.bfloat16], ids=str)
def test_codes_scales_and_back(device, gen, recipe, dtype, src):
    x = (torch.randn(130, 200, generator=gen) * torch.logspace(-3, 3, 200)).to(src)
    q = tw.quantize(x.to(device), recipe, dtype=dtype)
    assert q.shape == x.shape and q.dtype == dtype and q.recipe == recipe
    want = scales_of(x.float(), recipe, dtype, False)
    torch.testing.assert_close(expanded(q), want, rtol=1e-6, atol=0)
    codes = (x.float() / expanded(q)).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    assert torch.equal(q.data.cpu().view(torch.uint8), codes.view(torch.uint8))
    for out in (torch.float32, torch.bfloat16):
        back = q.dequantize(out)
        assert torch.equal(back.cpu(), (codes.float() * expanded(q)).to(out))


def test_powers_of_two(device, gen):
    x = torch.randn(4, 256, generator=gen)
    q = tw.quantize(x.to(device), "block1x128", pow2_scales=True)
    torch.testing.assert_close(expanded(q), scales_of(x, "block1x128", E4M3, True), rtol=0, atol=0)


def test_one_scale_for_the_tensors_of_all_ranks(world, device, gen):
    x = [torch.randn(3 + r, 40, generator=gen) * (r + 1) for r in range(world.size)]
    q = tw.quantize(x[world.rank].to(device), group=world)
    amax = max(t.abs().max() for t in x)
    torch.testing.assert_close(q.scales.cpu(), (amax / 448.0).view(1), rtol=1e-6, atol=0)


def product(qa, qb):
    """a @ b.T in f64, and the bound of DESIGN for it with a bf16 result."""
    a, b = value(qa), value(qb)
    return a @ b.t(), product_bound(a, b.t(), 1, torch.bfloat16)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_comm_gemm_of_fp8_operands(world, device, gen, dtype):
    size, me, n, k = world.size, world.rank, 24, 64
    x = torch.randn(4 * size, k, generator=gen)
    w = torch.randn(size, n, k, generator=gen)
    bias = torch.randn(n, generator=gen)
    own = x[4 * me : 4 * me + 4]
    xq = tw.quantize(own.to(device), dtype=dtype, group=world)
    wq = tw.quantize(w[me].to(device))
    # All ranks' rows with the scale that they share.
    rows = tw.all_gather(xq.data.view(torch.uint8)).view(dtype)
    every = tw.QTensor(rows, xq.scales, "tensor")
    y = tw.ag_gemm(xq, wq, bias=bias.to(device), activation=None)
    assert y.dtype == torch.bfloat16
    ref, bound = product(every, wq)
    within(y, ref + bias.double(), bound, "ag_gemm")
    # Partial products: k is divided, scales are each rank's own.
    a, b = torch.randn(3 * size, k * size, generator=gen), torch.randn(n, k * size, generator=gen)
    cols = [slice(r * k, r * k + k) for r in range(size)]
    parts = [
        (tw.quantize(a[:, c].to(device), dtype=dtype), tw.quantize(b[:, c].to(device)))
        for c in cols
    ]
    sums = [product(*p) for p in parts]
    ref = sum(s for s, _ in sums)
    wire = sum((value(p).abs() @ value(q).abs().t()) * size * 2.0**-8 for p, q in parts)
    bound = sum(b for _, b in sums) + wire
    z = tw.gemm_rs(*parts[me])
    within(z, ref[3 * me : 3 * me + 3], bound[3 * me : 3 * me + 3], "gemm_rs")
    within(tw.gemm_ar(*parts[me], wire="f32"), ref, bound, "gemm_ar")


@pytest.mark.parametrize("recipe", ["tensor", "block1x128", "block128x128", "mx1x32"])
def test_grouped_products_of_fp8_operands(device, gen, recipe):
    n, k, counts = 40, 256, [5, 0, 130, 1]
    x = torch.randn(sum(counts) + 3, k, generator=gen)
    w = torch.randn(len(counts), n, k, generator=gen)
    xq = tw.quantize(x.to(device), recipe)
    wq = [tw.quantize(t.to(device), recipe) for t in w]
    y = tw.grouped_gemm(xq, wq, torch.tensor(counts, device=device))
    assert y.dtype == torch.bfloat16
    at, a = 0, value(xq)
    for e, num in enumerate(counts):
        b = value(wq[e])
        rows = a[at : at + num]
        bound = product_bound(rows, b.t(), 1, torch.bfloat16)
        within(y[at : at + num], rows @ b.t(), bound, f"expert {e}")
        at += num
    assert not y[at:].any()


def test_experts_of_fp8_tokens(world, device, gen):
    """Codes and scales travel as they are; the results are those of the dequantised tokens."""
    size, me, tokens, hidden, top_k, experts = world.size, world.rank, 6, 256, 2, 2 * world.size
    g = tw.EpGroup(
        num_experts=experts, max_tokens=tokens, hidden=hidden, top_k=top_k, dtype=E4M3
    )
    x = torch.randn(size, tokens, hidden, generator=gen)
    chosen = [torch.randperm(experts, generator=gen)[:top_k] for _ in range(size * tokens)]
    idx = torch.stack(chosen)
    idx = idx.view(size, tokens, top_k)
    xq = tw.quantize(x[me].to(device), "block1x128")
    buf = g.buffer()
    rows, weights, splits = tw.ep_dispatch(buf, xq, idx[me].to(device))
    assert isinstance(rows, tw.QTensor) and weights is None
    all_q = [tw.quantize(x[r].to(device), "block1x128") for r in range(size)]
    at = 0
    for e in range(2):
        mine = [(r, t) for r in range(size) for t in range(tokens) if 2 * me + e in idx[r, t]]
        assert int(splits[e]) == len(mine)
        for r, t in mine:
            for got, ref in [(rows.data, all_q[r].data), (rows.scales, all_q[r].scales)]:
                assert torch.equal(got[at].view(torch.uint8), ref[t].view(torch.uint8))
            at += 1
    # Experts that double, in the type of the results.
    y = rows.dequantize(torch.bfloat16) * 2
    out = tw.ep_combine(buf, y)
    ref = (xq.dequantize(torch.bfloat16).float() * 2 * top_k).to(torch.bfloat16)
    assert torch.equal(out, ref)


def test_what_does_not_fit_is_refused(world, device):
    x = torch.zeros(4, 128, device=device)
    for bad in (
        lambda: tw.quantize(x[0]),
        lambda: tw.quantize(x, "rows"),
        lambda: tw.quantize(x, dtype=torch.bfloat16),
        lambda: tw.quantize(x, "mx1x32", group=world),
        lambda: tw.quantize(x.clone().requires_grad_()),
        lambda: tw.ag_gemm(tw.quantize(x, group=world), x),
        lambda: tw.ag_gemm(tw.quantize(x, "block1x128"), tw.quantize(x)),
        lambda: tw.gemm_rs(x, tw.quantize(x)),
        lambda: tw.grouped_gemm(tw.quantize(x), x[None], torch.tensor([4], device=device)),
        lambda: tw.QTensor(x, x, "tensor"),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
    if world.size > 1:
        with pytest.raises(tilewire.Mismatch, match="scale of its own"):
            tw.ag_gemm(tw.quantize(x), tw.quantize(x))
    g = tw.EpGroup(num_experts=world.size, max_tokens=4, hidden=128, top_k=1, dtype=E4M3)
    idx = torch.zeros(4, 1, dtype=torch.int64, device=device)
    for bad in (x, tw.quantize(x), tw.quantize(x, "block1x128", dtype=E5M2)):
        with pytest.raises(tilewire.InvalidArgument):
            tw.ep_dispatch(g.buffer(), bad, idx)
