//! The bytes and signals that a launch moves over each link.

use tilewire_symm::{LinkTraffic, Traffic};

use super::config::Strategy;
use super::launch::Pass;
use super::pieces::{Piece, Pieces};
use super::puts::{Hop, hops};

impl Pieces<'_> {
    /// Returns the traffic of one launch to and from each peer.
    pub fn traffic(&self, pass: Pass) -> Traffic {
        let s = self.sizes;
        let mut t = vec![LinkTraffic::default(); s.size];
        if s.size == 1 {
            return t;
        }
        let backward = pass == Pass::Backward;
        let some = |list: Vec<Piece>| list.into_iter().filter(|p| p.width * p.rows > 0);
        for p in some(self.puts()) {
            t[p.peer.idx()].puts += 1;
            t[p.peer.idx()].put_bytes += (p.width * p.rows) as u64;
        }
        for p in some(self.gets(backward)) {
            t[p.peer.idx()].gets += 1;
            t[p.peer.idx()].get_bytes += (p.width * p.rows) as u64;
        }
        // A credit, the keys, and the meeting behind results or gradients.
        let signals = 1 + u64::from(backward || s.inner > 1);
        t.iter_mut().for_each(|l| l.signals = signals);
        match s.strategy {
            Strategy::Ring => {
                for hop in hops(s.size) {
                    match hop {
                        Hop::Send { .. } => t[(self.me.idx() + 1) % s.size].signals += 1,
                        Hop::Take { grants: true, .. } => {
                            t[(self.me.idx() + s.size - 1) % s.size].signals += 1;
                        }
                        Hop::Take { .. } => {}
                    }
                }
            }
            _ => t.iter_mut().for_each(|l| l.signals += 1),
        }
        t[self.me.idx()] = LinkTraffic::default();
        t
    }

    /// Returns all pieces that a launch puts.
    fn puts(&self) -> Vec<Piece> {
        let s = self.sizes;
        match s.strategy {
            Strategy::AllGather => (0..s.size).flat_map(|p| self.pushed(p).concat()).collect(),
            Strategy::Ring => (0..s.size - 1).flat_map(|m| self.sent(m).concat()).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns all pieces that a launch gets.
    fn gets(&self, backward: bool) -> Vec<Piece> {
        let s = self.sizes;
        let pushes = matches!(s.strategy, Strategy::AllGather | Strategy::Ring);
        let mut gets = if pushes { Vec::new() } else { self.keys().concat() };
        if s.inner > 1 {
            gets.extend(self.query_tensors().concat());
            match backward {
                true => {
                    let [d_out, lse, delta] = s.upstream();
                    gets.extend(self.queries(d_out, s.dv, s.out));
                    gets.extend([lse, delta].map(|at| self.stats(at)).concat());
                    gets.extend(self.results(s.dq(), s.dqk));
                }
                false => {
                    gets.extend(self.results(0, s.dv));
                    gets.extend(self.lse());
                }
            }
        }
        if backward {
            gets.extend(self.parts().concat());
        }
        gets
    }
}
