//! Rows from choices: pure.

use super::PermuteDesc;

/// The row of each copy, and the copy of each row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// Row of each (token, choice), -1 if masked or dropped.
    pub slots: Vec<i32>,
    /// `token * top_k + choice` in each row of the capacity, -1 in padding.
    pub sources: Vec<i32>,
    /// Rows of each expert, padding included, clamped to the capacity.
    pub m_splits: Vec<i64>,
    /// Rows needed to drop nothing, padding included.
    pub total: i64,
    /// Copies dropped.
    pub dropped: i64,
}

impl Layout {
    /// Nothing anywhere: what a refused routing leaves behind.
    pub fn empty(d: &PermuteDesc, num_choices: usize) -> Self {
        Self {
            slots: vec![-1; num_choices],
            sources: vec![-1; d.capacity],
            m_splits: vec![0; d.num_experts],
            total: 0,
            dropped: 0,
        }
    }

    /// Lays out the copies that `idx` (`[tokens, top_k]`, -1 = masked) asks for; `None` if an
    /// index is neither an expert nor -1.
    pub fn new(d: &PermuteDesc, idx: &[i64]) -> Option<Self> {
        let mut counts = vec![0usize; d.num_experts];
        for &e in idx.iter().filter(|&&e| e != -1) {
            *counts.get_mut(usize::try_from(e).ok()?)? += 1;
        }
        let mut l = Self::empty(d, idx.len());
        let mut next = Vec::with_capacity(d.num_experts);
        let mut row = 0;
        for (split, num) in l.m_splits.iter_mut().zip(&counts) {
            next.push(row);
            let end = row + num.next_multiple_of(d.align);
            *split = (end.min(d.capacity) - row.min(d.capacity)) as i64;
            row = end;
        }
        l.total = row as i64;
        for (i, &e) in idx.iter().enumerate().filter(|(_, e)| **e != -1) {
            let at = next[e as usize];
            next[e as usize] += 1;
            match l.sources.get_mut(at) {
                Some(s) => (*s, l.slots[i]) = (i as i32, at as i32),
                None => l.dropped += 1,
            }
        }
        Some(l)
    }
}
