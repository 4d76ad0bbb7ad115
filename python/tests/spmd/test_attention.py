"""attention and cp_attention with gradients, beside dense attention in f64."""

import pytest
import torch
from dense import leaf, randn

import tilewire
import tilewire.torch as tw
from tilewire import _native


def dense(
    q, k, v, cu, causal=True, window=(None, None), scale=None, bias=None, softcap=None, sink=None
):
    """[tokens, heads, d] in f64, sequence after sequence."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for a, b in zip(cu[:-1], cu[1:]):
        if a == b:
            continue
        kk, vv = (t[a:b].repeat_interleave(group, 1) for t in (k, v))
        s = torch.einsum("qhd,khd->hqk", q[a:b], kk) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if bias is not None:
            s = s + bias[:, : b - a, : b - a]
        i = torch.arange(b - a)
        gap = i[None, :] - i[:, None]
        hide = torch.zeros(b - a, b - a, dtype=torch.bool)
        if causal:
            hide |= gap > 0
        if window[0] is not None:
            hide |= gap < -window[0]
        if window[1] is not None:
            hide |= gap > window[1]
        s = s.masked_fill(hide, float("-inf"))
        if sink is not None:
            s = torch.cat((s, sink[:, None, None].expand(-1, b - a, 1)), 2)
        lses.append(torch.logsumexp(s, 2))
        p = torch.softmax(s, 2)[..., : b - a]
        outs.append(torch.einsum("hqk,khd->qhd", p, vv))
    return torch.cat(outs), torch.cat(lses, 1)


TOL = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.bfloat16: dict(rtol=4e-2, atol=4e-2),
    torch.float16: dict(rtol=1e-2, atol=1e-2),
}

CASES = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(window=(5, 0)),
    "scaled": dict(scale=0.3, softcap=2.0),
    "sink": dict(sink=True),
    "bias": dict(bias=True),
}


def case(gen, name, tokens, hq=4, hkv=2, d=16, dtype=torch.float32):
    kw = dict(CASES[name])
    q, k, v = (randn(gen, tokens, h, d, dtype=dtype) for h in (hq, hkv, hkv))
    if kw.pop("sink", False):
        kw["sink"] = randn(gen, hq)
    if kw.pop("bias", False):
        kw["bias"] = randn(gen, hq, tokens, tokens)
    return (q, k, v), kw


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("dtype", list(TOL), ids=str)
def test_attention(device, gen, name, dtype):
    tokens, cu = 24, [0, 7, 7, 24]
    qkv, kw = case(gen, name, tokens, dtype=dtype)
    d_out = randn(gen, tokens, 4, 16, dtype=dtype)
    refs = [t.clone().requires_grad_() for t in qkv]
    extra = {n: kw[n].clone().requires_grad_() for n in ("sink", "bias") if n in kw}
    ref, ref_lse = dense(*refs, cu, **{**kw, **extra})
    ref.backward(d_out)
    mine = [leaf(t, dtype, device) for t in qkv]
    own = {n: leaf(t.detach(), torch.float32, device) for n, t in extra.items()}
    out, lse = tw.attention(*mine, cu_seqlens_q=cu, return_lse=True, **{**kw, **own})
    torch.testing.assert_close(out.cpu().double(), ref, **TOL[dtype])
    torch.testing.assert_close(lse.cpu().double(), ref_lse, rtol=1e-2, atol=1e-2)
    out.backward(d_out.to(out))
    for a, b in zip([*mine, *own.values()], [*refs, *extra.values()]):
        torch.testing.assert_close(a.grad.cpu().double(), b.grad, **TOL[dtype])


@pytest.mark.parametrize("name", list(CASES))
def test_offsets_in_tensors_have_the_bits_of_lists(device, gen, name):
    """Of documents that change, some of them empty, with gradients."""
    tokens = 24
    qkv, kw = case(gen, name, tokens)
    d_out = randn(gen, tokens, 4, 16).float().to(device)
    names = [n for n in ("sink", "bias") if n in kw]
    for cu in ([0, 7, 7, 24], [0, 0, 20, 24], [0, 24, 24, 24]):
        found = []
        for given in (cu, torch.tensor(cu, device=device)):
            mine = [leaf(t, torch.float32, device) for t in qkv]
            own = {n: leaf(kw[n], torch.float32, device) for n in names}
            args = {**kw, **own, "cu_seqlens_q": given, "return_lse": True}
            out, lse = tw.attention(*mine, **args)
            out.backward(d_out)
            found.append([out, lse, *(t.grad for t in (*mine, *own.values()))])
        for a, b in zip(*found):
            assert a.any() and torch.equal(a, b)


@pytest.mark.parametrize("queries, num", [(1, 3), (1, 40), (5, 20), (16, 2), (17, 2)])
def test_few_queries_over_many_keys(device, gen, queries, num):
    """Sequences of few queries have kernels of their own on a GPU; each sees all of its keys."""
    lens = [1 + 37 * i % 300 for i in range(num)]
    cu_q = [queries * i for i in range(num + 1)]
    cu_kv = [sum(lens[:i]) for i in range(num + 1)]
    rows = ((cu_q[-1], 8), (cu_kv[-1], 2), (cu_kv[-1], 2))
    q, k, v = (randn(gen, n, h, 64, dtype=torch.bfloat16) for n, h in rows)
    mine = [t.bfloat16().to(device) for t in (q, k, v)]
    out = tw.attention(*mine, causal=False, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:]):
        kk, vv = (t[c:d].repeat_interleave(4, 1) for t in (k, v))
        p = torch.softmax(torch.einsum("qhd,khd->hqk", q[a:b], kk) * 64**-0.5, 2)
        ref = torch.einsum("hqk,khd->qhd", p, vv)
        torch.testing.assert_close(out[a:b].cpu().double(), ref, **TOL[torch.bfloat16])


def test_offsets_of_keys_and_rows_behind_the_last_sequence(device, gen):
    q, k, v = (randn(gen, n, h, 16).float().to(device) for n, h in ((9, 4), (12, 2), (12, 2)))
    cu_q, cu_kv = ([0, 3, 7], [0, 5, 11])
    at = [torch.tensor(c, dtype=torch.int64, device=device) for c in (cu_q, cu_kv)]
    out = tw.attention(q, k, v, cu_seqlens_q=at[0], cu_seqlens_kv=at[1])
    ref = tw.attention(q[:7], k[:11], v[:11], cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    assert torch.equal(out[:7], ref) and ref.any() and not out[7:].any()
    # Without offsets of queries these are one sequence.
    one = tw.attention(q, k, v, cu_seqlens_kv=torch.tensor([0, 12], device=device))
    assert torch.equal(one, tw.attention(q, k, v))


def test_more_documents_than_a_plan_was_made_for(device, gen):
    """The tables of a GPU in a plan that was made for few have no place for 2100."""
    q, k, v = (randn(gen, 2100, h, 16).float().to(device) for h in (2, 1, 1))
    assert tw.attention(q, k, v).any()
    cu = list(range(2101))
    ref, _ = dense(*(t.cpu().double() for t in (q, k, v)), cu)
    for given in (cu, torch.tensor(cu, device=device)):
        out = tw.attention(q, k, v, cu_seqlens_q=given)
        torch.testing.assert_close(out.cpu().double(), ref, rtol=1e-4, atol=1e-4)


def test_offsets_in_tensors_that_do_not_fit(device):
    q = torch.randn(4, 4, 8, device=device)
    at = lambda *cu, **kw: torch.tensor(cu, device=device, **kw)  # noqa: E731
    for bad in (
        dict(cu_seqlens_q=at(0.0, 4.0)),
        dict(cu_seqlens_q=at(0)),
        dict(cu_seqlens_q=at(0, 4).view(1, 2)),
        dict(cu_seqlens_q=at(0, 4), cu_seqlens_kv=at(0, 2, 4)),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            tw.attention(q, q, q, **bad)
    with pytest.raises(tilewire.InvalidArgument, match="not for"):
        tw.attention(*[q[None]] * 3, cu_seqlens_q=at(0, 4))
    # What the numbers say is known where the call waits, and on a GPU when they are read.
    if device.type == "cpu":
        with pytest.raises(tilewire.InvalidArgument, match="more rows than `q`"):
            tw.attention(q, q, q, cu_seqlens_q=at(0, 2**32 + 4))
    for cu in (at(0, 5), at(0, 3, 2, 4), at(1, 4), at(-1, 4)):
        if device.type == "cpu":
            with pytest.raises(tilewire.InvalidArgument):
                tw.attention(q, q, q, cu_seqlens_q=cu)
        else:
            assert tw.attention(q, q, q, cu_seqlens_q=cu).isnan().all()
    assert not tw.attention(q, q, q, cu_seqlens_q=at(0, 4)).isnan().any()


def test_a_batch(device, gen):
    q, k, v = (randn(gen, 2, 9, h, 8) for h in (4, 2, 2))
    mine = [leaf(t, torch.float32, device) for t in (q, k, v)]
    out, lse = tw.attention(*mine, return_lse=True)
    assert out.shape == (2, 9, 4, 8) and lse.shape == (4, 2, 9)
    ref, _ = dense(*(t.flatten(0, 1) for t in (q, k, v)), [0, 9, 18])
    torch.testing.assert_close(out.cpu().double().flatten(0, 1), ref, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("strategy", ["get", "ring", "all_gather", "all_to_all"])
def test_cp_attention(world, device, gen, name, strategy):
    size = world.size
    tokens = 8 * size
    qkv, kw = case(gen, name, tokens, hq=8, hkv=4)
    d_out = randn(gen, tokens, 8, 16)
    refs = [t.clone().requires_grad_() for t in qkv]
    extra = {n: kw[n].clone().requires_grad_() for n in ("sink", "bias") if n in kw}
    cu = [0, tokens]
    ref, _ = dense(*refs, cu, **{**kw, **extra})
    ref.backward(d_out)
    mine = [leaf(tw.cp_shard(t), torch.float32, device) for t in qkv]
    own = {n: leaf(t.detach(), torch.float32, device) for n, t in extra.items()}
    out = tw.cp_attention(*mine, strategy=strategy, **{**kw, **own})
    whole = tw.cp_unshard(out.detach()).cpu().double()
    torch.testing.assert_close(whole, ref, rtol=1e-4, atol=1e-4)
    out.backward(tw.cp_shard(d_out).to(out))
    for a, b in zip(mine, refs):
        torch.testing.assert_close(a.grad.cpu().double(), tw.cp_shard(b.grad), rtol=1e-4, atol=1e-4)
    for a, b in zip(own.values(), extra.values()):
        torch.testing.assert_close(a.grad.cpu().double(), b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_tiles_that_wait_for_keys(world, device, gen, packed):
    """One kernel on sm_90a, the same numbers on the CPU."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("refused there")
    n = 64 * world.size
    cu = [0, n // 2, n] if packed else [0, n]
    qkv = [randn(gen, n, h, 64) for h in (4, 2, 2)]
    d_out = randn(gen, n, 4, 64)
    refs = [t.bfloat16().double().requires_grad_() for t in qkv]
    ref, _ = dense(*refs, cu)
    ref.backward(d_out)
    of = dict(cu_seqlens=cu)
    mine = [leaf(tw.cp_shard(t, **of), torch.bfloat16, device) for t in qkv]
    out = tw.cp_attention(*mine, cu_seqlens_q=cu, strategy="gated")
    whole = tw.cp_unshard(out.detach(), **of).cpu().double()
    torch.testing.assert_close(whole, ref, rtol=2e-2, atol=2e-2)
    out.backward(tw.cp_shard(d_out, **of).to(out))
    for a, b in zip(mine, refs):
        want = tw.cp_shard(b.grad, **of)
        torch.testing.assert_close(a.grad.cpu().double(), want, rtol=5e-2, atol=5e-2)


def test_an_unknown_strategy(world, device, gen):
    mine = [tw.cp_shard(randn(gen, 8 * world.size, 2, 8)).float().to(device) for _ in range(3)]
    with pytest.raises(tilewire.InvalidArgument, match="unknown strategy `fast`; one of get"):
        tw.cp_attention(*mine, strategy="fast")


@pytest.mark.parametrize("layout", ["zigzag_per_sequence", "zigzag", "contiguous", "balanced"])
def test_packed_documents_that_change(world, device, gen, layout):
    """Other lengths each time: one plan serves them."""
    size = world.size
    made = None
    for lens in ([4, 2, 2], [2, 6], [8]):
        cu = [0]
        for n in lens:
            cu.append(cu[-1] + n * 2 * size)
        q, k, v = (randn(gen, cu[-1], h, 8) for h in (4, 2, 2))
        ref, _ = dense(q, k, v, cu)
        mine = [tw.cp_shard(t.float().to(device), cu_seqlens=cu, layout=layout) for t in (q, k, v)]
        out = tw.cp_attention(*mine, cu_seqlens_q=torch.tensor(cu), layout=layout)
        whole = tw.cp_unshard(out, cu_seqlens=cu, layout=layout)
        torch.testing.assert_close(whole.cpu().double(), ref, rtol=1e-4, atol=1e-4)
        made = made or world.memory()["plans_made"]
    assert world.memory()["plans_made"] == made


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_packed_documents_in_tensors(world, device, gen, layout):
    """Read when the call runs; rows behind the last document are zero."""
    n = 10 * world.size + 1
    qkv = [randn(gen, n, h, 8) for h in (4, 2, 2)]
    d_out = randn(gen, n, 4, 8)
    of = dict(cu_seqlens=[0, n], layout=layout)
    made = None
    for lens in ([4, n - 4], [n - 7, 3, 2], [0, 5]):
        cu = [0]
        for length in lens:
            cu.append(cu[-1] + length)
        refs = [t.clone().requires_grad_() for t in qkv]
        ref, _ = dense(*(t[: cu[-1]] for t in refs), cu)
        ref.backward(d_out[: cu[-1]])
        mine = [leaf(tw.cp_shard(t, **of), torch.float32, device) for t in qkv]
        at = torch.tensor(cu, device=device)
        out = tw.cp_attention(*mine, cu_seqlens_q=at, layout=layout, tokens=n)
        whole = tw.cp_unshard(out.detach(), **of).cpu().double()
        torch.testing.assert_close(whole[: cu[-1]], ref, rtol=1e-4, atol=1e-4)
        assert not whole[cu[-1] :].any()
        out.backward(tw.cp_shard(d_out, **of).to(out))
        for a, b in zip(mine, refs):
            want = tw.cp_shard(b.grad, **of)
            torch.testing.assert_close(a.grad.cpu().double(), want, rtol=1e-4, atol=1e-4)
        made = made or world.memory()["plans_made"]
    assert world.memory()["plans_made"] == made
    for bad in ([0, 5], None):
        with pytest.raises(tilewire.InvalidArgument, match="`tokens` is for"):
            tw.cp_attention(*mine, cu_seqlens_q=bad, layout=layout, tokens=n)
    for tokens, why in ((-1, "must be a number"), ((n,), "must be a number"), (n + 0.5, "number")):
        with pytest.raises(tilewire.InvalidArgument, match=why):
            tw.cp_attention(*mine, cu_seqlens_q=at, layout=layout, tokens=tokens)
    with pytest.raises(tilewire.InvalidArgument, match="other rows than this rank"):
        tw.cp_attention(*mine, cu_seqlens_q=at, layout=layout, tokens=n + 2 * world.size)


@pytest.mark.parametrize("kw", [{}, dict(causal=False), dict(causal=False, window=(5, 2))])
def test_balanced_documents(world, device, gen, kw):
    """Documents of any lengths, divided by the work under the mask; gradients, too."""
    cu = [0, 13, 13, 50, 53, 53 + 7 * world.size]
    qkv = [randn(gen, cu[-1], h, 8) for h in (4, 2, 2)]
    d_out = randn(gen, cu[-1], 4, 8)
    refs = [t.clone().requires_grad_() for t in qkv]
    ref, _ = dense(*refs, cu, **kw)
    ref.backward(d_out)
    rows = dict(kw, cu_seqlens=cu, layout="balanced")
    mine = [leaf(tw.cp_shard(t, **rows), torch.float32, device) for t in qkv]
    counts = {len(tw.cp_shard(torch.arange(cu[-1]), **rows))} | {-(-cu[-1] // world.size)}
    assert max(counts) - min(counts) <= 1
    out = tw.cp_attention(*mine, cu_seqlens_q=cu, layout="balanced", **kw)
    whole = tw.cp_unshard(out.detach(), **rows).cpu().double()
    torch.testing.assert_close(whole, ref, rtol=1e-4, atol=1e-4)
    out.backward(tw.cp_shard(d_out, **rows).to(out))
    for a, b in zip(mine, refs):
        torch.testing.assert_close(
            a.grad.cpu().double(), tw.cp_shard(b.grad, **rows), rtol=1e-4, atol=1e-4
        )
    if world.size > 1:
        with pytest.raises(tilewire.InvalidArgument, match="balanced"):
            tw.cp_attention(*(t[None] for t in mine), layout="balanced")


@pytest.mark.parametrize("layout", ["zigzag_per_sequence", "zigzag", "contiguous"])
def test_each_entry_of_a_batch_is_divided_or_refused(world, device, gen, layout):
    """Layouts of all rows together give one rank the first entries: results were wrong."""
    batch, rows = 2, 4 * world.size
    qkv = [randn(gen, batch, rows, h, 8) for h in (4, 2, 2)]
    ref, _ = dense(*(t.flatten(0, 1) for t in qkv), [0, rows, 2 * rows])
    kw = dict(layout=layout)
    mine = [tw.cp_shard(t.float().to(device), dim=1, **kw) for t in qkv]
    if layout != "zigzag_per_sequence" and world.size > 1:
        with pytest.raises(tilewire.InvalidArgument, match="zigzag_per_sequence"):
            tw.cp_attention(*mine, **kw)
        return
    whole = tw.cp_unshard(tw.cp_attention(*mine, **kw), dim=1, **kw).cpu().double()
    torch.testing.assert_close(whole.flatten(0, 1), ref, rtol=1e-4, atol=1e-4)


def test_a_batch_over_ranks(world, device, gen):
    q, k, v = (randn(gen, 3, 4 * world.size, h, 8) for h in (4, 2, 2))
    mine = [leaf(tw.cp_shard(t, dim=1), torch.float32, device) for t in (q, k, v)]
    out = tw.cp_attention(*mine)
    s = 4 * world.size
    ref, _ = dense(*(t.flatten(0, 1) for t in (q, k, v)), [0, s, 2 * s, 3 * s])
    whole = tw.cp_unshard(out.detach(), dim=1).cpu().double()
    torch.testing.assert_close(whole.flatten(0, 1), ref, rtol=1e-4, atol=1e-4)


def test_dropout_is_the_same_on_any_number_of_ranks(world, device, gen):
    tokens = 8 * world.size
    q, k, v = (randn(gen, tokens, 2, 8).float().to(device) for _ in range(3))
    whole = tw.attention(q, k, v, dropout_p=0.4, seed=7)
    parts = [tw.cp_shard(t) for t in (q, k, v)]
    out = tw.cp_unshard(tw.cp_attention(*parts, dropout_p=0.4, seed=7))
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole, tw.attention(q, k, v))


def test_what_does_not_fit_is_refused(world, device):
    q, k = torch.randn(4, 4, 8, device=device), torch.randn(4, 3, 8, device=device)
    for bad in (
        lambda: tw.attention(q, k, k),
        lambda: tw.attention(q[0], q, q),
        lambda: tw.attention(q, q, q, cu_seqlens_q=[0, 5]),
        lambda: tw.attention(q, q, q, cu_seqlens_q=[0, 3, 2, 4]),
        lambda: tw.attention(q, q, q, sink=torch.zeros(3, device=device)),
        lambda: tw.cp_attention(q, q, q, layout="spiral"),
        lambda: tw.cp_attention(q, q, q, strategy="pigeons"),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            bad()


def test_gradients_in_any_order(device, gen, monkeypatch):
    """Of long sequences on a GPU the gradients of q are added as they come; they are near those of
    a fixed order. A CPU has one."""
    asked, backward = [], _native.attention_bwd

    def seen(spec, *args):
        asked.append(spec["deterministic"])
        return backward(spec, *args)

    monkeypatch.setattr(_native, "attention_bwd", seen)
    rows = 4160 if torch.device(device).type == "cuda" else 70
    dtype = torch.bfloat16 if rows > 70 else torch.float32
    made = [randn(gen, rows, h, 128).to(device, dtype) for h in (8, 8, 8, 8)]
    grads = []
    for deterministic in (True, False):
        q, k, v = (t.detach().requires_grad_() for t in made[:3])
        out = tw.attention(q, k, v, deterministic=deterministic)
        grads.append(torch.autograd.grad(out, (q, k, v), made[3]))
    for want, got in zip(*grads):
        most = want.abs().max()
        assert most > 0 and ((got - want).abs() <= (0.02 if rows > 70 else 0.0) * most).all()
    assert asked == [True, False]
