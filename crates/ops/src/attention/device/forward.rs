//! The kernels of the forward pass, and what those of both passes are chosen by.

use tilewire_core::{DType, Error, ErrorKind, Result};
use tilewire_device::cuda::{CudaContext, CudaModule, Grid, Kernel};
use tilewire_kernels::Source;
use tilewire_kernels::attention::hopper::{SM90_ATTENTION, SM90_ATTENTION_BWD};
use tilewire_kernels::attention::hopper_gates::{HopperGated, SM90_ATTENTION_GATED};
use tilewire_kernels::attention::{
    PLAIN_ATTENTION, PLAIN_ROWS, Plain, SM80_ATTENTION, Tile, Variant,
};

use super::hopper::{self, Hopper};
use super::hopper_grad;
use crate::attention::{AttentionDesc, AttnBackend, AttnMask};
use crate::common::cuda::{load, too_few_sms};

/// Returns how kernels name a type.
pub(super) fn code(t: DType) -> u32 {
    match t {
        DType::BF16 => 0,
        DType::F16 => 1,
        _ => 2,
    }
}

/// The upper bounds that all launches of a plan keep, and the types of their results.
pub(crate) struct Needs {
    /// Queries times heads.
    pub queries: usize,
    /// Segments of each sequence with the rows behind it that belong to none, and those that any
    /// other borders of spans make.
    pub pieces: (usize, usize),
    /// The output's, or f32.
    pub dkv: DType,
    /// Type of the forward pass's output: the description's, or f32 if it may be a part. Then the
    /// pass makes both types, as `TwAttn::out_type` says.
    pub out: DType,
}

/// A kernel, the rows of its tiles, and its blocks.
pub(super) struct Tiled {
    pub kernel: Kernel,
    pub rows: u64,
    threads: u32,
    shared_bytes: u32,
}

impl Tiled {
    pub fn new(kernel: Kernel, rows: u64, t: Tile, shared_bytes: u64) -> Result<Self> {
        let (threads, shared_bytes) = (32 * t.warps as u32, shared_bytes as u32);
        // Static shared memory counts, too: 48 KiB beside it are already more than the default.
        kernel.allow_shared(shared_bytes)?;
        Ok(Self { kernel, rows, threads, shared_bytes })
    }

    pub fn grid(&self, tiles: u32, heads: u32) -> Grid {
        Grid::new(tiles * heads, self.threads).shared(self.shared_bytes)
    }
}

/// The kernel of a forward pass.
pub(super) enum Attend {
    Portable(Tiled),
    Hopper(Hopper),
}

/// The kernels of one direction and type.
pub(super) struct Forward {
    pub attend: Attend,
    /// Makes results of the description's type, if `attend` makes parts of them and has one type:
    /// plain kernels.
    whole: Option<Tiled>,
    pub table: Kernel,
    pub name: String,
}

/// The compilation for matrix instructions, if there is one for these dimensions.
pub(super) fn variant(d: &AttentionDesc, extra: bool) -> Option<Variant> {
    let v = Variant { f16: d.dtype == DType::F16, dqk: d.dqk as u64, dv: d.dv as u64, extra };
    (matches!(d.dtype, DType::BF16 | DType::F16) && d.fits_matrices()).then_some(v)
}

/// The compilation that this device has the shared memory for; else the plain kernels do it.
pub(super) fn fitting(
    ctx: &CudaContext,
    v: Option<Variant>,
    bytes: fn(&Variant) -> u64,
) -> Result<Option<Variant>> {
    let most = u64::from(ctx.max_shared_bytes()?);
    Ok(v.and_then(|v| v.fitting(most, bytes)))
}

/// The compilations that plain causal attention of `dtype` takes, with heads of `dqk` and `dv`;
/// also those for sm_90a if `core`.
pub(crate) fn units(
    dtype: DType,
    (dqk, dv): (usize, usize),
    core: bool,
) -> Vec<(Source, Vec<(String, u64)>)> {
    let d = AttentionDesc { dv, ..AttentionDesc::new(1, (1, 1), dqk, dtype, AttnMask::CAUSAL) };
    let portable = match variant(&d, false) {
        Some(v) => (SM80_ATTENTION, v.defines()),
        None => (PLAIN_ATTENTION, plain(&d).defines()),
    };
    let mut all = vec![portable];
    if core && hopper::unfit(&d).is_none() {
        let base = hopper::variant(&d);
        all.push((SM90_ATTENTION, base.defines()));
        all.push((SM90_ATTENTION_GATED, HopperGated { base, whole: false }.defines()));
    }
    if core && hopper_grad::unfit(&d).is_none() {
        all.push((SM90_ATTENTION_BWD, hopper_grad::variant(&d).defines()));
    }
    all
}

pub(super) fn plain(d: &AttentionDesc) -> Plain {
    let [input, output] = [d.dtype, d.out].map(|t| u64::from(code(t)));
    Plain { input, output, dqk: d.dqk as u64, dv: d.dv as u64 }
}

/// Returns the definitions of the plain kernels that make results of the description's type, and dk
/// and dv of `dkv`: one compilation for both passes.
pub(super) fn results(d: &AttentionDesc, dkv: DType) -> Vec<(String, u64)> {
    if dkv == d.out { plain(d).defines() } else { plain(d).parts() }
}

/// Returns why the kernels for sm_90a are not taken, which do not fit the description as said; none
/// if they are.
///
/// # Errors
/// What the driver reports.
pub(super) fn core_lacks(
    ctx: &CudaContext,
    (by, unfit): (AttnBackend, Option<String>),
) -> Result<Option<String>> {
    Ok(match (by, unfit, Hopper::lacks(ctx)?) {
        (AttnBackend::Portable, ..) => Some("the portable ones were asked for".to_owned()),
        (_, Some(why), _) | (_, None, Some(why)) => Some(why),
        (AttnBackend::Auto, None, None) => too_few_sms(ctx)?,
        (AttnBackend::Hopper, None, None) => None,
    })
}

/// Returns whether the portable forward pass is faster: of documents of 64 rows it takes 0.98 of
/// the time of the one for sm_90a, of 128 rows 1.21 times (one H100, docs/lab/attention.md).
fn short(d: &AttentionDesc) -> bool {
    // Empty ones only say how many there may be.
    let documents = d.sequences.q.iter().filter(|r| !r.is_empty()).count();
    d.sequences.tokens_q < 96 * documents
}

/// The tile of plain kernels: a warp to a row.
pub(super) const ROWS: Tile = Tile { m: PLAIN_ROWS, n: PLAIN_ROWS, warps: PLAIN_ROWS };

impl Forward {
    pub fn new(
        ctx: &CudaContext,
        d: &AttentionDesc,
        needs: &Needs,
        backend: AttnBackend,
    ) -> Result<Self> {
        match Self::hopper(ctx, d, backend)? {
            Ok(hopper) => Ok(hopper),
            Err(why) => {
                let new = Self::portable(ctx, d, needs)?;
                let name = format!("{} (not the kernel for sm_90a: {why})", new.name);
                Ok(Self { name, ..new })
            }
        }
    }

    fn portable(ctx: &CudaContext, d: &AttentionDesc, needs: &Needs) -> Result<Self> {
        let with = |v: Variant| -> Result<Self> {
            let (m, t) = (load(ctx, &SM80_ATTENTION, v.defines())?, v.forward());
            let fwd = Tiled::new(m.kernel("tw_attn_fwd")?, t.m, t, v.forward_shared_bytes())?;
            let name = format!("tiles {}x{}", t.m, t.n);
            let (attend, table) = (Attend::Portable(fwd), m.kernel("tw_attn_table")?);
            Ok(Self { attend, whole: None, table, name })
        };
        match fitting(ctx, variant(d, d.has_extras()), Variant::forward_bytes)? {
            Some(v) => with(v),
            None => {
                let output = u64::from(code(needs.out));
                let m = load(ctx, &PLAIN_ATTENTION, Plain { output, ..plain(d) }.defines())?;
                let rows =
                    |m: &CudaModule| Tiled::new(m.kernel("tw_attn_fwd")?, PLAIN_ROWS, ROWS, 0);
                let whole = match needs.out == d.out {
                    true => None,
                    false => Some(rows(&load(ctx, &PLAIN_ATTENTION, results(d, needs.dkv))?)?),
                };
                let (attend, name) = (Attend::Portable(rows(&m)?), "plain".to_owned());
                Ok(Self { attend, whole, table: m.kernel("tw_attn_table")?, name })
            }
        }
    }

    /// Returns the kernel for sm_90a, or why the portable one attends.
    fn hopper(
        ctx: &CudaContext,
        d: &AttentionDesc,
        by: AttnBackend,
    ) -> Result<std::result::Result<Self, String>> {
        match (core_lacks(ctx, (by, hopper::unfit(d)))?, by) {
            (Some(why), AttnBackend::Hopper) => return Err(not_by_hopper(&why)),
            (None, AttnBackend::Auto) if short(d) => {
                return Ok(Err("its documents are short".to_owned()));
            }
            (Some(why), _) => return Ok(Err(why)),
            _ => {}
        }
        let (h, m) = match Hopper::new(ctx, d) {
            // Nothing to compile it with, and not shipped either.
            Err(e) if e.is_unavailable() && by == AttnBackend::Auto => {
                return Ok(Err(e.to_string()));
            }
            r => r?,
        };
        let (name, table) = (h.name(), m.kernel("tw_attn_table")?);
        Ok(Ok(Self { attend: Attend::Hopper(h), whole: None, table, name }))
    }

    /// Returns the portable kernel that makes results of `out_type`, in the place of `f`, which
    /// makes those of `Needs::out`.
    pub fn portable_for<'a>(
        &'a self,
        f: &'a Tiled,
        (d, out_type): (&AttentionDesc, u32),
    ) -> &'a Tiled {
        self.whole.as_ref().filter(|_| out_type == code(d.out)).unwrap_or(f)
    }

    /// Returns the rows of a tile of queries.
    pub fn rows(&self) -> u64 {
        match &self.attend {
            Attend::Portable(t) => t.rows,
            Attend::Hopper(h) => h.rows(),
        }
    }
}

pub(super) fn not_by_hopper(why: &str) -> Error {
    let text = format!("the attention kernel for sm_90a cannot do this: {why}");
    Error::new(ErrorKind::Unsupported, text)
        .hint("use the backend `auto`, which takes another kernel then")
}
