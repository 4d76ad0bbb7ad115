//! Records that their owner overwrites while others read them: entries of the flight recorder, and
//! the notes of the last two meetings.

use std::sync::atomic::Ordering;

use super::Word;

/// Writes an entry: its number into word 0, and `body` behind it. For the one writer.
#[inline]
pub fn publish<'a, W: Word + 'a>(word: impl Fn(usize) -> &'a W, seq: u64, body: &[u64]) {
    // A reader that finds 0 or another number here ignores the entry.
    word(0).store(0, Ordering::Relaxed);
    // Orders the stores below behind that one.
    word(0).fence(Ordering::Release);
    body.iter().enumerate().for_each(|(i, v)| word(1 + i).store(*v, Ordering::Relaxed));
    word(0).store(seq, Ordering::Release);
}

/// Reads the entry `seq` into `body`. Returns false if it is not written yet, or is overwritten:
/// then `body` holds nothing of use.
#[inline]
pub fn snapshot<'a, W: Word + 'a>(
    word: impl Fn(usize) -> &'a W,
    seq: u64,
    body: &mut [u64],
) -> bool {
    if word(0).load(Ordering::Acquire) != seq {
        return false;
    }
    body.iter_mut().enumerate().for_each(|(i, v)| *v = word(1 + i).load(Ordering::Relaxed));
    // Overwritten while it was read? The fence keeps the loads above before this one.
    word(0).fence(Ordering::Acquire);
    word(0).load(Ordering::Relaxed) == seq
}

/// Notes meeting `seq` and its fingerprint in the older one of two pairs of words. For the one
/// writer.
///
/// Two are kept: a rank that has passed meeting k may note k + 1 before I have looked at k, but not
/// k + 2, because that needs my k + 1, which I note after I have seen k.
#[inline]
pub fn note<'a, W: Word + 'a>(word: impl Fn(usize) -> &'a W, seq: u64, fingerprint: u64) {
    let of = |i| word(i).load(Ordering::Relaxed);
    let older = if of(0) <= of(2) { 0 } else { 2 };
    // Readers ignore the pair while it changes.
    word(older).store(0, Ordering::Relaxed);
    word(older).fence(Ordering::Release);
    word(older + 1).store(fingerprint, Ordering::Relaxed);
    word(older).store(seq, Ordering::Release);
}

/// Returns the fingerprint of meeting `seq`, if it is one of the last two that are noted.
///
/// It does not look at the number again: as [`note`] says, a pair is not overwritten before all
/// have looked at it.
#[inline]
pub fn noted<'a, W: Word + 'a>(word: impl Fn(usize) -> &'a W, seq: u64) -> Option<u64> {
    let at = [0, 2].into_iter().find(|i| word(*i).load(Ordering::Acquire) == seq)?;
    Some(word(at + 1).load(Ordering::Relaxed))
}

/// Returns the entry of a meeting; if later ones have overwritten it, what is noted of it.
///
/// A meeting is noted after its entry is written. So if the note exists and the entry was not
/// found, the entry may have been written in between: this looks for it once more, after the note.
#[inline]
pub fn entry_or_note<T>(
    mut entry: impl FnMut() -> Option<T>,
    note: impl FnOnce() -> Option<T>,
) -> Option<T> {
    entry().or_else(|| {
        let noted = note()?;
        Some(entry().unwrap_or(noted))
    })
}
