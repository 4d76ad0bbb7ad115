//! Call sites: what XLA keeps for each call of a compiled program, with a plan for each rank.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tilewire::device::Device;
use tilewire::device::cuda::CudaStream;
use tilewire::ops::ag_gemm::AgGemmPlan;
use tilewire::ops::attention::{AttentionPlan, Sequences};
use tilewire::ops::collective::CollectivePlan;
use tilewire::ops::cp_attention::CpAttentionPlan;
use tilewire::ops::ep::{EpHandle, EpPlan};
use tilewire::ops::gemm_ar::GemmArPlan;
use tilewire::ops::gemm_rs::GemmRsPlan;
use tilewire::ops::grouped_gemm::GroupedGemmPlan;
use tilewire::ops::permute::{PermuteMap, PermutePlan};
use tilewire::ops::quant::{DequantPlan, QuantPlan};
use tilewire::prelude::*;

use super::spec::{Desc, Spec};
use super::world::{Flight, JaxWorld, Local, world};
use crate::dlpack;

pub(super) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of a heap beside the plan's buffers: each of them begins on a new page or line.
const SLACK_BYTES: usize = 256 << 10;
/// Number of times that a heap which was too small all the same is made larger.
const GROWTHS: usize = 4;

/// A plan, and what a launch passes beside tensors.
pub enum Body {
    Collective(CollectivePlan, usize),
    AgGemm(AgGemmPlan, usize),
    GemmRs(GemmRsPlan, usize),
    GemmAr(GemmArPlan, usize),
    Grouped(Arc<GroupedGemmPlan>),
    /// Without sequences, by offsets among the arguments.
    Attention(Arc<AttentionPlan>, Option<Sequences>),
    CpAttention(Arc<CpAttentionPlan>, Option<Sequences>),
    Ep(Arc<EpPlan>, EpHandle),
    Permute(PermutePlan, PermuteMap),
    Quant(QuantPlan),
    Dequant(DequantPlan),
}

/// One rank's part of a call site.
pub struct Slot {
    pub body: Body,
    /// None of an operation that needs no other rank.
    pub team: Option<Arc<LiveTeam>>,
    pub device: Device,
    /// Launches on the CPU run here, in the order in which XLA calls.
    pub stream: Option<Stream>,
    pub order: Mutex<()>,
    /// Its plan is one of the world's layers, and stays as long as the world.
    pub lasts: Lasts,
}

/// The owner of the memory of a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lasts {
    /// The call site's.
    Site,
    /// The world's, made for this call site.
    World,
    /// The world's, made for an earlier one.
    Shared,
}

/// The state of a call in a compiled program.
pub struct Site {
    pub spec: Spec,
    /// Of an operation without a team: the world whose program it belongs to, if any.
    world: Option<Arc<JaxWorld>>,
    /// Of an operation with a team, for each device of the world in this process.
    slots: Vec<Slot>,
    /// Of one without, by the ordinal of the device, made when it is first called there.
    lazy: Mutex<HashMap<i32, Arc<Slot>>>,
    len_bytes: usize,
}

/// At the end of the process states are kept: what they use may be gone before.
static KEEP: AtomicBool = AtomicBool::new(false);

pub fn keep_states() {
    KEEP.store(true, Ordering::Relaxed);
}

/// XLA calls it when an executable goes.
///
/// # Safety
/// `state` is an `Arc<Site>` in a box, and XLA uses it no more.
pub unsafe extern "C" fn drop_site(state: *mut c_void) {
    if KEEP.load(Ordering::Relaxed) || crate::world::check_fork().is_err() {
        return;
    }
    // SAFETY: as above.
    let site = unsafe { Box::from_raw(state.cast::<Arc<Site>>()) };
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(site)));
    if done.is_err() {
        log::error!("the end of a call site panicked");
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(w) = &self.world {
            w.count_bytes(self.len_bytes, true);
        }
    }
}

/// Bytes of symmetric memory that a plan takes on each rank, at most.
fn len_bytes(desc: &Desc, size: usize, on_host: bool) -> usize {
    match desc {
        Desc::Collective(d, _) => CollectivePlan::memory(d, size),
        Desc::AgGemm(d, _, _) => AgGemmPlan::memory(d),
        Desc::GemmRs(d, _, _) => GemmRsPlan::memory(d, size),
        Desc::GemmAr(d, _, _) if on_host => GemmArPlan::host_memory(d, size),
        Desc::GemmAr(d, _, _) => GemmArPlan::memory(d, size),
        Desc::CpAttention(d, _, config) => CpAttentionPlan::memory(d, size, *config),
        Desc::Ep(d, _) => EpPlan::memory(d).symmetric,
        Desc::Quant(d) => QuantPlan::memory(d, size),
        Desc::Grouped(_) | Desc::Attention(..) | Desc::Permute(_) | Desc::Dequant(_) => 0,
    }
}

/// Returns the stream on which a plan is prepared. XLA's own stream is not known yet, and not
/// needed.
fn prepare_stream(device: &Device, name: &str) -> Result<Stream> {
    match device {
        Device::Host => Stream::new(name),
        Device::Cuda(ctx) => Ok(Stream::Cuda(CudaStream::new(ctx)?)),
    }
}

impl Site {
    /// The state of a new call site. Collective over the world, if there is one: all processes come
    /// here for the same calls in the same order, because they compile the same programs.
    ///
    /// # Errors
    /// `Mismatch` if another process compiles something else; what the plan reports.
    pub fn new(text: &str) -> Result<Self> {
        let spec = Spec::parse(text)?;
        if spec.is_local() {
            // What is wrong is known now; the plan needs a device.
            spec.describe(1)?;
            let world = if spec.world == 0 { None } else { world(spec.world).ok() };
            return Ok(Self {
                spec,
                world,
                slots: Vec::new(),
                lazy: Mutex::default(),
                len_bytes: 0,
            });
        }
        let op = spec.op.name();
        let world = world(spec.world).map_err(|e| e.op(op))?;
        let size = world.group(Rank::new(0), &spec.axes)?.len();
        let desc = spec.describe(size)?;
        let on_host = world.locals.iter().all(|l| matches!(l.device, Device::Host));
        let len_bytes = len_bytes(&desc, size, on_host);
        let slots = world.together((op, spec.site), text, len_bytes, |i, number| {
            let local = &world.locals[i];
            slot_of_team(&world, local, &spec, number, len_bytes)
        })?;
        let lasts = slots.first().map_or(Lasts::Site, |s| s.lasts);
        if lasts != Lasts::Shared {
            world.count_bytes(len_bytes, false);
        }
        // What goes with the site: the world keeps the rest.
        let len_bytes = if lasts == Lasts::Site { len_bytes } else { 0 };
        Ok(Self { spec, world: Some(world), slots, lazy: Mutex::default(), len_bytes })
    }

    /// Calls `f` with the slot of the device that XLA calls `ordinal`. A failure of a launch ends
    /// the teams of this rank: its program does not go on, and the other ranks must know.
    ///
    /// # Errors
    /// What `f` reports; `Stale`; `InvalidArgument` for a device that is not in the world.
    pub fn with_slot<R>(
        &self,
        ordinal: i32,
        cuda: bool,
        f: impl FnOnce(&Slot, Option<Flight>) -> Result<R>,
    ) -> Result<R> {
        let Some(world) = self.world.as_ref().filter(|_| !self.spec.is_local()) else {
            crate::world::check_fork()?;
            let done = self.lazy(ordinal, cuda).and_then(|slot| f(&slot, None));
            return done.map_err(|e| self.failed(ordinal, e));
        };
        let local = world.local(ordinal)?;
        let flight = world.fly()?;
        f(&self.slots[local], Some(flight)).map_err(|e| self.failed(ordinal, e))
    }

    /// Tells the other ranks, and other calls of this one, that a launch has failed here.
    pub fn failed(&self, ordinal: i32, e: Error) -> Error {
        let e = e.op(self.spec.op.name());
        let Some(world) = &self.world else { return e };
        let Ok(i) = world.local(ordinal) else { return e };
        let first = match self.slots.get(i).and_then(|s| s.team.as_ref()) {
            Some(team) => team.fail(e),
            None => e,
        };
        world.locals[i].end(&first);
        first
    }

    /// The slot of an operation without a team: made once for each device.
    fn lazy(&self, ordinal: i32, cuda: bool) -> Result<Arc<Slot>> {
        let mut lazy = lock(&self.lazy);
        if let Some(slot) = lazy.get(&ordinal) {
            return Ok(slot.clone());
        }
        let slot = Arc::new(self.local_slot(ordinal, cuda)?);
        lazy.insert(ordinal, slot.clone());
        Ok(slot)
    }

    fn local_slot(&self, ordinal: i32, cuda: bool) -> Result<Slot> {
        let device = match (cuda, u32::try_from(ordinal)) {
            (true, Ok(n)) => Device::Cuda(dlpack::context(n)?),
            _ => Device::Host,
        };
        let stream = prepare_stream(&device, "jax local")?;
        let body = match self.spec.describe(1)? {
            Desc::Grouped(desc) => {
                let plan = GroupedGemmPlan::new(desc)?;
                plan.prepare(&stream)?;
                Body::Grouped(Arc::new(plan))
            }
            Desc::Attention(desc, sequences) => {
                let plan = self.spec.order()?.plan(desc)?;
                plan.prepare(&stream)?;
                Body::Attention(Arc::new(plan), sequences)
            }
            Desc::Permute(desc) => {
                let plan = PermutePlan::new(desc)?;
                plan.prepare(&stream)?;
                let map = plan.map(desc.max_tokens)?;
                Body::Permute(plan, map)
            }
            Desc::Quant(desc) => {
                let plan = QuantPlan::new(desc, None)?;
                plan.prepare(&stream)?;
                Body::Quant(plan)
            }
            Desc::Dequant(desc) => {
                let plan = DequantPlan::new(desc)?;
                plan.prepare(&stream)?;
                Body::Dequant(plan)
            }
            _ => return Err(Error::internal("an operation with a team is made with it")),
        };
        let stream = matches!(device, Device::Host).then_some(stream);
        Ok(Slot { body, team: None, device, stream, order: Mutex::default(), lasts: Lasts::Site })
    }
}

/// Collective over the team: its memory and its plan.
fn slot_of_team(
    world: &JaxWorld,
    local: &Local,
    spec: &Spec,
    number: u64,
    len_bytes: usize,
) -> Result<Slot> {
    let op = spec.op.name();
    let group = world.group(local.rank, &spec.axes)?;
    let desc = spec.describe(group.len())?;
    let shared = matches!((&desc, &local.device), (Desc::Ep(..), Device::Cuda(_)));
    let key = format!("{:?} {:?} {}", spec.axes, spec.ep, spec.params.buffer);
    // Calls on a GPU run in the order of its stream, which is the same on all ranks, so the phases
    // of a layer share its memory.
    if let Some((team, plan)) = shared.then(|| local.layer(&key)).flatten() {
        let handle = plan.handle()?;
        let body = Body::Ep(plan, handle);
        let (device, order) = (local.device.clone(), Mutex::default());
        let lasts = Lasts::Shared;
        return Ok(Slot { body, team: Some(team), device, stream: None, order, lasts });
    }
    let name = format!("{op} {}.{number}", spec.site);
    let team = local.world.team(&group, &name)?;
    let team = team.ok_or_else(|| Error::internal("this rank is not in its own team"))?;
    let stream = prepare_stream(&local.device, &name)?;
    let mut cfg = HeapCfg::new(len_bytes + SLACK_BYTES);
    if let Device::Cuda(ctx) = &local.device {
        cfg = cfg.on_device(ctx.ordinal());
    }
    let planned = team.heap(world.settings.backend, cfg).and_then(|h| made(&h, &stream, desc));
    // Whoever waits for this rank in the making of the plan must hear of it. Nothing else ends.
    let body = planned.map_err(|e| team.fail(e))?;
    let team = Arc::new(team);
    local.watch(&team);
    if let (true, Body::Ep(plan, _)) = (shared, &body) {
        local.keep_layer(key, (team.clone(), plan.clone()));
    }
    let device = local.device.clone();
    let stream = matches!(device, Device::Host).then_some(stream);
    let lasts = if shared { Lasts::World } else { Lasts::Site };
    Ok(Slot { body, team: Some(team), device, stream, order: Mutex::default(), lasts })
}

/// Collective: a plan on `heap`, which grows if it must.
fn made(heap: &Heap, stream: &Stream, desc: Desc) -> Result<Body> {
    match desc {
        Desc::Collective(d, m) => {
            let plan = grown(heap, || CollectivePlan::new(d.clone(), heap))?;
            plan.prepare(stream)?;
            Ok(Body::Collective(plan, m))
        }
        Desc::AgGemm(d, m, algo) => {
            let plan = grown(heap, || AgGemmPlan::new(d.clone(), heap, algo))?;
            plan.prepare(stream)?;
            Ok(Body::AgGemm(plan, m))
        }
        Desc::GemmRs(d, m, algo) => {
            let plan = grown(heap, || GemmRsPlan::new(d.clone(), heap, algo))?;
            plan.prepare(stream)?;
            Ok(Body::GemmRs(plan, m))
        }
        Desc::GemmAr(d, m, algo) => {
            let plan = grown(heap, || GemmArPlan::new(d.clone(), heap, algo))?;
            plan.prepare(stream)?;
            Ok(Body::GemmAr(plan, m))
        }
        Desc::CpAttention(d, sequences, config) => {
            let plan = grown(heap, || CpAttentionPlan::new(d.clone(), heap, config))?;
            plan.prepare(stream)?;
            if sequences.is_none() {
                plan.takes_offsets()?;
            }
            Ok(Body::CpAttention(Arc::new(plan), sequences))
        }
        Desc::Ep(d, num_sms) => {
            let plan = grown(heap, || EpPlan::new(d.clone(), heap))?;
            let plan = match num_sms {
                Some(num) => plan.with_num_sms(num),
                None => plan,
            };
            plan.prepare(stream)?;
            let handle = plan.handle()?;
            Ok(Body::Ep(Arc::new(plan), handle))
        }
        Desc::Quant(d) => {
            let plan = grown(heap, || QuantPlan::new(d, Some(heap)))?;
            plan.prepare(stream)?;
            Ok(Body::Quant(plan))
        }
        Desc::Grouped(_) | Desc::Attention(..) | Desc::Permute(_) | Desc::Dequant(_) => {
            Err(Error::internal("an operation without a team has no heap"))
        }
    }
}

/// Every step is taken on all ranks or on none: `settle` makes one verdict of their attempts.
fn grown<P>(heap: &Heap, make: impl Fn() -> Result<P>) -> Result<P> {
    let mut tries = 0;
    loop {
        match heap.team().settle("plan", make()) {
            Err(e) if e.kind() == ErrorKind::Exhausted && tries < GROWTHS => {
                tries += 1;
                let (_, total) = heap.usage();
                heap.collect()?;
                heap.grow(2 * total)?;
            }
            made => return made,
        }
    }
}
