//! The kernels of a permutation, and what queues them.

use tilewire_core::{DType, Result};
use tilewire_device::Tensor;
use tilewire_device::cuda::{CudaContext, CudaStream, Grid, Kernel, LaunchArgs};
use tilewire_kernels::abi::TwRoute;
use tilewire_kernels::portable::{PERMUTE, PERMUTE_THREADS, permute_defines};

use super::scratch::chunks;
use crate::common::cuda::{addr, fit_32_bits, hold, load, mantissa};
use crate::permute::{PermuteDesc, PermuteMap, Permuted, Tokens, UnpermuteGrads};

const THREADS: usize = PERMUTE_THREADS as usize;

/// The kernels of a plan.
pub(crate) struct Prepared {
    count: Kernel,
    scan: Kernel,
    place: Kernel,
    permute: Kernel,
    words: Kernel,
    unpermute: Kernel,
    unpermute_bwd: Kernel,
    bwd_weights: Kernel,
}

/// Addresses of what tells rows from tokens: a map's slots or sources, and its status.
#[derive(Clone, Copy)]
struct Places {
    of: u64,
    status: u64,
    num: usize,
}

fn slots(map: &PermuteMap) -> Result<Places> {
    let (t, status) = (map.slots(), addr(map.status())?);
    Ok(Places { of: addr(t)?, status, num: t.shape().num_elems() })
}

fn sources(map: &PermuteMap) -> Result<Places> {
    let (t, status) = (map.sources(), addr(map.status())?);
    Ok(Places { of: addr(t)?, status, num: t.shape().num_elems() })
}

impl Prepared {
    pub fn new(ctx: &CudaContext, d: &PermuteDesc) -> Result<Self> {
        fit_32_bits("permutation", &[d.hidden, d.num_experts, d.align, d.capacity])?;
        let module = load(ctx, &PERMUTE, permute_defines(mantissa(d.out)))?;
        Ok(Self {
            count: module.kernel("tw_route_count")?,
            scan: module.kernel("tw_route_scan")?,
            place: module.kernel("tw_route_place")?,
            permute: module.kernel("tw_permute")?,
            words: module.kernel("tw_permute_words")?,
            unpermute: module.kernel("tw_unpermute")?,
            unpermute_bwd: module.kernel("tw_unpermute_bwd")?,
            bwd_weights: module.kernel("tw_unpermute_bwd_weights")?,
        })
    }

    pub fn route(
        &self,
        stream: &CudaStream,
        d: &PermuteDesc,
        (idx, map): (&Tensor, &PermuteMap),
    ) -> Result<()> {
        let scratch = map.scratch()?;
        let choices = map.tokens() * d.top_k;
        let p = TwRoute {
            idx: addr(idx)?,
            counts: scratch.counts.addr(),
            first: scratch.first.addr(),
            slots: addr(map.slots())?,
            sources: addr(map.sources())?,
            m_splits: addr(map.m_splits())?,
            total: addr(map.total())?,
            dropped: addr(map.dropped())?,
            status: addr(map.status())?,
            choices: choices as u32,
            experts: d.num_experts as u32,
            capacity: d.capacity as u32,
            align: d.align as u32,
            wide: u32::from(idx.dtype() == DType::I64),
            chunks: chunks(choices) as u32,
        };
        hold(stream, (idx.clone(), map.clone()));
        let blocks = p.chunks as usize;
        for (kernel, blocks) in [(&self.count, blocks), (&self.scan, 1), (&self.place, blocks)] {
            // SAFETY: all three take a `TwRoute`; the indices were checked, the map and its
            // scratch were made for this description and number of tokens, and both are held.
            unsafe { kernel.launch(stream, grid(blocks), LaunchArgs::new().arg(&p))? };
        }
        Ok(())
    }

    /// `out[r] = x[from[r] / per_token]` for rows of `row_bytes`.
    fn rows(
        &self,
        stream: &CudaStream,
        from: Places,
        top_k: usize,
        (x, out): (&Tensor, &Tensor),
        row_bytes: usize,
    ) -> Result<()> {
        if from.num == 0 || row_bytes == 0 {
            return Ok(());
        }
        let (x, out, k, len) = (addr(x)?, addr(out)?, top_k as u32, row_bytes as u64);
        let args = LaunchArgs::new().arg(&from.of).arg(&from.status).arg(&k);
        let args = args.arg(&x).arg(&out).arg(&len);
        // SAFETY: `tw_permute` takes (const int*, const int*, u32, const u8*, u8*, u64); the
        // tensors have a row for each token and for each place, and the caller holds them.
        unsafe { self.permute.launch(stream, grid(from.num), args) }
    }

    /// `out[i] = x[from[i]]`, words of f32.
    fn words(&self, stream: &CudaStream, from: Places, (x, out): (&Tensor, &Tensor)) -> Result<()> {
        if from.num == 0 {
            return Ok(());
        }
        let (x, out, num) = (addr(x)?, addr(out)?, from.num as u32);
        let args = LaunchArgs::new().arg(&from.of).arg(&from.status).arg(&num).arg(&x).arg(&out);
        // SAFETY: `tw_permute_words` takes (const int*, const int*, u32, const u32*, u32*); `out`
        // has `num` elements, every place is one of `x`, and the caller holds them.
        unsafe { self.words.launch(stream, grid(from.num.div_ceil(THREADS)), args) }
    }

    pub fn permute(
        &self,
        stream: &CudaStream,
        d: &PermuteDesc,
        map: &PermuteMap,
        (t, out): (&Tokens, &Permuted),
    ) -> Result<()> {
        hold(stream, (map.clone(), t.clone(), out.clone()));
        let from = sources(map)?;
        let row_bytes = d.hidden * d.dtype.size();
        self.rows(stream, from, d.top_k, (&t.x, &out.x), row_bytes)?;
        if let (Some(w), Some(o)) = (&t.weights, &out.weights) {
            self.words(stream, from, (w, o))?;
        }
        if let (Some(s), Some(o)) = (&t.scales, &out.scales) {
            self.rows(stream, from, d.top_k, (s, o), 4 * d.num_scales)?;
        }
        Ok(())
    }

    pub fn unpermute(
        &self,
        stream: &CudaStream,
        d: &PermuteDesc,
        map: &PermuteMap,
        (rows, weights, out): (&Tensor, Option<&Tensor>, &Tensor),
    ) -> Result<()> {
        hold(stream, (map.clone(), rows.clone(), weights.cloned(), out.clone()));
        if map.tokens() == 0 || d.hidden == 0 {
            return Ok(());
        }
        let (from, k, h) = (slots(map)?, d.top_k as u32, d.hidden as u32);
        let (rows, weights, out) = (addr(rows)?, addr(weights)?, addr(out)?);
        let args = LaunchArgs::new().arg(&from.of).arg(&from.status).arg(&k);
        let args = args.arg(&rows).arg(&weights).arg(&out).arg(&h);
        // SAFETY: `tw_unpermute` takes (const int*, const int*, u32, const Bits*, const float*,
        // Bits*, u32), weights null for none; the tensors were checked, and are held.
        unsafe { self.unpermute.launch(stream, grid(map.tokens()), args) }
    }

    pub fn permute_bwd(
        &self,
        stream: &CudaStream,
        d: &PermuteDesc,
        map: &PermuteMap,
        (g, out): (&Permuted, &Tokens),
    ) -> Result<()> {
        self.unpermute(stream, d, map, (&g.x, None, &out.x))?;
        let (Some(g), Some(o)) = (&g.weights, &out.weights) else { return Ok(()) };
        hold(stream, (g.clone(), o.clone()));
        self.words(stream, slots(map)?, (g, o))
    }

    pub fn unpermute_bwd(
        &self,
        stream: &CudaStream,
        d: &PermuteDesc,
        map: &PermuteMap,
        g: &UnpermuteGrads,
    ) -> Result<()> {
        hold(stream, (map.clone(), g.clone()));
        let (k, h, d_out) = (d.top_k as u32, d.hidden as u32, addr(&g.d_out)?);
        let weights = addr(g.weighted.as_ref().map(|w| &w.weights))?;
        let (from, d_rows) = (sources(map)?, addr(&g.d_rows)?);
        if from.num > 0 && d.hidden > 0 {
            let args = LaunchArgs::new().arg(&from.of).arg(&from.status).arg(&k);
            let args = args.arg(&d_out).arg(&weights).arg(&d_rows).arg(&h);
            // SAFETY: `tw_unpermute_bwd` takes (const int*, const int*, u32, const Bits*, const
            // float*, Bits*, u32), weights null for none; the tensors were checked, and are held.
            unsafe { self.unpermute_bwd.launch(stream, grid(from.num), args)? };
        }
        let (from, Some(w)) = (slots(map)?, &g.weighted) else { return Ok(()) };
        if from.num == 0 {
            return Ok(());
        }
        let (num, rows, d_weights) = (from.num as u32, addr(&w.rows)?, addr(&w.d_weights)?);
        let args = LaunchArgs::new().arg(&from.of).arg(&from.status).arg(&k).arg(&num);
        let args = args.arg(&d_out).arg(&rows).arg(&d_weights).arg(&h);
        let blocks = from.num.div_ceil(THREADS / 32);
        // SAFETY: `tw_unpermute_bwd_weights` takes (const int*, const int*, u32, u32, const Bits*,
        // const Bits*, float*, u32), a warp for each choice; checked and held as above.
        unsafe { self.bwd_weights.launch(stream, grid(blocks), args) }
    }
}

fn grid(blocks: usize) -> Grid {
    Grid::new(blocks as u32, PERMUTE_THREADS as u32)
}
