//! Sends and receives against gets.

use tilewire_core::Rank;
use tilewire_device::cuda::NcclOp;

use super::{List, Rows, packed_bytes, trip};
use crate::cp_attention::pieces::tests::{Buffer, carry_out, worlds};
use crate::cp_attention::pieces::{Piece, Pieces};

/// Memory of a rank in an exchange: its source, its destination and the two workspaces, each from a
/// multiple of 2^28 on.
struct Regions([Buffer; 4]);

impl Regions {
    fn at(&self, addr: u64, len: usize) -> &[f32] {
        let first = (addr % (1 << 28)) as usize / 4;
        &self.0[(addr >> 28) as usize][first..first + len / 4]
    }

    fn put(&mut self, addr: u64, x: &[f32]) {
        let first = (addr % (1 << 28)) as usize / 4;
        self.0[(addr >> 28) as usize][first..first + x.len()].copy_from_slice(x);
    }

    fn copy(&mut self, list: &[Rows]) {
        for r in list {
            for i in 0..r.rows {
                let row = self.at(r.from + (i * r.from_pitch) as u64, r.width).to_vec();
                self.put(r.to + (i * r.to_pitch) as u64, &row);
            }
        }
    }
}

type ListOf = fn(&Pieces<'_>) -> Vec<Piece>;

const LISTS: [ListOf; 8] = [
    |p| p.keys()[0].clone(),
    |p| p.keys()[1].clone(),
    |p| p.queries(0, p.sizes.dqk, 4),
    |p| p.stats(0),
    |p| p.results(0, p.sizes.dv),
    |p| p.lse(),
    |p| p.parts()[0].clone(),
    |p| p.parts()[1].clone(),
];

/// Checks that the sends and receives of two lists in one exchange deliver the rows that gets would
/// deliver, and that they fit the workspaces.
#[test]
fn sends_and_receives_do_what_gets_do() {
    worlds(|w| {
        let size = w.sizes.size;
        for two in LISTS.chunks(2) {
            let pieces = |me| two.iter().flat_map(|f| f(&w.lists(me))).collect::<Vec<_>>();
            let end = |f: fn(&Piece) -> usize| {
                (0..size).flat_map(pieces).filter(|p| p.rows > 0).map(|p| f(&p)).max().unwrap_or(0)
            };
            let has = end(|p| p.src + (p.rows - 1) * p.src_pitch + p.width) / 4;
            let fills = end(|p| p.dst + (p.rows - 1) * p.dst_pitch + p.width) / 4;
            // Each list fills a tensor of its own.
            let list = |(i, f): (usize, &ListOf), me: usize| {
                let all = (0..size).map(|r| if r == me { Vec::new() } else { f(&w.lists(r)) });
                let dst = (1 << 28) + (4 * i * fills) as u64;
                List { src: 0, dst, mine: f(&w.lists(me)), all: all.collect() }
            };
            let most = packed_bytes(&w.sizes, true);
            let have: Vec<Buffer> =
                (0..size).map(|r| (0..has).map(|i| (r * 100_000 + i) as f32).collect()).collect();
            let trips: Vec<_> = (0..size)
                .map(|me| {
                    let lists: Vec<_> = two.iter().enumerate().map(|f| list(f, me)).collect();
                    trip(Rank::new(me as u32), &lists, (2 << 28, 3 << 28))
                })
                .collect();
            let mut memory: Vec<Regions> = have
                .iter()
                .map(|b| {
                    Regions([
                        b.clone(),
                        vec![-1.0; 2 * fills],
                        vec![-1.0; most / 4],
                        vec![-1.0; most / 4],
                    ])
                })
                .collect();
            let mut mail = vec![std::collections::VecDeque::new(); size * size];
            for (me, t) in trips.iter().enumerate() {
                assert!(t.sent.max(t.received) <= most, "{} and {} of {most}", t.sent, t.received);
                memory[me].copy(&t.pack);
                for op in &t.calls {
                    if let NcclOp::Send { src, count, peer } = *op {
                        let bytes = memory[me].at(src, count).to_vec();
                        mail[me * size + peer as usize].push_back(bytes);
                    }
                }
            }
            for (me, t) in trips.iter().enumerate() {
                for op in &t.calls {
                    if let NcclOp::Recv { dst, count, peer } = *op {
                        let bytes = mail[peer as usize * size + me].pop_front().unwrap();
                        assert_eq!(bytes.len() * 4, count);
                        memory[me].put(dst, &bytes);
                    }
                }
                memory[me].copy(&t.unpack);
                for (i, f) in two.iter().enumerate() {
                    let mut want = vec![-1.0; fills];
                    carry_out(&f(&w.lists(me)), &have, &mut want);
                    let got = &memory[me].0[1][i * fills..(i + 1) * fills];
                    assert!(got == want, "{:?} rank {me} list {i}", w.sizes.strategy);
                }
            }
            assert!(mail.iter().all(|m| m.is_empty()), "something was sent that nobody wants");
        }
    });
}
