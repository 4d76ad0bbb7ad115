//! What devices write to each other, as the driver whose devices are emulated counts it, and
//! attacks on single signals and puts: `kernels/emu/driver/attacks.h`.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint};

use libloading::os::unix::{Library, RTLD_NOW};

/// What becomes of a signal, or of what it publishes; the numbers of `attacks.h`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// It is not stored.
    Lose = 1,
    /// It is stored twice.
    Twice = 2,
    /// The value of the launch before is stored.
    Stale = 3,
    /// It is stored before its data; a credit, with the one that its word got before.
    Early = 4,
    /// Its data stay away.
    Drop = 5,
    /// Its data go to another place.
    Shift = 6,
    /// The kernel that raises totals runs twice.
    RaiseTwice = 7,
}

/// What is attacked.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Target {
    pub device: u32,
    pub launch: u32,
    pub site: String,
    pub peer: u32,
    pub nth: u32,
}

/// What was seen of a run.
#[derive(Default, Debug)]
pub struct Report {
    /// (device, launch, site) to signals to each peer. Of sites `run KERNEL` the peer is the device
    /// itself.
    pub signals: BTreeMap<(u32, u32, String), BTreeMap<u32, u64>>,
    /// (device, launch, peer) to bytes written, and to different bytes.
    pub wrote: BTreeMap<(u32, u32, u32), (u64, u64)>,
}

/// The watching driver.
pub struct Watch(Library);

impl Watch {
    /// None unless this process runs on that driver, and kernels tell it of their stores.
    pub fn new() -> Option<Self> {
        std::env::var_os("TW_EMU_WATCH")?;
        // SAFETY: opening the driver runs nothing but what it runs for every program.
        let it = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW) }.ok()?;
        // SAFETY: the symbol is looked for, and not called.
        unsafe { it.get::<extern "C" fn()>(b"tw_emu_watch\0") }.ok()?;
        Some(Self(it))
    }

    /// A new run. With `keeps`, data are counted; with `observed`, the run before is what attacks
    /// compare with.
    pub fn begin(&self, keeps: bool, observed: bool) {
        // SAFETY: `attacks.h` declares it so.
        unsafe {
            let f = self.0.get::<extern "C" fn(c_int, c_int)>(b"tw_emu_watch\0").unwrap();
            f(c_int::from(keeps), c_int::from(observed));
        }
    }

    /// What this device does from now on belongs to `launch`.
    pub fn launch(&self, device: u32, launch: u32) {
        // SAFETY: `attacks.h` declares it so.
        unsafe {
            let f = self.0.get::<extern "C" fn(c_int, c_int)>(b"tw_emu_launch\0").unwrap();
            f(device as c_int, launch as c_int);
        }
    }

    /// Results of this device are about to be read.
    pub fn read(&self, device: u32) {
        // SAFETY: `attacks.h` declares it so.
        unsafe { self.0.get::<extern "C" fn(c_int)>(b"tw_emu_read\0").unwrap()(device as c_int) }
    }

    pub fn attack(&self, kind: Kind, t: &Target, by: u64) {
        type Attack = extern "C" fn(c_int, c_int, c_int, *const c_char, c_int, c_uint, u64);
        let site = CString::new(t.site.as_str()).unwrap();
        let (device, launch, peer) = (t.device as c_int, t.launch as c_int, t.peer as c_int);
        // SAFETY: `attacks.h` declares it so; it keeps no pointer.
        unsafe {
            let f = self.0.get::<Attack>(b"tw_emu_attack\0").unwrap();
            f(kind as c_int, device, launch, site.as_ptr(), peer, t.nth, by);
        }
    }

    /// Whether another signal comes to the word of the attacked one before it.
    pub fn has_before(&self) -> bool {
        // SAFETY: `attacks.h` declares it so.
        unsafe { self.0.get::<extern "C" fn() -> c_int>(b"tw_emu_has_before\0").unwrap()() != 0 }
    }

    /// For how long a device reads slowly behind an early credit.
    pub fn be_patient(&self, ms: u64) {
        // SAFETY: `attacks.h` declares it so.
        unsafe { self.0.get::<extern "C" fn(u64)>(b"tw_emu_patience\0").unwrap()(ms) }
    }

    /// How often the attack has struck.
    pub fn hits(&self) -> i32 {
        // SAFETY: `attacks.h` declares it so.
        unsafe { self.0.get::<extern "C" fn() -> c_int>(b"tw_emu_hits\0").unwrap()() }
    }

    pub fn report(&self) -> Report {
        unsafe extern "C" {
            fn free(p: *mut c_char);
        }
        // SAFETY: `attacks.h` declares it so; the text is freed once, behind its last use.
        let text = unsafe {
            let p = self.0.get::<extern "C" fn() -> *mut c_char>(b"tw_emu_report\0").unwrap()();
            let text = CStr::from_ptr(p).to_str().unwrap().to_owned();
            free(p);
            text
        };
        let mut out = Report::default();
        for line in text.lines() {
            let words: Vec<&str> = line.splitn(6, ' ').collect();
            let n = |i: usize| words[i].parse::<u64>().unwrap();
            let (device, launch, peer) = (n(1) as u32, n(2) as u32, n(3) as u32);
            if words[0] == "signal" {
                let site = (device, launch, words[5].to_owned());
                out.signals.entry(site).or_default().insert(peer, n(4));
            } else {
                out.wrote.insert((device, launch, peer), (n(4), n(5)));
            }
        }
        out
    }
}
