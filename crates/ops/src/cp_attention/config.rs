//! The ways in which keys reach queries.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tilewire_core::{Error, ErrorKind, Result};
use tilewire_kernels::attention::PARTS;

use super::desc::{CpAttentionDesc, Layout};
use crate::attention::AttnConfig;

/// The way keys and values reach the queries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Owners publish, readers get the rows that they need.
    Get,
    /// Neighbour to neighbour, store and forward of the rows that ranks ahead need.
    Ring,
    /// Owners push to each rank the rows that it needs.
    AllGather,
    /// Heads are scattered instead (Ulysses).
    AllToAll,
    /// Heads are scattered inside groups of `a2a_size`; a rank gets the keys of its heads from all
    /// ranks.
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

    /// Returns the name used in options and JSON.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, s)| *s == self).map_or("?", |(n, _)| n)
    }

    /// Returns the ranks of a group that scatters heads.
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

/// The order in which the forward pass takes keys into its sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyOrder {
    /// A rank's own keys first, then those of the rank before it, whose first push is to it, and so
    /// on: the order in which they should come. When they come changes no bit.
    #[default]
    Arrival,
    /// Ascending in the global rows, by tiles that begin at multiples of 128 rows of a sequence:
    /// out and lse have the same bits on any number of ranks, one among them. Each rank's rows of
    /// each sequence must begin there, too. Whole tiles travel of what a window ends in. Gradients
    /// are not made in that order.
    Canonical,
}

/// The configuration of a context-parallel attention. Pure data; equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct CpConfig {
    /// The way in which keys reach queries.
    pub strategy: Strategy,
    /// Tiles of the arithmetic.
    pub tiles: AttnConfig,
    /// On devices, of `all_gather` alone: the forward pass is one kernel, which waits for each
    /// rank's keys where it meets them. It needs sm_90a, heads that the kernel for it has
    /// ([`AttnBackend::Hopper`](crate::attention::AttnBackend)), at most 32 ranks, and q, k, v and
    /// out that begin at multiples of 16 bytes. The host has one algorithm anyway.
    ///
    /// A plan without a configuration takes it where there is a kernel, the world has no more ranks
    /// than a process sees devices and none of the team share one, and keys travel by puts in their
    /// own type. It then refuses tensors that begin elsewhere: `CpConfig::of(Strategy::AllGather)`
    /// takes any output of the forward pass. Launches of a heap with gates come from one thread at
    /// a time.
    #[serde(default)]
    pub gated: bool,
    /// Another order than that of arrival needs gates.
    #[serde(default)]
    pub order: KeyOrder,
}

impl CpConfig {
    /// Returns the usual tiles, and no gates.
    pub fn of(strategy: Strategy) -> Self {
        Self { strategy, tiles: AttnConfig::default(), gated: false, order: KeyOrder::Arrival }
    }

    /// Checks that launches may bring the offsets of their sequences in tensors, as far as this
    /// says: [`CpAttentionPlan::takes_offsets`](super::CpAttentionPlan::takes_offsets) knows the
    /// transport, too.
    ///
    /// # Errors
    /// `Unsupported`, with the reason.
    pub fn takes_offsets(&self, d: &CpAttentionDesc, size: usize) -> Result<()> {
        let why = match () {
            () if self.strategy != Strategy::AllGather => {
                format!("keys travel by {}", self.strategy)
            }
            () if self.order == KeyOrder::Canonical => "keys are in the canonical order".to_owned(),
            () if !matches!(d.layout, Layout::Zigzag | Layout::Contiguous) => {
                format!("the layout {:?} depends on the sequences", d.layout)
            }
            () if 2 * size > PARTS => format!("there are {size} ranks, not at most {}", PARTS / 2),
            () => return Ok(()),
        };
        Err(no_offsets(&why))
    }

    /// Checks that the parts belong together, and that the heads can be scattered.
    ///
    /// # Errors
    /// `InvalidArgument` naming what does not fit.
    pub fn check(&self, d: &CpAttentionDesc, size: usize) -> Result<()> {
        self.strategy.check(d, size)?;
        self.tiles.check()?;
        if self.gated && self.strategy != Strategy::AllGather {
            return Err(Error::invalid("gates are of keys that their owners push")
                .expected(Strategy::AllGather)
                .seen(self.strategy));
        }
        if self.order == KeyOrder::Canonical && !self.gated {
            return Err(Error::invalid("keys in the canonical order need gates")
                .hint("set `gated`, and the strategy all_gather"));
        }
        Ok(())
    }
}

/// Returns the error of launches by offsets in tensors.
pub(super) fn no_offsets(why: &str) -> Error {
    let text = format!("offsets in tensors are not for this plan: {why}");
    Error::new(ErrorKind::Unsupported, text)
        .hint("offsets are for all_gather by puts, and the layouts zigzag and contiguous")
}

impl fmt::Display for CpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gated = match (self.gated, self.order) {
            (false, _) => "",
            (true, KeyOrder::Arrival) => " gated",
            (true, KeyOrder::Canonical) => " gated canonical",
        };
        write!(f, "{}{gated} {}", self.strategy, self.tiles)
    }
}
