//! The memory operations of each kernel of `comm/signal.cu`, one by one.
//!
//! This processor would forgive a release that became a plain store. So the sequence itself is the
//! test: which operation, with which order, on which word.

use std::fmt::Write;

use crate::host::{Launch, Lib};
use crate::signal::{LIB, TIMEOUT, alone};
use crate::team::{LAYOUT, Team};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![each_operation_has_the_order_of_the_protocol_page];

/// The words of rank 0's memory by their names in the protocol.
fn name(team: &Team, addr: u64) -> String {
    let l = &*LAYOUT;
    let m = &team.ranks[0];
    if addr == 0 {
        return String::new();
    }
    if let Some((page, off)) = m.control.find(addr) {
        return match off {
            o if o >= l.signals => {
                let i = (o - l.signals) / 16;
                format!(" count[{page}][{}][{}]", i / team.size, i % team.size)
            }
            o if o >= l.inbox => {
                let o = o - l.inbox;
                format!(" inbox[{page}][{}][{}]", o / l.inbox_row, o % l.inbox_row / 8)
            }
            o => format!(" abort[{page}][{}]", (o - l.abort) / 8),
        };
    }
    let own = [("fault", &m.fault), ("pinned", &m.pinned)];
    let place = own.iter().find_map(|(n, m)| m.find(addr).map(|(_, off)| (n, off / 8)));
    place.map_or_else(|| " ?".to_owned(), |(n, i)| format!(" {n}[{i}]"))
}

/// The operations of one thread of a launch; equal neighbours are counted.
fn trace(team: &Team, launch: Launch<'_>, thread: u32) -> String {
    let (mut lines, mut text) = (Vec::<(String, u32)>::new(), String::new());
    alone(team, launch, |op, addr, t| {
        if t != thread {
            return;
        }
        let line = format!("{op}{}", name(team, addr));
        match lines.last_mut() {
            Some((last, n)) if *last == line => *n += 1,
            _ => lines.push((line, 1)),
        }
    });
    for (line, n) in lines {
        if n == 1 {
            writeln!(text, "{line}").unwrap();
        } else {
            writeln!(text, "{line} x{n}").unwrap();
        }
    }
    text
}

const SIGNAL: &str = "\
ld.relaxed.gpu fault[0]
fence.acq_rel.sys
st.release.sys count[2][4][0]
";
const BUMP: &str = "\
ld.relaxed.gpu fault[0]
fence.acq_rel.sys
";
const WAIT: &str = "\
ld.relaxed.gpu fault[0]
ld.acquire.sys count[0][4][1]
";
/// 64 polls, the reasons to end, the last look, the claim, the report, its head, the peers.
const WAIT_ENDS: &str = "\
ld.relaxed.gpu fault[0]
ld.acquire.sys count[0][4][2] x64
ld.relaxed.gpu fault[0]
ld.acquire.sys abort[0][1]
ld.acquire.sys abort[0][2]
ld.acquire.sys pinned[0]
ld.acquire.sys count[0][4][2]
atom.acq_rel.gpu.cas fault[0]
st.relaxed.sys pinned[9]
st.relaxed.sys pinned[10]
st.relaxed.sys pinned[11]
st.relaxed.sys pinned[12]
st.relaxed.sys pinned[13]
st.relaxed.sys pinned[14]
st.relaxed.sys pinned[15]
st.release.sys pinned[8]
st.release.sys abort[1][0]
st.release.sys abort[2][0]
";
const BARRIER: &str = "\
ld.relaxed.gpu fault[0]
fence.acq_rel.sys
st.release.sys inbox[1][5][0]
ld.acquire.sys inbox[0][5][1]
";

/// Compares each kernel's operations with the lists above.
pub fn orders(lib: &'static Lib) {
    let mut team = Team::new(lib, 3);
    team.timeout_ns = 0;
    assert_eq!(trace(&team, team.signal(0, 2, 4, 3), 0), SIGNAL);
    assert_eq!(trace(&team, team.bump(0, 2, 4, 3), 0), BUMP);
    team.set_count(0, 4, 1, 1);
    assert_eq!(trace(&team, team.wait(0, 1, 4, 1), 0), WAIT);
    for p in 1..3 {
        team.ranks[0].control.set(0, LAYOUT.inbox + 5 * LAYOUT.inbox_row + 8 * p, 1);
    }
    assert_eq!(trace(&team, team.barrier(0, 5), 1), BARRIER);
    assert_eq!(trace(&team, team.wait(0, 2, 4, 1), 0), WAIT_ENDS);
    assert_eq!(team.fault(0), team.code(0, 2, TIMEOUT));
}

fn each_operation_has_the_order_of_the_protocol_page() {
    orders(*LIB);
}
