//! Connections that were refused, by reason.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The reason for which a connection was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// It knows another secret.
    Secret,
    /// Another user, or one that our user namespace does not map.
    User,
    /// It said something that is no hello of ours.
    Garbage,
    /// It closed without a proof.
    Closed,
    /// It said nothing for too long, or made way for a newer one.
    Silent,
    /// Its user, not ours, had as many in their hello as one may have.
    Crowd,
}

const TEXTS: [(Reason, &str); 6] = [
    (Reason::Secret, "with another secret"),
    (Reason::User, "of another user"),
    (Reason::Garbage, "with a bad hello"),
    (Reason::Closed, "closed in the hello"),
    (Reason::Silent, "silent"),
    (Reason::Crowd, "beyond the limit of a user"),
];

/// Counts of refused connections.
#[derive(Default, Debug)]
pub(crate) struct Refusals([AtomicU64; TEXTS.len()]);

impl Refusals {
    pub fn add(&self, why: Reason) {
        self.0[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn count(&self, why: Reason) -> u64 {
        self.0[why as usize].load(Ordering::Relaxed)
    }

    pub fn total(&self) -> u64 {
        TEXTS.iter().map(|(why, _)| self.count(*why)).sum()
    }
}

/// `3 connections were refused: 2 with another secret, 1 silent`.
impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.total();
        let were = if all == 1 { "connection was" } else { "connections were" };
        write!(f, "{all} {were} refused")?;
        let some = TEXTS.iter().filter(|(why, _)| self.count(*why) > 0);
        for (i, (why, text)) in some.enumerate() {
            write!(f, "{}{} {text}", if i == 0 { ": " } else { ", " }, self.count(*why))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_and_listed() {
        let r = Refusals::default();
        assert_eq!(r.to_string(), "0 connections were refused");
        TEXTS.iter().for_each(|(why, _)| r.add(*why));
        r.add(Reason::Secret);
        assert_eq!((r.total(), r.count(Reason::Secret)), (7, 2));
        let text = r.to_string();
        assert!(text.starts_with("7 connections were refused: 2 with another secret, 1 of"));
        assert!(text.ends_with(", 1 silent, 1 beyond the limit of a user"), "{text}");
    }
}
