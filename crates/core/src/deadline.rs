//! A point in time past which a wait gives up.

use std::time::{Duration, Instant};

/// The time at which a wait gives up. Passed by value through every call that may block.
///
/// ```
/// # use std::time::Duration;
/// # use tilewire_core::Deadline;
/// let d = Deadline::after(Duration::from_secs(5));
/// assert!(!d.expired() && d.remaining() > Duration::from_secs(4));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    /// `limit` from now.
    pub fn after(limit: Duration) -> Self {
        Self { start: Instant::now(), limit }
    }

    /// `limit_s` seconds from now.
    pub fn after_s(limit_s: f64) -> Self {
        Self::after(Duration::from_secs_f64(limit_s))
    }

    /// True once the time is up.
    pub fn expired(&self) -> bool {
        self.elapsed() >= self.limit
    }

    /// Time since the deadline was made.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Time left; zero once expired.
    pub fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.elapsed())
    }

    /// The whole time that was granted.
    pub fn limit(&self) -> Duration {
        self.limit
    }
}
