//! The workspace of attention.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaMemory};

use super::fp8::Wide;
use super::hopper_fp8::HopperFp8;
use super::offsets::table_bytes;
use super::split::{Pieces, SplitKeys};
use crate::attention::AttentionDesc;
use crate::common::cuda::workspace;
use crate::common::workspaces::Workspaces;

/// The sizes of a workspace.
pub(super) struct Sizes {
    /// Most segments of one table.
    pub segs: usize,
    /// Queries times heads.
    pub queries: usize,
    /// With FP8 inputs of one rank: their description, and rows of heads of queries and of keys.
    pub wide: Option<(AttentionDesc, (usize, usize))>,
    /// Those of sums of dq, if one kernel makes all gradients.
    pub sums: Option<SumsSizes>,
}

/// The sizes of [`Sums`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SumsSizes {
    /// Elements of dq.
    pub elements: usize,
    /// Words that count turns.
    pub words: usize,
}

/// Sums of dq of the backward passes of one stream, one at a time.
pub(crate) struct Sums {
    /// `[Hq, 2, tokens_q, dqk / 2]` f32.
    pub sums: CudaMemory,
    /// As `TwDqSums` says: zero between launches.
    pub words: CudaMemory,
}

impl SumsSizes {
    /// At most a quarter more, so that plans of about as many rows have the same.
    fn rounded(self) -> Self {
        let up = |n: usize| n.next_multiple_of((n.next_power_of_two() / 8).max(1));
        Self { elements: up(self.elements), words: up(self.words) }
    }
}

/// Things that plans share, by their keys, while a plan has them.
type Known<K, T> = Vec<(K, Weak<T>)>;

/// Returns what `all` has for `key`, or makes it.
fn shared<K: PartialEq, T>(all: &mut Known<K, T>, key: K, make: impl FnOnce() -> T) -> Arc<T> {
    all.retain(|(_, known)| known.strong_count() > 0);
    let known = all.iter().find(|(of, _)| *of == key).and_then(|(_, known)| known.upgrade());
    known.unwrap_or_else(|| {
        let new = Arc::new(make());
        all.push((key, Arc::downgrade(&new)));
        new
    })
}

impl Sums {
    /// Returns the workspaces of plans on the device of `ctx` whose sizes round to the same: they
    /// are large, and launches on one stream take turns anyhow.
    pub fn shared(ctx: &CudaContext, sizes: SumsSizes) -> Arc<Workspaces<Self>> {
        static ALL: Mutex<Known<(u32, SumsSizes), Workspaces<Sums>>> = Mutex::new(Vec::new());
        let sizes = sizes.rounded();
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        shared(&mut all, (ctx.ordinal(), sizes), || {
            Workspaces::new(ctx, move |ctx| Sums::new(ctx, sizes))
        })
    }

    fn new(ctx: &CudaContext, sizes: SumsSizes) -> Result<Self> {
        let (sums, words) = (4 * sizes.elements, 4 * sizes.words);
        Ok(Self { sums: workspace(ctx, sums)?, words: workspace(ctx, words)? })
    }
}

/// The workspace of one launch at a time.
pub(super) struct Space {
    /// Segments of queries for the forward kernel and for dq, and of keys: three tables. Written by
    /// a kernel in front of each launch, because launches may bring their own.
    pub tables: CudaMemory,
    /// `[Hq, tokens_q]` f32.
    pub delta: CudaMemory,
    /// `[1]` u32: whether the offsets of the launch were refused.
    pub refused: CudaMemory,
    /// With FP8 inputs of one rank.
    pub wide: Option<Wide>,
    /// With kernels for few queries.
    pub pieces: Option<Pieces>,
    /// With FP8 products: transposed values.
    pub turned: Option<CudaMemory>,
}

impl Space {
    pub fn new(
        ctx: &CudaContext,
        sizes: &Sizes,
        (split, fp8): (Option<&SplitKeys>, Option<&HopperFp8>),
    ) -> Result<Self> {
        let Sizes { segs, queries, wide, .. } = sizes;
        let wide = wide.as_ref().map(|(d, rows)| Wide::new(ctx, d, *rows)).transpose()?;
        let pieces = split.map(|s| s.workspace(ctx)).transpose()?;
        let turned = fp8.map(|f| f.workspace(ctx)).transpose()?;
        let (tables, delta) =
            (workspace(ctx, 3 * table_bytes(*segs))?, workspace(ctx, 4 * queries)?);
        Ok(Self { tables, delta, refused: workspace(ctx, 4)?, wide, pieces, turned })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_of_about_as_many_rows_share_sums() {
        let of = |elements, words| SumsSizes { elements, words }.rounded();
        assert_eq!(of(1 << 20, 257), of((1 << 20) - 9, 250 + 33));
        assert_eq!(of(0, 1), SumsSizes { elements: 0, words: 1 });
        for n in [1, 2, 7, 8, 9, 1000, 12_345_678] {
            let up = of(n, n);
            assert!(up.elements >= n && up.elements <= n + n / 4 && up.words == up.elements, "{n}");
        }
        let mut all = Vec::new();
        let first = shared(&mut all, of(900, 90), || 1);
        let again = shared(&mut all, of(899, 90), || 2);
        let other = shared(&mut all, of(1100, 90), || 3);
        assert_eq!((*first, *again, *other, all.len()), (1, 1, 3, 2));
        // With the last plan they are gone.
        drop((first, again));
        assert_eq!((*shared(&mut all, of(900, 90), || 4), all.len()), (4, 2));
    }
}
