//! The deterministic allocator: equal calls on all ranks give equal offsets.

use std::collections::BTreeMap;

use tilewire_core::{Error, ErrorKind, Result, inject};

/// Every allocation starts on this boundary (bytes, or slots for signals).
pub(crate) struct Allocator {
    /// Free ranges, offset to length.
    free: BTreeMap<usize, usize>,
    len: usize,
    align: usize,
    /// Digest of all calls so far; equal on all ranks as long as they agree.
    digest: u64,
    num_calls: u64,
}

impl Allocator {
    pub fn new(len: usize, align: usize) -> Self {
        Self { free: BTreeMap::from([(0, len)]), len, align, digest: 0, num_calls: 0 }
    }

    fn note(&mut self, what: &str, a: usize, b: usize, tag: &str) {
        let mut h = blake3::Hasher::new();
        h.update(&self.digest.to_le_bytes());
        h.update(what.as_bytes());
        h.update(&(a as u64).to_le_bytes());
        h.update(&(b as u64).to_le_bytes());
        h.update(tag.as_bytes());
        let out = h.finalize();
        let mut word = [0; 8];
        word.copy_from_slice(&out.as_bytes()[..8]);
        self.digest = u64::from_le_bytes(word);
        self.num_calls += 1;
    }

    /// Allocates by first fit. A length of 0 takes no space but has an offset.
    pub fn alloc(&mut self, len: usize, tag: &str) -> Result<usize> {
        inject::step("a free range of the heap")?;
        let need = len.checked_next_multiple_of(self.align).unwrap_or(usize::MAX);
        let found = self.free.iter().find(|&(_, &l)| l >= need).map(|(&o, &l)| (o, l));
        let Some((offset, have)) = found else {
            let free: usize = self.free.values().sum();
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("the heap has no free range for `{tag}`"),
            )
            .expected(format_args!("{need} free in one piece"))
            .seen(format_args!("{free} of {} free in all", self.len))
            .hint(
                "make the heap larger (Plan::memory says what each plan needs), call the \
                       collective `heap.grow()`, or return dropped buffers with `heap.collect()`",
            ));
        };
        if need > 0 {
            self.free.remove(&offset);
            if have > need {
                self.free.insert(offset + need, have - need);
            }
        }
        self.note("alloc", offset, len, tag);
        Ok(offset)
    }

    /// Returns a range given by `alloc`.
    pub fn release(&mut self, offset: usize, len: usize) {
        let len = len.next_multiple_of(self.align);
        self.note("free", offset, len, "");
        if len == 0 {
            return;
        }
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&o, &l)) = self.free.range(..offset).next_back()
            && o + l == offset
        {
            start = o;
        }
        if let Some(l) = self.free.remove(&end) {
            end += l;
        }
        self.free.insert(start, end - start);
    }

    /// Adds `more` at the end.
    pub fn grow(&mut self, more: usize) {
        let at = self.len;
        self.len += more;
        self.release(at, more);
    }

    /// Adds memory up to `at` as free, and the `len` bytes from there as used.
    pub fn take_over(&mut self, at: usize, len: usize) {
        if at > self.len {
            self.grow(at - self.len);
        }
        self.len = at + len;
        self.note("take over", at, len, "");
    }

    /// Returns the digest and number of calls, for comparison between ranks.
    pub fn digest(&self) -> (u64, u64) {
        (self.digest, self.num_calls)
    }

    pub fn free_len(&self) -> usize {
        self.free.values().sum()
    }

    pub fn total_len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Live ranges never overlap; equal calls give equal offsets and digests; releasing
        /// everything in any order gives the whole range back.
        #[test]
        fn no_overlap_deterministic_and_whole_again(
            ops in prop::collection::vec((0usize..3000, any::<prop::sample::Index>()), 1..60)
        ) {
            let (mut a, mut b) = (Allocator::new(1 << 16, 256), Allocator::new(1 << 16, 256));
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (len, idx) in ops {
                if len % 3 == 0 && !live.is_empty() {
                    let (o, l) = live.swap_remove(idx.index(live.len()));
                    a.release(o, l);
                    b.release(o, l);
                } else if let Ok(o) = a.alloc(len, "t") {
                    prop_assert_eq!(b.alloc(len, "t").unwrap(), o);
                    prop_assert!(o % 256 == 0 && o + len <= 1 << 16);
                    for &(p, l) in &live {
                        prop_assert!(o + len <= p || p + l <= o || len == 0 || l == 0);
                    }
                    live.push((o, len));
                }
                prop_assert_eq!(a.digest(), b.digest());
            }
            for (o, l) in live {
                a.release(o, l);
            }
            prop_assert_eq!(a.free_len(), 1 << 16);
            prop_assert_eq!(a.alloc(1 << 16, "all").unwrap(), 0);
        }
    }

    #[test]
    fn exhaustion_says_what_was_asked_and_what_is_free() {
        let mut a = Allocator::new(1024, 256);
        a.alloc(512, "x").unwrap();
        let e = a.alloc(1000, "kv").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Exhausted);
        let t = e.to_string();
        assert!(t.contains("`kv`") && t.contains("1024 free") && t.contains("512 of 1024"), "{t}");
        a.grow(1024);
        a.alloc(1000, "kv").unwrap();
    }
}
