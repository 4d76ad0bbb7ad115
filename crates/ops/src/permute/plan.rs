//! The plan of a permutation.

use tilewire_core::{DType, Error, Result};
use tilewire_device::cuda::CudaStream;
use tilewire_device::{Node, Pending, Stream, Tensor};

use super::desc::together;
use super::launch::UnpermuteGrads;
use super::{PermuteDesc, PermuteMap, PermuteMemory, Permuted, Tokens, device, host};
use crate::common::cuda::{Ready, together_on};
use crate::common::{Named, apart, expect_tensor};

/// A permutation of tokens. Local: no team.
pub struct PermutePlan {
    desc: PermuteDesc,
    ready: Ready<device::Prepared>,
}

impl PermutePlan {
    /// Returns what a permutation takes.
    pub fn memory(desc: &PermuteDesc) -> PermuteMemory {
        let row = desc.hidden * desc.dtype.size() + 4 * desc.num_scales + 4;
        PermuteMemory {
            map: 4 * (desc.max_tokens * desc.top_k + desc.capacity) + 8 * desc.num_experts + 20,
            permuted: desc.capacity * row,
        }
    }

    /// A plan for at most `desc.max_tokens` tokens.
    ///
    /// # Errors
    /// As [`PermuteDesc::check`].
    pub fn new(desc: PermuteDesc) -> Result<Self> {
        desc.check()?;
        Ok(Self { desc, ready: Ready::new() })
    }

    /// Returns the description.
    pub fn desc(&self) -> &PermuteDesc {
        &self.desc
    }

    /// Makes what launches on streams of the device of `stream` need: nothing on the host, kernels
    /// on a CUDA device.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Unavailable` without a compiler.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let make = |ctx: &_| device::Prepared::new(ctx, &self.desc);
        self.ready.prepare(stream, make).map_err(|e| e.op("permute"))
    }

    /// In words, what it takes and does.
    pub fn explain(&self) -> String {
        let m = Self::memory(&self.desc);
        format!("permute {}\nlocal; map {} bytes, permuted {}", self.desc, m.map, m.permuted)
    }

    /// A map for one batch of `tokens` tokens, on the device that the plan is prepared for; before
    /// that, in the CPU's memory.
    ///
    /// # Errors
    /// `InvalidArgument` for more tokens than the plan's; `Exhausted` if the device has not enough
    /// memory.
    pub fn map(&self, tokens: usize) -> Result<PermuteMap> {
        PermuteMap::new(&self.desc, tokens, self.ready.cuda().map(|(ctx, _)| ctx))
    }

    /// Queues one work, of which each device has its form. `tensors` must lie on that of `stream`.
    fn queue<T>(
        &self,
        stream: &Stream,
        op: &'static str,
        tensors: &[Named<'_>],
        (out, cuda): (T, impl FnOnce(&device::Prepared, &CudaStream) -> Result<()>),
        run: impl Fn(&PermuteDesc) -> Result<()> + Send + Sync + 'static,
    ) -> Result<Pending<T>> {
        let ready = self.ready.on(stream).map_err(|e| e.op(op))?;
        together_on(stream, tensors).map_err(|e| e.op(op))?;
        if let Some((s, p)) = ready {
            return s.in_launch(|| {
                let _span = s.span(op);
                cuda(p, s).map_err(|e| e.op(op))?;
                Pending::new(out, stream, None)
            });
        }
        let desc = self.desc;
        stream.launch(Node::new(op, move || run(&desc)))?;
        Pending::new(out, stream, None)
    }

    /// Queues the routing of `topk_idx` (`[map.tokens(), top_k]` i32 or i64, -1 = masked).
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for a wrong tensor. An index that is no expert is found
    /// when the work runs: see [`PermuteMap::check`].
    pub fn route(
        &self,
        stream: &Stream,
        topk_idx: &Tensor,
        map: &PermuteMap,
    ) -> Result<Pending<PermuteMap>> {
        let op = |e: Error| e.op("permute_route");
        map.check_desc(&self.desc).map_err(op)?;
        let dtype = if topk_idx.dtype() == DType::I32 { DType::I32 } else { DType::I64 };
        let shape = [map.tokens(), self.desc.top_k];
        expect_tensor("topk_idx", topk_idx, dtype, &shape)
            .map_err(|e| op(e.hint("`topk_idx` is i32 or i64")))?;
        let (idx, m) = (topk_idx.clone(), map.clone());
        let tensors = [map.named(), ("topk_idx", Some(topk_idx))];
        let cuda = |p: &device::Prepared, s: &_| p.route(s, &self.desc, (topk_idx, map));
        let out = (map.clone(), cuda);
        self.queue(stream, "permute_route", &tensors, out, move |d| host::route(d, &idx, &m))
    }

    /// Queues `out.x[slot(t, j)] = t.x[t]`, and the same for weights and scales.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for tensors that do not fit, or results that overlap what
    /// is read.
    pub fn permute(
        &self,
        stream: &Stream,
        map: &PermuteMap,
        t: &Tokens,
        out: &Permuted,
    ) -> Result<Pending<Permuted>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            map.check_desc(d)?;
            t.check(d, d.dtype, map.tokens())?;
            out.check(d, d.dtype)?;
            together("weights", t.weights.is_some(), out.weights.is_some())?;
            together("scales", t.scales.is_some(), out.scales.is_some())?;
            together("scales", t.scales.is_some(), d.num_scales > 0)?;
            apart(&out.named(), &t.named())
        };
        check().map_err(|e| e.op("permute"))?;
        let tensors = [&[map.named()][..], &t.named(), &out.named()].concat();
        let cuda = |p: &device::Prepared, s: &_| p.permute(s, d, map, (t, out));
        let (m, t, o, both) = (map.clone(), t.clone(), out.clone(), (out.clone(), cuda));
        self.queue(stream, "permute", &tensors, both, move |d| host::permute(d, &m, &t, &o))
    }

    /// Queues `out[t] = sum_j w[t, j] rows[slot(t, j)]`: `rows` is `[capacity, hidden]`,
    /// `topk_weights` `[tokens, top_k]` f32 (1 if not given), `out` `[tokens, hidden]`.
    ///
    /// # Errors
    /// As [`PermutePlan::permute`].
    pub fn unpermute(
        &self,
        stream: &Stream,
        map: &PermuteMap,
        (rows, topk_weights): (&Tensor, Option<&Tensor>),
        out: &Tensor,
    ) -> Result<Pending<Tensor>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            map.check_desc(d)?;
            expect_tensor("rows", rows, d.out, &[d.capacity, d.hidden])?;
            if let Some(w) = topk_weights {
                expect_tensor("topk_weights", w, DType::F32, &[map.tokens(), d.top_k])?;
            }
            expect_tensor("out", out, d.out, &[map.tokens(), d.hidden])?;
            apart(&[("out", Some(out))], &[("rows", Some(rows)), ("topk_weights", topk_weights)])
        };
        check().map_err(|e| e.op("unpermute"))?;
        let tensors =
            [map.named(), ("rows", Some(rows)), ("topk_weights", topk_weights), ("out", Some(out))];
        let cuda = |p: &device::Prepared, s: &_| p.unpermute(s, d, map, (rows, topk_weights, out));
        let (m, r, w, o) = (map.clone(), rows.clone(), topk_weights.cloned(), out.clone());
        self.queue(stream, "unpermute", &tensors, (out.clone(), cuda), move |d| {
            host::unpermute(d, &m, (&r, w.as_ref()), &o)
        })
    }

    /// Queues the backward of permute: `g` holds the gradients of the permuted tokens (type `out`)
    /// and weights, `out` receives those of the tokens and `topk_weights`. Scales have none.
    ///
    /// # Errors
    /// As [`PermutePlan::permute`].
    pub fn permute_bwd(
        &self,
        stream: &Stream,
        map: &PermuteMap,
        g: &Permuted,
        out: &Tokens,
    ) -> Result<Pending<Tokens>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            map.check_desc(d)?;
            g.check(d, d.out)?;
            out.check(d, d.out, map.tokens())?;
            together("weights", g.weights.is_some(), out.weights.is_some())?;
            if g.scales.is_some() || out.scales.is_some() {
                return Err(Error::invalid("scales have no gradient"));
            }
            apart(&out.named(), &g.named())
        };
        check().map_err(|e| e.op("permute_bwd"))?;
        let tensors = [&[map.named()][..], &g.named(), &out.named()].concat();
        let cuda = |p: &device::Prepared, s: &_| p.permute_bwd(s, d, map, (g, out));
        let (m, g, o, both) = (map.clone(), g.clone(), out.clone(), (out.clone(), cuda));
        self.queue(stream, "permute_bwd", &tensors, both, move |d| host::permute_bwd(d, &m, &g, &o))
    }

    /// Queues the backward of unpermute: `d_rows[slot(t, j)] = w[t, j] d_out[t]` and, with weights,
    /// `d_weights[t, j] = <d_out[t], rows[slot(t, j)]>`.
    ///
    /// # Errors
    /// As [`PermutePlan::permute`].
    pub fn unpermute_bwd(
        &self,
        stream: &Stream,
        map: &PermuteMap,
        g: &UnpermuteGrads,
    ) -> Result<Pending<UnpermuteGrads>> {
        let d = &self.desc;
        let check = || -> Result<()> {
            map.check_desc(d)?;
            let (rows, choices) = ([d.capacity, d.hidden], [map.tokens(), d.top_k]);
            expect_tensor("d_out", &g.d_out, d.out, &[map.tokens(), d.hidden])?;
            expect_tensor("d_rows", &g.d_rows, d.out, &rows)?;
            let Some(w) = &g.weighted else {
                return apart(&[("d_rows", Some(&g.d_rows))], &[("d_out", Some(&g.d_out))]);
            };
            expect_tensor("weights", &w.weights, DType::F32, &choices)?;
            expect_tensor("rows", &w.rows, d.out, &rows)?;
            expect_tensor("d_weights", &w.d_weights, DType::F32, &choices)?;
            let outs = [("d_rows", Some(&g.d_rows)), ("d_weights", Some(&w.d_weights))];
            let ins = [("d_out", &g.d_out), ("weights", &w.weights), ("rows", &w.rows)];
            apart(&outs, &ins.map(|(what, t)| (what, Some(t))))
        };
        check().map_err(|e| e.op("unpermute_bwd"))?;
        let w = g.weighted.as_ref();
        let tensors = [
            map.named(),
            ("d_out", Some(&g.d_out)),
            ("d_rows", Some(&g.d_rows)),
            ("weights", w.map(|w| &w.weights)),
            ("rows", w.map(|w| &w.rows)),
            ("d_weights", w.map(|w| &w.d_weights)),
        ];
        let cuda = |p: &device::Prepared, s: &_| p.unpermute_bwd(s, d, map, g);
        let (m, t, both) = (map.clone(), g.clone(), (g.clone(), cuda));
        self.queue(stream, "unpermute_bwd", &tensors, both, move |d| host::unpermute_bwd(d, &m, &t))
    }
}
