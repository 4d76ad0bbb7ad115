//! The results of `prepare` on a device: kernels and private memory.

use tilewire_core::{DType, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory, device_count};
use tilewire_device::{Stream, Tensor};

use super::fp8::Fp8;
use super::nccl::Exchange;
use crate::attention::device::{Gated, Merge, Needs, Prepared as Attention, aligned, kernel_desc};
use crate::attention::{AttentionDesc, AttnBackend, AttnInputs};
use crate::common::PlanCore;
use crate::common::cuda::{no_kernel, workspace};
use crate::common::lanes::Lane;
use crate::common::reduce::Reducer;
use crate::cp_attention::config::{CpConfig, KeyOrder, Strategy};
use crate::cp_attention::desc::CpAttentionDesc;
use crate::cp_attention::launch::Work;
use crate::cp_attention::pieces::Sizes;
use crate::cp_attention::schedule::most_segments;

/// Returns whether `prepare` may choose the strategy on devices. Each device is one hop away from
/// every other, so a ring sends the same bytes over fewer links. It is used only if the caller asks
/// for it.
pub(in crate::cp_attention) fn may_choose(s: Strategy) -> bool {
    s != Strategy::Ring
}

/// Private memory of a plan. Empty where a strategy has no use for it.
pub(super) struct Memory {
    /// Tensors of queries of my group.
    pub q: Vec<CudaMemory>,
    /// Tensors of keys of all ranks.
    pub keys: Vec<CudaMemory>,
    pub d_out: CudaMemory,
    pub lse: CudaMemory,
    pub delta: CudaMemory,
    /// Parts of dk and dv of my rows.
    pub slots: CudaMemory,
    /// Results over my own keys and over the other ranks' keys, and their lse.
    pub outs: CudaMemory,
    pub lses: CudaMemory,
}

impl Memory {
    fn new(ctx: &CudaContext, s: &Sizes, (backward, merges): (bool, bool)) -> Result<Self> {
        let some = |there: bool, len: usize| workspace(ctx, if there { len } else { 0 });
        let scatters = s.inner > 1;
        let gets = s.size > 1 && (s.sequential || s.strategy != Strategy::AllGather);
        let (rows, keys) = (s.inner * s.max_q * s.hq, s.all_keys() * s.hkv);
        Ok(Self {
            q: s.q_wire.iter().map(|b| some(scatters, rows * b)).collect::<Result<_>>()?,
            keys: s.wire.iter().map(|b| some(gets, keys * b)).collect::<Result<_>>()?,
            d_out: some(scatters && backward, rows * s.dv * s.out)?,
            lse: some(scatters, rows * 4)?,
            delta: some(scatters && backward, rows * 4)?,
            slots: some(backward && s.adds(), s.num_parts() * s.slot().0)?,
            outs: some(merges, 2 * rows * s.dv * 4)?,
            lses: some(merges, 2 * rows * 4)?,
        })
    }

    pub fn all(&self) -> Vec<CudaMemory> {
        let a = [&self.d_out, &self.lse, &self.delta, &self.slots, &self.outs, &self.lses];
        a.into_iter().chain(&self.q).chain(&self.keys).cloned().collect()
    }
}

/// Checks, before a launch is on record, what the kernels cannot take of the caller's tensors:
/// those that they read or write where these are, without a copy between.
///
/// # Errors
/// `InvalidArgument` naming a tensor that does not begin at a multiple of 16 bytes.
pub(in crate::cp_attention) fn check_aligned(
    p: &Prepared,
    x: &AttnInputs,
    work: &Work,
) -> Result<()> {
    let s = &p.sizes;
    // Traded heads travel, and so do keys, but for a rank's own where it begins with these.
    let (here, alone, at_once) = (s.inner == 1, s.size == 1, s.begins_at_once());
    let own_keys = here && (at_once || alone) && p.fp8.keys.is_none();
    let own_queries = here && p.desc.dtype == x.q.data.dtype();
    let mut all =
        vec![(own_queries, "q", &x.q.data), (own_keys, "k", &x.k.data), (own_keys, "v", &x.v.data)];
    match work {
        // Results over parts of the keys are merged to any address.
        Work::Forward(o) => all.push((here && (!at_once || p.gated.is_some()), "out", &o.out)),
        Work::Backward(w) => {
            let (saved, g) = &**w;
            all.extend([(true, "out", &saved.out), (true, "d_out", &saved.d_out)]);
            all.extend([(here, "dq", &g.dq), (alone, "dk", &g.dk), (alone, "dv", &g.dv)]);
        }
    }
    let mut in_place = all.into_iter().filter(|(in_place, ..)| *in_place);
    in_place.try_for_each(|(_, what, t)| aligned(&p.desc, &[(what, t.cuda()?.addr())]))
}

/// Returns whether `prepare` may choose a forward pass whose tiles wait for their keys, as far as
/// this rank knows: there is a kernel, keys travel in their own type, no other rank of the team is
/// on my device, and the world has no more ranks than there are devices, so that no other team's
/// need be. `size` and `world`: the ranks of both.
///
/// # Errors
/// What the driver reports.
pub(in crate::cp_attention) fn may_gate(
    lane: &Lane,
    d: &CpAttentionDesc,
    (size, world): (usize, usize),
) -> Result<bool> {
    let ctx = lane.context();
    let shares = ctx.num_sms()? != lane.here().num_sms()? || world > device_count()? as usize;
    if size == 1 || d.kv_wire().1 || shares {
        return Ok(false);
    }
    Ok(Gated::lacks(ctx, &d.attn, AttnBackend::Auto, size)?.is_none())
}

/// The kernel whose forward pass waits for keys itself.
///
/// # Errors
/// `Unsupported` if there is none for `d` or `size` ranks.
fn gated(lane: &Lane, d: &AttentionDesc, (size, order): (usize, KeyOrder)) -> Result<Gated> {
    let ctx = lane.context();
    match Gated::lacks(ctx, d, AttnBackend::Hopper, size)? {
        Some(why) => Err(no_kernel(
            format!("attention that waits for keys where it meets them ({why})"),
            "there is one on sm_90a, bf16 or f16; without gates every plan has kernels",
        )),
        None => {
            // Its blocks hold their multiprocessors until keys have come. One stays free, so that
            // what other streams queue goes on: an `enter` that a peer waits for, kernels that
            // make what its copies send, and copies between ranks of one device.
            let free = u32::from(size > 1);
            let num = lane.here().num_sms()?.saturating_sub(free).max(1);
            Gated::new(ctx, d, (num, order == KeyOrder::Canonical))
        }
    }
}

/// The kernels and memory that `prepare` makes.
pub(in crate::cp_attention) struct Prepared {
    pub(super) attention: Attention,
    /// The description that its kernels are compiled for: of a wider type where keys travel as FP8.
    pub(super) desc: AttentionDesc,
    pub(super) fp8: Fp8,
    pub config: CpConfig,
    pub sizes: Sizes,
    pub(super) memory: Memory,
    /// The kernel of the forward pass that waits for keys itself.
    pub(super) gated: Option<Gated>,
    /// Adds parts of dk and dv.
    pub(super) sum: Option<Reducer>,
    /// Merges results over parts of the keys.
    pub(super) merge: Option<Merge>,
    pub(super) nccl: Option<Exchange>,
}

impl Prepared {
    pub fn new(
        lane: &Lane,
        d: &CpAttentionDesc,
        (config, nccl): (CpConfig, bool),
        size: usize,
    ) -> Result<Self> {
        let (ctx, mut sizes) = (lane.context(), Sizes::new(d, config.strategy, size));
        sizes.sequential = nccl;
        let dkv = if sizes.adds() { DType::F32 } else { d.attn.out };
        let split = sizes.begins_at_once();
        let queries = sizes.max_q * d.attn.heads_q;
        let out = if split { DType::F32 } else { d.attn.out };
        let pieces = most_segments(d.layout, size, sizes.inner);
        let needs = Needs { queries, pieces, dkv, out };
        let desc = if d.kv_wire().1 { kernel_desc(&d.attn) } else { d.attn.clone() };
        let attention = Attention::sized(ctx, &desc, &needs, AttnBackend::Auto)?;
        let adds = d.backward && sizes.adds();
        let types = [DType::F32, DType::F32, d.attn.out];
        let sum = adds.then(|| Reducer::new(ctx, types)).transpose()?;
        // One rank has no merge, but tiles of its own.
        let gates = config.gated && (split || config.order == KeyOrder::Canonical);
        if gates && d.kv_wire().1 {
            return Err(no_kernel(
                "attention that waits for keys that travel as FP8 where it meets them",
                "leave `gated` off, or send keys in their own type",
            ));
        }
        let gated = gates.then(|| gated(lane, &desc, (size, config.order))).transpose()?;
        let merges = split && gated.is_none();
        let merge = merges.then(|| Merge::new(ctx, &d.attn)).transpose()?;
        let memory = Memory::new(ctx, &sizes, (d.backward, merges))?;
        let fp8 = Fp8::new(ctx, d, &sizes)?;
        let nccl = nccl.then(|| Exchange::new(ctx, &sizes, d.backward)).transpose()?;
        Ok(Self { attention, desc, fp8, config, sizes, memory, gated, sum, merge, nccl })
    }

    /// Collective, behind the agreement: NCCL, if rows go through it.
    pub fn connect(&self, core: &PlanCore, stream: &Stream) -> Result<()> {
        self.nccl.as_ref().map_or(Ok(()), |n| n.connect(core, stream))
    }

    /// Returns `[1]` i32, not 0 if offsets of any launch cannot be used.
    pub fn status(&self) -> &Tensor {
        self.attention.status()
    }

    /// Returns whether rows go through NCCL.
    pub fn by_nccl(&self) -> bool {
        self.nccl.is_some()
    }

    pub fn explain(&self) -> Option<String> {
        let by_nccl = self.nccl.as_ref().and_then(Exchange::explain);
        by_nccl.map(str::to_owned).or_else(|| self.gated.as_ref().map(Gated::name))
    }
}
