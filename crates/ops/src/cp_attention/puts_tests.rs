//! The rows that are put: each rank ends with the keys that it reads, and no others travel.

use proptest::prelude::*;
use tilewire_core::DType;

use super::*;
use crate::attention::{AttentionDesc, AttnMask};
use crate::cp_attention::config::Strategy;
use crate::cp_attention::desc::{CpAttentionDesc, Layout};
use crate::cp_attention::launch::Pass;
use crate::cp_attention::pieces::AREA;
use crate::cp_attention::pieces::tests::{Buffer, World, bytes_of, fitted, put, tensor};
use crate::cp_attention::schedule::most_segments;
use crate::cp_attention::tests::seqs;

/// Runs the steps of all ranks: a message is taken after it was sent and before its slot is written
/// again, every granted credit is acquired, and a message holds the keys of the rank that the
/// schedule names.
#[test]
fn a_ring_brings_all_keys_through_two_slots() {
    for size in 1..=8usize {
        let (mut at, mut credits) = (vec![0; size], vec![0usize; size]);
        // The content of the slots of each rank: the owner of the keys, or nothing.
        let mut slots = vec![[None; 2]; size];
        let mut taken = vec![Vec::new(); size];
        let steps = hops(size);
        loop {
            let mut moved = false;
            for r in 0..size {
                let Some(hop) = steps.get(at[r]) else { continue };
                let (next, before) = ((r + 1) % size, (r + size - 1) % size);
                match *hop {
                    Hop::Send { acquires: true, .. } if credits[r] == 0 => continue,
                    Hop::Send { t, acquires } => {
                        credits[r] -= usize::from(acquires);
                        let owner = if t == 0 { r } else { taken[r][t - 1] };
                        assert_eq!(slots[next][t % 2].replace(owner), None, "{size}: {hop:?}");
                    }
                    Hop::Take { t, .. } if slots[r][t % 2].is_none() => continue,
                    Hop::Take { t, grants } => {
                        assert_eq!(taken[r].len(), t);
                        taken[r].extend(slots[r][t % 2].take());
                        credits[before] += usize::from(grants);
                    }
                }
                (at[r], moved) = (at[r] + 1, true);
            }
            if !moved {
                break;
            }
        }
        assert!(at.iter().all(|a| *a == steps.len()), "{size}: a rank waits for ever");
        assert_eq!(credits, vec![0; size], "{size}: a credit that nobody takes");
        for (r, taken) in taken.iter().enumerate() {
            let want: Vec<usize> = (1..size).map(|t| (r + size - t) % size).collect();
            assert_eq!(*taken, want);
        }
    }
}

/// The content of places that no rank has put to.
const UNSENT: f32 = -1.0;
/// Elements of a row and head of keys, and of values.
const DIMS: [usize; 2] = [3, 2];

impl World {
    /// Returns the keys of rank `r` as tensors of its own.
    fn own(&self, r: usize) -> Vec<Buffer> {
        DIMS.map(|dim| tensor(&self.rows_kv(r), 0..self.sizes.all_kv, dim)).to_vec()
    }

    /// Returns what is in the dense rows of the keys of rank `owner` if its rows are there that
    /// are `wanted`.
    fn arrived(&self, owner: usize, wanted: &[bool]) -> Vec<Buffer> {
        let own = self.own(owner).into_iter().zip(DIMS);
        let keep = |(t, dim): (Buffer, usize)| {
            let row = self.sizes.all_kv * dim;
            t.chunks(row)
                .zip(wanted)
                .flat_map(|(x, w)| if *w { x.to_vec() } else { vec![UNSENT; row] })
                .collect()
        };
        own.map(keep).collect()
    }

    /// Returns what dense rows of the keys of rank `owner` hold in tensors of rank `me`, each of
    /// which begins at the byte in `at`.
    fn found(&self, owner: usize, tensors: &[&Buffer], at: &[usize]) -> Vec<Buffer> {
        let first = self.lists(0).first_key(owner);
        let num = self.rows_kv(owner).len();
        let rows = |((t, at), dim): ((&&Buffer, &usize), usize)| {
            let row = self.sizes.all_kv * dim;
            t[at / 4 + first * row..at / 4 + (first + num) * row].to_vec()
        };
        tensors.iter().zip(at).zip(DIMS).map(rows).collect()
    }
}

/// Copies pieces, and returns their bytes.
fn copy(pieces: &[Piece], from: &Buffer, to: &mut Buffer) -> u64 {
    let mut bytes = 0;
    for p in pieces {
        assert_eq!((p.src_pitch, p.dst_pitch), (p.width, p.width), "whole rows");
        let len = p.width * p.rows;
        assert!(len > 0, "{p:?}");
        put(to, p.dst, from[p.src / 4..(p.src + len) / 4].to_vec());
        bytes += len as u64;
    }
    bytes
}

/// Checks that pushed rows come to their places, and nowhere else, and that they are the bytes of
/// each link.
fn check_pushed(w: &World) {
    let (s, mut came) = (&w.sizes, vec![vec![0; w.sizes.size]; w.sizes.size]);
    for (me, came) in came.iter_mut().enumerate() {
        let mut area = bytes_of(w, AREA);
        for owner in (0..s.size).filter(|p| *p != me) {
            for (list, own) in w.lists(owner).pushed(me).iter().zip(w.own(owner)) {
                assert!(list.iter().all(|p| p.peer.idx() == me));
                came[owner] += copy(list, &own, &mut area);
            }
        }
        for owner in 0..s.size {
            let wanted = match owner == me {
                true => vec![false; w.rows_kv(me).len()],
                false => w.wanted(&[me], owner),
            };
            let found = w.found(owner, &[&area; 2], &s.published().1);
            assert_eq!(found, w.arrived(owner, &wanted), "{me} of {owner}: {} {:?}", w.d, w.seqs);
        }
    }
    let sent = |owner: usize| came.iter().map(|from| from[owner]).collect();
    check_links(w, &(0..s.size).map(sent).collect::<Vec<_>>());
}

/// Checks the bytes of each link, and signals, against the traffic of a pass.
fn check_links(w: &World, bytes: &[Vec<u64>]) {
    for (me, bytes) in bytes.iter().enumerate() {
        let traffic = w.lists(me).traffic(Pass::Forward);
        let got: Vec<u64> = traffic.iter().map(|l| l.put_bytes).collect();
        assert_eq!(got, *bytes, "rank {me}: {} {:?}", w.d, w.seqs);
        for (peer, l) in traffic.iter().enumerate() {
            // A ring signals each message; all others signal once, with rows or without.
            let next = usize::from(peer == (me + 1) % w.sizes.size);
            let ring = 1 + next * (w.sizes.size - 1);
            let signals = if w.sizes.strategy == Strategy::Ring { ring } else { 2 };
            let before = (peer + 1) % w.sizes.size == me && w.sizes.strategy == Strategy::Ring;
            let credits = if before { w.sizes.size.saturating_sub(3) } else { 0 };
            let want = if peer == me { 0 } else { signals + credits };
            assert_eq!((l.signals, l.gets), (want as u64, 0), "{me} to {peer}");
        }
    }
}

/// Checks that each message of a ring holds the rows that the ranks ahead of it need, and no
/// others; that a rank has all rows that it needs at the end; and the bytes of each link.
fn check_passed(w: &World) {
    let s = &w.sizes;
    let mut bytes = vec![vec![0; s.size]; s.size];
    let dense = || DIMS.map(|dim| vec![UNSENT; w.seqs.tokens_kv * s.all_kv * dim]).to_vec();
    let mut keys: Vec<Vec<Buffer>> = (0..s.size).map(|_| dense()).collect();
    // All send, then all take: an order that the credits allow. A slot that was taken is empty.
    for t in 0..s.size - 1 {
        let mut areas: Vec<Buffer> = (0..s.size).map(|_| bytes_of(w, AREA)).collect();
        for (me, sent) in bytes.iter_mut().enumerate() {
            let next = (me + 1) % s.size;
            let from = if t == 0 { w.own(me) } else { keys[me].clone() };
            for (list, from) in w.lists(me).sent(t).iter().zip(&from) {
                assert!(list.iter().all(|p| p.peer.idx() == next));
                sent[next] += copy(list, from, &mut areas[next]);
            }
        }
        for (me, area) in areas.iter().enumerate() {
            let mut taken = 0;
            for (list, to) in w.lists(me).taken(t).iter().zip(&mut keys[me]) {
                taken += copy(list, area, to);
            }
            let came = area.iter().filter(|x| **x != UNSENT).count() as u64;
            assert_eq!(taken, 4 * came, "what is sent is taken");
        }
    }
    for (me, keys) in keys.iter().enumerate() {
        for n in 1..s.size {
            let owner = (me + n) % s.size;
            let readers: Vec<usize> = (0..n).map(|i| (me + i) % s.size).collect();
            let want = w.arrived(owner, &w.wanted(&readers, owner));
            let found = w.found(owner, &keys.iter().collect::<Vec<_>>(), &[0, 0]);
            assert_eq!(found, want, "{me} of {owner}: {} {:?}", w.d, w.seqs);
        }
    }
    check_links(w, &bytes);
}

fn check_puts(w: &World) {
    match w.sizes.strategy {
        _ if w.sizes.size == 1 => assert_eq!(w.lists(0).traffic(Pass::Forward)[0].puts, 0),
        Strategy::AllGather => check_pushed(w),
        Strategy::Ring => check_passed(w),
        _ => {}
    }
}

#[test]
fn rows_that_are_needed_are_put_and_no_others() {
    crate::cp_attention::pieces::tests::worlds(check_puts);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Checks the same for random sequences, masks and numbers of ranks.
    #[test]
    fn rows_of_any_sequences_are_put_where_they_are_needed(
        lens in prop::collection::vec((0usize..14, 0usize..14, 0usize..3), 1..6),
        equal in any::<bool>(),
        layout in prop::sample::select(Layout::NAMES.map(|(_, l)| l).to_vec()),
        mask in (prop::option::of(0usize..9), prop::option::of(0usize..4)),
        size in 1usize..9,
    ) {
        let lens: Vec<_> =
            lens.into_iter().map(|(q, kv, pad)| (q, if equal { q } else { kv }, pad)).collect();
        let seqs = fitted(layout, size, &seqs(&lens));
        let mask = AttnMask { left: mask.0, right: mask.1 };
        let mut attn = AttentionDesc::new(1, (2, 2), DIMS[0], DType::F32, mask);
        (attn.dv, attn.sequences) = (DIMS[1], seqs.clone());
        let d = CpAttentionDesc { layout, ..CpAttentionDesc::new(attn) };
        for strategy in [Strategy::AllGather, Strategy::Ring] {
            let w = World::new(d.clone(), &seqs, strategy, size);
            check_puts(&w);
            check_segments(&w);
        }
    }

    /// Many sequences, and windows that end in each of their chunks; heads traded by two, too.
    #[test]
    fn tables_of_many_sequences_fit(
        lens in prop::collection::vec((1usize..60, 1usize..60, 0usize..3), 20..60),
        equal in any::<bool>(),
        layout in prop::sample::select(Layout::NAMES.map(|(_, l)| l).to_vec()),
        mask in (prop::option::of(0usize..20), prop::option::of(0usize..9)),
        size in prop::sample::select(vec![2usize, 4, 8]),
    ) {
        let lens: Vec<_> =
            lens.into_iter().map(|(q, kv, pad)| (q, if equal { q } else { kv }, pad)).collect();
        let seqs = fitted(layout, size, &seqs(&lens));
        let mask = AttnMask { left: mask.0, right: mask.1 };
        let mut attn = AttentionDesc::new(1, (2, 2), DIMS[0], DType::F32, mask);
        (attn.dv, attn.sequences) = (DIMS[1], seqs.clone());
        let d = CpAttentionDesc { layout, a2a_size: 2, ..CpAttentionDesc::new(attn) };
        for strategy in [Strategy::Get, Strategy::Hybrid] {
            check_segments(&World::new(d.clone(), &seqs, strategy, size));
        }
    }
}

/// Checks that a device has space for the tables of each rank, as for a plan of so many sequences.
fn check_segments(w: &World) {
    let (each, beside) = most_segments(w.d.layout, w.sizes.size, w.sizes.inner);
    let most = each * w.seqs.kv.len() + 1 + beside;
    for r in 0..w.sizes.size {
        let lists = w.lists(r);
        let tables =
            [lists.all_tables(&w.seqs), lists.other_tables(&w.seqs), lists.own_tables(&w.seqs)];
        let len = tables.iter().map(|(q, kv)| q.len().max(kv.len())).max().unwrap();
        assert!(len <= most, "{len} segments, {most} at most: rank {r}, {} {:?}", w.d, w.seqs);
    }
}
