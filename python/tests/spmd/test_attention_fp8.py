"""attention of QTensors: codes with a scale for 128 tokens of a head, beside dense attention in f64
of their values."""

import pytest
import torch
from dense import randn
from test_attention import dense
from test_quant import value

import tilewire
import tilewire.torch as tw


def codes(gen, tokens, heads, device):
    """A QTensor on the device, and its values [tokens, heads, 128] in f64 on the CPU. Scales of
    tokens and heads lie far apart."""
    x = randn(gen, tokens, heads * 128) * torch.linspace(0.3, 1.5, tokens)[:, None]
    q = tw.quantize(x.float().to(device), "block128x128")
    return q, value(q).view(tokens, heads, 128)


def near(out, ref, lse, ref_lse, terms, device):
    """A CPU widens codes to f32. sm_90a rounds probabilities to e4m3, a sixteenth at most, and sums
    scores with 14 bits, which is 0.02 where their terms add up to 16; other GPUs round values to
    bf16. `terms`: the same attention to absolute values."""
    exact = torch.device(device).type == "cpu"
    bound = 2.0**-8 * ref.abs() + (1e-4 if exact else 0.09 * terms)
    assert out.dtype == torch.bfloat16 and ((out.cpu().double() - ref).abs() <= bound).all()
    assert lse.dtype == torch.float32
    close = 1e-4 if exact else 5e-2
    torch.testing.assert_close(lse.cpu().double(), ref_lse, rtol=close, atol=close)


CASES = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(window=(40, 3), causal=False),
    "scaled": dict(scale=0.03, softcap=2.0),
    "sink": dict(sink=True),
    "bias": dict(bias=True),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("tensors", [False, True], ids=["lists", "tensors"])
def test_attention_of_codes(device, gen, name, tensors):
    cu = [0, 7, 7, 150, 290]
    (q, qx), (k, kx), (v, vx) = (codes(gen, cu[-1], h, device) for h in (4, 2, 2))
    kw, extra = dict(CASES[name]), {}
    if kw.pop("sink", False):
        extra["sink"] = randn(gen, 4)
    if kw.pop("bias", False):
        extra["bias"] = randn(gen, 4, 143, 143)
    ref, ref_lse = dense(qx, kx, vx, cu, **kw, **extra)
    terms, _ = dense(qx, kx, vx.abs(), cu, **kw, **extra)
    own = {n: t.float().to(device) for n, t in extra.items()}
    offsets = torch.tensor(cu, device=device) if tensors else cu
    out, lse = tw.attention(q, k, v, cu_seqlens_q=offsets, return_lse=True, **kw, **own)
    near(out, ref, lse, ref_lse, terms, device)


def test_codes_have_the_results_of_what_they_stand_for(device, gen):
    """One sequence; the same launch again, and with dropout."""
    (q, qx), (k, kx), (v, vx) = (codes(gen, 130, h, device) for h in (4, 2, 2))
    ref, ref_lse = dense(qx, kx, vx, [0, 130])
    terms, _ = dense(qx, kx, vx.abs(), [0, 130])
    out, lse = tw.attention(q, k, v, return_lse=True)
    near(out, ref, lse, ref_lse, terms, device)
    again = tw.attention(q, k, v)
    assert torch.equal(out, again)
    wide = [t.float().to(device) for t in (qx, kx, vx)]
    dropped, want = (tw.attention(*x, dropout_p=0.3, seed=5) for x in ((q, k, v), wide))
    # A GPU widens codes to bf16 for dropout: scores whose terms add up to 16 move by 0.13 at most.
    share = 1e-4 if torch.device(device).type == "cpu" else 0.14 / 0.7
    bound = 2.0**-8 * want.abs() + share * terms.to(want)
    assert ((dropped.float() - want).abs() <= bound).all() and not torch.equal(dropped, out)


def test_codes_in_a_compiled_graph(device, gen):
    x = [randn(gen, 140, h * 128).float().to(device) for h in (4, 2, 2)]

    def run(q, k, v):
        return tw.attention(*(tw.quantize(t, "block128x128") for t in (q, k, v)), return_lse=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(*x), compiled(*x)):
        assert a.any() and torch.equal(a, b)


def test_codes_that_do_not_fit_are_refused(device, gen):
    (q, _), (k, _), (v, _) = (codes(gen, 130, h, device) for h in (4, 2, 2))
    x = randn(gen, 130, 512).float().to(device)
    others = {
        "none of them": (x.view(130, 4, 128), k, v),
        "block128x128": (tw.quantize(x, "block1x128"), k, v),
        "float8_e4m3fn": (q, tw.quantize(x[:, :256], "block128x128", dtype=torch.float8_e5m2), v),
        r"heads \* 128": (q, k, tw.quantize(x[:, :200], "block128x128")),
    }
    for text, args in others.items():
        with pytest.raises(tilewire.InvalidArgument, match=text):
            tw.attention(*args)
    # Three heads for two of keys; scales of fewer tokens.
    with pytest.raises(tilewire.InvalidArgument, match="multiple"):
        tw.attention(codes(gen, 130, 3, device)[0], k, v)
    few = tw.QTensor(k.data, k.scales[:1], k.recipe)
    with pytest.raises(tilewire.InvalidArgument, match="k scales"):
        tw.attention(q, few, v)
    sink = torch.zeros(4, device=device, requires_grad=True)
    with pytest.raises(tilewire.InvalidArgument, match="no gradient"):
        tw.attention(q, k, v, sink=sink)
