//! Who meets whose keys, when, and with which slices: one pure schedule for prediction, host and
//! kernels.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, Rank, Result};

use super::CpAttentionDesc;
use crate::attention::host::Dims;
use crate::attention::{AttnConfig, Queries, Sequences, Slice};

/// The way keys and values reach the queries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Owners publish, readers get what they need.
    Get,
    /// Neighbour to neighbour, store and forward.
    Ring,
    /// Push to all.
    AllGather,
    /// Heads are scattered instead (Ulysses).
    AllToAll,
    /// Heads scattered inside groups of `a2a_size`, ring between the groups.
    Hybrid,
}

impl Strategy {
    /// All values with their names.
    pub const NAMES: [(&'static str, Strategy); 5] = [
        ("get", Strategy::Get),
        ("ring", Strategy::Ring),
        ("all_gather", Strategy::AllGather),
        ("all_to_all", Strategy::AllToAll),
        ("hybrid", Strategy::Hybrid),
    ];

    /// The name used in options and JSON.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, s)| *s == self).map_or("?", |(n, _)| n)
    }

    /// Ranks of a group that scatters heads.
    pub(super) fn inner(self, d: &CpAttentionDesc, size: usize) -> usize {
        match self {
            Strategy::AllToAll => size,
            Strategy::Hybrid => d.a2a_size,
            _ => 1,
        }
    }

    /// Checks that the heads can be scattered.
    ///
    /// # Errors
    /// `InvalidArgument` naming the heads that do not divide.
    pub fn check(self, d: &CpAttentionDesc, size: usize) -> Result<()> {
        let (a, hq, hkv) = (self.inner(d, size), d.attn.heads_q, d.attn.heads_kv);
        if a == 0 || !size.is_multiple_of(a) {
            return Err(Error::invalid("`a2a_size` must divide the team")
                .expected(format_args!("a divisor of {size}"))
                .seen(a));
        }
        if hq.is_multiple_of(a) && (hkv.is_multiple_of(a) || a.is_multiple_of(hkv)) {
            return Ok(());
        }
        Err(Error::invalid(format!("`{self}` cannot scatter these heads over {a} ranks"))
            .expected(format_args!("Hq a multiple of {a}; Hkv a multiple or a divisor of {a}"))
            .seen(format_args!("Hq {hq}, Hkv {hkv}"))
            .hint("use get, ring or all_gather, or a smaller a2a_size"))
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(n, _)| *n == s).map(|(_, v)| *v).ok_or_else(|| {
            let names: Vec<_> = Self::NAMES.iter().map(|(n, _)| *n).collect();
            Error::invalid(format!("unknown strategy `{s}`; one of {}", names.join(", ")))
        })
    }
}

/// How it is carried out. Pure data; equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct CpConfig {
    /// How keys reach queries.
    pub strategy: Strategy,
    /// Tiles of the arithmetic.
    pub tiles: AttnConfig,
}

impl CpConfig {
    /// The usual tiles.
    pub fn of(strategy: Strategy) -> Self {
        Self { strategy, tiles: AttnConfig::default() }
    }
}

impl fmt::Display for CpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.strategy, self.tiles)
    }
}

/// One step of the compute lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CpTask {
    /// Wait until the keys of group `owner` are here; `src` sends (or publishes) them.
    Wait {
        /// The rank that signals.
        src: Rank,
        /// Whose keys.
        owner: usize,
    },
    /// My queries against the keys of group `owner`.
    Attend {
        /// Whose keys.
        owner: usize,
    },
}

/// Ranks as `outer` groups of `inner` consecutive ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Grid {
    pub inner: usize,
    pub outer: usize,
    /// My place in the group, and my group.
    pub at: usize,
    pub group: usize,
}

impl Grid {
    fn new(me: Rank, size: usize, inner: usize) -> Self {
        Self { inner, outer: size / inner, at: me.idx() % inner, group: me.idx() / inner }
    }

    /// Member `i` of my group.
    pub fn member(&self, i: usize) -> Rank {
        Rank::new((self.group * self.inner + i) as u32)
    }

    /// My counterpart (same heads) in group `g`.
    pub fn counterpart(&self, g: usize) -> Rank {
        Rank::new((g * self.inner + self.at) as u32)
    }

    /// Places of the other members, the next one first.
    pub fn other_members(&self) -> impl Iterator<Item = usize> + Clone {
        let (at, n) = (self.at, self.inner);
        (1..n).map(move |i| (at + i) % n)
    }

    /// The other groups, the next one first.
    pub fn other_groups(&self) -> impl Iterator<Item = usize> + Clone {
        let (at, n) = (self.group, self.outer);
        (1..n).map(move |i| (at + i) % n)
    }
}

/// Everything that one rank needs to know about one launch.
pub(super) struct Schedule {
    pub strategy: Strategy,
    pub grid: Grid,
    /// Heads that this rank computes, and the numbers of the first ones.
    pub dims: Dims,
    pub first_head: usize,
    /// Rows of each member of my group.
    pub member_q: Vec<Vec<Range<usize>>>,
    pub member_kv: Vec<Vec<Range<usize>>>,
    /// Rows of keys of each group, member after member: the order in which they lie on the wire.
    pub areas: Vec<Vec<Range<usize>>>,
    /// Of each area: the spans that some query of my group sees.
    pub needed: Vec<Vec<bool>>,
    /// Of each group: the spans of my area that its queries see.
    pub asked: Vec<Vec<bool>>,
    /// Slices of my group's queries against each area.
    pub slices: Vec<Vec<Slice>>,
    pub tasks: Vec<CpTask>,
}

/// Key heads of place `at` among `inner`: a part of them, or one that several places share.
pub(super) fn kv_heads(heads: usize, inner: usize, at: usize) -> Range<usize> {
    match heads % inner {
        0 => at * heads / inner..(at + 1) * heads / inner,
        _ => at * heads / inner..at * heads / inner + 1,
    }
}

pub(super) fn num_rows(spans: &[Range<usize>]) -> usize {
    spans.iter().map(Range::len).sum()
}

impl Schedule {
    /// The schedule of rank `me`.
    pub fn new(
        d: &CpAttentionDesc,
        seqs: &Sequences,
        strategy: Strategy,
        me: Rank,
        size: usize,
    ) -> Self {
        let grid = Grid::new(me, size, strategy.inner(d, size));
        let members =
            |g: usize| (0..grid.inner).map(move |i| Rank::new((g * grid.inner + i) as u32));
        let rows_q = |g| members(g).map(|r| d.rows_q(seqs, r, size)).collect::<Vec<_>>();
        let rows_kv = |g| members(g).map(|r| d.rows_kv(seqs, r, size)).collect::<Vec<_>>();
        let queries = |g| Queries::new(&rows_q(g).concat(), seqs, &d.attn.mask);
        let areas: Vec<_> = (0..grid.outer).map(|g| rows_kv(g).concat()).collect();
        let mine = queries(grid.group);
        let heads = kv_heads(d.attn.heads_kv, grid.inner, grid.at);
        let hq = d.attn.heads_q / grid.inner;
        Self {
            strategy,
            grid,
            dims: Dims { hq, hkv: heads.len(), dqk: d.attn.dqk, dv: d.attn.dv },
            first_head: grid.at * hq,
            member_q: rows_q(grid.group),
            member_kv: rows_kv(grid.group),
            needed: areas.iter().map(|a| mine.see(a)).collect(),
            asked: (0..grid.outer).map(|g| queries(g).see(&areas[grid.group])).collect(),
            slices: areas.iter().map(|a| mine.slices(a)).collect(),
            areas,
            tasks: tasks(&grid, strategy),
        }
    }

    /// Rows of my group's queries.
    pub fn rows_q(&self) -> usize {
        self.member_q.iter().map(|s| num_rows(s)).sum()
    }

    /// The needed parts of an area in which a row takes `row_bytes`: (bytes, rows) of each span
    /// that is wanted and not empty.
    pub fn parts(
        area: &[Range<usize>],
        wanted: &[bool],
        row_bytes: usize,
    ) -> Vec<(Range<usize>, Range<usize>)> {
        let mut at = 0;
        let mut out = Vec::new();
        for (span, want) in area.iter().zip(wanted) {
            let end = at + span.len();
            if *want && at < end {
                out.push((at * row_bytes..end * row_bytes, at..end));
            }
            at = end;
        }
        out
    }
}

/// Own keys first, then group after group in the order in which they come.
fn tasks(grid: &Grid, strategy: Strategy) -> Vec<CpTask> {
    let mut tasks = vec![CpTask::Attend { owner: grid.group }];
    let ring = matches!(strategy, Strategy::Ring | Strategy::Hybrid);
    let before = (grid.group + grid.outer - 1) % grid.outer;
    for (i, next) in grid.other_groups().enumerate() {
        let owner = if ring { (grid.group + grid.outer - 1 - i) % grid.outer } else { next };
        let src = grid.counterpart(if ring { before } else { owner });
        tasks.push(CpTask::Wait { src, owner });
        tasks.push(CpTask::Attend { owner });
    }
    tasks
}
