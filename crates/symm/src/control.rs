//! The control page: one per (team, rank), mapped by all members.
//!
//! ```text
//! 0x0000  magic u64 | layout version u32, rank u32 | size u32, pad | team id u64 | generation u64
//! 0x0080  bell u32 | sleepers u32          futex of the owner; a signal rings it
//! 0x0088  sign u64                         the owner waits: a count << 8 | world rank awaited
//! 0x0100  abort[64] u64                    slot i is written by rank i
//! 0x0300  report[8] u64                    why the owner aborted; first writer wins
//! 0x0340  last two prepares: { sequence u64, fingerprint u64 }
//! 0x1000  barrier inbox[64 channels][64] u64
//! 0x9000  signals[NUM_SIGNALS][size] { count u64, tag u64 }
//! ....    flight recorder
//! ```
//! The page is zero before any other rank can map it (the file starts as zeros).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tilewire_core::{Error, ErrorKind, Rank, Result};

use crate::map::{Mapping, PAGE};
use crate::protocol;
use crate::recorder::RECORDER_BYTES;

/// Signal slots of a team.
pub const NUM_SIGNALS: usize = 4096;
/// Barrier channels of a team.
pub(crate) const NUM_CHANNELS: usize = 64;

pub(crate) const MAGIC: u64 = 0x7469_6c65_7769_7265; // "tilewire"
pub(crate) const LAYOUT_VERSION: u64 = 2;

const OFF_MAGIC: usize = 0x00;
const OFF_VERSION_RANK: usize = 0x08;
const OFF_SIZE: usize = 0x10;
const OFF_TEAM: usize = 0x18;
const OFF_GENERATION: usize = 0x20;
const OFF_BELL: usize = 0x80;
const OFF_SLEEPERS: usize = 0x84;
const OFF_SIGN: usize = 0x88;
pub(crate) const OFF_ABORT: usize = 0x100;
const OFF_REPORT: usize = 0x300;
const OFF_PREPARE: usize = 0x340;
pub(crate) const OFF_INBOX: usize = 0x1000;
/// Bytes of one barrier channel in the inbox.
pub(crate) const INBOX_ROW: usize = 64 * 8;
pub(crate) const OFF_SIGNALS: usize = 0x9000;

/// All control pages of a team, seen by one member.
pub(crate) struct Control {
    map: Mapping,
    size: usize,
}

/// Returns the bytes of a page without flight recorder: the size of a control page in device
/// memory.
pub(crate) fn device_page_bytes(size: usize) -> usize {
    recorder_offset(size)
}

/// Returns the header words of `rank`'s page, in order from offset 0.
pub(crate) fn header(rank: Rank, size: usize, team_id: u64, generation: u64) -> [u64; 5] {
    [MAGIC, LAYOUT_VERSION << 32 | u64::from(rank.get()), size as u64, team_id, generation]
}

/// Fails unless `got`, read from `peer`'s page, is the header that it must have.
pub(crate) fn check_header(got: &[u64; 5], want: &[u64; 5], peer: Rank) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Mismatch,
        "the control page of a peer belongs to another team or version",
    )
    .peer(peer)
    .expected(format_args!("{want:x?}"))
    .seen(format_args!("{got:x?}")))
}

/// Returns the bytes of one page of a team with `size` members.
pub(crate) fn page_bytes(size: usize) -> usize {
    recorder_offset(size) + RECORDER_BYTES.next_multiple_of(PAGE)
}

fn recorder_offset(size: usize) -> usize {
    OFF_SIGNALS + (NUM_SIGNALS * size * 16).next_multiple_of(PAGE)
}

impl Control {
    pub fn new(map: Mapping, size: usize) -> Self {
        Self { map, size }
    }

    /// Fills in the header of my own page.
    pub fn init(&self, me: Rank, team_id: u64, generation: u64) {
        let w = |off: usize, v: u64| self.map.word(me.idx(), off).store(v, Ordering::Relaxed);
        w(OFF_VERSION_RANK, LAYOUT_VERSION << 32 | u64::from(me.get()));
        w(OFF_SIZE, self.size as u64);
        w(OFF_TEAM, team_id);
        w(OFF_GENERATION, generation);
        self.map.word(me.idx(), OFF_MAGIC).store(MAGIC, Ordering::Release);
    }

    /// Checks the header of a peer's page.
    pub fn check(&self, peer: Rank, team_id: u64, generation: u64) -> Result<()> {
        let r = |off: usize| self.map.word(peer.idx(), off).load(Ordering::Acquire);
        let got = [OFF_MAGIC, OFF_VERSION_RANK, OFF_SIZE, OFF_TEAM, OFF_GENERATION].map(r);
        check_header(&got, &header(peer, self.size, team_id, generation), peer)
    }

    pub fn abort_slot(&self, page: Rank, writer: Rank) -> &AtomicU64 {
        self.map.word(page.idx(), OFF_ABORT + 8 * writer.idx())
    }

    pub fn report_word(&self, page: Rank, i: usize) -> &AtomicU64 {
        assert!(i < 8, "a report has 8 words");
        self.map.word(page.idx(), OFF_REPORT + 8 * i)
    }

    /// Returns the sequence number (0 and 2) and fingerprint (1 and 3) of the owner's last two
    /// prepares.
    pub fn prepare_word(&self, page: Rank, i: usize) -> &AtomicU64 {
        assert!(i < 4, "two prepares have 4 words");
        self.map.word(page.idx(), OFF_PREPARE + 8 * i)
    }

    /// Returns the word by which the owner of a page says that it waits.
    pub fn sign_word(&self, page: Rank) -> &AtomicU64 {
        self.map.word(page.idx(), OFF_SIGN)
    }

    pub fn inbox(&self, page: Rank, channel: usize, writer: Rank) -> &AtomicU64 {
        assert!(channel < NUM_CHANNELS && writer.idx() < self.size, "no such barrier slot");
        self.map.word(page.idx(), OFF_INBOX + channel * INBOX_ROW + writer.idx() * 8)
    }

    fn signal_offset(&self, slot: usize, writer: Rank) -> usize {
        assert!(slot < NUM_SIGNALS && writer.idx() < self.size, "no such signal slot");
        OFF_SIGNALS + (slot * self.size + writer.idx()) * 16
    }

    pub fn count(&self, page: Rank, slot: usize, writer: Rank) -> &AtomicU64 {
        self.map.word(page.idx(), self.signal_offset(slot, writer))
    }

    pub fn tag(&self, page: Rank, slot: usize, writer: Rank) -> &AtomicU64 {
        self.map.word(page.idx(), self.signal_offset(slot, writer) + 8)
    }

    pub fn recorder_word(&self, page: Rank, offset: usize) -> &AtomicU64 {
        self.map.word(page.idx(), recorder_offset(self.size) + offset)
    }

    fn bell(&self, page: Rank) -> (&AtomicU32, &AtomicU32) {
        (self.map.word32(page.idx(), OFF_BELL), self.map.word32(page.idx(), OFF_SLEEPERS))
    }

    /// Wakes the threads that sleep on `page`'s bell.
    pub fn ring(&self, page: Rank) {
        let (bell, sleepers) = self.bell(page);
        protocol::ring(bell, sleepers);
    }

    /// Sleeps until my bell rings, `still()` turns false, or `limit` passes.
    pub fn sleep(&self, me: Rank, limit: std::time::Duration, still: impl FnOnce() -> bool) {
        let (bell, sleepers) = self.bell(me);
        protocol::sleep(bell, sleepers, limit, still);
    }
}
