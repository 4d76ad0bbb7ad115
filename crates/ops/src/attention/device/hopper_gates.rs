//! The forward pass on sm_90a over keys that come while it runs
//! (`attention/sm90_attention_gated.cu`).

use std::sync::Arc;

use tilewire_core::{Error, Result};
use tilewire_device::cuda::{
    CudaContext, CudaModule, CudaStream, Grid, Kernel, LaunchArgs, RawTensorMap,
};
use tilewire_kernels::abi::{TwAttn, TwGates, TwSeg, TwTeam};
use tilewire_kernels::attention::hopper::{THREADS, TILE_M};
#[cfg(doc)]
use tilewire_kernels::attention::hopper_gates::WHOLE;
use tilewire_kernels::attention::hopper_gates::{GATES, HopperGated, SM90_ATTENTION_GATED};

use super::forward::core_lacks;
use super::hopper::{Hopper, described, order, unfit, variant};
use super::offsets::Segments;
use super::queue::{Prepared, aligned, with_tables};
use crate::attention::table::number_tiles;
use crate::attention::{AttentionDesc, AttnBackend};
use crate::common::counters::Counters;
use crate::common::cuda::load;

/// The keys of a launch: mine where they are, and the words by which those of others come.
pub(crate) struct Keys {
    /// Addresses of my keys and values, rows as far apart as those of the others.
    pub own: [u64; 2],
    pub team: TwTeam,
    /// The slot of the flags behind each rank's keys, and the flag of rank 0.
    pub flags: (u32, u64),
    /// The end of each rank's rows among all keys.
    pub ends: Vec<usize>,
}

impl Keys {
    fn gates(&self) -> Result<TwGates> {
        let me = self.team.me as usize;
        if self.ends.len() > GATES || self.ends.len() != self.team.size as usize {
            return Err(Error::internal(format!("{} ranks at {GATES} gates", self.ends.len())));
        }
        let own = me.checked_sub(1).map_or(0, |before| self.ends[before]) as u32;
        let (slot, flags) = self.flags;
        let mut g = TwGates { team: self.team, flags, slot, own, end: [u32::MAX; GATES] };
        g.end.iter_mut().zip(&self.ends).for_each(|(to, end)| *to = *end as u32);
        Ok(g)
    }
}

/// The kernel of one description on one device.
pub(crate) struct Gated {
    ctx: CudaContext,
    variant: HopperGated,
    kernel: Kernel,
    /// Multiprocessors of a launch: those of this rank, where ranks share a device.
    num_sms: u32,
    /// Of heads that are done together.
    counters: Arc<Counters>,
    _module: CudaModule,
}

impl Gated {
    /// Returns why there is no such kernel for `d` and `ranks` ranks; none if there is.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn lacks(
        ctx: &CudaContext,
        d: &AttentionDesc,
        by: AttnBackend,
        ranks: usize,
    ) -> Result<Option<String>> {
        if ranks > GATES {
            return Ok(Some(format!("it has gates for {GATES} ranks, not {ranks}")));
        }
        core_lacks(ctx, (by, unfit(d)))
    }

    /// Loads the kernel of a description that it does not lack, with blocks on `num_sms`
    /// multiprocessors; `whole`: with keys of a tile that divide [`WHOLE`] rows.
    ///
    /// # Errors
    /// As [`CudaContext::module`]; `Unsupported` if the device refuses the shared memory.
    pub fn new(
        ctx: &CudaContext,
        d: &AttentionDesc,
        (num_sms, whole): (u32, bool),
    ) -> Result<Self> {
        let variant = HopperGated { base: variant(d), whole };
        let module = load(ctx, &SM90_ATTENTION_GATED, variant.defines())?;
        let kernel = module.kernel("tw_hopper_attn_gated")?;
        kernel.allow_shared(variant.shared_bytes())?;
        let counters = Counters::of(ctx)?;
        Ok(Self { ctx: ctx.clone(), variant, kernel, num_sms, counters, _module: module })
    }

    /// Returns what is used, for people.
    pub fn name(&self) -> String {
        format!(
            "one kernel whose tiles wait for their keys (tiles {TILE_M}x{})",
            self.variant.keys()
        )
    }

    /// Queues the forward pass of tables with at least one tile: one kernel. `few`: as for
    /// [`Hopper::launch`].
    ///
    /// # Safety
    /// As for [`Hopper::launch`]; `keys.own` has the rows that `keys.ends` says, and the other keys
    /// of `p` are written before their flags are raised, by transfers of this launch.
    unsafe fn launch(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (p, tokens_kv): (&TwAttn, usize),
        keys: &Keys,
        few: Option<[&[TwSeg]; 2]>,
    ) -> Result<()> {
        let (gates, maps) = (keys.gates()?, self.maps(d, p, keys.own)?);
        let order = order(self.counters.next(stream), (d, tokens_kv), few);
        let blocks = u64::from(self.num_sms).min(u64::from(p.tiles) * u64::from(p.heads_q));
        let grid = Grid::new(blocks as u32, THREADS).shared(self.variant.shared_bytes());
        let args = maps.iter().fold(LaunchArgs::new().arg(p).arg(&order), LaunchArgs::raw_map);
        // SAFETY: `tw_hopper_attn_gated` takes (TwAttn, TwAttnOrder, 6 x TwTensorMap, TwGates); the
        // caller's contract for what they describe. `counter` as for `Hopper::launch`.
        unsafe { self.kernel.launch(stream, grid, args.arg(&gates)) }
    }

    /// The tensor maps of q, k, v, out and my k and v.
    fn maps(&self, d: &AttentionDesc, p: &TwAttn, own: [u64; 2]) -> Result<[RawTensorMap; 6]> {
        let [q, k, v, out] = described(d, p, (TILE_M, self.variant.keys()));
        // Without a row of keys they have no address, and nothing is read.
        let or_q = |addr: u64| if addr == 0 { p.q } else { addr };
        let any = usize::MAX;
        let all = [
            (p.q, any, &q),
            (or_q(p.k), any, &k),
            (or_q(p.v), any, &v),
            (p.out, any, &out),
            (or_q(own[0]), any, &k),
            (or_q(own[1]), any, &v),
        ];
        RawTensorMap::all(&self.ctx, all)
    }
}

impl Prepared {
    /// Queues the forward pass of tensors that are held by `gated`, with the rows of the tables,
    /// whose keys are rows among those of all ranks. The flags of all ranks are counted by the
    /// caller behind it.
    pub fn forward_gated(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        (p, keys): (&TwAttn, &Keys),
        rows: Segments,
        gated: &Gated,
    ) -> Result<()> {
        let [k, v] = keys.own;
        aligned(d, &[("q", p.q), ("k", k), ("v", v), ("out", p.out)])?;
        let contained;
        let (tables, tokens_kv, few) = match rows {
            Segments::Known((mut q, kv)) if Hopper::takes_few([&q, &kv]) => {
                let tiles = number_tiles(&mut q, TILE_M as u64);
                let tokens_kv = kv.iter().map(|s| s.len as usize).sum();
                let p = TwAttn { num_own: q.len() as u32, tiles, ..*p };
                contained = [q, kv];
                (p, tokens_kv, Some(contained.each_ref().map(|s| &**s)))
            }
            rows => {
                let [own, other] = self.forward_tables(stream, d, rows, TILE_M as u64)?;
                (with_tables(p, (&own, &other)), other.rows, None)
            }
        };
        if tables.tiles == 0 || p.heads_q == 0 {
            return Ok(());
        }
        // SAFETY: what `p` and `keys` point to was checked against the description (shapes, types,
        // the same device), begins at multiples of 16 bytes (`aligned`), and is held by the stream;
        // tables are made of the launch's own rows, by rank. Keys are put before their flags.
        unsafe { gated.launch(stream, d, (&tables, tokens_kv), keys, few) }
    }
}
