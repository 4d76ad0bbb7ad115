//! Teams of virtual ranks on control pages with the layout of `crates/symm`.

use std::sync::{Arc, LazyLock};

use bytemuck::{NoUninit, Pod, Zeroable};
use tilewire_kernels::SIGNAL;
use tilewire_kernels::abi::{TwPoison, TwTeam};

use crate::compile::Unit;
use crate::host::{Kernel, Launch, Lib, RUNTIME};
use crate::memory::{Memory, Pages};
use crate::run::Run;

pub const CONTROL: &str = include_str!("../../../crates/symm/src/control.rs");
pub const STORE: &str = include_str!("../../../crates/symm/src/vmm/store.rs");

/// `const NAME: usize = a * b;` of a source of `crates/symm`: its constants are not public.
fn constant(source: &str, name: &str) -> usize {
    let rest = source.split(&format!("const {name}: usize = ")).nth(1);
    let value = rest.and_then(|r| r.split(';').next()).unwrap_or_else(|| panic!("no {name}"));
    let number = |t: &str| match t.trim().strip_prefix("0x") {
        Some(hex) => usize::from_str_radix(hex, 16),
        None => t.trim().parse(),
    };
    value
        .split('*')
        .map(|f| number(f).unwrap_or_else(|e| panic!("{name} = {value}: {e}")))
        .product()
}

/// Where the words lie.
pub struct Layout {
    pub abort: usize,
    pub inbox: usize,
    pub inbox_row: usize,
    pub signals: usize,
    pub num_signals: usize,
    pub num_channels: usize,
    pub report: usize,
}

pub static LAYOUT: LazyLock<Layout> = LazyLock::new(|| Layout {
    abort: constant(CONTROL, "OFF_ABORT"),
    inbox: constant(CONTROL, "OFF_INBOX"),
    inbox_row: constant(CONTROL, "INBOX_ROW"),
    signals: constant(CONTROL, "OFF_SIGNALS"),
    num_signals: constant(CONTROL, "NUM_SIGNALS"),
    num_channels: constant(CONTROL, "NUM_CHANNELS"),
    report: 8 * constant(STORE, "PINNED_REPORT"),
});

/// The kernels of `text`, which is that of `comm/signal.cu` or a mutant of it.
pub fn load(text: String) -> &'static Lib {
    let value = |d: &&'static str| {
        let name = d.strip_prefix("TW_").expect("definitions begin with TW_");
        (*d, constant(CONTROL, name) as u64)
    };
    let own = ["t_put", "t_check", "t_copy", "t_enter", "t_left"];
    RUNTIME.load(&Unit {
        name: SIGNAL.name,
        text: text + include_str!("signal_probes.cu"),
        defines: SIGNAL.defines.iter().map(value).collect(),
        kernels: SIGNAL.kernels.iter().copied().chain(own).collect(),
        smem: 0,
    })
}

/// `TwPages` of `signal_probes.cu`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct PagesParam {
    base: u64,
    stride: u64,
    errors: u64,
    me: u32,
    size: u32,
}

/// What one rank holds, and its view of what all share.
pub struct RankMemory {
    pub control: Arc<Memory>,
    pub data: Arc<Memory>,
    pub sent: Memory,
    pub expected: Memory,
    pub epoch: Memory,
    pub fault: Memory,
    pub pinned: Memory,
    pub errors: Memory,
}

impl RankMemory {
    pub fn all(&self) -> [&Memory; 8] {
        [
            &self.control,
            &self.data,
            &self.sent,
            &self.expected,
            &self.epoch,
            &self.fault,
            &self.pinned,
            &self.errors,
        ]
    }
}

/// A team of virtual ranks.
pub struct Team {
    pub size: usize,
    pub generation: u32,
    pub timeout_ns: u64,
    pub ranks: Vec<RankMemory>,
    kernels: Vec<(&'static str, Kernel)>,
}

impl Team {
    pub fn new(lib: &'static Lib, size: usize) -> Self {
        let l = &*LAYOUT;
        // As `control::device_page_bytes`.
        let control = Pages::new(size, l.signals + l.num_signals * size * 16);
        let data = Pages::new(size, 8 * size);
        let (control, data) = (control.views("control"), data.views("data"));
        let ranks = (0..size as u32).map(|r| {
            let own = |name: &str, words: usize| {
                Memory::new(&format!("{name} of rank {r}"), r, 8 * words)
            };
            RankMemory {
                control: control[r as usize].clone(),
                data: data[r as usize].clone(),
                sent: own("sent", l.num_signals * size),
                expected: own("expected", l.num_signals * size),
                epoch: own("epoch", l.num_channels),
                fault: own("fault", 1),
                pinned: own("pinned", 16),
                errors: own("errors", 1),
            }
        });
        let own = ["t_put", "t_check", "t_copy", "t_enter", "t_left"];
        let kernels = SIGNAL.kernels.iter().copied().chain(own).map(|n| (n, lib.kernel(n)));
        Self {
            size,
            generation: 7,
            timeout_ns: 20_000_000,
            ranks: ranks.collect(),
            kernels: kernels.collect(),
        }
    }

    pub fn param(&self, rank: usize) -> TwTeam {
        let r = &self.ranks[rank];
        TwTeam {
            control: r.control.addr(),
            stride: r.control.stride(),
            sent: r.sent.addr(),
            expected: r.expected.addr(),
            epoch: r.epoch.addr(),
            fault: r.fault.addr(),
            pinned: r.pinned.addr(),
            timeout_ns: self.timeout_ns,
            me: rank as u32,
            size: self.size as u32,
            generation: self.generation,
            abort: LAYOUT.abort as u32,
        }
    }

    fn pages(&self, rank: usize) -> PagesParam {
        let r = &self.ranks[rank];
        PagesParam {
            base: r.data.addr(),
            stride: r.data.stride(),
            errors: r.errors.addr(),
            me: rank as u32,
            size: self.size as u32,
        }
    }

    fn kernel(&self, name: &str) -> &Kernel {
        &self.kernels.iter().find(|(n, _)| *n == name).expect(name).1
    }

    fn at(&self, name: &str, rank: usize, peer: usize, slot: usize, n: u64) -> Launch<'_> {
        let launch = self.kernel(name).launch(1).arg(&self.param(rank));
        launch.arg(&(peer as u32)).arg(&(slot as u32)).arg(&n)
    }

    pub fn signal(&self, rank: usize, dst: usize, slot: usize, n: u64) -> Launch<'_> {
        self.at("tw_signal", rank, dst, slot, n)
    }

    pub fn bump(&self, rank: usize, dst: usize, slot: usize, n: u64) -> Launch<'_> {
        self.at("tw_bump_epoch", rank, dst, slot, n)
    }

    pub fn wait(&self, rank: usize, src: usize, slot: usize, n: u64) -> Launch<'_> {
        self.at("tw_wait", rank, src, slot, n)
    }

    /// One block of 64 threads, as `DeviceTransport::barrier` launches it.
    pub fn barrier(&self, rank: usize, channel: usize) -> Launch<'_> {
        self.kernel("tw_barrier").launch(64).arg(&self.param(rank)).arg(&(channel as u32))
    }

    /// One block of 256 threads, as `DeviceTransport::advance` launches it.
    pub fn advance(&self, rank: usize, first: usize, num: usize) -> Launch<'_> {
        let launch = self.kernel("tw_advance").launch(256).arg(&self.param(rank));
        launch.arg(&(first as u32)).arg(&(num as u32))
    }

    /// One block of 64 threads, as `DeviceTransport::enter` launches it.
    pub fn enter_launch(&self, rank: usize, credit: usize, first: usize, num: usize) -> Launch<'_> {
        let launch = self.kernel("tw_enter").launch(64).arg(&self.param(rank));
        launch.arg(&(credit as u32)).arg(&(first as u32)).arg(&(num as u32))
    }

    /// One block of 64 threads, as `DeviceTransport::wait_peers` launches it.
    pub fn wait_peers(&self, rank: usize, slot: usize) -> Launch<'_> {
        self.kernel("tw_wait_peers").launch(64).arg(&self.param(rank)).arg(&(slot as u32))
    }

    /// One block of 256 threads over `len` bytes at `out`.
    pub fn poison(&self, rank: usize, out: u64, len: u64) -> Launch<'_> {
        let mut p = TwPoison { out: [0; 8], len: [0; 8], byte: [0; 8] };
        // The second of two outputs, the first of no bytes.
        (p.out[1], p.len[1], p.byte[1]) = (out, len, 255);
        self.kernel("tw_poison").launch(256).arg(&self.param(rank)).arg(&p)
    }

    fn own<A: NoUninit, B: NoUninit>(&self, name: &str, a: &A, b: &B) -> Launch<'_> {
        self.kernel(name).launch(1).arg(a).arg(b)
    }

    pub fn put(&self, rank: usize, dst: usize, v: u64) -> Launch<'_> {
        self.own("t_put", &self.pages(rank), &(dst as u32)).arg(&v)
    }

    pub fn check(&self, rank: usize, src: usize, v: u64) -> Launch<'_> {
        self.own("t_check", &self.pages(rank), &(src as u32)).arg(&v)
    }

    pub fn copy(&self, dst: u64, src: u64) -> Launch<'_> {
        self.own("t_copy", &dst, &src)
    }

    pub fn enter(&self, rank: usize, round: u64) -> Launch<'_> {
        self.own("t_enter", &self.pages(rank), &round)
    }

    pub fn left(&self, rank: usize, round: u64) -> Launch<'_> {
        self.own("t_left", &self.pages(rank), &round)
    }

    /// A run with the memory of all ranks.
    pub fn run(&self, seed: u64) -> Run<'_> {
        Run::new(seed).memory(self.ranks.iter().flat_map(RankMemory::all))
    }

    /// Byte offset of a count, as `control::signal_offset`.
    pub fn count_offset(&self, slot: usize, writer: usize) -> usize {
        LAYOUT.signals + (slot * self.size + writer) * 16
    }

    pub fn count(&self, page: usize, slot: usize, writer: usize) -> u64 {
        self.ranks[page].control.get(page, self.count_offset(slot, writer))
    }

    pub fn set_count(&self, page: usize, slot: usize, writer: usize, v: u64) {
        self.ranks[page].control.set(page, self.count_offset(slot, writer), v);
    }

    pub fn abort(&self, page: usize, writer: usize) -> u64 {
        self.ranks[page].control.get(page, LAYOUT.abort + 8 * writer)
    }

    pub fn set_abort(&self, page: usize, writer: usize, code: u64) {
        self.ranks[page].control.set(page, LAYOUT.abort + 8 * writer, code);
    }

    pub fn fault(&self, rank: usize) -> u64 {
        self.ranks[rank].fault.get(0, 0)
    }

    pub fn errors(&self) -> u64 {
        self.ranks.iter().map(|r| r.errors.get(0, 0)).sum()
    }

    /// Every word of every rank, for comparing before and after.
    pub fn snapshot(&self) -> Vec<Vec<u64>> {
        let words =
            |m: &Memory, i: usize| (0..m.len_bytes() / 8).map(|w| m.get(i, 8 * w)).collect();
        let pages =
            self.ranks.iter().enumerate().flat_map(|(r, m)| [(&*m.control, r), (&*m.data, r)]);
        let own = self.ranks.iter().flat_map(|m| m.all()[2..].to_vec()).map(|m| (m, 0));
        pages.chain(own).map(|(m, i)| words(m, i)).collect()
    }

    /// As `AbortCode::pack`.
    pub fn code(&self, from: usize, about: usize, reason: u64) -> u64 {
        1 << 63
            | (from as u64) << 48
            | (about as u64) << 40
            | reason << 32
            | u64::from(self.generation)
    }

    /// The report of a rank's device, read as `vmm/fault.rs` reads it.
    pub fn report(&self, rank: usize) -> Option<Report> {
        let word = |i: usize| self.ranks[rank].pinned.get(0, LAYOUT.report + 8 * i);
        let head = word(0);
        if head == 0 || word(7) as u32 != self.generation {
            return None;
        }
        Some(Report {
            barrier: head >> 8 & 0xff == 2,
            reason: head & 0xff,
            slot: word(1) as usize,
            peer: word(2) as usize,
            expected: word(3),
            seen: word(4),
            elapsed_ns: word(5),
            code: word(6),
        })
    }

    /// Nothing has failed, and every count was sent and consumed exactly once.
    #[track_caller]
    pub fn assert_settled(&self) {
        assert_eq!(self.errors(), 0, "a wait ended before its data, or after it was overwritten");
        let l = &*LAYOUT;
        for (r, m) in self.ranks.iter().enumerate() {
            assert_eq!((self.fault(r), self.report(r)), (0, None), "rank {r} has a fault");
            for i in 0..l.num_signals * self.size {
                let (slot, src) = (i / self.size, i % self.size);
                let sent = self.ranks[src].sent.get(0, 8 * (slot * self.size + r));
                let seen = [self.count(r, slot, src), m.expected.get(0, 8 * i)];
                assert_eq!(seen, [sent; 2], "slot {slot} of rank {r} from {src}");
                assert_eq!(m.control.get(r, l.signals + 16 * i + 8), 0, "nobody writes a tag");
            }
            let mut head = (0..l.inbox / 8).map(|w| m.control.get(r, 8 * w));
            assert!(head.all(|w| w == 0), "rank {r} heard an abort, or its header changed");
        }
    }
}

/// The 64 bytes in pinned memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    pub barrier: bool,
    pub reason: u64,
    pub slot: usize,
    pub peer: usize,
    pub expected: u64,
    pub seen: u64,
    pub elapsed_ns: u64,
    pub code: u64,
}
