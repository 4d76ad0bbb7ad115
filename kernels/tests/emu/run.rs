//! Runs: streams of launches on memory, and what is told of them.

use std::any::Any;
use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_void};
use std::panic::{self, AssertUnwindSafe};
use std::ptr::null_mut;

use crate::host::{Launch, Lib, RawEvent, RawLaunch, RawRegion, RawRun, RawStream, Stats};
use crate::memory::{ANY, Memory};

/// A memory operation that is about to happen.
pub struct Event<'a> {
    pub op: &'a str,
    pub kernel: &'a str,
    /// 0 for a fence.
    pub addr: u64,
    pub thread: u32,
}

type Hook<'a> = Box<dyn FnMut(&Event<'_>) + Send + 'a>;

/// Streams of launches on memory.
pub struct Run<'a> {
    streams: Vec<(u32, Vec<Launch<'a>>)>,
    memory: Vec<&'a Memory>,
    hook: Option<Hook<'a>>,
    /// Decides the order in which threads run, if there is one worker.
    pub seed: u64,
    /// OS threads. With more than one, the streams of rank `r` stay on worker `r % workers`,
    /// or go to whoever is free if `spread`.
    pub workers: u32,
    pub spread: bool,
    /// Most blocks of a launch that are alive at once.
    pub resident: u32,
    pub yield_permille: u32,
    /// Now and then a warp stands still while others go on.
    pub warp_pauses: bool,
    pub tick_ns: u64,
    pub max_steps: u64,
    pub deadline_ms: u64,
}

/// The hook, and what it panicked with.
struct Told<'a> {
    hook: Hook<'a>,
    panic: Option<String>,
}

/// What a panic says.
pub fn words(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default().to_owned()
}

/// Passes an event to the hook of the run. False if that panicked: the run ends.
unsafe extern "C" fn tell(ctx: *mut c_void, event: *const RawEvent) -> bool {
    // SAFETY: `go` passes its `Told` as the context, and only the one worker calls this.
    let (told, e) = unsafe { (&mut *ctx.cast::<Told<'_>>(), &*event) };
    // SAFETY: the runtime's strings end with zero and live as long as the run.
    let text = |s: *const c_char| unsafe { CStr::from_ptr(s) }.to_str().unwrap_or("?");
    let event = Event { op: text(e.op), kernel: text(e.kernel), addr: e.addr, thread: e.thread };
    // No panic may pass through the fiber's frames.
    match panic::catch_unwind(AssertUnwindSafe(|| (told.hook)(&event))) {
        Ok(()) => true,
        Err(p) => {
            told.panic = Some(words(&*p));
            false
        }
    }
}

impl<'a> Run<'a> {
    pub fn new(seed: u64) -> Self {
        Self {
            streams: Vec::new(),
            memory: Vec::new(),
            hook: None,
            seed,
            workers: 1,
            spread: false,
            resident: 16,
            yield_permille: 200,
            warp_pauses: false,
            tick_ns: 10,
            max_steps: 5_000_000,
            // For a loop that calls nothing: others end by their steps, on slow machines too.
            deadline_ms: 180_000,
        }
    }

    /// Launches of `rank` that run one after the other.
    pub fn stream(mut self, rank: u32, launches: Vec<Launch<'a>>) -> Self {
        self.streams.push((rank, launches));
        self
    }

    /// What the kernels may touch.
    pub fn memory(mut self, memory: impl IntoIterator<Item = &'a Memory>) -> Self {
        self.memory.extend(memory);
        self
    }

    /// Called before each memory operation.
    pub fn hook(mut self, hook: impl FnMut(&Event<'_>) + Send + 'a) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Runs all streams to their ends.
    ///
    /// # Errors
    /// What the hook panicked with, or what the emulator found: threads that do not meet, memory
    /// that is not there, a hang.
    pub fn go(mut self) -> Result<Stats, String> {
        assert!(self.hook.is_none() || self.workers == 1, "a hook is called by one worker");
        let launches = self.streams.iter().flat_map(|(_, l)| l);
        if let Some(problem) = launches.clone().find_map(Launch::problem) {
            return Err(problem);
        }
        let lib = self.streams.iter().find_map(|(_, l)| l.first()).map(|l| l.lib()).unwrap();
        let args: Vec<Vec<*mut c_void>> = launches.clone().map(Launch::pointers).collect();
        let raw: Vec<RawLaunch> = launches.zip(&args).map(|(l, a)| l.raw(a)).collect();
        let mut first = 0;
        let streams: Vec<RawStream> = self
            .streams
            .iter()
            .map(|(rank, l)| {
                let launches = raw[first..].as_ptr();
                first += l.len();
                let worker = if self.spread { ANY } else { *rank };
                RawStream { launches, len: l.len() as u32, rank: *rank, worker, pad: 0 }
            })
            .collect();
        // Ranks may share a mapping.
        let mut seen = HashSet::new();
        self.memory.retain(|m| seen.insert(m.addr()));
        let mut regions: Vec<RawRegion> = self.memory.iter().flat_map(|m| m.regions()).collect();
        regions.sort_by_key(|r| r.base);
        let mut told = self.hook.take().map(|hook| Told { hook, panic: None });
        let mut message = vec![0u8; 8192];
        let mut run = self.raw(&streams, &regions, &mut message);
        if let Some(t) = &mut told {
            run.hook = Some(tell);
            run.hook_ctx = (&raw mut *t).cast();
        }
        // SAFETY: every pointer in `run` is to something above, which outlives the call; kernels
        // reach only `self.memory`, which is borrowed, and are stopped at its guards.
        let good = unsafe { (lib.runtime().run)(&raw mut run) };
        if let Some(p) = told.and_then(|t| t.panic) {
            return Err(format!("in the hook: {p}"));
        }
        let stats = run.stats;
        let text = CStr::from_bytes_until_nul(&message).unwrap().to_string_lossy();
        if good { Ok(stats) } else { Err(self.told_of(lib, &text).explain(&text)) }
    }

    /// The library of the kernel that a message names, or the run's first.
    fn told_of(&self, first: &'static Lib, message: &str) -> &'static Lib {
        let mut launches = self.streams.iter().flat_map(|(_, l)| l);
        let named = launches.find(|l| message.contains(&format!(" {} ", l.name())));
        named.map_or(first, Launch::lib)
    }

    fn raw(&self, streams: &[RawStream], regions: &[RawRegion], message: &mut [u8]) -> RawRun {
        RawRun {
            streams: streams.as_ptr(),
            regions: regions.as_ptr(),
            hook: None,
            hook_ctx: null_mut(),
            message: message.as_mut_ptr(),
            message_len: message.len() as u64,
            seed: self.seed,
            // How far threads of the OS get while others stand still says nothing.
            max_steps: if self.workers == 1 { self.max_steps } else { u64::MAX },
            deadline_ns: self.deadline_ms * 1_000_000,
            tick_ns: self.tick_ns,
            num_streams: streams.len() as u32,
            num_regions: regions.len() as u32,
            workers: self.workers,
            resident: self.resident,
            yield_permille: self.yield_permille,
            no_views: 0,
            warp_pauses: u32::from(self.warp_pauses),
            pad: 0,
            stats: Stats::default(),
        }
    }
}
