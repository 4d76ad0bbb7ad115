"""What the tests compare with: dense torch in f64 on global tensors, and the error bound."""

import torch

UNIT = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float64: 2.0**-53,
}


def randn(gen, *shape, dtype=torch.float32, device="cpu"):
    """Random values that ``dtype`` holds, as f64 on the CPU."""
    return torch.randn(*shape, generator=gen, dtype=torch.float32).to(dtype).double()


def leaf(t, dtype, device):
    """My piece of a global tensor, with a gradient to come."""
    return t.to(device=device, dtype=dtype).contiguous().requires_grad_()


def rows_of(m, size, rows=None):
    """First row and number of rows of each rank."""
    rows = rows or [m // size + (1 if r < m % size else 0) for r in range(size)]
    starts = [sum(rows[:r]) for r in range(size)]
    return list(zip(starts, rows))


def product_bound(a, b, size, dtype, wire=None):
    """The bound of DESIGN for a product a @ b whose partial results ``size`` ranks add."""
    k = a.shape[-1]
    u_wire = UNIT[wire or dtype] if size > 1 else 0.0
    return (size * u_wire + 4 * UNIT[torch.float32] * k**0.5) * (a.abs() @ b.abs())


def within(got, ref, bound, what):
    """Every element finite and within rounding of the output and ``bound``."""
    dtype = got.dtype
    got = got.detach().double().cpu()
    if got.shape != ref.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, not {tuple(ref.shape)}")
    if not torch.isfinite(got).all():
        raise AssertionError(f"{what}: {int((~torch.isfinite(got)).sum())} elements are not finite")
    limit = UNIT[dtype] * ref.abs() + bound + 1e-30
    worst = ((got - ref).abs() / limit).max().item() if got.numel() else 0.0
    if worst > 1.0:
        raise AssertionError(f"{what}: error is {worst:.3g} times the bound")
