//! GEMM+RS and GEMM+AR on CUDA devices: a GEMM for each chunk of a peer's rows, pushed by copy
//! engine behind it; one kernel adds what arrived, in the order of the ranks.
//!
//! A chunk lies in its slot as it was computed: rows of all columns, in the wire's type. My own
//! part stays f32 until it is added. FP8 operands are widened to f32 first, W with the scale.
//! `sequential` is one GEMM of all rows where its f32 is not too large (`whole.rs`). Through NCCL
//! it is one GEMM and one collective.

mod whole;

use std::any::Any;
use std::ops::Range;

use tilewire_core::{DType, Rank, Result};
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
use crate::common::{Algo, Choice, OverlapConfig, PlanCore, Via, not_prepared, range_of};
use crate::gemm::device::{GemmKernels, Matrix, Product, unscaled};
use crate::gemm::device::{Widened, kernel_desc};
use crate::gemm::{BOrder, GemmDesc};

pub(crate) use whole::MOST_BYTES as MOST_WHOLE_BYTES;
use whole::Whole;

/// The kernels and workspace that `prepare` makes.
pub(crate) struct Prepared {
    /// Peers' rows, in the wire's type.
    theirs: GemmKernels,
    /// My rows, in f32, or all rows.
    mine: GemmKernels,
    reducer: Reducer,
    /// Products on their way to peers: `[m, n]` of the wire's type.
    partial: CudaMemory,
    /// My rows: `[slot_rows, n]` f32.
    own: CudaMemory,
    /// If the plan may be `sequential` by puts, and all rows in f32 are not too large.
    whole: Option<Whole>,
    /// With FP8 operands.
    widened: Option<Widened>,
    nccl: ByNccl,
}

impl Prepared {
    /// `most_whole` is the most bytes of all rows in f32.
    pub fn new(
        lane: &Lane,
        d: &GemmRsDesc,
        size: usize,
        (choice, most_whole): (&Choice, usize),
    ) -> Result<Self> {
        let ctx = lane.context();
        let desc = kernel_desc(&d.gemm());
        let gemm = |out| GemmKernels::new(ctx, &GemmDesc { out, ..desc }, choice.kernel());
        let partial = workspace(ctx, d.m * d.n * d.wire.size())?;
        let whole = match choice.may_be(is_whole) {
            true => Whole::of(ctx, d, &partial, most_whole)?,
            false => None,
        };
        Ok(Self {
            theirs: gemm(d.wire)?,
            mine: gemm(DType::F32)?,
            reducer: Reducer::new(ctx, [d.wire, DType::F32, d.out])?,
            partial,
            own: workspace(ctx, slot_rows(d, size) * d.n * 4)?,
            whole,
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

    /// Returns the product of all rows, if launches of `config` are made of it.
    fn whole(&self, config: &OverlapConfig) -> Option<&Whole> {
        self.whole.as_ref().filter(|_| is_whole(config))
    }

    pub fn explain(&self, config: &OverlapConfig) -> String {
        if let Some(n) = self.nccl.explain() {
            return format!("{}\nsum: {n}", self.theirs.explain());
        }
        if let Some(whole) = self.whole(config) {
            return format!("{}\n{}", self.mine.explain(), whole.explain());
        }
        format!("{}\nmine: {}", self.theirs.explain(), self.mine.explain())
    }

    /// The workspace of a launch.
    fn held(&self) -> impl Any + Clone + Send + Sync + use<> {
        let whole = self.whole.as_ref().map(|w| w.sums.clone());
        (self.partial.clone(), self.own.clone(), whole, self.widened.as_ref().map(Widened::held))
    }

    /// Describes what makes [`Job::terms`].
    pub fn explain_product(&self) -> String {
        self.theirs.explain()
    }
}

/// Returns whether all products of a launch come before all transfers, and rows travel as they are
/// computed: then they can be one product. NCCL's is one by itself.
pub(crate) fn is_whole(config: &OverlapConfig) -> bool {
    config.algo == Algo::Sequential && config.via == Via::Puts
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
    /// The product of all rows, in the wire's type: the plan's workspace, used by one launch at a
    /// time.
    pub fn terms(&self, p: &Prepared) -> Result<Tensor> {
        let (d, m) = (self.desc, self.shape.m);
        let memory = p.partial.slice(0, m * d.n * d.wire.size())?;
        Tensor::over_cuda(memory, d.wire, tilewire_core::Shape::d2(m, d.n))
    }

    /// Queues what makes [`Job::terms`] of tensors that were checked.
    pub fn multiply(&self, l: &Lanes<'_>, p: &Prepared, t: &GemmRsInputs) -> Result<()> {
        let run = Run { l, job: self, p, t, me: l.me(), out: t.out.cuda()? };
        holding(l.main, (t.clone(), p.held()), || {
            run.widen()?;
            run.product(&(0..self.shape.m), false)
        })
    }

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

/// Work of one launch.
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
    let p = ready(stream, job, &t)?;
    let out = t.out.cuda()?;
    let at = core.begin_on(stream, format_args!("m={}", job.shape.m))?;
    let flags = match job.shape.config.via {
        Via::Nccl => DATA..DATA,
        Via::Puts => job.copies().flags(),
    };
    let enter = Slots { signals: job.signals, credit: CREDIT, flags };
    core.run_on(lane, at, &enter, &[Poison::value(out.clone())], |l| {
        let run = Run { l, job, p, t: &t, me: core.team().rank(), out: out.clone() };
        holding(l.main, (t.clone(), p.held()), || run.run())
    })?;
    core.pending(t.out, at)
}

/// Checks that tensors lie on the stream's device, and returns what `prepare` has made.
pub(crate) fn ready<'a>(stream: &Stream, job: &Job<'a>, t: &GemmRsInputs) -> Result<&'a Prepared> {
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
    job.prepared.ok_or_else(not_prepared)
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
        let config = &self.job.shape.config;
        if config.via == Via::Nccl {
            return self.by_nccl();
        }
        match self.p.whole(config) {
            Some(whole) => self.by_one_product(whole)?,
            None => self.by_owners(config.algo == Algo::Sequential)?,
        }
        self.take_back()
    }

    /// One product of all rows, then all pushes, then my sums.
    fn by_one_product(&self, whole: &Whole) -> Result<()> {
        let s = &self.job.shape;
        self.multiply(&self.p.mine, &(0..s.m), whole.sums.addr())?;
        let own = range_of(s.rows, self.me);
        whole.round(self.l, (s.m, self.job.desc.n), &own, &self.p.partial)?;
        if s.rows.len() > 1 {
            self.l.fork()?;
        }
        let mine = self.at(&whole.sums, own.start);
        for task in s.tasks {
            match task {
                RsTask::Push { owner, chunk, tiles } => self.push(*owner, *chunk, &span(tiles))?,
                RsTask::Reduce { chunk, tiles } => self.reduce(*chunk, &span(tiles), mine)?,
            }
        }
        Ok(())
    }

    /// A product for each chunk of each owner's rows, in the order of the tasks. `sequential`
    /// pushes behind the first product of its own rows.
    fn by_owners(&self, sequential: bool) -> Result<()> {
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
                    self.reduce(*chunk, &rows, self.p.own.addr())?;
                }
            }
        }
        Ok(())
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

    /// The address of a row of f32 products.
    fn at(&self, memory: &CudaMemory, row: usize) -> u64 {
        memory.addr() + (row * self.job.desc.n * DType::F32.size()) as u64
    }

    /// The product of global rows, to where they are pushed from or to my own part.
    fn product(&self, rows: &Range<usize>, mine: bool) -> Result<()> {
        let (d, own) = (self.job.desc, range_of(self.job.shape.rows, self.me));
        if mine {
            let first = rows.start.saturating_sub(own.start);
            return self.multiply(&self.p.mine, rows, self.at(&self.p.own, first));
        }
        let at = self.p.partial.addr() + (rows.start * d.n * d.wire.size()) as u64;
        self.multiply(&self.p.theirs, rows, at)
    }

    /// The product of global rows, to address `to`.
    fn multiply(&self, kernels: &GemmKernels, rows: &Range<usize>, to: u64) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let d = self.job.desc;
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

    /// Adds all parts of my rows of a chunk, of which mine begin at address `mine`, and the bias
    /// once. GEMM+AR returns them.
    fn reduce(&self, chunk: usize, rows: &Range<usize>, mine: u64) -> Result<()> {
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
            own: mine + (first * d.n * DType::F32.size()) as u64,
            out: self.out.addr() + (at * d.n * d.out.size()) as u64,
            bias: Bias::of(self.t.bias.as_ref())?,
            rows: rows.len(),
            cols: d.n,
            scale: 1.0,
        };
        self.p.reducer.launch(self.l, &sum)?;
        self.give_back(chunk, rows)
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
