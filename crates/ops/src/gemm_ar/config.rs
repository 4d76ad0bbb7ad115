//! Which rows the owner of a chunk pushes back, and when they arrive.

use std::ops::Range;

use tilewire_core::Rank;

use crate::common::{part, range_of};

/// Global rows of chunk `chunk` of `owner`.
pub(super) fn chunk_rows(rows: &[usize], owner: Rank, chunk: usize, num: usize) -> Range<usize> {
    let shard = range_of(rows, owner);
    let p = part(shard.len(), chunk, num);
    shard.start + p.start..shard.start + p.end
}
