//! Test hooks: stop, drop, repeat or delay any single step of the protocol.

use std::sync::Arc;

use tilewire_core::Rank;

/// Kind of a protocol step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum StepKind {
    /// A put is about to be made.
    Put,
    /// A get is about to be made.
    Get,
    /// A signal or credit is about to be raised.
    Signal,
    /// A flag is about to be stored.
    Flag,
    /// A wait is about to begin.
    Wait,
    /// A piece of arithmetic is about to begin.
    Compute,
}

/// The point in an operation that a rank has reached.
#[derive(Clone, Copy, Debug)]
pub struct HookPoint<'a> {
    /// Name of the operation.
    pub op: &'a str,
    /// Phase of the operation.
    pub phase: &'a str,
    /// The kind of the next step.
    pub kind: StepKind,
    /// My team rank.
    pub rank: Rank,
    /// The peer of the step, if it has one.
    pub peer: Option<Rank>,
    /// Number of steps of this kind that this rank made in this team before.
    pub nth: u64,
}

/// The hook's decision about a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HookAction {
    /// As if there were no hook.
    Proceed,
    /// Leave the step out.
    Skip,
    /// Perform the step twice (signals and flags only).
    Twice,
    /// Store the value that the flag's word has already, that of an earlier launch (flags only).
    Stale,
    /// Perform the step after the next signal to the same peer (puts only).
    AfterSignal,
    /// Perform the step 64 bytes from its place (puts only).
    Shift,
}

pub(crate) type Hook = Arc<dyn Fn(&HookPoint<'_>) -> HookAction + Send + Sync>;
