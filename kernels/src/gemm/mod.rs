//! The order of a matrix product's tiles.

/// Returns the tile (row, column) that block `block` of `gemm/sm80_gemm.cu` computes: columns of up
/// to 8 tiles, so that blocks that run together share both operands in L2.
///
/// # Panics
/// If `block` is not below `tiles_m * tiles_n`.
pub fn tile(block: u32, tiles_m: u32, tiles_n: u32) -> (u32, u32) {
    assert!(u64::from(block) < u64::from(tiles_m) * u64::from(tiles_n), "no such tile");
    let band = 8 * tiles_n;
    let (first, at) = (block / band * 8, block % band);
    let rows = (tiles_m - first).min(8);
    (first + at % rows, at / rows)
}

#[cfg(test)]
mod tests {
    use super::tile;

    #[test]
    fn each_tile_is_made_once() {
        for (tiles_m, tiles_n) in [(1, 1), (1, 9), (7, 3), (8, 2), (9, 5), (16, 1), (35, 4)] {
            let mut seen: Vec<_> =
                (0..tiles_m * tiles_n).map(|b| tile(b, tiles_m, tiles_n)).collect();
            seen.sort_unstable();
            let all: Vec<_> =
                (0..tiles_m).flat_map(|m| (0..tiles_n).map(move |n| (m, n))).collect();
            assert_eq!(seen, all, "{tiles_m} x {tiles_n}");
        }
    }
}
