//! One fault for all teams of a rank.
//!
//! A step crosses several teams on one stream. A rank that falls silent is missed by each of them that it belongs to, one
//! behind the other, and each wait has a deadline of its own: together they would take as many times as long. So the first
//! fault of a team here ends the other teams of this rank as well, while the device is still waited for, and their
//! peers hear of it as of any abort.

use std::sync::{Arc, OnceLock};

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_device::{Device, Probe};
use tilewire_symm::LiveTeam;

pub(crate) struct Together {
    teams: [LiveTeam; 4],
    first: OnceLock<Error>,
}

impl Together {
    /// Looks at the teams whenever the device is waited for, as long as it lives.
    pub fn new(teams: [&LiveTeam; 4], device: &Device) -> Arc<Self> {
        let new = Arc::new(Self { teams: teams.map(LiveTeam::clone), first: OnceLock::new() });
        if let Device::Cuda(ctx) = device {
            let probe: Arc<dyn Probe> = new.clone();
            ctx.watch(Arc::downgrade(&probe));
        }
        new
    }

    /// The first fault of a team, which ends the others.
    pub fn check(&self) -> Result<()> {
        if let Some(e) = self.first.get() {
            return Err(e.clone());
        }
        let all = || self.teams.iter().filter_map(|t| t.check().err()).collect::<Vec<_>>();
        if all().is_empty() {
            return Ok(());
        }
        // Once more: a peer tells of a death on one team, and then of its own end on the others.
        let mut found = all();
        let dead = found.iter().position(Error::is_peer_dead).unwrap_or(0);
        let first = self.first.get_or_init(|| found.swap_remove(dead));
        for t in &self.teams {
            if t.check().is_ok() {
                let text = format!("another team of this rank is over: {}", first.message());
                t.fail(Error::new(ErrorKind::Aborted, text).cause(first.clone()));
            }
        }
        Err(first.clone())
    }
}

impl Probe for Together {
    fn poll(&self) {
        // Whoever waits asks, too.
        let _told = self.check();
    }
}
