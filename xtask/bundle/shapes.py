"""Grouped products of `rates grouped`, for what others make of them."""

# Groups, rows in all, columns, contraction.
GROUPED = [
    (32, 32768, 4096, 7168),
    (32, 32768, 7168, 2048),
    (8, 32768, 4096, 7168),
    (32, 8192, 4096, 7168),
    (128, 16384, 2048, 5120),
    (64, 512, 4096, 7168),
]


def sizes(groups, rows, even):
    """Rows of each group: equal, or 1 : 3 : 5 ... in a mixed order. As in `rates grouped`."""
    if even:
        return [rows * (e + 1) // groups - rows * e // groups for e in range(groups)]
    mixed = [(e * 5 + 3) % groups for e in range(groups)]
    of = lambda i: rows * i * i // (groups * groups)
    return [of(i + 1) - of(i) for i in mixed]
