//! The tiles of a product by the core for sm_90a: variants of the kernel, and which of them takes
//! least. Pure.

use tilewire_core::DType;
use tilewire_kernels::hopper::{
    CLUSTER, Epilogue, Order, SKINNY_PARTS, SKINNY_ROWS, Skinny, TILE_K, TILE_M, Variant, pairs,
};

use super::cublaslt::row_counts;
use crate::gemm::{AOrder, Activation, BOrder, GemmDesc};

/// The orders of a description that the core has.
pub(super) fn order(d: &GemmDesc) -> Option<Order> {
    match (d.a_order, d.b_order) {
        (AOrder::Mk, BOrder::Nk) => Some(Order::Nt),
        (AOrder::Mk, BOrder::Kn) => Some(Order::Nn),
        (AOrder::Km, BOrder::Kn) => Some(Order::Tn),
        (AOrder::Km, BOrder::Nk) => None,
    }
}

/// The variants that launches of a description may need: those of one epilogue in all widths.
pub(super) fn variants(d: &GemmDesc) -> Option<Vec<Variant>> {
    let (order, e) = (order(d)?, &d.epilogue);
    let epilogue = match e.activation {
        // A launch of another operation's tile may store the bare product, too.
        Activation::None if e.bias || e.accumulate => Epilogue::Linear,
        Activation::None => Epilogue::Plain,
        Activation::Relu => Epilogue::Relu,
        Activation::Gelu => Epilogue::Gelu,
        Activation::SwiGlu => Epilogue::SwiGlu,
        Activation::DGelu => Epilogue::DGelu,
        Activation::DSwiGlu => Epilogue::DSwiGlu,
    };
    let (f16, out_f32) = (d.a == DType::F16, d.out == DType::F32);
    let fits =
        |v: &Variant| (v.order, v.f16, v.out_f32, v.epilogue) == (order, f16, out_f32, epilogue);
    Some(Variant::all().into_iter().filter(fits).collect())
}

/// A contraction that is cut into parts: each has a sum of its own, which are added in their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    pub parts: usize,
    /// Stages of the contraction that a part has; the last may have fewer.
    pub steps: usize,
}

impl Cut {
    /// `k` in at most so many parts, none of which is empty.
    pub fn new(k: usize, parts: usize) -> Self {
        let all = k.div_ceil(TILE_K);
        let steps = all.div_ceil(parts.max(1)).max(1);
        Self { parts: all.div_ceil(steps), steps }
    }

    /// True if there is more than one part.
    pub fn is_cut(&self) -> bool {
        self.parts > 1
    }
}

/// Parts of a contraction at most.
const MOST_PARTS: usize = 16;
/// Stages of a part at least: below it the beginning and the end of a tile take longer.
const FEWEST_STEPS: usize = 4;
/// Microseconds that a tile of whole waves takes beside its products.
const TILE_US: f64 = 2.0;
/// The same of a tile of 320 columns into 16 bits with an epilogue, whose bias does not come ahead.
const BIAS_US: f64 = 1.5;
/// Columns of a tile times elements of k that a multiprocessor computes in a microsecond, in whole
/// waves: at the clock of a GPU that all of them make warm.
const RATE: f64 = 20480.0;

/// The time of a tile of `cols` columns in microseconds: by its rate among whole waves of 8192 x
/// 8192 x 8192 as measured on one H100 (docs/lab/gemm.md), where tiles of 256 columns take 16 waves
/// and those of 224, 192 and 128 take 18, 21 and 32, and the time beside its products. Those of 320
/// columns take 13; their rate was measured on one H200, relative to 256. All but that is of a time
/// when no tiles overlapped.
fn tile_us(v: &Variant, k: usize) -> f64 {
    let rate = match v.cols {
        320 => 1.019,
        256 => 1.0,
        224 => 0.979,
        192 => 0.973,
        _ => 0.845,
    };
    let waits = v.cols > 256 && v.epilogue != Epilogue::Plain && !v.out_f32;
    (v.cols * k) as f64 / rate / RATE + TILE_US + if waits { BIAS_US } else { 0.0 }
}

/// Of less than a wave, in microseconds: the launch and the ends of a tile; a stage of 128 columns,
/// at the highest clock; the second kernel. These and the next are fitted to 96 products of 12
/// shapes on one H200, with 7 % of error (root mean square; docs/lab/gemm.md).
const LAUNCH_US: f64 = 3.9;
const STAGE_US: f64 = 0.3;
const SUM_US: f64 = 1.3;
/// Bytes of sums that are written and read in a microsecond.
const SUM_BYTES: f64 = 4.35e6;
/// Bytes of B that tiles of 256 columns on all multiprocessors read in one, from memory or L2.
const MEMORY_BYTES: f64 = 3.9e6;
const L2_BYTES: f64 = 4.5e6;
/// Bytes of B that stay in L2 from launch to launch.
const IN_L2: usize = 48 << 20;

/// The time of reading B, of which `busy` is the part of the clusters that do.
fn read_us(v: &Variant, [_, n, k]: [usize; 3], busy: f64) -> f64 {
    let bytes = 2 * n * k;
    let rate = if bytes > IN_L2 { MEMORY_BYTES } else { L2_BYTES };
    bytes as f64 / (rate * (v.cols as f64 / 256.0).sqrt() * (0.67 + 0.33 * busy))
}

/// The time of a product of `shape` (m, n, k) by tiles of `v` on so many clusters, in microseconds:
/// of all parts, before they are added.
fn us(v: &Variant, shape @ [_, _, k]: [usize; 3], cut: Cut, clusters: u32) -> f64 {
    let (num, clusters) = (cut.parts * num_pairs(v, shape), clusters as usize);
    let waves = num.div_ceil(clusters) as f64;
    let busy = num as f64 / (waves * clusters as f64);
    let products = if num <= clusters {
        cut.steps as f64 * STAGE_US * v.cols as f64 / 128.0
    } else {
        waves * tile_us(v, k.min(cut.steps * TILE_K)) - LAUNCH_US
    };
    LAUNCH_US + products.max(read_us(v, shape, busy))
}

/// The one of `all`, of which there is one at least, that takes least for a product of (m, n, k):
/// by whole waves of clusters. Every one gives the same bits.
pub(super) fn best(
    all: impl Iterator<Item = Variant>,
    shape: [usize; 3],
    cut: Cut,
    clusters: u32,
) -> Option<Variant> {
    let cost = |v: &Variant| us(v, shape, cut, clusters);
    all.min_by(|a, b| cost(a).total_cmp(&cost(b)))
}

/// The pairs of tiles of a product of (m, n, k), or of a part of its contraction.
pub(super) fn num_pairs(v: &Variant, [m, n, _]: [usize; 3]) -> usize {
    let cols = if v.epilogue == Epilogue::SwiGlu { n / 2 } else { n };
    pairs(m.div_ceil(TILE_M), cols.div_ceil(v.width()))
}

/// Cuts the contraction of a product of `shape` for a device of so many clusters: by what takes
/// least of whole contractions by `all` and of parts. Where there are few tiles most
/// multiprocessors would have none; parts that are computed at once give them some. The number of
/// parts decides about the bits, so what a launch is limited to does not decide about it.
fn cut(all: &[Variant], shape @ [m, n, k]: [usize; 3], clusters: u32) -> Cut {
    let whole = Cut::new(k, 1);
    let mut least = all.iter().map(|v| us(v, shape, whole, clusters)).fold(f64::INFINITY, f64::min);
    let mut found = whole;
    for v in of_parts(all) {
        for parts in 2..=at_once(&v, shape, clusters).min(MOST_PARTS) {
            let c = Cut::new(k, parts);
            if c.parts < parts || c.steps < FEWEST_STEPS {
                continue;
            }
            let bytes = (2 * 4 * parts * m * n) as f64;
            let us = us(&v, shape, c, clusters) + SUM_US + bytes / SUM_BYTES;
            if us < least {
                (least, found) = (us, c);
            }
        }
    }
    found
}

/// The variants, one of a width, that compute the parts of a product by one of `all`.
pub(super) fn of_parts(all: &[Variant]) -> Vec<Variant> {
    let Some(first) = all.first() else { return Vec::new() };
    let of = first.of_parts();
    let fits = |v: &Variant| Variant { cols: of.cols, ..*v } == of;
    Variant::all().into_iter().filter(fits).collect()
}

/// The rows by which a contraction is cut for `m` rows: of at most one tile the next power of two,
/// of more all that their tiles have. Not those that a plan is made for: its bits would depend on
/// them.
fn rounded(m: usize) -> usize {
    if m < TILE_M { m.next_power_of_two().max(16) } else { m.next_multiple_of(TILE_M) }
}

/// The most tiles of few rows that `sms` multiprocessors compute at once with k in so many parts,
/// each by a cluster. Clusters of three and more do not fill the multiprocessors: of an H200's 132
/// those of 3 to 8 fill 117, 120, 110, 102, 105 and 120, by the driver. How many differs from chip
/// to chip, as the parts must not: some less.
fn tiles_at_once(parts: usize, sms: usize) -> usize {
    match parts {
        1 | 2 => sms / parts,
        3 | 4 => sms * 17 / 20 / parts,
        _ => sms * 31 / 40 / parts,
    }
}

/// The kernel of few rows that `d` has, if it has one, and its tiles.
fn tiles_of_few_rows(d: &GemmDesc) -> Option<(Skinny, usize)> {
    let v = variants(d)?.first()?.skinny()?;
    let cols = if d.epilogue.activation == Activation::SwiGlu { d.n / 2 } else { d.n };
    Some((v, cols.div_ceil(v.width())))
}

/// True if `sms` multiprocessors compute all tiles of few rows at once.
pub(super) fn has_few_tiles(d: &GemmDesc, sms: usize) -> bool {
    tiles_of_few_rows(d).is_some_and(|(_, tiles)| tiles <= sms)
}

/// The kernel of few rows that `d` has, if it has one, and how it cuts contractions: into `parts`,
/// or into as many of some stages each as all tiles still have at once.
fn skinny(d: &GemmDesc, parts: Option<usize>, sms: usize) -> Option<(Skinny, Cut)> {
    let (v, tiles) = tiles_of_few_rows(d)?;
    let steps = d.k.div_ceil(TILE_K);
    let fits = |n: &usize| steps >= n * FEWEST_STEPS && tiles <= tiles_at_once(*n, sms);
    let most = || (1..=SKINNY_PARTS).rev().find(fits).unwrap_or(1);
    Some((v, Cut::new(d.k, parts.unwrap_or_else(most))))
}

/// Variants and workspace of launches of at most `d.m` rows.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// The kernel of at most [`SKINNY_ROWS`] rows, where it makes these products.
    pub skinny: Option<(Skinny, Cut)>,
    /// Variants that compute whole contractions.
    pub whole: Vec<Variant>,
    /// Those that compute parts.
    pub of_parts: Vec<Variant>,
    /// The cuts of contractions, by rounded rows, ascending; others are whole.
    cuts: Vec<(usize, Cut)>,
    /// The cut of all of them, if it is asked for.
    fixed: Option<Cut>,
    /// Bytes of the largest sums of parts.
    pub bytes: usize,
}

impl Wanted {
    /// The most parts of a contraction, whatever computes them.
    pub fn most_parts(&self) -> usize {
        let of_few_rows = self.skinny.map_or(1, |(_, c)| c.parts);
        self.most_parts_of_core().max(of_few_rows)
    }

    /// The most parts of a contraction that the core computes.
    pub fn most_parts_of_core(&self) -> usize {
        let by_core = |m: usize| m > SKINNY_ROWS || self.skinny.is_none();
        let cuts = self.cuts.iter().filter(|(m, _)| by_core(*m)).map(|(_, c)| c);
        cuts.chain(&self.fixed).map(|c| c.parts).max().unwrap_or(1)
    }

    /// Returns the cut of a product of `m` rows; none if its contraction is whole.
    pub fn cut(&self, m: usize) -> Option<Cut> {
        let found = || self.cuts.binary_search_by_key(&rounded(m), |(rows, _)| *rows).ok();
        self.fixed.or_else(|| found().map(|i| self.cuts[i].1)).filter(Cut::is_cut)
    }
}

/// The variants that are best for some numbers of rows, so that no plan compiles what it never
/// launches. `parts`: those that are asked for; `all` and `limited`: the clusters of the device and
/// of a launch.
pub(super) fn wanted(d: &GemmDesc, parts: Option<usize>, all: u32, limited: u32) -> Wanted {
    let whole = variants(d).unwrap_or_default();
    let of_parts = of_parts(&whole);
    let few = skinny(d, parts, (all * CLUSTER) as usize);
    // A cluster must not have more blocks than a launch may have.
    let most = SKINNY_PARTS.min((limited * CLUSTER) as usize);
    let mut found = Wanted {
        skinny: few.filter(|(_, c)| c.parts <= most),
        fixed: parts.map(|n| Cut::new(d.k, n)),
        ..Wanted::default()
    };
    if parts.is_none() {
        let rows = (4..).map(|i| 1 << i).take_while(|m| *m < TILE_M);
        let (less, more): (Vec<_>, Vec<_>) = rows.partition(|m| *m <= SKINNY_ROWS && few.is_some());
        // Whatever makes them, few rows are cut in one way: it decides about the bits.
        found.cuts.extend(less.iter().flat_map(|m| few.map(|(_, c)| (*m, c))));
        let rows = more.into_iter().chain((TILE_M..).step_by(TILE_M));
        // More rows have more tiles: none of them is cut any more.
        let several = |m| of_parts.iter().any(|v| at_once(v, [m, d.n, d.k], all) > 1);
        for m in rows.take_while(|m| *m <= rounded(d.m) && several(*m)) {
            let c = cut(&whole, [m, d.n, d.k], all);
            found.cuts.extend(c.is_cut().then_some((m, c)));
        }
    }
    // The largest of those that are rounded to the same, too.
    let cuts = found.cuts.iter().map(|(m, _)| *m).chain(row_counts(d.m)).map(|m| m.min(d.m));
    let by_core = |m: &usize| *m > SKINNY_ROWS || found.skinny.is_none();
    for m in cuts.filter(by_core).collect::<Vec<_>>() {
        let shape = [m, d.n, d.k];
        let (from, to, c) = match found.cut(m) {
            Some(c) => (&of_parts, &mut found.of_parts, c),
            None => (&whole, &mut found.whole, Cut::new(d.k, 1)),
        };
        if c.is_cut() {
            found.bytes = found.bytes.max(4 * c.parts * m * d.n);
        }
        let v = best(from.iter().copied(), shape, c, limited);
        to.extend(v.filter(|v| !to.contains(v)));
    }
    found
}

/// Parts of which all clusters together have every tile at once.
fn at_once(v: &Variant, shape: [usize; 3], clusters: u32) -> usize {
    clusters as usize / num_pairs(v, shape).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Epilogue as Ends;

    const NT: fn(usize, usize, usize) -> GemmDesc = |m, n, k| GemmDesc::nt(m, n, k, DType::BF16);

    fn tn(m: usize, n: usize, k: usize) -> GemmDesc {
        GemmDesc { a_order: AOrder::Km, b_order: BOrder::Kn, ..NT(m, n, k) }
    }

    #[test]
    fn waves_decide_about_the_width() {
        let nt = NT(8192, 8192, 8192);
        let all = variants(&nt).unwrap();
        let cols: Vec<_> = all.iter().map(|v| v.cols).collect();
        assert_eq!(cols, [256, 224, 192, 128, 320]);
        let whole = |k| Cut::new(k, 1);
        let best = |m, n, k| best(all.iter().copied(), [m, n, k], whole(k), 66).unwrap().cols;
        // As measured on one H100, and with 320 columns on one H200 (docs/lab/gemm.md).
        for (m, n, k, want) in [
            (8192, 8192, 8192, 320),
            (8192, 7168, 8192, 256),
            (4096, 4096, 4096, 256),
            (2048, 7168, 8192, 224),
        ] {
            assert_eq!(best(m, n, k), want, "{m} {n} {k}");
        }
        let bias = Ends { bias: true, ..Ends::NONE };
        let all_bias = variants(&GemmDesc { epilogue: bias, ..nt }).unwrap();
        for (shape @ [_, _, k], want) in [
            ([2048, 7168, 8192], 320),
            ([8192, 12288, 6144], 320),
            ([8192, 8192, 3584], 256),
            ([8192, 7168, 8192], 256),
        ] {
            let v = super::best(all_bias.iter().copied(), shape, whole(k), 66).unwrap();
            assert_eq!(v.cols, want, "{shape:?}");
        }
        // Few tiles: narrow ones keep more multiprocessors busy.
        assert_eq!(best(256, 8192, 4096), 128);
        // A plan loads what it may launch.
        let cols = |m| {
            let w = wanted(&GemmDesc { m, ..nt }, None, 66, 66);
            w.whole.iter().map(|v| v.cols).collect::<Vec<_>>()
        };
        assert!(cols(64).is_empty() && cols(8192).contains(&320), "{:?}", [cols(64), cols(8192)]);
        assert!(wanted(&NT(64, 4096, 4096), None, 66, 66).of_parts.is_empty());
    }

    /// Four of twelve shapes measured on one H200, for which the model takes what was within 1 % of
    /// the best of eight numbers of parts; docs/lab/gemm.md names those where it does not.
    #[test]
    fn parts_and_columns_of_four_shapes_are_the_best_measured() {
        for (shape @ [m, n, k], want) in [
            ([1, 4096, 4096], (8, 256)),
            ([64, 8192, 28672], (4, 256)),
            ([16, 16384, 2048], (2, 256)),
            ([512, 512, 65536], (8, 128)),
        ] {
            // Few rows of this order are not cut by the kernel of few rows.
            let w = wanted(&tn(m, n, k), None, 66, 66);
            let c = w.cut(m).unwrap();
            let v = best(w.of_parts.iter().copied(), shape, c, 66).unwrap();
            assert_eq!((c.parts, v.cols), want, "{shape:?}");
        }
    }

    /// The parts that were fastest of one to eight on one H200 with weights that are not in L2, or
    /// took 2 % longer at most, but for the last three.
    #[test]
    fn few_rows_are_cut_as_was_measured() {
        for ([n, k], want) in [
            ([4096, 4096], 3),
            ([7168, 8192], 2),
            ([8192, 28672], 2),
            ([28672, 8192], 1),
            ([2048, 7168], 6),
            ([16384, 2048], 1),
            ([4736, 4096], 3),
            ([4864, 4096], 2),
            ([512, 64], 1),
        ] {
            let w = wanted(&NT(64, n, k), None, 66, 66);
            let (v, c) = w.skinny.unwrap();
            assert_eq!((c.parts, w.most_parts()), (want, want), "{n} {k}");
            assert!(w.whole.is_empty() && w.of_parts.is_empty() && v.width() == 128);
            // Bits do not depend on the rows, nor on what a launch is limited to: where a cluster
            // would be larger, the core has the same parts.
            for m in 1..=64 {
                assert_eq!(w.cut(m).map_or(1, |c| c.parts), want, "{m}");
            }
            let limited = wanted(&NT(64, n, k), None, 66, 1);
            assert_eq!(limited.skinny.is_some(), want <= 2, "{n} {k}");
            assert_eq!(limited.cut(5), w.cut(5));
            assert!(limited.skinny.is_some() || !limited.of_parts.is_empty());
        }
        // The core's parts are others.
        let w = wanted(&NT(256, 1024, 4096), None, 66, 66);
        assert_eq!((w.most_parts(), w.most_parts_of_core()), (8, 6));
        let swiglu = Ends { activation: Activation::SwiGlu, ..Ends::NONE };
        let w = wanted(&GemmDesc { epilogue: swiglu, ..NT(8, 4096, 4096) }, None, 66, 66);
        assert_eq!(w.skinny.map(|(v, c)| (v.width(), c.parts)), Some((64, 3)));
        let tiles = |d| [131, 132].map(|sms| has_few_tiles(&d, sms));
        assert_eq!(
            [tiles(NT(8, 132 * 128, 64)), tiles(tn(8, 128, 64))],
            [[false, true], [false; 2]]
        );
    }

    #[test]
    fn parts_are_whole_stages_and_none_is_empty() {
        for k in [1, 64, 65, 200, 4096, 65536] {
            for parts in [0, 1, 2, 3, 7, 16, 100_000] {
                let (c, all) = (Cut::new(k, parts), k.div_ceil(TILE_K));
                assert!(c.parts >= 1 && c.parts <= parts.max(1), "{c:?}");
                assert!((c.parts - 1) * c.steps < all && all <= c.parts * c.steps, "{k} {c:?}");
            }
        }
        assert_eq!(Cut::new(640, 4), Cut { parts: 4, steps: 3 });
    }

    #[test]
    fn few_tiles_are_cut_until_all_multiprocessors_have_one() {
        let parts = |m, n, k| wanted(&tn(m, n, k), None, 66, 66).cut(m).map_or(1, |c| c.parts);
        assert_eq!(parts(512, 512, 65536), 8);
        assert_eq!(
            [parts(1, 4096, 4096), parts(64, 4096, 4096), parts(64, 8192, 28672)],
            [8, 5, 4]
        );
        // Enough tiles, or so short a contraction that the second kernel would take longer.
        assert_eq!(
            [parts(8192, 8192, 8192), parts(2048, 7168, 8192), parts(64, 4096, 256)],
            [1; 3]
        );
        // Rows that are fewer than the plan was made for, and other limits, change no bit.
        let large = wanted(&NT(16384, 4096, 4096), None, 66, 66);
        let small = wanted(&NT(200, 4096, 4096), None, 66, 2);
        for m in 1..=200 {
            assert_eq!(large.cut(m), small.cut(m), "{m}");
        }
        assert!(large.cut(16384).is_none() && !large.whole.is_empty());
    }

    #[test]
    fn every_launch_has_kernels_and_space() {
        for (n, k) in [(4096, 4096), (512, 65536), (136, 72), (24576, 2048), (8, 8)] {
            for most in [1, 17, 100, 700, 3000] {
                for parts in [None, Some(1), Some(3)] {
                    for (limited, of) in [(66, NT), (1, NT), (66, tn as fn(_, _, _) -> _)] {
                        let w = wanted(&of(most, n, k), parts, 66, limited);
                        for m in 1..=most {
                            let c = w.cut(m);
                            if m <= SKINNY_ROWS && w.skinny.is_some() {
                                continue;
                            }
                            let of = if c.is_some() { &w.of_parts } else { &w.whole };
                            assert!(!of.is_empty(), "{m} of {most}, {n}, {k}, {parts:?}");
                            let bytes = c.map_or(0, |c| 4 * c.parts * m * n);
                            assert!(bytes <= w.bytes, "{m} of {most}, {n}, {k}: {bytes}");
                        }
                    }
                }
            }
        }
    }
}
