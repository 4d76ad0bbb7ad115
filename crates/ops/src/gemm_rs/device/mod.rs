//! GEMM+RS and GEMM+AR on CUDA devices: a GEMM for each chunk of a peer's rows, pushed by copy
//! engine behind it; one kernel adds what arrived, in the order of the ranks.
//!
//! A chunk lies in its slot as it was computed: rows of all columns, in the wire's type. My own
//! part stays f32 until it is added. FP8 operands are widened to f32 first, W with the scale.
//! Through NCCL it is one GEMM and one collective.

use std::ops::Range;

use tilewire_core::{DType, Error, Rank, Result};
use tilewire_device::cuda::{CudaMemory, NcclOp};
use tilewire_device::{Buffer, Pending, Stream, Tensor};
use tilewire_symm::{LiveTeam, Signals, SymBuf};

use super::GemmRsDesc;
use super::copies::{Copies, Gather};
use super::launch::{CREDIT, DATA, GemmRsInputs, slot_rows};
use super::schedule::{RsTask, RsTile};
use crate::collective::device::scatter;
use crate::common::Bias;
use crate::common::cuda::{addr, holding, together_on, workspace};
use crate::common::lanes::{Lane, Lanes, Poison, Slots};
use crate::common::nccl::ByNccl;
use crate::common::reduce::{Reducer, Sum};
use crate::common::ring::Arrival;
use crate::common::{Algo, OverlapConfig, PlanCore, Via, range_of};
use crate::gemm::device::{GemmKernels, Matrix, Product, unscaled};
use crate::gemm::device::{Widened, kernel_desc};
use crate::gemm::{BOrder, GemmBackend, GemmDesc};

/// The kernels and workspace that `prepare` makes.
pub(crate) struct Prepared {
    /// Peers' rows, in the wire's type.
    theirs: GemmKernels,
    /// My rows, in f32.
    mine: GemmKernels,
    reducer: Reducer,
    /// Products on their way to peers: `[m, n]` of the wire's type.
    partial: CudaMemory,
    /// My rows: `[slot_rows, n]` f32.
    own: CudaMemory,
    /// With FP8 operands.
    widened: Option<Widened>,
    nccl: ByNccl,
}

impl Prepared {
    pub fn new(lane: &Lane, d: &GemmRsDesc, size: usize, kernel: GemmBackend) -> Result<Self> {
        let ctx = lane.context();
        let desc = kernel_desc(&d.gemm());
        let gemm = |out| GemmKernels::new(ctx, &GemmDesc { out, ..desc }, kernel);
        Ok(Self {
            theirs: gemm(d.wire)?,
            mine: gemm(DType::F32)?,
            reducer: Reducer::new(ctx, [d.wire, DType::F32, d.out])?,
            partial: workspace(ctx, d.m * d.n * d.wire.size())?,
            own: workspace(ctx, slot_rows(d, size) * d.n * 4)?,
            widened: Widened::of(ctx, &d.gemm())?,
            nccl: ByNccl::default(),
        })
    }

    /// Collective, behind the agreement: NCCL for sums of `d.m` rows, to their owners or to all.
    pub fn connect(
        &self,
        core: &PlanCore,
        stream: &Stream,
        d: &GemmRsDesc,
        to_all: bool,
    ) -> Result<()> {
        let team = core.team();
        let rows = d.shards.rows(d.m, team.size())?;
        let ops = match to_all {
            true => vec![self.sum_to_all(d.m * d.n, self.partial.addr())],
            false => self.sum_to_owners(d, team.rank(), &rows, self.own.addr()),
        };
        // SAFETY: workspace of a plan of which nothing is launched yet, made for as many rows; all
        // ranks agree on the description.
        unsafe { self.nccl.prepare(core, stream, (d.wire, &ops)) }
    }

    fn sum_to_all(&self, count: usize, dst: u64) -> NcclOp {
        NcclOp::AllReduce { src: self.partial.addr(), dst, count }
    }

    fn sum_to_owners(&self, d: &GemmRsDesc, me: Rank, rows: &[usize], dst: u64) -> Vec<NcclOp> {
        scatter(me, rows, (d.n, d.wire.size()), (self.partial.addr(), dst))
    }

    /// Collective: see [`GemmKernels::agree`].
    pub fn agree(&self, team: &LiveTeam) -> Result<()> {
        self.theirs.agree(team)?;
        self.mine.agree(team)
    }

    pub fn explain(&self) -> String {
        if let Some(n) = self.nccl.explain() {
            return format!("{}\nsum: {n}", self.theirs.explain());
        }
        format!("{}\nmine: {}", self.theirs.explain(), self.mine.explain())
    }
}

/// The schedule of one launch.
pub(crate) struct Shape<'a> {
    pub m: usize,
    pub rows: &'a [usize],
    pub tasks: &'a [RsTask],
    pub config: OverlapConfig,
}

/// One launch of either operation.
pub(crate) struct Job<'a> {
    pub desc: &'a GemmRsDesc,
    pub prepared: Option<&'a Prepared>,
    pub slots: &'a SymBuf,
    pub signals: &'a Signals,
    pub shape: Shape<'a>,
    /// GEMM+AR: where reduced rows return to, and in which order.
    pub gather: Option<(&'a SymBuf, &'a [Arrival])>,
}

impl Job<'_> {
    fn copies(&self) -> Copies<'_> {
        let (d, shape) = (self.desc, &self.shape);
        let gather = self.gather.map(|(buf, _)| Gather {
            buf,
            row: d.n * d.out.size(),
            ring: shape.config.algo == Algo::Ring,
        });
        Copies {
            rows: shape.rows,
            chunks: shape.config.sub_chunks,
            slot_rows: slot_rows(d, shape.rows.len()),
            row: d.n * d.wire.size(),
            slots: self.slots,
            signals: self.signals,
            gather,
        }
    }
}

struct Run<'a> {
    l: &'a Lanes<'a>,
    job: &'a Job<'a>,
    p: &'a Prepared,
    t: &'a GemmRsInputs,
    me: Rank,
    out: CudaMemory,
}

/// Queues one launch of tensors that were checked.
pub(crate) fn launch(
    core: &PlanCore,
    lane: &Lane,
    stream: &Stream,
    job: &Job<'_>,
    t: GemmRsInputs,
) -> Result<Pending<Tensor>> {
    if t.scale.is_some() && !job.desc.x.is_fp8() {
        return Err(unscaled(job.desc.x));
    }
    let given = [
        ("x", Some(&t.x)),
        ("w", Some(&t.w)),
        ("bias", t.bias.as_ref()),
        ("scale", t.scale.as_ref()),
        ("out", Some(&t.out)),
    ];
    together_on(stream, &given)?;
    let out = t.out.cuda()?;
    let at = core.begin_on(stream, format_args!("m={}", job.shape.m))?;
    let p = job.prepared.ok_or_else(|| Error::internal("a prepared plan lacks its kernels"))?;
    let flags = match job.shape.config.via {
        Via::Nccl => DATA..DATA,
        Via::Puts => job.copies().flags(),
    };
    let enter = Slots { signals: job.signals, credit: CREDIT, flags };
    core.run_on(lane, at, &enter, &[Poison::value(out.clone())], |l| {
        let own = (p.partial.clone(), p.own.clone(), p.widened.as_ref().map(Widened::held));
        let run = Run { l, job, p, t: &t, me: core.team().rank(), out: out.clone() };
        holding(l.main, (t.clone(), own), || run.run())
    })?;
    core.pending(t.out, at)
}

/// All rows of a chunk: its tiles span all columns.
fn span(tiles: &[RsTile]) -> Range<usize> {
    tiles.first().map_or(0, |t| t.rows.start)..tiles.last().map_or(0, |t| t.rows.end)
}

impl Run<'_> {
    /// One product of all rows, its sum over the ranks by NCCL, and the bias.
    fn by_nccl(&self) -> Result<()> {
        let (d, p, s) = (self.job.desc, self.p, &self.job.shape);
        self.product(&(0..s.m), false)?;
        let to_all = self.job.gather.is_some();
        let rows = if to_all { s.m } else { s.rows[self.me.idx()] };
        // NCCL adds to one type and knows no bias: what it cannot store as it is goes through my
        // workspace.
        let direct = d.wire == d.out && !d.bias;
        let own = if to_all { p.partial.addr() } else { p.own.addr() };
        let dst = if direct { self.out.addr() } else { own };
        let ops = match to_all {
            true => vec![p.sum_to_all(s.m * d.n, dst)],
            false => p.sum_to_owners(d, self.me, s.rows, dst),
        };
        // SAFETY: `partial` has all rows of the wire's type; the output was checked against the
        // description, and `own` holds my rows in f32; all are held. Only this stream uses
        // them.
        unsafe { p.nccl.queue(self.l.main, d.wire, &ops)? };
        if direct {
            return Ok(());
        }
        let (out, bias) = (self.out.addr(), Bias::of(self.t.bias.as_ref())?);
        let sum = Sum { slots: dst, stride: 0, own: dst, out, bias, rows, cols: d.n, scale: 1.0 };
        p.reducer.launch_parts(self.l, &sum, (None, 1))
    }

    fn run(&self) -> Result<()> {
        self.widen()?;
        if self.job.shape.config.via == Via::Nccl {
            return self.by_nccl();
        }
        let sequential = self.job.shape.config.algo == Algo::Sequential;
        let mut held = Vec::new();
        for task in self.job.shape.tasks {
            match task {
                RsTask::Push { owner, chunk, tiles } => {
                    let rows = span(tiles);
                    self.product(&rows, false)?;
                    if sequential {
                        held.push((*owner, *chunk, rows));
                    } else {
                        self.l.fork()?;
                        self.push(*owner, *chunk, &rows)?;
                    }
                }
                RsTask::Reduce { chunk, tiles } => {
                    let rows = span(tiles);
                    self.product(&rows, true)?;
                    if !held.is_empty() {
                        self.l.fork()?;
                        held.drain(..).try_for_each(|(o, c, r)| self.push(o, c, &r))?;
                    }
                    self.reduce(*chunk, &rows)?;
                    self.give_back(*chunk, &rows)?;
                }
            }
        }
        self.take_back()
    }

    /// With FP8: X and W, as f32.
    fn widen(&self) -> Result<()> {
        let (Some(w), d) = (&self.p.widened, self.job.desc) else { return Ok(()) };
        let w_shape = match d.w_order {
            BOrder::Nk => (d.n, d.k),
            BOrder::Kn => (d.k, d.n),
        };
        let codes = (addr(&self.t.w)?, addr(self.t.scale.as_ref())?);
        let x = (addr(&self.t.x)?, 0);
        // SAFETY: the tensors were checked against the description that the workspace was made for,
        // and all is held.
        unsafe {
            w.b.rows(self.l.main, codes, 0, w_shape)?;
            w.a.rows(self.l.main, x, 0, (self.job.shape.m, d.k))
        }
    }

    /// The product of global rows, to where they are pushed from or to my own part.
    fn product(&self, rows: &Range<usize>, mine: bool) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let d = self.job.desc;
        let own = range_of(self.job.shape.rows, self.me);
        let (kernels, to) = match mine {
            true => (&self.p.mine, self.p.own.addr() + ((rows.start - own.start) * d.n * 4) as u64),
            false => {
                let at = rows.start * d.n * d.wire.size();
                (&self.p.theirs, self.p.partial.addr() + at as u64)
            }
        };
        let ldb = match d.w_order {
            BOrder::Nk => d.k,
            BOrder::Kn => d.n,
        };
        let (x, w, size) = match &self.p.widened {
            Some(w) => (w.a.addr(), w.b.addr(), DType::F32.size()),
            None => (addr(&self.t.x)?, addr(&self.t.w)?, d.x.size()),
        };
        let product = Product {
            shape: (rows.len(), d.n, d.k),
            a: Matrix::new(x + (rows.start * d.k * size) as u64, d.k),
            b: Matrix::new(w, ldb),
            d: Matrix::new(to, d.n),
            bias: Bias::default(),
            aux: Matrix::default(),
            accumulate: false,
        };
        // SAFETY: the tensors were checked against the description that the kernels were made for;
        // they and the workspace are held, and the workspace is used by one launch at a time.
        unsafe { kernels.launch(self.l.main, &product) }
    }

    fn push(&self, owner: Rank, chunk: usize, rows: &Range<usize>) -> Result<()> {
        let (d, l, copies) = (self.job.desc, self.l, self.job.copies());
        let (first, row) = (copies.range(owner).start, d.n * d.wire.size());
        let part = self.p.partial.slice(rows.start * row, rows.len() * row)?;
        let at = rows.start.saturating_sub(first) * row;
        copies.push((l.net, l.side), &l.permit, (owner, chunk), 1, |_, put| {
            put(at, &part, part.len_bytes())
        })
    }

    /// Adds all parts of my rows of a chunk, and the bias once.
    fn reduce(&self, chunk: usize, rows: &Range<usize>) -> Result<()> {
        let (d, l) = (self.job.desc, self.l);
        self.job.copies().wait((l.net, l.main), chunk)?;
        let own = range_of(self.job.shape.rows, self.me);
        let (size, row) = (self.job.shape.rows.len(), d.n * d.wire.size());
        let first = rows.start.saturating_sub(own.start);
        let stride = slot_rows(d, size) * row;
        let whole = l.here.addr(self.job.slots.range(0, size * stride), size * stride)?;
        // GEMM+AR stores my rows among all.
        let at = if self.job.gather.is_some() { rows.start } else { first };
        let sum = Sum {
            slots: whole + (first * row) as u64,
            stride: stride as u64,
            own: self.p.own.addr() + (first * d.n * 4) as u64,
            out: self.out.addr() + (at * d.n * d.out.size()) as u64,
            bias: Bias::of(self.t.bias.as_ref())?,
            rows: rows.len(),
            cols: d.n,
            scale: 1.0,
        };
        self.p.reducer.launch(self.l, &sum)
    }

    /// GEMM+AR: returns reduced rows of a chunk.
    fn give_back(&self, chunk: usize, rows: &Range<usize>) -> Result<()> {
        let (copies, l) = (self.job.copies(), self.l);
        let Some(g) = &copies.gather else { return Ok(()) };
        let part = self.out.slice(rows.start * g.row, rows.len() * g.row)?;
        l.fork()?;
        copies.give((l.net, l.side), &l.permit, (g, chunk), rows, &part)
    }

    /// GEMM+AR: takes in what the other owners have reduced.
    fn take_back(&self) -> Result<()> {
        let (copies, l) = (self.job.copies(), self.l);
        let (Some(g), Some((_, arrivals))) = (&copies.gather, self.job.gather) else {
            return Ok(());
        };
        for a in arrivals {
            match g.ring {
                true => copies.take((l.net, l.side), &l.permit, (g, a), || l.join())?,
                false => copies.take((l.net, l.main), &l.permit, (g, a), || Ok(()))?,
            }
            let mut out = self.out.slice(a.rows.start * g.row, a.rows.len() * g.row)?;
            copies.land((l.net, l.main), (g, &a.rows), &mut out)?;
        }
        Ok(())
    }
}
