//! Parameters: global names and shapes, and the part of each that a rank holds.

use std::ops::Range;

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::Tensor;

use crate::config::{Coord, Grid, ModelCfg, VOCAB};

/// Which part of a parameter a rank holds, and over which ranks its gradient is summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// All of it on every rank; gradients are summed over all.
    Replicated,
    /// Some rows or columns; gradients are summed over the ranks with the same tp coordinate.
    Sharded,
    /// The experts of this rank; gradients are complete, as all their tokens come here.
    Expert,
}

/// A piece of a global matrix that lies in one piece of the local one: `rows x cols`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Global rows.
    pub rows: Range<usize>,
    /// Global columns.
    pub cols: Range<usize>,
}

/// One parameter on one rank, with gradient and moments.
pub struct Param {
    /// Global name.
    pub name: String,
    /// Global shape.
    pub global: (usize, usize),
    /// The local rows, from top to bottom.
    pub pieces: Vec<Piece>,
    /// Part and reduction.
    pub kind: Kind,
    /// Weight decay applies.
    pub decay: bool,
    /// Local values.
    pub w: Tensor,
    /// Local gradient.
    pub g: Vec<f32>,
    /// First moment.
    pub m: Vec<f32>,
    /// Second moment.
    pub v: Vec<f32>,
}

impl Param {
    /// Number of local elements.
    pub fn len(&self) -> usize {
        self.g.len()
    }

    /// True if this rank holds nothing of it.
    pub fn is_empty(&self) -> bool {
        self.g.is_empty()
    }

    /// Calls `f(local offset, global offset, length)` for each contiguous run.
    pub fn runs(&self, mut f: impl FnMut(usize, usize, usize)) {
        let mut local = 0;
        for p in &self.pieces {
            for r in p.rows.clone() {
                f(local, r * self.global.1 + p.cols.start, p.cols.len());
                local += p.cols.len();
            }
        }
    }
}

/// Standard normal of position `i`.
fn normal_at(rng: &Rng, i: u64) -> f64 {
    let u = 1.0 - rng.f64_at(2 * i);
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * rng.f64_at(2 * i + 1)).cos()
}

/// Makes parameters whose values depend on name, seed and global position alone.
struct Maker<'a> {
    cfg: &'a ModelCfg,
    grid: &'a Grid,
    coord: Coord,
    experts: Range<usize>,
    seed: u64,
    out: Vec<Param>,
}

impl Maker<'_> {
    fn add(
        &mut self,
        name: String,
        global: (usize, usize),
        pieces: Vec<Piece>,
        kind: Kind,
        std: f64,
    ) -> Result<()> {
        let rows: usize = pieces.iter().map(|p| p.rows.len()).sum();
        let cols = pieces.first().map_or(global.1, |p| p.cols.len());
        let mut word = [0; 8];
        word.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..8]);
        let rng = Rng::new(self.seed ^ u64::from_le_bytes(word));
        let n = rows * cols;
        let mut p = Param {
            decay: global.0 > 1,
            name,
            global,
            pieces,
            kind,
            w: Tensor::zeros(DType::F32, Shape::d2(rows, cols)),
            g: vec![0.0; n],
            m: vec![0.0; n],
            v: vec![0.0; n],
        };
        let mut w = vec![0.0f32; n];
        p.runs(|local, at, len| {
            for i in 0..len {
                // Gains start at one, matrices at random.
                w[local + i] =
                    if std == 0.0 { 1.0 } else { (std * normal_at(&rng, (at + i) as u64)) as f32 };
            }
        });
        p.w = Tensor::from_slice(&w, Shape::d2(rows, cols))?;
        self.out.push(p);
        Ok(())
    }

    fn whole(&mut self, name: String, rows: usize, cols: usize, std: f64) -> Result<()> {
        let piece = Piece { rows: 0..rows, cols: 0..cols };
        self.add(name, (rows, cols), vec![piece], Kind::Replicated, std)
    }

    fn layer(&mut self, l: usize) -> Result<()> {
        let c = *self.cfg;
        let (d, hd, tp, t) = (c.d_model, c.head_dim, self.grid.tp, self.coord.tp);
        let depth = (2.0 * c.layers as f64).sqrt();
        let std = 1.0 / (d as f64).sqrt();
        self.whole(format!("layers.{l}.norm1"), 1, d, 0.0)?;
        let (q, kv) = (c.heads / tp * hd, c.kv_heads / tp * hd);
        let all_cols = |rows: Range<usize>| Piece { rows, cols: 0..d };
        let (k0, v0) = (c.heads * hd, (c.heads + c.kv_heads) * hd);
        let pieces = vec![
            all_cols(t * q..(t + 1) * q),
            all_cols(k0 + t * kv..k0 + (t + 1) * kv),
            all_cols(v0 + t * kv..v0 + (t + 1) * kv),
        ];
        let rows = (c.heads + 2 * c.kv_heads) * hd;
        self.add(format!("layers.{l}.qkv"), (rows, d), pieces, Kind::Sharded, std)?;
        let piece = Piece { rows: 0..d, cols: t * q..(t + 1) * q };
        let o_std = 1.0 / ((c.heads * hd) as f64).sqrt() / depth;
        self.add(format!("layers.{l}.out"), (d, c.heads * hd), vec![piece], Kind::Sharded, o_std)?;
        self.whole(format!("layers.{l}.norm2"), 1, d, 0.0)?;
        self.whole(format!("layers.{l}.router"), c.experts, d, std)?;
        let e = self.experts.clone();
        let up = Piece { rows: e.start * 2 * c.d_ff..e.end * 2 * c.d_ff, cols: 0..d };
        self.add(
            format!("layers.{l}.up"),
            (c.experts * 2 * c.d_ff, d),
            vec![up],
            Kind::Expert,
            std,
        )?;
        let down = Piece { rows: e.start * d..e.end * d, cols: 0..c.d_ff };
        let d_std = 1.0 / (c.d_ff as f64).sqrt() / depth;
        self.add(
            format!("layers.{l}.down"),
            (c.experts * d, c.d_ff),
            vec![down],
            Kind::Expert,
            d_std,
        )
    }
}

/// Positions of a layer's parameters among all.
#[derive(Clone, Copy, Debug)]
pub struct LayerIdx {
    /// Gain before attention, `[1, d]`.
    pub norm1: usize,
    /// Projections to queries, keys and values, `[(heads + 2 kv_heads) head_dim, d]`.
    pub qkv: usize,
    /// Projection back, `[d, heads head_dim]`.
    pub out: usize,
    /// Gain before the experts, `[1, d]`.
    pub norm2: usize,
    /// Router, `[experts, d]`.
    pub router: usize,
    /// Gate and up projections, `[experts * 2 d_ff, d]`.
    pub up: usize,
    /// Down projections, `[experts * d, d_ff]`.
    pub down: usize,
}

/// Embedding, `[256, d]`.
pub const EMBED: usize = 0;
/// Gain before the head, `[1, d]`.
pub const NORM: usize = 1;
/// Head, `[256, d]`.
pub const HEAD: usize = 2;

/// Parameters of layer `l`.
pub fn layer(l: usize) -> LayerIdx {
    let b = 3 + 7 * l;
    LayerIdx {
        norm1: b,
        qkv: b + 1,
        out: b + 2,
        norm2: b + 3,
        router: b + 4,
        up: b + 5,
        down: b + 6,
    }
}

/// All parameters of a rank; `experts` are the global numbers of its experts.
///
/// # Errors
/// If there is no memory.
pub fn make(
    cfg: &ModelCfg,
    grid: &Grid,
    coord: Coord,
    experts: Range<usize>,
    seed: u64,
) -> Result<Vec<Param>> {
    let mut m = Maker { cfg, grid, coord, experts, seed, out: Vec::new() };
    let d = cfg.d_model;
    m.whole("embed".to_owned(), VOCAB, d, 1.0)?;
    m.whole("norm".to_owned(), 1, d, 0.0)?;
    m.whole("head".to_owned(), VOCAB, d, 0.5 / (d as f64).sqrt())?;
    (0..cfg.layers).try_for_each(|l| m.layer(l))?;
    Ok(m.out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_core::Rank;

    /// The parts of all ranks together are the global parameter, value for value.
    #[test]
    fn parts_are_slices_of_the_whole() {
        let cfg = ModelCfg::default();
        let solo = Grid { dp: 1, cp: 1, tp: 1 };
        let whole = make(&cfg, &solo, solo.coord(Rank::new(0)), 0..8, 5).unwrap();
        let grid = Grid { dp: 1, cp: 2, tp: 2 };
        for r in Rank::all(4) {
            let e = r.idx() * 2..r.idx() * 2 + 2;
            let part = make(&cfg, &grid, grid.coord(r), e, 5).unwrap();
            assert_eq!(part.len(), whole.len());
            for (p, w) in part.iter().zip(&whole) {
                assert_eq!((&p.name, p.global), (&w.name, w.global));
                let (have, all) = (p.w.to_f32().unwrap(), w.w.to_f32().unwrap());
                let mut covered = 0;
                p.runs(|local, at, len| {
                    assert_eq!(have[local..local + len], all[at..at + len], "{}", p.name);
                    covered += len;
                });
                assert_eq!(covered, p.len());
            }
        }
        let l = layer(1);
        assert_eq!(whole[l.down].name, "layers.1.down");
        assert_eq!(whole[l.norm1].name, "layers.1.norm1");
    }
}
