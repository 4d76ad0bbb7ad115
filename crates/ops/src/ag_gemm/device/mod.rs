//! AG+GEMM on CUDA devices.
//!
//! - `pipelined`: copy engines push chunks, and one GEMM runs behind the flag of each.
//! - `ring`: chunks are passed from neighbour to neighbour, and one GEMM runs behind each.
//! - `sequential`: one GEMM runs behind the flags of all chunks.
//! - `sequential_nccl`: NCCL gathers the rows, and one GEMM runs behind it.
//!
//! FP8 is sent as it is; received rows are widened to f32 before their product, W with the scale.

use tilewire_core::{DType, Rank, Result};
use tilewire_device::cuda::CudaMemory;
use tilewire_device::{Buffer, Pending, Stream};
use tilewire_symm::LiveTeam;

use super::AgGemmDesc;
use super::copies::Copies;
use super::launch::{AgGemmInputs, Base, CREDIT, DATA};
use super::schedule::AgTask;
use crate::collective::device::gather;
use crate::common::Bias;
use crate::common::cuda::{addr, hold, holding, together_on};
use crate::common::lanes::{Lane, Lanes, Poison, Slots};
use crate::common::nccl::ByNccl;
use crate::common::ring::arrivals;
use crate::common::{Algo, OverlapConfig, Via, chunk_rows, range_of};
use crate::gemm::device::{GemmKernels, Matrix, Product, unscaled};
use crate::gemm::device::{Widened, kernel_desc};
use crate::gemm::{BOrder, GemmBackend};

/// The kernels and workspace that `prepare` makes.
pub(super) struct Prepared {
    gemm: GemmKernels,
    /// With FP8 operands: all rows of X, and W.
    widened: Option<Widened>,
    nccl: ByNccl,
}

impl Prepared {
    pub fn new(lane: &Lane, desc: &AgGemmDesc, kernel: GemmBackend) -> Result<Self> {
        let (ctx, d) = (lane.context(), desc.gemm());
        let gemm = GemmKernels::new(ctx, &kernel_desc(&d), kernel)?;
        Ok(Self { gemm, widened: Widened::of(ctx, &d)?, nccl: ByNccl::default() })
    }

    /// Collective, behind the agreement: connects NCCL, for a configuration that is of it.
    pub fn connect(&self, base: &Base, lane: &Lane, stream: &Stream) -> Result<()> {
        let (team, d) = (base.core.team(), &base.desc);
        let rows = d.shards.rows(d.m, team.size())?;
        let row = d.k * d.x.size();
        let all = lane.here().addr(base.gather.range(0, d.m * row), d.m * row)?;
        let own = all + (range_of(&rows, team.rank()).start * row) as u64;
        let ops = gather(team.rank(), &rows, (d.k, d.x.size()), (own, all));
        // SAFETY: the gather buffer of a plan of which nothing is launched yet; its heap outlives
        // this call, and all ranks agree on the description.
        unsafe { self.nccl.prepare(&base.core, stream, (d.x, &ops)) }
    }

    /// Collective: see [`GemmKernels::agree`].
    pub fn agree(&self, team: &LiveTeam) -> Result<()> {
        self.gemm.agree(team)
    }

    pub fn explain(&self) -> String {
        let nccl = self.nccl.explain().map_or(String::new(), |n| format!("\ngather: {n}"));
        self.gemm.explain() + &nccl
    }
}

/// One launch.
pub(super) struct Job<'a> {
    pub base: &'a Base,
    pub prepared: Option<&'a Prepared>,
    pub m: usize,
    pub rows: &'a [usize],
    pub tasks: &'a [AgTask],
    pub config: OverlapConfig,
}

struct Run<'a> {
    l: &'a Lanes<'a>,
    job: &'a Job<'a>,
    p: &'a Prepared,
    t: &'a AgGemmInputs,
    x: CudaMemory,
}

/// Queues one launch of tensors that were checked.
pub(super) fn launch(
    lane: &Lane,
    stream: &Stream,
    job: &Job<'_>,
    t: AgGemmInputs,
) -> Result<Pending<AgGemmInputs>> {
    let base = job.base;
    if t.scale.is_some() && !base.desc.x.is_fp8() {
        return Err(unscaled(base.desc.x));
    }
    let given = [
        ("x", Some(&t.x)),
        ("w", Some(&t.w)),
        ("bias", t.bias.as_ref()),
        ("scale", t.scale.as_ref()),
        ("aux_in", t.aux_in.as_ref()),
        ("out", Some(&t.out)),
        ("aux_out", t.aux_out.as_ref()),
        ("gathered", t.gathered.as_ref()),
    ];
    together_on(stream, &given)?;
    let outs = [Some(&t.out), t.aux_out.as_ref(), t.gathered.as_ref()];
    let outs = outs.into_iter().flatten().map(|t| Ok(Poison::value(t.cuda()?)));
    let outs = outs.collect::<Result<Vec<_>>>()?;
    let at = base.core.begin_on(stream, format_args!("m={}", job.m))?;
    // Begun, so prepared.
    let Some(prepared) = job.prepared else {
        return Err(tilewire_core::Error::internal("a prepared plan lacks its kernels"));
    };
    let nccl = job.config.via == Via::Nccl;
    // A ring signals one peer alone, message by message: its totals are not made for all at once.
    let flags = match (job.config.via, job.config.algo) {
        (Via::Nccl, _) | (_, Algo::Ring) => DATA..DATA,
        _ => DATA..DATA + job.config.sub_chunks,
    };
    let enter = Slots { signals: &base.signals, credit: CREDIT, flags };
    let x = t.x.cuda()?;
    base.core.run_on(lane, at, &enter, &outs, |l| {
        let held = (t.clone(), prepared.widened.as_ref().map(Widened::held));
        let run = Run { l, job, p: prepared, t: &t, x: x.clone() };
        holding(l.main, held, || run.queue(nccl))
    })?;
    base.core.pending(t, at)
}

impl Run<'_> {
    fn row(&self) -> usize {
        self.job.base.desc.k * self.job.base.desc.x.size()
    }

    fn me(&self) -> Rank {
        self.job.base.core.team().rank()
    }

    fn queue(&self, nccl: bool) -> Result<()> {
        if nccl {
            self.gather(&self.p.nccl)?;
        } else {
            self.copies()?;
        }
        self.widen_own()?;
        if nccl {
            // No flag says which rows have arrived: all have.
            self.widen_rows(0..self.job.m)?;
        }
        self.compute()
    }

    /// Everybody's shards by NCCL.
    fn gather(&self, nccl: &ByNccl) -> Result<()> {
        let (d, len) = (&self.job.base.desc, self.job.m * self.row());
        let all = self.l.here.addr(self.job.base.gather.range(0, len), len)?;
        let ops = gather(self.me(), self.job.rows, (d.k, d.x.size()), (self.x.addr(), all));
        hold(self.l.main, self.job.base.core.heap().clone());
        // SAFETY: X was checked against the description and is held; the gather buffer holds
        // all rows, and nobody writes it but this call: the ranks have met, and none launches
        // anything else before.
        unsafe { nccl.queue(self.l.main, d.x, &ops) }
    }

    fn lane(&self) -> Copies<'_> {
        Copies {
            rows: self.job.rows,
            chunks: self.job.config.sub_chunks,
            ring: self.ring(),
            row: self.row(),
            gather: &self.job.base.gather,
            signals: &self.job.base.signals,
        }
    }

    /// Copy lane: pushes my shard.
    fn copies(&self) -> Result<()> {
        let l = self.l;
        let part = |bytes: std::ops::Range<usize>,
                    put: &mut dyn FnMut(&CudaMemory) -> Result<()>| {
            put(&self.x.slice(bytes.start, bytes.len())?)
        };
        self.lane().push((l.net, l.side), &l.permit, part)
    }

    fn ring(&self) -> bool {
        self.job.config.algo == Algo::Ring
    }

    /// Compute lane: the task table.
    fn compute(&self) -> Result<()> {
        let (l, main, me) = (self.l, self.l.main, self.me());
        let own = range_of(self.job.rows, me);
        let puts = self.job.config.via == Via::Puts;
        if puts && self.job.config.algo == Algo::Sequential && self.x.len_bytes() > 0 {
            // One product over all rows: mine must lie among the others'.
            let at = self.job.base.gather.range(own.start * self.row(), self.x.len_bytes());
            l.net.put(main, &l.permit, (me, at), &self.x, "own rows")?;
        }
        let mut ring = arrivals(me, self.job.rows, self.job.config.sub_chunks);
        for task in self.job.tasks {
            match task {
                AgTask::Wait { src, chunk } => {
                    match ring.next() {
                        Some(a) if self.ring() => {
                            // The caller's stream goes on behind it, and multiplies it while it
                            // is passed on.
                            self.lane().take((l.net, l.side), &l.permit, &a, || l.join())?;
                        }
                        _ => {
                            l.net.wait(main, *src, self.lane().slot(*chunk), 1, "chunk")?;
                        }
                    }
                    self.widen(*src, *chunk)?;
                }
                AgTask::Tile { rows, cols } => self.tile(rows, cols)?,
            }
        }
        self.keep_gathered()
    }

    /// With FP8: my own rows and W, as f32.
    fn widen_own(&self) -> Result<()> {
        let (Some(w), d) = (&self.p.widened, &self.job.base.desc) else { return Ok(()) };
        let own = range_of(self.job.rows, self.me());
        let w_shape = match d.w_order {
            BOrder::Nk => (d.n, d.k),
            BOrder::Kn => (d.k, d.n),
        };
        let (weight, scale) = (addr(&self.t.w)?, addr(self.t.scale.as_ref())?);
        // SAFETY: the tensors were checked against the description that the workspace was made for,
        // and all is held.
        unsafe {
            w.b.rows(self.l.main, (weight, scale), 0, w_shape)?;
            w.a.rows(self.l.main, (self.x.addr(), 0), own.start, (own.len(), d.k))
        }
    }

    /// With FP8: a chunk that has arrived, as f32.
    fn widen(&self, src: Rank, chunk: usize) -> Result<()> {
        self.widen_rows(chunk_rows(self.job.rows, src, chunk, self.job.config.sub_chunks))
    }

    /// The same of rows of the gather buffer that have arrived.
    fn widen_rows(&self, rows: std::ops::Range<usize>) -> Result<()> {
        let (Some(w), k) = (&self.p.widened, self.job.base.desc.k) else { return Ok(()) };
        let at = self.job.base.gather.range(rows.start * k, rows.len() * k);
        let codes = self.l.here.addr(at, rows.len() * k)?;
        // SAFETY: rows of the gather buffer, waited for; the workspace has all rows, and is held.
        unsafe { w.a.rows(self.l.main, (codes, 0), rows.start, (rows.len(), k)) }
    }

    /// Address of global rows of X, and of W, as the kernel reads them, with the bytes of an
    /// element.
    fn operands(&self, rows: &std::ops::Range<usize>) -> Result<(u64, u64, usize)> {
        let (d, row) = (&self.job.base.desc, self.row());
        if let Some(w) = &self.p.widened {
            let size = DType::F32.size();
            return Ok((w.a.addr() + (rows.start * d.k * size) as u64, w.b.addr(), size));
        }
        let own = range_of(self.job.rows, self.me());
        let mine = rows.start >= own.start && rows.end <= own.end;
        let a = if mine {
            self.x.addr() + ((rows.start - own.start) * row) as u64
        } else {
            let at = self.job.base.gather.range(rows.start * row, rows.len() * row);
            self.l.here.addr(at, rows.len() * row)?
        };
        Ok((a, addr(&self.t.w)?, d.w.size()))
    }

    /// Product of global rows with columns of W.
    fn tile(&self, rows: &std::ops::Range<usize>, cols: &std::ops::Range<usize>) -> Result<()> {
        let (d, t) = (&self.job.base.desc, self.t);
        let (a, w, w_size) = self.operands(rows)?;
        let at = |base: u64, elems: usize, size: usize| {
            if base == 0 { 0 } else { base + (elems * size) as u64 }
        };
        let (b_first, ldb) = match d.w_order {
            BOrder::Nk => (cols.start * d.k, d.k),
            BOrder::Kn => (cols.start, d.n),
        };
        // Activations that pair columns have tiles over all columns.
        let act = d.epilogue.activation;
        let (out_cols, aux_cols) = (act.out_cols(d.n), act.aux_cols(d.n));
        let aux = addr(t.aux_in.as_ref().or(t.aux_out.as_ref()))?;
        let elems = |width: usize| rows.start * width + cols.start;
        let product = Product {
            shape: (rows.len(), cols.len(), d.k),
            a: Matrix::new(a, d.k),
            b: Matrix::new(at(w, b_first, w_size), ldb),
            d: Matrix::new(at(addr(&t.out)?, elems(out_cols), d.out.size()), out_cols),
            bias: Bias::of(t.bias.as_ref())?.at_col(cols.start),
            aux: Matrix::new(at(aux, elems(aux_cols), d.out.size()), aux_cols),
            accumulate: false,
        };
        // SAFETY: the tensors were checked against the description that the kernel was made for and
        // are held; the rows of the gather buffer were waited for
        // (`each_tile_once_after_its_chunk`), and get no credit to be written again before the next
        // launch.
        unsafe { self.p.gemm.launch(self.l.main, &product) }
    }

    /// Copies X of all ranks to the output that asks for it.
    fn keep_gathered(&self) -> Result<()> {
        let Some(g) = &self.t.gathered else { return Ok(()) };
        let (g, row, me) = (g.cuda()?, self.row(), self.me());
        let own = range_of(self.job.rows, me);
        for part in [0..own.start, own.end..self.job.m] {
            let mut out = g.slice(part.start * row, part.len() * row)?;
            if out.len_bytes() > 0 {
                let at = self.job.base.gather.range(part.start * row, out.len_bytes());
                // SAFETY: all chunks were waited for, and their writers get no credit before the
                // next launch.
                unsafe { self.l.net.get(self.l.main, (me, at), &mut out, "gathered")? };
            }
        }
        self.l.main.copy_memory(&g.slice(own.start * row, own.len() * row)?, &self.x)
    }
}
