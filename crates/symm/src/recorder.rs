//! The flight recorder: the last launches of each rank, readable by its peers.
//!
//! Lives in the control page. An entry is 24 words; the sequence number is written last
//! (release) and read first (acquire), so a reader never sees a half-written entry as valid.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use tilewire_core::Rank;

use crate::control::Control;
use crate::protocol;

/// Entries kept per rank.
pub(crate) const NUM_ENTRIES: usize = 2048;
const ENTRY_WORDS: usize = 24;
/// Words of an entry; word 0 is its number.
const KIND: usize = 1;
const STATE: usize = 2;
const FINGERPRINT: usize = 3;
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
    let mut body = [0; ENTRY_WORDS - 1];
    body[KIND - 1] = match kind {
        EntryKind::Prepare => 1,
        EntryKind::Launch => 2,
    };
    body[FINGERPRINT - 1] = fp;
    let text = cut(text, TEXT_BYTES).as_bytes();
    for (word, part) in body[TEXT_WORD - 1..].iter_mut().zip(text.chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..part.len()].copy_from_slice(part);
        *word = u64::from_le_bytes(bytes);
    }
    protocol::publish(|i| ctl.recorder_word(me, base(seq) + 8 * i), seq, &body);
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
        ctl.recorder_word(me, base(seq) + 8 * STATE).store(v, Ordering::Relaxed);
    }
}

/// Returns the entry `seq` of `rank`'s page, unless it is not written yet or overwritten already.
pub(crate) fn read(ctl: &Control, rank: Rank, seq: u64) -> Option<Entry> {
    let mut body = [0; ENTRY_WORDS - 1];
    let word = |i| ctl.recorder_word(rank, base(seq) + 8 * i);
    if seq == 0 || !protocol::snapshot(word, seq, &mut body) {
        return None;
    }
    let (kind, state) = (body[KIND - 1], body[STATE - 1]);
    let mut text: Vec<u8> = body[TEXT_WORD - 1..].iter().flat_map(|w| w.to_le_bytes()).collect();
    text.truncate(text.iter().rposition(|&b| b != 0).map_or(0, |p| p + 1));
    Some(Entry {
        seq,
        kind: if kind == 1 { EntryKind::Prepare } else { EntryKind::Launch },
        state: match state {
            0 => EntryState::Queued,
            1 => EntryState::Running,
            2 => EntryState::Done,
            _ => EntryState::Failed,
        },
        fingerprint: body[FINGERPRINT - 1],
        text: String::from_utf8_lossy(&text).into_owned(),
    })
}

/// Notes a prepare where later launches cannot overwrite it. The last two are kept.
pub(crate) fn write_prepare(ctl: &Control, me: Rank, seq: u64, fp: u64) {
    protocol::note(|i| ctl.prepare_word(me, i), seq, fp);
}

/// Returns the entry of `rank` at `seq`. If later launches have overwritten it, returns the record
/// of the prepare `seq`, if that is one of the last two.
pub(crate) fn read_or_prepare(ctl: &Control, rank: Rank, seq: u64) -> Option<Entry> {
    protocol::entry_or_note(|| read(ctl, rank, seq), || read_prepare(ctl, rank, seq))
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
    let fingerprint = protocol::noted(|i| ctl.prepare_word(rank, i), seq)?;
    Some(Entry {
        seq,
        kind: EntryKind::Prepare,
        state: EntryState::Done,
        fingerprint,
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
