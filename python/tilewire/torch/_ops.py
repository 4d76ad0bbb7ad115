"""The operations as torch sees them: schemas, implementations, shapes of their outputs.

``torch.library`` with plain implementations costs 3 us a call where ``custom_op`` costs 12, and
compiles as well. Gradients are in ``_functions.py``: an ``autograd.Function`` around these costs a
third of ``register_autograd``. Where nothing watches, an implementation is called without torch's
dispatcher, which costs more than the rest of the call.

All operations make their outputs and are pure, so graphs may hold them as they are. They know
their world by its number, and must be called by all its ranks in the same order.
"""

import torch

from .. import _native
from .._errors import Unsupported

_lib = torch.library.Library("tilewire", "DEF")

# Arguments that need no dispatcher: subclasses of tensors, fake and distributed ones, do.
_PLAIN = frozenset(
    (torch.Tensor, torch.nn.Parameter, torch.dtype)
    + (int, bool, float, str, list, tuple, type(None))
)


def _define(schema, run, shapes, direct=True):
    """An operation: ``run`` makes the outputs on the CPU and on GPUs, ``shapes`` fake ones. One
    that is not ``direct`` always goes through the dispatcher."""
    _lib.define(schema)
    name = schema[: schema.index("(")]
    for key in ("CPU", "CUDA"):
        _lib.impl(name, run, key)
    _lib.impl(name, shapes, "Meta")

    def transformed(*args, **kw):
        raise Unsupported(f"tilewire.{name} has no transforms of torch.func (vmap, grad, jvp, ...)")

    # Without it torch would run jvp without a tangent, and vmap once for each entry of the batch.
    _lib.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")
    op = getattr(torch.ops.tilewire, name).default
    if not direct:
        return op
    has_lists = "Tensor[]" in schema
    # Names of this function are found in half the time of a module's names.
    compiling, all_plain = torch.compiler.is_compiling, _PLAIN.issuperset
    modes, profiled = torch._C._len_torch_dispatch_stack, torch.autograd._profiler_enabled
    transform = torch._C._functorch.peek_interpreter_stack

    def call(*args):
        # A mode, a transform or a profiler must see operations.
        if compiling() or not all_plain(map(type, args)) or modes() or transform() or profiled():
            return op(*args)
        if has_lists and not all(all_plain(map(type, a)) for a in args if type(a) is list):
            return op(*args)
        # First come the operands. One that is negated lazily is made by the dispatcher.
        x, w = args[0], args[1]
        lazy = x.is_meta or x.is_neg() or isinstance(w, torch.Tensor) and w.is_neg()
        return op(*args) if lazy else run(*args)

    return call


def weight_order(w):
    """A weight [n, k] as the kernels take it: itself, or, if it is a transposed view, what it is a
    view of, and True."""
    if w.is_contiguous():
        return w, False
    if w.dim() == 2 and w.t().is_contiguous():
        return w.t(), True
    return w.contiguous(), False


def size_of(world):
    """Ranks of a world, by its number. Shapes follow from the number alone: a graph that was
    compiled for a world of another size has another one."""
    return world >> 12 & 0xFFF


def rank_of(world):
    """My rank in a world, by its number."""
    return world & 0xFFF


def _gathered_rows(x, world, rows):
    return x.shape[0] * size_of(world) if rows is None else sum(rows)


def _own_rows(m, world, rows):
    size, rank = size_of(world), rank_of(world)
    if rows is not None:
        return rows[rank] if len(rows) == size else 0
    return m // size + (1 if rank < m % size else 0)


def _out_dtype(x):
    return torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype


def _product(x, rows, cols):
    """An output [rows, cols] of products of ``x``. Sizes one by one, without a dtype, cost half as
    much as a call with keywords."""
    if x.dtype.itemsize == 1:
        return x.new_empty(rows, cols, dtype=torch.bfloat16)
    return x.new_empty(rows, cols)


# ag_gemm: all_gather(x) w^T and its epilogue.


def _ag_outputs(x, w, world, act, rows, kn):
    m = _gathered_rows(x, world, rows)
    n = w.shape[1] if kn else w.shape[0]
    return m, n, _product(x, m, n // 2 if act == "swiglu" else n)


def _ag_gemm(x, w, bias, world, act, rows, kn, algo, grad, scale=None):
    x = x.contiguous()
    _, _, out = _ag_outputs(x, w, world, act, rows, kn)
    _native.ag_gemm(world, x, w, bias, out, None, None, scale, act, rows, kn, algo, grad, False)
    return out


def _ag_gemm_meta(x, w, bias, world, act, rows, kn, algo, grad, scale=None):
    return _ag_outputs(x, w, world, act, rows, kn)[2]


def _ag_gemm_gather(x, w, bias, world, act, rows, kn, algo, grad, returned):
    x = x.contiguous()
    m, _, out = _ag_outputs(x, w, world, act, rows, kn)
    gathered = x.new_empty(m, x.shape[1])
    args = (x, w, bias, out, gathered, None, None, act, rows, kn, algo, grad, returned)
    _native.ag_gemm(world, *args)
    return out, gathered


def _ag_gemm_gather_meta(x, w, bias, world, act, rows, kn, algo, grad, returned):
    m, _, out = _ag_outputs(x, w, world, act, rows, kn)
    return out, x.new_empty(m, x.shape[1])


def _ag_gemm_aux(x, w, bias, world, act, rows, kn, algo, grad, returned):
    x = x.contiguous()
    m, n, out = _ag_outputs(x, w, world, act, rows, kn)
    gathered = x.new_empty(m, x.shape[1])
    aux = out.new_empty(m, n)
    beside = (gathered, aux, None)
    _native.ag_gemm(world, x, w, bias, out, *beside, act, rows, kn, algo, grad, returned)
    return out, gathered, aux


def _ag_gemm_aux_meta(x, w, bias, world, act, rows, kn, algo, grad, returned):
    m, n, out = _ag_outputs(x, w, world, act, rows, kn)
    return out, x.new_empty(m, x.shape[1]), out.new_empty((m, n))


_AG = (
    "Tensor x, Tensor w, Tensor? bias, int world, str? act, int[]? rows, bool kn, str? algo,"
    " bool grad"
)
# The scale, [1] f32, multiplies the product: that of FP8 operands.
ag_gemm = _define(f"ag_gemm({_AG}, Tensor? scale=None) -> Tensor", _ag_gemm, _ag_gemm_meta)
ag_gemm_gather = _define(
    f"ag_gemm_gather({_AG}, bool returned) -> (Tensor, Tensor)",
    _ag_gemm_gather,
    _ag_gemm_gather_meta,
)
ag_gemm_aux = _define(
    f"ag_gemm_aux({_AG}, bool returned) -> (Tensor, Tensor, Tensor)",
    _ag_gemm_aux,
    _ag_gemm_aux_meta,
)


# gemm_rs and gemm_ar: x w^T, added over the ranks.


def _gemm_rs_meta(x, w, bias, world, rows, kn, wire, algo, grad, scale=None):
    n = w.shape[1] if kn else w.shape[0]
    return _product(x, _own_rows(x.shape[0], world, rows), n)


def _gemm_rs(x, w, bias, world, rows, kn, wire, algo, grad, scale=None):
    x = x.contiguous()
    out = _gemm_rs_meta(x, w, bias, world, rows, kn, wire, algo, grad)
    _native.gemm_rs(world, x, w, bias, scale, out, rows, kn, wire, algo, grad)
    return out


def _gemm_ar_meta(x, w, bias, world, kn, wire, algo, scale=None):
    return _product(x, x.shape[0], w.shape[1] if kn else w.shape[0])


def _gemm_ar(x, w, bias, world, kn, wire, algo, scale=None):
    x = x.contiguous()
    out = _gemm_ar_meta(x, w, bias, world, kn, wire, algo)
    _native.gemm_ar(world, x, w, bias, scale, out, kn, wire, algo)
    return out


def _column_meta(x, w, bias, world, grad):
    return _product(x, x.shape[0], w.shape[0])


def _column(x, w, bias, world, grad):
    """x w^T + bias of this rank alone. With ``grad`` the plan is made that ``gemm_ar`` needs for
    the gradient of x: that has the form of x, and the gradient of the result that of the result."""
    out = torch.nn.functional.linear(x, w, bias)
    if grad:
        base, kn = weight_order(w.t())
        _native.prepare_gemm_ar(world, out, base, x, kn)
    return out


column = _define(
    "column(Tensor x, Tensor w, Tensor? bias, int world, bool grad) -> Tensor",
    _column,
    _column_meta,
)
gemm_rs = _define(
    "gemm_rs(Tensor x, Tensor w, Tensor? bias, int world, int[]? rows, bool kn, str? wire,"
    " str? algo, bool grad, Tensor? scale=None) -> Tensor",
    _gemm_rs,
    _gemm_rs_meta,
)
gemm_ar = _define(
    "gemm_ar(Tensor x, Tensor w, Tensor? bias, int world, bool kn, str? wire, str? algo,"
    " Tensor? scale=None) -> Tensor",
    _gemm_ar,
    _gemm_ar_meta,
)


# Collectives.


def _all_gather_meta(x, world, rows, grad):
    return x.new_empty((_gathered_rows(x, world, rows), *x.shape[1:]))


def _all_gather(x, world, rows, grad):
    x = x.contiguous()
    out = _all_gather_meta(x, world, rows, grad)
    _native.all_gather(world, x, out, rows, grad)
    return out


def _reduce_scatter_meta(x, world, op, rows, grad):
    return x.new_empty((_own_rows(x.shape[0], world, rows), *x.shape[1:]))


def _reduce_scatter(x, world, op, rows, grad):
    x = x.contiguous()
    out = _reduce_scatter_meta(x, world, op, rows, grad)
    _native.reduce_scatter(world, x, out, op, rows, grad)
    return out


def _all_reduce_meta(x, world, op):
    return x.new_empty(x.shape)


def _all_reduce(x, world, op):
    x = x.contiguous()
    out = x.new_empty(x.shape)
    _native.all_reduce(world, x, out, op)
    return out


def _splits(flat, world):
    size = size_of(world)
    return [list(flat[i * size : (i + 1) * size]) for i in range(size)]


def _all_to_all_meta(x, splits, world, grad):
    rows = sum(splits[rank_of(world) :: size_of(world)])
    return x.new_empty((rows, *x.shape[1:]))


def _all_to_all(x, splits, world, grad):
    x = x.contiguous()
    out = _all_to_all_meta(x, splits, world, grad)
    _native.all_to_all(world, x, out, _splits(splits, world), grad)
    return out


all_gather = _define(
    "all_gather(Tensor x, int world, int[]? rows, bool grad) -> Tensor",
    _all_gather,
    _all_gather_meta,
)
reduce_scatter = _define(
    "reduce_scatter(Tensor x, int world, str op, int[]? rows, bool grad) -> Tensor",
    _reduce_scatter,
    _reduce_scatter_meta,
)
all_reduce = _define(
    "all_reduce(Tensor x, int world, str op) -> Tensor",
    _all_reduce,
    _all_reduce_meta,
)
# The splits of all ranks, row by row.
all_to_all = _define(
    "all_to_all(Tensor x, int[] splits, int world, bool grad) -> Tensor",
    _all_to_all,
    _all_to_all_meta,
)


# grouped_gemm: products of the experts that are here.


def _weights(w):
    """As the native calls take them: one [groups, n, k], or a list of [n, k]."""
    return [t.contiguous() for t in w]


def _grouped_n(w):
    return w[0].shape[-2]


def _grouped_fprop_meta(x, w, bias, m_splits):
    return _product(x, x.shape[0], _grouped_n(w))


def _grouped_fprop(x, w, bias, m_splits):
    x = x.contiguous()
    out = _grouped_fprop_meta(x, w, bias, m_splits)
    _native.grouped_fprop(x, _weights(w), bias, m_splits, out, None)
    return out


def _grouped_fp8_meta(x, x_scales, x_recipe, w, w_scales, w_recipes, bias, m_splits):
    return _grouped_fprop_meta(x, w, bias, m_splits)


def _grouped_fp8(x, x_scales, x_recipe, w, w_scales, w_recipes, bias, m_splits):
    out = _grouped_fprop_meta(x, w, bias, m_splits)
    scales = {"x": (x_scales, x_recipe), "w": list(zip(w_scales, w_recipes))}
    _native.grouped_fprop(x, list(w), bias, m_splits, out, scales)
    return out


def _grouped_dgrad_meta(dy, w, m_splits):
    return dy.new_empty(dy.shape[0], w[0].shape[-1])


def _grouped_dgrad(dy, w, m_splits):
    dy = dy.contiguous()
    dx = _grouped_dgrad_meta(dy, w, m_splits)
    _native.grouped_dgrad(dy, _weights(w), m_splits, dx)
    return dx


def _grouped_wgrad_meta(x, dy, m_splits, bias):
    groups = m_splits.shape[0]
    dbias = dy.new_empty((groups, dy.shape[1]) if bias else (0,), dtype=torch.float32)
    return x.new_empty((groups, dy.shape[1], x.shape[1])), dbias


def _grouped_wgrad(x, dy, m_splits, bias):
    x, dy = x.contiguous(), dy.contiguous()
    dw, dbias = _grouped_wgrad_meta(x, dy, m_splits, bias)
    _native.grouped_wgrad(x, dy, m_splits, [dw], None, dbias if bias else None)
    return dw, dbias


def _grouped_wgrad_into(x, dy, m_splits, dw, mask, bias):
    x, dy = x.contiguous(), dy.contiguous()
    rows = (m_splits.shape[0], dy.shape[1]) if bias else (0,)
    dbias = dy.new_empty(rows, dtype=torch.float32)
    _native.grouped_wgrad(x, dy, m_splits, list(dw), mask, dbias if bias else None)
    return dbias


def _grouped_wgrad_into_meta(x, dy, m_splits, dw, mask, bias):
    rows = (m_splits.shape[0], dy.shape[1]) if bias else (0,)
    return dy.new_empty(rows, dtype=torch.float32)


grouped_fprop = _define(
    "grouped_fprop(Tensor x, Tensor[] w, Tensor? bias, Tensor m_splits) -> Tensor",
    _grouped_fprop,
    _grouped_fprop_meta,
)
grouped_fp8 = _define(
    "grouped_fp8(Tensor x, Tensor x_scales, str x_recipe, Tensor[] w, Tensor[] w_scales,"
    " str[] w_recipes, Tensor? bias, Tensor m_splits) -> Tensor",
    _grouped_fp8,
    _grouped_fp8_meta,
)
grouped_dgrad = _define(
    "grouped_dgrad(Tensor dy, Tensor[] w, Tensor m_splits) -> Tensor",
    _grouped_dgrad,
    _grouped_dgrad_meta,
)
grouped_wgrad = _define(
    "grouped_wgrad(Tensor x, Tensor dy, Tensor m_splits, bool bias) -> (Tensor, Tensor)",
    _grouped_wgrad,
    _grouped_wgrad_meta,
)
# Into gradients that are there: added where the mask is not zero, else overwritten.
grouped_wgrad_into = _define(
    "grouped_wgrad_into(Tensor x, Tensor dy, Tensor m_splits, Tensor(a!)[] dw, Tensor? mask,"
    " bool bias) -> Tensor",
    _grouped_wgrad_into,
    _grouped_wgrad_into_meta,
    direct=False,  # the dispatcher marks what it writes
)


# quantize and dequantize. A world of 0 is none: the scales are those of this tensor.


def _scales_shape(rows, cols, recipe):
    if recipe == "block1x128":
        return (rows, -(-cols // 128))
    if recipe == "block128x128":
        return (-(-rows // 128), -(-cols // 128))
    return (rows, -(-cols // 32)) if recipe == "mx1x32" else (1,)


def _quantize_meta(x, world, recipe, dtype, pow2):
    kind = torch.float8_e8m0fnu if recipe == "mx1x32" else torch.float32
    shape = _scales_shape(x.shape[0], x.shape[1], recipe)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=kind)


def _quantize(x, world, recipe, dtype, pow2):
    x = x.contiguous()
    data, scales = _quantize_meta(x, world, recipe, dtype, pow2)
    _native.quantize(world, x, data, scales, recipe, pow2)
    return data, scales


def _dequantize_meta(data, scales, recipe, dtype):
    return data.new_empty(data.shape, dtype=dtype)


def _dequantize(data, scales, recipe, dtype):
    out = _dequantize_meta(data, scales, recipe, dtype)
    _native.dequantize(data, scales, recipe, out)
    return out


quantize = _define(
    "quantize(Tensor x, int world, str recipe, ScalarType dtype, bool pow2) -> (Tensor, Tensor)",
    _quantize,
    _quantize_meta,
)
dequantize = _define(
    "dequantize(Tensor data, Tensor scales, str recipe, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_meta,
)


# attention and cp_attention. A world of 0 is none: all rows are here. `at` are row offsets in
# tensors, in place of those of the spec.


def _spec(
    cu_q,
    cu_kv,
    left,
    right,
    scale,
    softcap,
    dropout_p,
    seed,
    layout,
    strategy,
    a2a_size,
    deterministic,
    tokens,
):
    return {
        "cu_q": cu_q,
        "cu_kv": cu_kv,
        "left": left,
        "right": right,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "seed": seed,
        "layout": layout,
        "strategy": strategy,
        "a2a_size": a2a_size,
        "deterministic": deterministic,
        "tokens": tokens,
    }


def _attention_meta(q, k, v, bias, sink, at_q, at_kv, world, grad, dbias, dsink, *spec):
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]), dtype=_out_dtype(q))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _tensors(q, k, v, bias, sink, at_q, at_kv, out, lse, scales=None):
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink, "out": out, "lse": lse}
    tensors["cu_q"], tensors["cu_kv"], tensors["scales"] = at_q, at_kv, scales
    return tensors


def _attention(q, k, v, bias, sink, at_q, at_kv, world, grad, dbias, dsink, *spec):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = _attention_meta(q, k, v, bias, sink, at_q, at_kv, world, grad, dbias, dsink)
    tensors = _tensors(q, k, v, bias, sink, at_q, at_kv, out, lse)
    if world:
        _native.cp_attention_fwd(world, _spec(*spec), tensors, grad, dbias, dsink)
    else:
        _native.attention_fwd(_spec(*spec), tensors)
    return out, lse


def _attention_fp8_meta(
    q, k, v, q_scales, k_scales, v_scales, bias, sink, at_q, at_kv, *spec
):
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]), dtype=torch.bfloat16)
    return out, q_scales.new_empty((q.shape[1], q.shape[0]))


def _attention_fp8(q, k, v, q_scales, k_scales, v_scales, bias, sink, at_q, at_kv, *spec):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    scales = q_scales.contiguous(), k_scales.contiguous(), v_scales.contiguous()
    out, lse = _attention_fp8_meta(q, k, v, *scales, bias, sink, at_q, at_kv)
    _native.attention_fwd(
        _spec(*spec), _tensors(q, k, v, bias, sink, at_q, at_kv, out, lse, scales)
    )
    return out, lse


def _attention_backward_meta(
    d_out, q, k, v, bias, sink, at_q, at_kv, out, lse, world, dbias, dsink, *spec
):
    f32 = torch.float32
    db = bias.new_empty(bias.shape, dtype=f32) if dbias else q.new_empty(0, dtype=f32)
    ds = sink.new_empty(sink.shape, dtype=f32) if dsink else q.new_empty(0, dtype=f32)
    return out.new_empty(q.shape), out.new_empty(k.shape), out.new_empty(v.shape), db, ds


def _attention_backward(
    d_out, q, k, v, bias, sink, at_q, at_kv, out, lse, world, dbias, dsink, *spec
):
    q, k, v, d_out = q.contiguous(), k.contiguous(), v.contiguous(), d_out.contiguous()
    grads = _attention_backward_meta(
        d_out, q, k, v, bias, sink, at_q, at_kv, out, lse, world, dbias, dsink
    )
    dq, dk, dv, db, ds = grads
    tensors = _tensors(q, k, v, bias, sink, at_q, at_kv, out, lse)
    given = {"d_out": d_out, "dq": dq, "dk": dk, "dv": dv}
    given["dbias"], given["dsink"] = db if dbias else None, ds if dsink else None
    if world:
        _native.cp_attention_bwd(world, _spec(*spec), tensors, given)
    else:
        _native.attention_bwd(_spec(*spec), tensors, given)
    return grads


_SPEC = (
    "int[] cu_q, int[] cu_kv, int? left, int? right, float? scale, float? softcap,"
    " float dropout_p, int seed, str layout, str? strategy, int a2a_size,"
    " bool deterministic, int[]? tokens"
)
attention = _define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, Tensor? at_q,"
    f" Tensor? at_kv, int world, bool grad, bool dbias, bool dsink, {_SPEC}) -> (Tensor, Tensor)",
    _attention,
    _attention_meta,
)
# Codes [tokens, heads, 128], and a scale for 128 tokens of a head.
attention_fp8 = _define(
    "attention_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scales, Tensor k_scales,"
    " Tensor v_scales, Tensor? bias, Tensor? sink, Tensor? at_q, Tensor? at_kv,"
    f" {_SPEC}) -> (Tensor, Tensor)",
    _attention_fp8,
    _attention_fp8_meta,
)
attention_backward = _define(
    "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink,"
    " Tensor? at_q, Tensor? at_kv, Tensor out, Tensor lse, int world, bool dbias, bool dsink,"
    f" {_SPEC})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_meta,
)
