//! Parameters: global names and shapes, and the part of each that a rank holds.

use std::ops::Range;

use tilewire_core::{DType, Result, Shape};
use tilewire_device::{Stream, Tensor};
use tilewire_ops::layers::{Init, LayersPlan};

use crate::config::{Coord, Grid, ModelCfg, VOCAB};
use crate::place::Place;

/// The part of a parameter that a rank holds, and the ranks over which its gradient is summed.
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
    /// Local values, in the model's type.
    pub w: Tensor,
    /// The same in f32, if the model's type is another.
    pub master: Option<Tensor>,
    /// Gradient from this rank's rows, f32; all of it is written in each step.
    pub part: Tensor,
    /// Gradient, f32: the parts of all ranks that hold this; of experts, `part` itself.
    pub g: Tensor,
    /// First moment, f32.
    pub m: Tensor,
    /// Second moment, f32.
    pub v: Tensor,
}

impl Param {
    /// Number of local elements.
    pub fn len(&self) -> usize {
        self.w.shape().num_elems()
    }

    /// True if this rank holds nothing of it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values in f32.
    pub fn values(&self) -> &Tensor {
        self.master.as_ref().unwrap_or(&self.w)
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

/// Standard deviation of the first logits of the router. Larger than one, so that experts are
/// chosen by a clear margin: few tokens are near a tie that rounding could turn over, and the
/// expert that changes then has a small weight.
const ROUTER_SPREAD: f64 = 4.0;

/// The description of a parameter that has no memory yet.
#[derive(Clone, Debug)]
pub struct Spec {
    name: String,
    global: (usize, usize),
    pieces: Vec<Piece>,
    kind: Kind,
    /// Standard deviation of the first values; 0: ones.
    std: f64,
}

impl Spec {
    /// Local rows and columns.
    fn shape(&self) -> (usize, usize) {
        let rows = self.pieces.iter().map(|p| p.rows.len()).sum();
        (rows, self.pieces.first().map_or(self.global.1, |p| p.cols.len()))
    }

    /// Local elements, in whole lines: what it takes in the vectors that are summed.
    fn padded(&self) -> usize {
        let (rows, cols) = self.shape();
        (rows * cols).next_multiple_of(LINE)
    }
}

/// Elements to whose multiples parameters are aligned in the vectors that are summed over ranks.
const LINE: usize = 64;

/// Lists parameters.
struct Maker<'a> {
    cfg: &'a ModelCfg,
    grid: &'a Grid,
    coord: Coord,
    experts: Range<usize>,
    out: Vec<Spec>,
}

impl Maker<'_> {
    fn add(
        &mut self,
        name: String,
        global: (usize, usize),
        pieces: Vec<Piece>,
        kind: Kind,
        std: f64,
    ) {
        self.out.push(Spec { name, global, pieces, kind, std });
    }

    fn whole(&mut self, name: String, rows: usize, cols: usize, std: f64) {
        let piece = Piece { rows: 0..rows, cols: 0..cols };
        self.add(name, (rows, cols), vec![piece], Kind::Replicated, std);
    }

    fn layer(&mut self, l: usize) {
        let c = *self.cfg;
        let (d, hd, tp, t) = (c.d_model, c.head_dim, self.grid.tp, self.coord.tp);
        let depth = (2.0 * c.layers as f64).sqrt();
        let std = 1.0 / (d as f64).sqrt();
        self.whole(format!("layers.{l}.norm1"), 1, d, 0.0);
        let (q, kv) = (c.heads / tp * hd, c.kv_heads / tp * hd);
        let all_cols = |rows: Range<usize>| Piece { rows, cols: 0..d };
        let (k0, v0) = (c.heads * hd, (c.heads + c.kv_heads) * hd);
        let pieces = vec![
            all_cols(t * q..(t + 1) * q),
            all_cols(k0 + t * kv..k0 + (t + 1) * kv),
            all_cols(v0 + t * kv..v0 + (t + 1) * kv),
        ];
        let rows = (c.heads + 2 * c.kv_heads) * hd;
        self.add(format!("layers.{l}.qkv"), (rows, d), pieces, Kind::Sharded, std);
        let piece = Piece { rows: 0..d, cols: t * q..(t + 1) * q };
        let o_std = 1.0 / ((c.heads * hd) as f64).sqrt() / depth;
        self.add(format!("layers.{l}.out"), (d, c.heads * hd), vec![piece], Kind::Sharded, o_std);
        self.whole(format!("layers.{l}.norm2"), 1, d, 0.0);
        self.whole(format!("layers.{l}.router"), c.experts, d, ROUTER_SPREAD * std);
        let e = self.experts.clone();
        let up = Piece { rows: e.start * 2 * c.d_ff..e.end * 2 * c.d_ff, cols: 0..d };
        let whole = (c.experts * 2 * c.d_ff, d);
        self.add(format!("layers.{l}.up"), whole, vec![up], Kind::Expert, std);
        let down = Piece { rows: e.start * d..e.end * d, cols: 0..c.d_ff };
        let d_std = 1.0 / (c.d_ff as f64).sqrt() / depth;
        let whole = (c.experts * d, c.d_ff);
        self.add(format!("layers.{l}.down"), whole, vec![down], Kind::Expert, d_std);
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
pub fn specs(cfg: &ModelCfg, grid: &Grid, coord: Coord, experts: Range<usize>) -> Vec<Spec> {
    let mut m = Maker { cfg, grid, coord, experts, out: Vec::new() };
    let d = cfg.d_model;
    m.whole("embed".to_owned(), VOCAB, d, 1.0);
    m.whole("norm".to_owned(), 1, d, 0.0);
    m.whole("head".to_owned(), VOCAB, d, 0.5 / (d as f64).sqrt());
    (0..cfg.layers).for_each(|l| m.layer(l));
    m.out
}

/// Elements of the vector of all gradients of one kind.
pub fn len_of(specs: &[Spec], kind: Kind) -> usize {
    specs.iter().filter(|s| s.kind == kind).map(Spec::padded).sum()
}

/// The gradients of all parameters of one kind, one behind the other.
pub struct Flat {
    /// From this rank's rows, `[len, 1]` f32.
    pub part: Tensor,
    /// Summed over ranks; of experts, `part` itself.
    pub sum: Tensor,
    next: usize,
}

impl Flat {
    fn new(place: &Place, specs: &[Spec], kind: Kind) -> Result<Self> {
        let zeros = || place.zeros(DType::F32, len_of(specs, kind), 1);
        let part = zeros()?;
        let sum = if kind == Kind::Expert { part.clone() } else { zeros()? };
        Ok(Self { part, sum, next: 0 })
    }

    /// The places of the next parameter.
    fn take(&mut self, s: &Spec) -> Result<(Tensor, Tensor)> {
        let (rows, cols) = s.shape();
        let cut = |t: &Tensor| t.rows(self.next, rows * cols)?.reshape(Shape::d2(rows, cols));
        let both = (cut(&self.part)?, cut(&self.sum)?);
        self.next += s.padded();
        Ok(both)
    }
}

/// Parameters of a rank, and the vectors that their gradients lie in.
pub struct Params {
    /// In the order of their specs.
    pub all: Vec<Param>,
    /// Of [`Kind::Replicated`], [`Kind::Sharded`], [`Kind::Expert`].
    pub flats: [Flat; 3],
}

/// Makes parameters whose first values depend on name, seed and global position alone.
///
/// # Errors
/// `Exhausted` if there is no memory; what the device reports.
pub fn make(
    specs: &[Spec],
    place: &Place,
    (layers, stream): (&LayersPlan, &Stream),
    seed: u64,
) -> Result<Params> {
    let kinds = [Kind::Replicated, Kind::Sharded, Kind::Expert];
    let flat = |k: Kind| Flat::new(place, specs, k);
    let mut flats = [flat(kinds[0])?, flat(kinds[1])?, flat(kinds[2])?];
    let mut all = Vec::with_capacity(specs.len());
    for s in specs {
        let (rows, cols) = s.shape();
        let (part, g) = flats[s.kind as usize].take(s)?;
        let zeros = |dtype| place.zeros(dtype, rows, cols);
        let master = (place.dtype != DType::F32).then(|| zeros(DType::F32)).transpose()?;
        let p = Param {
            name: s.name.clone(),
            global: s.global,
            pieces: s.pieces.clone(),
            kind: s.kind,
            decay: s.global.0 > 1,
            w: zeros(place.dtype)?,
            master,
            part,
            g,
            m: zeros(DType::F32)?,
            v: zeros(DType::F32)?,
        };
        first_values(&p, s, (layers, stream), seed)?;
        all.push(p);
    }
    Ok(Params { all, flats })
}

fn first_values(
    p: &Param,
    s: &Spec,
    (layers, stream): (&LayersPlan, &Stream),
    seed: u64,
) -> Result<()> {
    let mut word = [0; 8];
    word.copy_from_slice(&blake3::hash(s.name.as_bytes()).as_bytes()[..8]);
    let mut row = 0;
    for piece in &s.pieces {
        let num = piece.rows.len();
        let work = Init {
            w: p.w.rows(row, num)?,
            master: p.master.as_ref().map(|m| m.rows(row, num)).transpose()?,
            origin: (piece.rows.start, piece.cols.start),
            global_cols: s.global.1,
            seed: seed ^ u64::from_le_bytes(word),
            std: s.std,
        };
        layers.run(stream, &work)?;
        row += num;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_core::Rank;
    use tilewire_device::Device;
    use tilewire_ops::layers::LayersDesc;

    /// The parts of all ranks together are the global parameter, value for value.
    #[test]
    fn parts_are_slices_of_the_whole() {
        let cfg = ModelCfg::default();
        let solo = Grid { dp: 1, cp: 1, tp: 1 };
        let stream = Stream::new("test").unwrap();
        let desc = LayersDesc { dtype: DType::F32, rows: 1, cols: 1, experts: 1 };
        let layers = LayersPlan::new(desc).unwrap();
        layers.prepare(&stream).unwrap();
        let place = Place { device: Device::Host, dtype: DType::F32 };
        let make = |grid: &Grid, r: Rank, experts| {
            let specs = specs(&cfg, grid, grid.coord(r), experts);
            let all = make(&specs, &place, (&layers, &stream), 5).unwrap().all;
            stream.synchronize().unwrap();
            all
        };
        let whole = make(&solo, Rank::new(0), 0..8);
        let grid = Grid { dp: 1, cp: 2, tp: 2 };
        for r in Rank::all(4) {
            let e = r.idx() * 2..r.idx() * 2 + 2;
            let part = make(&grid, r, e);
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
