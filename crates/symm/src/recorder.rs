//! The flight recorder: the last launches of each rank, readable by its peers.
//!
//! Lives in the control page. An entry is 24 words; the sequence number is written last
//! (release) and read first (acquire), so a reader never sees a half-written entry as valid.

use std::sync::atomic::{Ordering, fence};

use serde::{Deserialize, Serialize};
use tilewire_core::Rank;

use crate::control::Control;

/// Entries kept per rank.
pub(crate) const NUM_ENTRIES: usize = 2048;
const ENTRY_WORDS: usize = 24;
const TEXT_WORD: usize = 8;
const TEXT_BYTES: usize = (ENTRY_WORDS - TEXT_WORD) * 8;
pub(crate) const RECORDER_BYTES: usize = NUM_ENTRIES * ENTRY_WORDS * 8;

/// The subject of a collective call; equal on all ranks or the call fails.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fingerprint {
    hash: [u8; 32],
    text: String,
}

impl Fingerprint {
    /// Makes the fingerprint of `op` from a text of everything that must be equal on all ranks.
    pub fn new(op: &str, what: impl std::fmt::Display) -> Self {
        let text = format!("{op} {what}");
        let mut h = blake3::Hasher::new();
        h.update(env!("CARGO_PKG_VERSION").as_bytes());
        h.update(text.as_bytes());
        Self { hash: *h.finalize().as_bytes(), text }
    }

    /// Makes a fingerprint from its tag and text in a flight recorder.
    pub(crate) fn recorded(tag: u64, text: String) -> Self {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&tag.to_le_bytes());
        Self { hash, text }
    }

    /// Returns the operation.
    pub fn op(&self) -> &str {
        self.text.split(' ').next().unwrap_or_default()
    }

    /// Returns the text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the first eight bytes of the hash, which credits carry.
    pub fn tag(&self) -> u64 {
        let mut b = [0; 8];
        b.copy_from_slice(&self.hash[..8]);
        u64::from_le_bytes(b)
    }
}

/// The subject of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A collective `prepare`.
    Prepare,
    /// A `launch`.
    Launch,
}

/// Its progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryState {
    /// Called by the user.
    Queued,
    /// Running on its stream.
    Running,
    /// Complete.
    Done,
    /// Failed or drained.
    Failed,
}

/// One line of the flight recorder.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// Position in the team's program order, from 1.
    pub seq: u64,
    /// Its subject.
    pub kind: EntryKind,
    /// Its progress.
    pub state: EntryState,
    /// First eight bytes of the fingerprint.
    pub fingerprint: u64,
    /// Operation, shapes, dtype and configuration as text.
    pub text: String,
}

fn base(seq: u64) -> usize {
    (seq as usize % NUM_ENTRIES) * ENTRY_WORDS * 8
}

/// Returns at most `max_bytes` of `text`, in whole characters.
pub(crate) fn cut(text: &str, max_bytes: usize) -> &str {
    let end = (0..=max_bytes.min(text.len())).rev().find(|&i| text.is_char_boundary(i));
    &text[..end.unwrap_or(0)]
}

/// Returns the number of the last entry of `rank`'s page; 0 without one.
pub(crate) fn last(ctl: &Control, rank: Rank) -> u64 {
    // A number that is being replaced reads as 0, and then its predecessor counts.
    let number = |i| ctl.recorder_word(rank, base(i)).load(Ordering::Acquire);
    (0..NUM_ENTRIES as u64).map(number).max().unwrap_or(0)
}

/// Writes an entry into my page.
pub(crate) fn write(ctl: &Control, me: Rank, seq: u64, kind: EntryKind, fp: u64, text: &str) {
    let at = base(seq);
    let put = |i: usize, v: u64| ctl.recorder_word(me, at + 8 * i).store(v, Ordering::Relaxed);
    // A reader that finds 0 or another number here ignores the entry.
    ctl.recorder_word(me, at).store(0, Ordering::Relaxed);
    // Orders the stores below behind that one.
    fence(Ordering::Release);
    put(
        1,
        match kind {
            EntryKind::Prepare => 1,
            EntryKind::Launch => 2,
        },
    );
    put(2, 0);
    put(3, fp);
    let text = cut(text, TEXT_BYTES).as_bytes();
    for i in 0..ENTRY_WORDS - TEXT_WORD {
        let mut word = [0; 8];
        let part = text.get(8 * i..).unwrap_or_default();
        let n = part.len().min(8);
        word[..n].copy_from_slice(&part[..n]);
        put(TEXT_WORD + i, u64::from_le_bytes(word));
    }
    ctl.recorder_word(me, at).store(seq, Ordering::Release);
}

/// Records the state of an entry of my page.
pub(crate) fn set_state(ctl: &Control, me: Rank, seq: u64, state: EntryState) {
    if ctl.recorder_word(me, base(seq)).load(Ordering::Relaxed) == seq {
        let v = match state {
            EntryState::Queued => 0,
            EntryState::Running => 1,
            EntryState::Done => 2,
            EntryState::Failed => 3,
        };
        ctl.recorder_word(me, base(seq) + 16).store(v, Ordering::Relaxed);
    }
}

/// Returns the entry `seq` of `rank`'s page, unless it is not written yet or overwritten already.
pub(crate) fn read(ctl: &Control, rank: Rank, seq: u64) -> Option<Entry> {
    let at = base(seq);
    let get = |i: usize| ctl.recorder_word(rank, at + 8 * i).load(Ordering::Relaxed);
    if seq == 0 || ctl.recorder_word(rank, at).load(Ordering::Acquire) != seq {
        return None;
    }
    let (kind, state, fingerprint) = (get(1), get(2), get(3));
    let mut text = Vec::with_capacity(TEXT_BYTES);
    for i in TEXT_WORD..ENTRY_WORDS {
        text.extend_from_slice(&get(i).to_le_bytes());
    }
    text.truncate(text.iter().rposition(|&b| b != 0).map_or(0, |p| p + 1));
    // Overwritten while we read it? The fence keeps the loads above before this one.
    fence(Ordering::Acquire);
    if ctl.recorder_word(rank, at).load(Ordering::Relaxed) != seq {
        return None;
    }
    Some(Entry {
        seq,
        kind: if kind == 1 { EntryKind::Prepare } else { EntryKind::Launch },
        state: match state {
            0 => EntryState::Queued,
            1 => EntryState::Running,
            2 => EntryState::Done,
            _ => EntryState::Failed,
        },
        fingerprint,
        text: String::from_utf8_lossy(&text).into_owned(),
    })
}

/// Notes a prepare where later launches cannot overwrite it.
///
/// Two are kept: a rank that has passed prepare k may record k + 1 before I have looked at k, but
/// not k + 2, because that needs my k + 1, which I record after I have seen k.
pub(crate) fn write_prepare(ctl: &Control, me: Rank, seq: u64, fp: u64) {
    let word = |i| ctl.prepare_word(me, i);
    let older =
        if word(0).load(Ordering::Relaxed) <= word(2).load(Ordering::Relaxed) { 0 } else { 2 };
    // Readers ignore the entry while it changes.
    word(older).store(0, Ordering::Relaxed);
    fence(Ordering::Release);
    word(older + 1).store(fp, Ordering::Relaxed);
    word(older).store(seq, Ordering::Release);
}

/// Returns the entry of `rank` at `seq`. If later launches have overwritten it, returns the record
/// of the prepare `seq`, if that is one of the last two.
///
/// A prepare is recorded after its entry is written. So if the record exists and the entry was not
/// found, the entry may have been written in between: this reads it once more, after the record.
pub(crate) fn read_or_prepare(ctl: &Control, rank: Rank, seq: u64) -> Option<Entry> {
    read(ctl, rank, seq).or_else(|| {
        let noted = read_prepare(ctl, rank, seq)?;
        Some(read(ctl, rank, seq).unwrap_or(noted))
    })
}

/// Reads as [`read_or_prepare`], where an entry of `kind` is expected. Launches that are compared
/// are recorded as prepares are; a record whose text is overwritten is taken to be of the expected
/// kind.
pub(crate) fn read_or_met(
    ctl: &Control,
    rank: Rank,
    (kind, seq): (EntryKind, u64),
) -> Option<Entry> {
    let noted = |e: Entry| if e.text == FORGOTTEN { Entry { kind, ..e } } else { e };
    read_or_prepare(ctl, rank, seq).map(noted)
}

/// The text in place of one that launches have overwritten.
const FORGOTTEN: &str = "(a meeting whose words are no longer recorded)";

/// Returns prepare number `seq` of `rank`, if it is one of its last two.
fn read_prepare(ctl: &Control, rank: Rank, seq: u64) -> Option<Entry> {
    let word = |i| ctl.prepare_word(rank, i);
    let at = [0, 2].into_iter().find(|&i| word(i).load(Ordering::Acquire) == seq)?;
    Some(Entry {
        seq,
        kind: EntryKind::Prepare,
        state: EntryState::Done,
        fingerprint: word(at + 1).load(Ordering::Relaxed),
        text: FORGOTTEN.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::control::page_bytes;
    use crate::map::{Mapping, shared_file};

    const ROUNDS: u64 = 20_000;

    /// Checks that a reader finds a prepare that is being written with its text, or not at all.
    #[test]
    fn a_prepare_is_never_seen_without_its_words_while_it_is_written() {
        let bytes = page_bytes(1);
        let file = shared_file("recorder", bytes).unwrap();
        let ctl = Control::new(Mapping::new(&[file], bytes, bytes).unwrap(), 1);
        let (me, read_up_to) = (Rank::new(0), AtomicU64::new(0));
        let wrong = std::thread::scope(|s| {
            s.spawn(|| {
                for seq in 1..=ROUNDS {
                    let fp = Fingerprint::recorded(seq, format!("op {seq}"));
                    write(&ctl, me, seq, EntryKind::Prepare, fp.tag(), fp.text());
                    write_prepare(&ctl, me, seq, fp.tag());
                    while read_up_to.load(Ordering::Acquire) < seq {
                        std::thread::yield_now();
                    }
                }
            });
            let wrong = (1..=ROUNDS).find_map(|seq| {
                let mut looks = 0u32;
                let found = loop {
                    looks += 1;
                    match read_or_prepare(&ctl, me, seq) {
                        Some(e) => break e,
                        // Where the two share a core.
                        None if looks.is_multiple_of(256) => std::thread::yield_now(),
                        None => std::hint::spin_loop(),
                    }
                };
                read_up_to.store(seq, Ordering::Release);
                let right = found.fingerprint == seq && found.text == format!("op {seq}");
                (!right).then_some(found)
            });
            // Whatever was found, the writer must end.
            read_up_to.store(u64::MAX, Ordering::Release);
            wrong
        });
        assert_eq!(wrong, None);
    }
}
