//! The inputs of an expert-parallel layer's executors: slots, areas, tensors.

use std::sync::Arc;

use tilewire_device::Tensor;
use tilewire_symm::{Signals, SymBuf};

use super::EpDesc;
use super::schedule::Schedule;
use crate::common::{CollectiveBackend, PlanCore};

/// Signal slots of counts, tokens and returns: on the host announcements of launches, two in turn;
/// on devices names of credit and arrival in reports.
pub(super) const COUNTS: (usize, usize) = (0, 1);
pub(super) const TOKENS: (usize, usize) = (2, 3);
pub(super) const RETURNS: (usize, usize) = (4, 5);

/// The phases, each with a plan core of its own.
pub(super) const ROUTE: usize = 0;
pub(super) const DISPATCH: usize = 1;
pub(super) const COMBINE: usize = 2;
pub(super) const DISPATCH_BWD: usize = 3;
pub(super) const COMBINE_BWD: usize = 4;

/// The plan's part of the heap, which its executors use.
pub(super) struct Base {
    pub desc: EpDesc,
    pub backend: CollectiveBackend,
    pub cores: [PlanCore; 5],
    pub counts: SymBuf,
    pub tokens: SymBuf,
    pub returns: SymBuf,
    /// Credits and arrivals.
    pub flags: SymBuf,
    pub signals: Arc<Signals>,
    pub num_sms: usize,
}

impl Base {
    pub fn areas(&self) -> Areas<'_> {
        Areas {
            counts: &self.counts,
            tokens: &self.tokens,
            returns: &self.returns,
            flags: &self.flags,
        }
    }
}

/// The areas of a plan in symmetric memory.
pub(super) struct Areas<'a> {
    pub counts: &'a SymBuf,
    pub tokens: &'a SymBuf,
    pub returns: &'a SymBuf,
    pub flags: &'a SymBuf,
}

impl Areas<'_> {
    /// Returns the ranges of words that carry the number of a launch: buffer, first byte, bytes.
    pub fn words(&self, d: &EpDesc) -> [(&SymBuf, usize, usize); 3] {
        let s = Schedule::new(d);
        [
            (self.counts, 0, s.counts_len()),
            (self.tokens, s.meta(0), s.tokens_len() - s.meta(0)),
            (self.flags, 0, s.flags_len()),
        ]
    }
}

/// Results of a dispatch, in the row order of the layout. Rows without a token are zero. Rows
/// behind the last expert's in the expert-major order may stay unwritten: no split includes them.
#[derive(Clone, Debug)]
pub struct EpDispatch {
    /// Tokens `[recv_rows, hidden]`.
    pub x: Tensor,
    /// Scales `[recv_rows, num_scales]` f32, with FP8 tokens.
    pub scales: Option<Tensor>,
    /// Weight of the copy in each expert-major row, `[capacity]` f32, if weights were given.
    pub weights: Option<Tensor>,
}

/// The tensors that a dispatch-type phase sends.
#[derive(Clone)]
pub(super) struct Push {
    pub x: Tensor,
    pub weights: Option<Tensor>,
    pub scales: Option<Tensor>,
}

/// The tensors that a dispatch-type phase delivers.
pub(super) enum Out {
    Dispatch(EpDispatch),
    CombineBwd { dy: Tensor, weighted: Option<(Tensor, Tensor, Tensor)> },
}

/// The tensors that a combine-type phase sends and delivers.
pub(super) struct Return {
    pub y: Tensor,
    pub weights: Option<Tensor>,
    /// True if `y` has a row per copy, false if it has a row per record.
    pub expert_major: bool,
    pub dw: Option<Tensor>,
    pub out: Tensor,
    pub dw_out: Option<Tensor>,
}
