"""``tilewire.torch.te``'s layers beside dense ones in f64: values, gradients, what Megatron
needs."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import leaf, randn

import tilewire
import tilewire.torch as tw
from tilewire.torch import te

IN, OUT, ROWS, BATCH = 12, 8, 3, 2
TOL = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.bfloat16: dict(rtol=3e-2, atol=1e-1),
    torch.float16: dict(rtol=1e-2, atol=2e-2),
}


@pytest.fixture(scope="module")
def group(world, device):
    """A process group whose World the first layer makes."""
    group = dist.new_group(backend="gloo")
    tw.init(group, device=device, timeout_s=60)
    yield group


def close(got, ref, dtype=torch.float32):
    torch.testing.assert_close(got.detach().cpu().double(), ref.detach(), **TOL[dtype])


def dense(gen, size, dtype):
    """A whole layer [OUT * size, IN * size] with an input of [ROWS * size, BATCH, IN * size]."""
    x = randn(gen, ROWS * size, BATCH, IN * size, dtype=dtype)
    w, b = randn(gen, OUT * size, IN * size, dtype=dtype), randn(gen, OUT * size, dtype=dtype)
    dy = randn(gen, ROWS * size, BATCH, OUT * size, dtype=dtype)
    refs = [t.clone().requires_grad_() for t in (x, w, b)]
    y = F.linear(*refs)
    y.backward(dy)
    return (x, w, b, dy), y, [t.grad for t in refs]


def layer_of(world, group, device, mode, w, b, dtype=torch.float32, **kw):
    """A layer with this rank's part of a whole one; the slices of rows and columns that it
    holds."""
    size, me = world.size, world.rank
    kw = dict(kw, parallel_mode=mode, tp_group=group, params_dtype=dtype, device=device)
    layer = te.Linear(IN * size, OUT * size, **kw)
    rows = slice(OUT * me, OUT * me + OUT) if mode == "column" else slice(None)
    cols = slice(IN * me, IN * me + IN) if mode == "row" else slice(None)
    with torch.no_grad():
        layer.weight.copy_(w[rows, cols])
        if layer.use_bias:
            layer.bias.copy_(b[rows])
    return layer, rows, cols


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("mode", ["column", "row", None])
def test_linear_equals_the_dense_one(world, group, device, gen, mode, sequence, dtype):
    size, me = world.size, world.rank
    (x, w, b, dy), ref, grads = dense(gen, size, dtype)
    kw = dict(sequence_parallel=sequence)
    layer, rows, cols = layer_of(world, group, device, mode, w, b, dtype, **kw)
    own = slice(ROWS * me, ROWS * me + ROWS)
    divided = own if sequence and mode else slice(None)
    x_at = (divided if mode == "column" else slice(None), slice(None), cols)
    y_at = (divided if mode == "row" else slice(None), slice(None), rows)
    mx = leaf(x[x_at], dtype, device)
    y = layer(mx)
    assert y.dtype == dtype
    close(y, ref[y_at], dtype)
    y.backward(dy[y_at].to(y))
    close(mx.grad, grads[0][x_at], dtype)
    close(layer.weight.grad, grads[1][rows, cols], dtype)
    # A replicated bias has the gradient of the rows that are here, and says so.
    close(layer.bias.grad, dy[y_at].sum((0, 1)), dtype)
    if mode == "row":
        assert layer.bias.sequence_parallel == (sequence and size > 1)
    else:
        close(layer.bias.grad, grads[2][rows], dtype)
    assert set(layer.state_dict()) == set(torch.nn.Linear(1, 1).state_dict())
    assert layer.weight.tensor_model_parallel and layer.weight.partition_dim == (mode == "row")


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_bias_that_is_returned(world, group, device, gen, mode):
    (x, w, b, _), ref, _ = dense(gen, world.size, torch.float32)
    layer, rows, cols = layer_of(world, group, device, mode, w, b, return_bias=True)
    y, bias = layer(x[..., cols].float().to(device))
    close(y + bias, ref[..., rows])
    close(bias, b[rows])
    plain, _, _ = layer_of(world, group, device, mode, w, b, bias=False)
    close(plain(x[..., cols].float().to(device)), ref[..., rows] - b[rows])
    assert set(plain.state_dict()) == {"weight"} and plain.bias.numel() == 0


def test_gradients_are_accumulated_in_main_grad(world, group, device, gen):
    (x, w, b, dy), _, grads = dense(gen, world.size, torch.float32)
    layer, rows, _ = layer_of(
        world, group, device, "column", w, b, sequence_parallel=True, fuse_wgrad_accumulation=True
    )
    own = slice(ROWS * world.rank, ROWS * world.rank + ROWS)
    mx, p = x[own].float().to(device), layer.weight

    def run(**kw):
        layer(mx, **kw).backward(dy[..., rows].float().to(device))

    with pytest.raises(tilewire.InvalidArgument, match="main_grad"):
        run()
    p.main_grad = torch.ones_like(p)
    run()
    close(p.main_grad, grads[1][rows] + 1)
    assert p.grad is None
    run(is_first_microbatch=True)
    close(p.main_grad, grads[1][rows])
    run(is_first_microbatch=False)
    close(p.main_grad, 2 * grads[1][rows])
    p.overwrite_main_grad = True
    run()
    close(p.main_grad, grads[1][rows])
    # Megatron waits for the hooks of a parameter, which run where a gradient comes: of zeros.
    seen = []
    p.grad_added_to_main_grad = False
    p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad.clone()))
    run()
    assert p.grad_added_to_main_grad and len(seen) == 1 and not seen[0].any()
    close(p.main_grad, grads[1][rows])


@pytest.mark.parametrize("split", [("query_", "key"), {"gate": 3, "up_": 5}], ids=["even", "sizes"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_weight_in_several_parameters(world, group, device, gen, split, mode):
    size = world.size
    if isinstance(split, dict):
        split = {name: n * size for name, n in split.items()}
    (x, w, b, dy), ref, grads = dense(gen, size, torch.float32)
    kw = dict(parallel_mode=mode, tp_group=group, device=device)
    layer = te.Linear(IN * size, OUT * size, parameters_split=split, **kw)
    sizes = [OUT * size // 2] * 2 if isinstance(split, tuple) else list(split.values())
    names = [n.rstrip("_") for n in split]
    assert set(layer.state_dict()) == {f"{n}_{kind}" for n in names for kind in ("weight", "bias")}
    cols = slice(IN * world.rank, IN * world.rank + IN) if mode == "row" else slice(None)
    picked, at = [], 0
    for name, n in zip(names, sizes):
        own = n // size if mode == "column" else n
        start = at + own * world.rank if mode == "column" else at
        rows = torch.arange(start, start + own)
        picked.append(rows)
        with torch.no_grad():
            getattr(layer, f"{name}_weight").copy_(w[rows][:, cols])
            getattr(layer, f"{name}_bias").copy_(b[rows])
        at += n
    rows = torch.cat(picked)
    y = layer(x[..., cols].float().to(device))
    close(y, ref[..., rows])
    y.backward(dy[..., rows].float().to(device))
    for name, part in zip(names, picked):
        close(getattr(layer, f"{name}_weight").grad, grads[1][part][:, cols])
        close(getattr(layer, f"{name}_bias").grad, grads[2][part])


def test_autocast_takes_its_type(world, group, device, gen):
    (x, w, b, _), ref, _ = dense(gen, world.size, torch.bfloat16)
    for mode in ("column", "row", None):
        for sequence in (True, False):
            layer, rows, cols = layer_of(
                world, group, device, mode, w, b, torch.float32, sequence_parallel=sequence
            )
            divided = sequence and mode is not None
            own = slice(ROWS * world.rank, ROWS * world.rank + ROWS) if divided else slice(None)
            x_at = (own if mode == "column" else slice(None), slice(None), cols)
            mx = leaf(x[x_at], torch.float32, device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                y = layer(mx)
            assert y.dtype == torch.bfloat16
            close(y, ref[own if mode == "row" else slice(None)][..., rows], torch.bfloat16)
            y.float().sum().backward()
            assert mx.grad.dtype == layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", list(TOL), ids=str)
@pytest.mark.parametrize("splits", [[3, 0, 4], [0, 0, 0], [9, 0, 0]], ids=str)
def test_grouped_linear_equals_a_loop(device, gen, splits, dtype):
    rows = 9
    x, dy = randn(gen, rows, IN, dtype=dtype), randn(gen, rows, OUT, dtype=dtype)
    w, b = randn(gen, 3, OUT, IN, dtype=dtype), randn(gen, 3, OUT, dtype=dtype)
    layer = te.GroupedLinear(3, IN, OUT, params_dtype=dtype, device=device)
    names = {f"weight{e}": w[e].to(dtype) for e in range(3)}
    names.update({f"bias{e}": b[e].to(dtype) for e in range(3)})
    layer.load_state_dict({**names, "_extra_state": torch.empty(0, dtype=torch.uint8)})
    assert set(layer.state_dict()) == set(names)
    out = torch.full((rows, OUT), float("nan"), dtype=dtype, device=device)
    dgrad = torch.full((rows, IN), float("nan"), dtype=dtype, device=device)
    for given in (False, True):
        mx = leaf(x, dtype, device)
        kw = dict(out=out, dgrad_out=dgrad) if given else {}
        m = splits if given else torch.tensor(splits, dtype=torch.int32, device=device)
        y = layer(mx, m, **kw)
        layer.zero_grad()
        y.backward(dy.to(y))
        assert not given or (y.data_ptr() == out.data_ptr() and not out.requires_grad)
        dx = dgrad if given else mx.grad
        at = 0
        for e, n in enumerate(splits):
            own = slice(at, at + n)
            close(y[own], F.linear(x[own], w[e], b[e]), dtype)
            close(dx[own], dy[own] @ w[e], dtype)
            close(getattr(layer, f"weight{e}").grad, dy[own].t() @ x[own], dtype)
            close(getattr(layer, f"bias{e}").grad, dy[own].sum(0), dtype)
            at += n
        assert not y[at:].any() and not dx[at:].any()
    for bad in (out.requires_grad_(), out.detach()[1:], out.detach().double()):
        with pytest.raises(tilewire.InvalidArgument, match="out"):
            layer(mx, splits, out=bad)


def test_grouped_gradients_are_accumulated_in_main_grad(device, gen):
    x, dy, w = randn(gen, 6, IN), randn(gen, 6, OUT), randn(gen, 2, OUT, IN)
    layer = te.GroupedLinear(2, IN, OUT, fuse_wgrad_accumulation=True, device=device)
    layer.load_state_dict({f"weight{e}": w[e].float() for e in range(2)}, strict=False)
    for e in range(2):
        getattr(layer, f"weight{e}").main_grad = torch.ones(OUT, IN, device=device)
    layer.weight1.overwrite_main_grad = True
    layer.weight0.grad_added_to_main_grad = False
    refs = [dy[:2].t() @ x[:2], dy[2:].t() @ x[2:]]

    def run(**kw):
        layer(x.float().to(device), [2, 4], **kw).backward(dy.float().to(device))

    run()
    close(layer.weight0.main_grad, refs[0] + 1)
    close(layer.weight1.main_grad, refs[1])
    assert layer.weight0.grad_added_to_main_grad and not layer.weight0.grad.any()
    assert layer.weight1.grad is None
    close(layer.bias1.grad, dy[2:].sum(0))
    run(is_first_microbatch=True)
    close(layer.weight0.main_grad, refs[0])
    run(is_first_microbatch=False)
    close(layer.weight0.main_grad, 2 * refs[0])


def test_shapes_that_tensor_parallelism_divides(device):
    kw = dict(tp_size=2, bias=False, device=device)
    column = te.GroupedLinear(2, IN, OUT, parallel_mode="column", **kw)
    row = te.GroupedLinear(2, IN, OUT, parallel_mode="row", **kw)
    assert column.weight0.shape == (OUT // 2, IN) and row.weight1.shape == (OUT, IN // 2)
    with pytest.raises(tilewire.InvalidArgument, match="bias"):
        te.GroupedLinear(2, IN, OUT, tp_size=2, parallel_mode="column", device=device)
    with pytest.raises(tilewire.InvalidArgument, match="multiple"):
        te.Linear(IN, 7, tp_size=2, parallel_mode="column", device=device)
    y, biases = te.GroupedLinear(2, IN, OUT, return_bias=True, device=device)(
        torch.zeros(2, IN, device=device), [1, 1]
    )
    assert not y.any() and [b.shape for b in biases] == [(OUT,), (OUT,)]


def test_how_weights_begin(device):
    torch.manual_seed(0)
    w = te.Linear(256, 256, device=device).weight
    assert abs(w.std().item() - 0.023) < 1e-3 and abs(w.mean().item()) < 1e-3
    assert not te.Linear(4, 4, device=device).bias.any()
    forks = []

    class Tracker:
        def fork(self, name="default"):
            forks.append(name)
            return torch.no_grad()

    def tracker():
        return Tracker()

    kw = dict(get_rng_state_tracker=tracker, init_method=torch.nn.init.ones_, device=device)
    assert bool((te.Linear(4, 4, **kw).weight == 1).all())
    te.GroupedLinear(2, 4, 4, rng_tracker_name="expert", **kw)
    assert forks == ["default", "expert", "expert"]
    late = te.Linear(4, 4, device="meta")
    assert late.weight.is_meta
    late.reset_parameters()
    assert not late.weight.is_meta and late.weight.any()


@pytest.mark.needs(even=True)
def test_layers_of_domains_by_initialize_ub(world, device, gen):
    """The ranks in groups of two that follow each other, as TransformerEngine divides them."""
    none = [te.UserBufferQuantizationMode.NONE]
    te.initialize_ub([8, IN], 2, quantization_modes=none, ub_cfgs={"fc1_fprop": {"num_sm": 2}})
    with pytest.raises(RuntimeError, match="already"):
        te.initialize_ub([8, IN], 2)
    groups = [dist.new_group([r, r + 1], backend="gloo") for r in range(0, world.size, 2)]
    mine, rank = groups[world.rank // 2], world.rank % 2
    x, w = randn(gen, world.size // 2, 4, IN), randn(gen, 2 * OUT, IN)
    own = x[world.rank // 2]
    for _ in range(2):
        layer = te.Linear(
            IN,
            2 * OUT,
            sequence_parallel=True,
            tp_group=mine,
            parallel_mode="column",
            ub_overlap_ag=True,
            ub_overlap_rs_dgrad=True,
            ub_name="fc1",
            device=device,
        )
        assert layer.tp_size == 2
        with torch.no_grad():
            layer.weight.copy_(w[OUT * rank : OUT * rank + OUT])
        y = layer(own[2 * rank : 2 * rank + 2].float().to(device))
        close(y, F.linear(own, w[OUT * rank : OUT * rank + OUT]))
        te.destroy_ub()  # and a layer that is used again makes its World anew
        close(layer(own[2 * rank : 2 * rank + 2].float().to(device)), y.double().cpu())
        te.destroy_ub()
    with pytest.raises(tilewire.InvalidArgument, match="tp_size"):
        te.initialize_ub([8, IN], world.size + 1)
    te.destroy_ub()


def test_a_group_that_comes_later(world, group, device, gen):
    (x, w, b, _), ref, _ = dense(gen, world.size, torch.float32)
    layer = te.Linear(
        IN * world.size, OUT * world.size, parallel_mode="row", tp_size=world.size, device=device
    )
    cols = slice(IN * world.rank, IN * world.rank + IN)
    with torch.no_grad():
        layer.weight.copy_(w[:, cols]), layer.bias.copy_(b)
    mine = x[..., cols].float().to(device)
    if world.size > 1:
        with pytest.raises(tilewire.InvalidArgument, match="set_tensor_parallel_group"):
            layer(mine)
    layer.set_tensor_parallel_group(group)
    close(layer(mine), ref)
    many = 2 * world.size
    other = te.Linear(many, OUT, parallel_mode="row", tp_size=many, device=device)
    with pytest.raises(tilewire.InvalidArgument, match="tp_size"):
        other.set_tensor_parallel_group(group)
    # A copy has the same group; one that is saved is given a group again.
    assert torch.equal(copy.deepcopy(layer)(mine), layer(mine))
    saved = pickle.loads(pickle.dumps(layer))
    saved.set_tensor_parallel_group(group)
    assert torch.equal(saved(mine), layer(mine))


def test_state_dicts_of_nn_linear_both_ways(device):
    ours, theirs = te.Linear(4, 3, device=device), torch.nn.Linear(4, 3, device=device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, device=device)
    torch.testing.assert_close(ours(x), theirs(x))
    again = torch.nn.Linear(4, 3, device=device)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x), theirs(x))
    with pytest.raises(RuntimeError, match="Unexpected"):
        ours.load_state_dict({**theirs.state_dict(), "other": x})


def test_what_has_no_counterpart_is_named(device):
    x = torch.zeros(2, 4, device=device)
    for name, make in [
        ("delay_wgrad_compute", lambda **kw: te.Linear(4, 4, device=device, **kw)),
        ("save_original_input", lambda **kw: te.Linear(4, 4, device=device, **kw)),
        ("fp8_output", lambda **kw: te.Linear(4, 4, device=device)(x, **kw)),
        ("fp8_grad", lambda **kw: te.Linear(4, 4, device=device)(x, **kw)),
        ("delay_wgrad_compute", lambda **kw: te.GroupedLinear(2, 4, 4, device=device, **kw)),
        ("save_original_input", lambda **kw: te.GroupedLinear(2, 4, 4, device=device, **kw)),
        ("single_grouped_weight", lambda **kw: te.GroupedLinear(2, 4, 4, device=device, **kw)),
        ("single_grouped_bias", lambda **kw: te.GroupedLinear(2, 4, 4, device=device, **kw)),
        ("ub_overlap_ag", lambda **kw: te.GroupedLinear(2, 4, 4, device=device, **kw)),
        ("ub_overlap_rs", lambda **kw: te.GroupedLinear(2, 4, 4, device=device, **kw)),
        ("use_fp8", lambda **kw: te.initialize_ub([4, 4], 1, **kw)),
    ]:
        with pytest.raises(tilewire.Unsupported, match=name):
            make(**{name: True})
    with pytest.raises(tilewire.Unsupported, match="quantization_modes"):
        te.initialize_ub([4, 4], 1, quantization_modes=[te.UserBufferQuantizationMode.FP8])
    for kw in (
        dict(parallel_mode="diagonal"),
        dict(symmetric_ar_type="telepathy"),
        dict(parameters_split=[]),
        dict(parameters_split={"a": 1, "b": 1}),
    ):
        with pytest.raises(tilewire.InvalidArgument):
            te.Linear(4, 4, device=device, **kw)
    with pytest.raises(tilewire.Unsupported, match="params_dtype"):
        te.Linear(4, 4, params_dtype=torch.float64, device=device)
    grouped = te.GroupedLinear(2, 4, 4, device=device)
    for bad in (lambda: grouped(x, [1]), lambda: grouped(x[0], [1, 1])):
        with pytest.raises(tilewire.InvalidArgument):
            bad()
