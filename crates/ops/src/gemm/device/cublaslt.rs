//! GEMM on CUDA devices by cuBLASLt.
//!
//! `prepare` asks for an algorithm for some numbers of rows and runs each once, so that a launch
//! loads nothing: its rows take the algorithm of the next larger of those numbers. The library's
//! first answer is taken, not the fastest of some by the clock: the choice depends on the shape
//! and the library only, so it is the same in every process and the bits are.

use std::sync::{Arc, Mutex, PoisonError};

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::Queue;
use tilewire_device::cuda::{
    CublasLt, CudaContext, CudaEvent, CudaMemory, CudaStream, LtAlgo, LtDesc, LtProduct,
};

use super::product::Product;
use crate::common::cuda::workspace;
use crate::gemm::backend::ALIGN_BYTES;
use crate::gemm::{AOrder, BOrder, GemmDesc};

/// The most workspace that an algorithm may take; what the library's own documentation advises for
/// Hopper.
const MAX_WORKSPACE_BYTES: usize = 32 << 20;
/// Fewer rows take the algorithm for so many.
const LEAST_ROWS: usize = 16;
/// Rows of the run that loads an algorithm's kernels.
const WARM_ROWS: usize = 128;

/// The algorithms of one description on one device.
pub(super) struct Lt {
    lib: Arc<CublasLt>,
    desc: LtDesc,
    /// By rows, ascending.
    algos: Vec<(usize, LtAlgo)>,
    workspace: Option<Workspace>,
}

/// Workspace for sums of parts of a contraction. One launch uses it at a time: each waits for the
/// event that the last has recorded. In a capture there is no such wait: graphs of one plan must be
/// ordered by whoever replays them.
struct Workspace {
    memory: CudaMemory,
    last: Mutex<CudaEvent>,
}

/// The numbers of rows that get an algorithm: powers of two, and what is needed for `m`.
pub(super) fn row_counts(m: usize) -> Vec<usize> {
    let mut rows: Vec<usize> =
        (0..).map(|i| LEAST_ROWS << i).take_while(|&r| r < m && r < 1 << 30).collect();
    // A multiple of the least, because with A as [k, m] the rows are a stride.
    rows.push(m.next_multiple_of(LEAST_ROWS));
    rows
}

impl Lt {
    /// # Errors
    /// `Unavailable` without the library; `Unsupported` if it has no algorithm; what it reports.
    pub fn new(ctx: &CudaContext, d: &GemmDesc) -> Result<Self> {
        let lib = CublasLt::on(ctx)?;
        let desc = LtDesc {
            n: d.n,
            k: d.k,
            dtype: d.a,
            out: d.out,
            a_turned: d.a_order == AOrder::Km,
            b_turned: d.b_order == BOrder::Kn,
            bias: d.epilogue.bias,
        };
        let mut algos = Vec::new();
        for m in row_counts(d.m) {
            let limits = (ALIGN_BYTES as u32, MAX_WORKSPACE_BYTES);
            let found = lib.algos(&desc, &shape(&desc, m), limits, 1)?;
            let Some(first) = found.first() else {
                let text = format!("cuBLASLt {} has no algorithm for {m} rows", lib.version());
                return Err(Error::new(ErrorKind::Unsupported, text));
            };
            algos.push((m, *first));
        }
        let most = algos.iter().map(|(_, a)| a.workspace_bytes).max().unwrap_or(0);
        let make = || -> Result<_> {
            let last = Mutex::new(CudaEvent::new(ctx, false)?);
            Ok(Workspace { memory: workspace(ctx, most)?, last })
        };
        let workspace = (most > 0).then(make).transpose()?;
        let me = Self { lib, desc, algos, workspace };
        me.warm(ctx)?;
        Ok(me)
    }

    /// Runs each algorithm once: the library loads a kernel when it is first launched, and a load
    /// may wait for kernels that are running, which may wait for a peer that waits for this one.
    fn warm(&self, ctx: &CudaContext) -> Result<()> {
        let (d, stream) = (&self.desc, CudaStream::new(ctx)?);
        let (a, out) = (WARM_ROWS * d.k * d.dtype.size(), WARM_ROWS * d.n * d.out.size());
        let alloc = |bytes| CudaMemory::zeroed(ctx, bytes);
        let (a, b, out) = (alloc(a)?, alloc(d.n * d.k * d.dtype.size())?, alloc(out)?);
        let bias = alloc(d.n * d.out.size())?;
        let mut seen: Vec<LtAlgo> = Vec::new();
        for (rows, algo) in &self.algos {
            if seen.contains(algo) {
                continue;
            }
            seen.push(*algo);
            let p = shape(d, WARM_ROWS.min(*rows));
            let p = LtProduct {
                a: (a.addr(), p.a.1),
                b: (b.addr(), p.b.1),
                d: (out.addr(), p.d.1),
                bias: bias.addr(),
                ..p
            };
            let memory = self.workspace.as_ref().map(|w| &w.memory);
            // SAFETY: the operands were made for this shape, with at most `WARM_ROWS` rows; all of
            // them and the workspace, which nobody else knows yet, live until the stream is done.
            let ran = unsafe { self.lib.launch(&stream, (d, &p), algo, memory) };
            match ran {
                // Made for more rows than these: then its kernels are loaded by the first launch.
                Err(e) if e.is_unsupported() => {}
                r => r?,
            }
        }
        stream.synchronize_until(None)
    }

    /// Returns what is used, equal in processes that use the same.
    pub fn text(&self) -> String {
        format!("cuBLASLt {}", self.lib.version())
    }

    /// Returns what is used, for people.
    pub fn explain(&self) -> String {
        let bytes =
            self.workspace.as_ref().map_or(0, |w| tilewire_device::Buffer::len_bytes(&w.memory));
        let found = self.lib.found();
        format!(
            "{} ({}: {}), the library's first choice for each of {} numbers of rows, workspace {bytes} \
             bytes; the portable kernel where an address or a row is no multiple of {ALIGN_BYTES} \
             bytes, or the library refuses so few rows",
            self.text(),
            found.how,
            found.path.display(),
            self.algos.len(),
        )
    }

    /// Returns why it does not make this product; none if it does.
    pub fn refuses(&self, p: &Product) -> Option<String> {
        let d = &self.desc;
        let (m, n, k) = p.shape;
        if (n, k) != (d.n, d.k) || (p.bias.addr != 0) != d.bias || p.bias.of_out || p.aux.addr != 0
        {
            return Some("it is not the product that the algorithms were chosen for".to_owned());
        }
        if self.algos.last().is_none_or(|(most, _)| m > *most) {
            return Some(format!("{m} rows are more than the algorithms were chosen for"));
        }
        let places = [("A", p.a, d.dtype), ("B", p.b, d.dtype), ("D", p.d, d.out)];
        let odd = |addr: u64| !addr.is_multiple_of(ALIGN_BYTES as u64);
        let bad = places.iter().find(|(_, x, t)| odd(x.addr) || odd((x.ld * t.size()) as u64));
        bad.map(|(name, ..)| *name).or(odd(p.bias.addr).then_some("bias")).map(|name| {
            format!("{name} or its rows do not start at multiples of {ALIGN_BYTES} bytes")
        })
    }

    /// Queues a product that is not refused.
    ///
    /// # Safety
    /// As `GemmKernels::launch`.
    ///
    /// # Errors
    /// What the library reports.
    pub unsafe fn launch(&self, stream: &CudaStream, p: &Product) -> Result<()> {
        let m = p.shape.0;
        let algo = self.algos.iter().find(|(rows, _)| *rows >= m).map(|(_, a)| a);
        let algo = algo.ok_or_else(|| {
            Error::internal("a product was launched that should have been refused")
        })?;
        let product = LtProduct {
            m,
            a: (p.a.addr, p.a.ld),
            b: (p.b.addr, p.b.ld),
            d: (p.d.addr, p.d.ld),
            bias: p.bias.addr,
            accumulate: p.accumulate,
        };
        let what = (&self.desc, &product);
        let Some(w) = self.workspace.as_ref().filter(|_| algo.workspace_bytes > 0) else {
            // SAFETY: the caller's contract; the algorithm takes no workspace.
            return unsafe { self.lib.launch(stream, what, algo, None) };
        };
        let last = w.last.lock().unwrap_or_else(PoisonError::into_inner);
        let captured = stream.is_capturing();
        if !captured {
            stream.wait(&last)?;
        }
        // SAFETY: the caller's contract; launches that use the workspace follow each other by the
        // event, replays by the rule of `Workspace`.
        unsafe { self.lib.launch(stream, what, algo, Some(&w.memory))? };
        if captured { Ok(()) } else { stream.record(&last) }
    }
}

/// A product of `m` rows without addresses, its rows one behind the other.
fn shape(d: &LtDesc, m: usize) -> LtProduct {
    LtProduct {
        m,
        a: (0, if d.a_turned { m } else { d.k }),
        b: (0, if d.b_turned { d.n } else { d.k }),
        d: (0, d.n),
        bias: 0,
        accumulate: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_rows_have_an_algorithm_for_at_least_as_many() {
        for m in [1, 15, 16, 17, 100, 128, 8192, 12345] {
            let rows = row_counts(m);
            assert!(rows.is_sorted() && rows.iter().all(|r| r.is_multiple_of(LEAST_ROWS)));
            let most = *rows.last().unwrap();
            assert!(most >= m && most < m + LEAST_ROWS, "{rows:?}");
            // Twice the rows at most, and the least.
            for want in 1..=m {
                let got = *rows.iter().find(|r| **r >= want).unwrap();
                assert!(got < 2 * want || got == LEAST_ROWS, "{want}: {got}");
            }
        }
    }
}
