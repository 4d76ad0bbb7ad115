//! FP8 on devices: keys, values and queries that travel as e4m3 with a scale for each (row, head),
//! and parts of dk and dv that travel as FP8. Codes are widened where they are used, a rank's own
//! too ([`AttentionDesc::widened`](crate::attention::AttentionDesc::widened)).

use tilewire_core::{DType, Result};
use tilewire_device::cuda::{CudaContext, CudaMemory};

use crate::attention::device::Wide;
use crate::common::cuda::{no_kernel, workspace};
use crate::common::reduce::Reducer;
use crate::cp_attention::desc::CpAttentionDesc;
use crate::cp_attention::pieces::{Sizes, place};
use crate::quant::device::{Narrow, Widen};

/// Refuses heads that no kernel quantises.
///
/// # Errors
/// `Unsupported`, with an alternative as its hint.
pub(in crate::cp_attention) fn check(d: &CpAttentionDesc) -> Result<()> {
    let narrows = d.fp8_kv && !d.attn.dtype.is_fp8() || d.dkv_wire.is_fp8();
    let dim = d.attn.dqk.max(d.attn.dv);
    if narrows && dim > Narrow::MOST_COLS {
        return Err(no_kernel(
            format!("keys, values or their gradients in FP8 with heads of {dim}"),
            "heads of at most 128 are quantised; leave `fp8_kv` off and `dkv_wire` at f32",
        ));
    }
    Ok(())
}

/// Kernels and workspace of a plan.
pub(super) struct Fp8 {
    pub keys: Option<Keys>,
    pub parts: Option<Parts>,
}

/// Keys that travel as e4m3.
pub(super) struct Keys {
    /// Values of my heads: of the queries of my group, if they change, and of the keys of all
    /// ranks.
    pub wide: Wide,
    /// Wider inputs are quantised: the kernel, then codes and scales of my keys as they travel.
    pub narrow: Option<(Narrow, Vec<CudaMemory>)>,
    /// 16-bit queries to f32, if the kernels take that.
    pub convert: Option<Reducer>,
}

/// Parts of dk and dv that travel as FP8.
pub(super) struct Parts {
    pub narrow: Narrow,
    pub widen: Widen,
    /// dk, then dv, of the keys of all ranks, as the kernels make them: f32.
    pub raw: CudaMemory,
    /// The same as they travel.
    pub packed: CudaMemory,
    /// Parts of my rows as they travel.
    pub slots: CudaMemory,
}

impl Fp8 {
    pub fn new(ctx: &CudaContext, d: &CpAttentionDesc, s: &Sizes) -> Result<Self> {
        let keys = d.kv_wire().1.then(|| Keys::new(ctx, d, s)).transpose()?;
        let parts = (d.backward && s.fp8_parts()).then(|| Parts::new(ctx, d, s)).transpose()?;
        Ok(Self { keys, parts })
    }

    pub fn all(&self) -> Vec<CudaMemory> {
        let keys = self.keys.iter().flat_map(|k| {
            let own = k.narrow.iter().flat_map(|(_, own)| own.clone());
            k.wide.held().into_iter().chain(own)
        });
        let parts = self.parts.iter().flat_map(|p| [&p.raw, &p.packed, &p.slots].map(Clone::clone));
        keys.chain(parts).collect()
    }
}

impl Keys {
    fn new(ctx: &CudaContext, d: &CpAttentionDesc, s: &Sizes) -> Result<Self> {
        let (a, own) = (&d.attn, s.max_kv * s.all_kv);
        let wide = a.widened();
        let queries = if a.dtype == wide { 0 } else { s.inner * s.max_q * s.hq };
        let rows = (queries, s.all_keys() * s.hkv);
        let narrow = match a.dtype.is_fp8() {
            true => None,
            false => {
                let own = s.wire.iter().map(|b| workspace(ctx, own * b)).collect::<Result<_>>()?;
                Some((Narrow::new(ctx, a.dtype, DType::F8E4M3)?, own))
            }
        };
        let converts = matches!(a.dtype, DType::BF16 | DType::F16) && wide == DType::F32;
        let convert = converts.then(|| Reducer::new(ctx, [a.dtype, DType::F32, DType::F32]));
        Ok(Self { wide: Wide::new(ctx, a, rows)?, narrow, convert: convert.transpose()? })
    }
}

impl Parts {
    fn new(ctx: &CudaContext, d: &CpAttentionDesc, s: &Sizes) -> Result<Self> {
        let rows = s.all_keys() * s.hkv;
        Widen::check(rows, s.dqk.max(s.dv))?;
        Ok(Self {
            narrow: Narrow::new(ctx, DType::F32, d.dkv_wire)?,
            widen: Widen::new(ctx, d.dkv_wire, DType::F32)?,
            raw: workspace(ctx, 4 * rows * (s.dqk + s.dv))?,
            packed: workspace(ctx, place(0, rows, &s.part_wire).1)?,
            slots: workspace(ctx, s.num_parts() * s.packed_slot().1)?,
        })
    }
}
