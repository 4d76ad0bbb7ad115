//! The parts of a launch, for the plan and both executors.

use tilewire_device::Tensor;
use tilewire_symm::Permit;

use crate::attention::{AttnGrads, AttnOut, AttnSaved};

/// Signal slots of a plan: the credit of a launch; the flag of keys that were pushed or passed on;
/// the meetings behind the tensors published before the arithmetic, and behind it; the credit of a
/// slot of the ring.
pub(super) const CREDIT: usize = 0;
pub(super) const KEYS: usize = 1;
pub(super) const MEET_KEYS: usize = 2;
pub(super) const MEET_BACK: usize = 3;
pub(super) const RING_CREDIT: usize = 4;
pub(super) const NUM_SLOTS: usize = 5;

/// Forward or backward pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Pass {
    /// out and lse.
    Forward,
    /// dq, dk, dv.
    Backward,
}

/// The outputs of a launch, and the inputs of its pass alone.
pub(super) enum Work {
    Forward(AttnOut),
    Backward(Box<(AttnSaved, AttnGrads)>),
}

impl Work {
    pub fn name(&self) -> &'static str {
        if self.is_backward() { "bwd" } else { "fwd" }
    }

    pub fn is_backward(&self) -> bool {
        matches!(self, Work::Backward(_))
    }

    pub fn poison(&self) {
        match self {
            Work::Forward(o) => o.poison(),
            Work::Backward(b) => b.1.poison(),
        }
    }

    /// Returns the tensors that the pass writes.
    pub fn outputs(&self) -> Vec<&Tensor> {
        match self {
            Work::Forward(o) => vec![&o.out, &o.lse],
            Work::Backward(b) => b.1.named().into_iter().filter_map(|(_, t)| t).collect(),
        }
    }
}

/// A launch that has entered: its permit, for whichever lane puts.
pub(super) type Entered = std::sync::Arc<Permit>;
