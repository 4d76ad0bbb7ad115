//! The share of its communication that a step hides, measured on this machine.
//!
//! Each operation of a layer that communicates is launched in three ways, on tensors that are made
//! once: as the step launches it, its arithmetic alone, and its communication alone. A time runs
//! from the launch until nothing is in flight any more.
//!
//! | operations | arithmetic alone | communication alone |
//! |---|---|---|
//! | the four projections (tp) | the product of the gathered rows | the collective |
//! | `cp_attention`, both passes (cp) | local attention of my queries over all keys they see | the bytes that the plan predicts for each link, in one all-to-all |
//! | the experts, both passes (all ranks) | the grouped products | route, dispatch, combine |
//!
//! What a team of one rank does is left out, and so are the backward passes that a step without
//! attention or without experts does not run. The model's own experts are timed, but with tokens
//! that are routed evenly: how uneven the router is depends on the text. Not covered, because no
//! arithmetic could hide them: the sums of gradients and of the load-balancing loss. All that is
//! covered happens once in each layer, so the layers' number cancels.

mod attention;
mod experts;
mod projections;

use std::time::Instant;

use tilewire_core::{Error, ErrorKind, Result};
use tilewire_symm::LiveTeam;

use crate::model::Model;

/// Timed repetitions of each way; the median counts.
const ROUNDS: usize = 5;

/// Microseconds of one operation: the median over rounds of the slowest rank.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Times {
    /// As the step launches it.
    ours: f64,
    /// The arithmetic alone.
    compute: f64,
    /// The communication alone.
    comm: f64,
}

/// One way to launch an operation; it ends when the work has.
type Way<'a> = &'a dyn Fn() -> Result<()>;

/// Times ways on all ranks.
struct Clock<'a>(&'a LiveTeam);

impl Clock<'_> {
    /// Collective. In each round one way after the other, so that a slow moment of the machine
    /// meets all of them.
    fn measure(&self, ours: Way<'_>, compute: Way<'_>, comm: Way<'_>) -> Result<Times> {
        let mut mine = Vec::with_capacity(3 * (ROUNDS + 1));
        for _ in 0..=ROUNDS {
            for way in [ours, compute, comm] {
                self.0.exchange("align", &[])?;
                let start = Instant::now();
                way()?;
                mine.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        let all = self.0.exchange("times", bytemuck::cast_slice(&mine))?;
        let mut slowest = vec![0.0f64; mine.len()];
        for times in &all {
            if times.len() != size_of_val(&mine[..]) {
                return Err(Error::new(ErrorKind::Protocol, "a peer has timed something else"));
            }
            let times: Vec<f64> = bytemuck::pod_collect_to_vec(times);
            slowest.iter_mut().zip(times).for_each(|(s, t)| *s = s.max(t));
        }
        let median = |way: usize| {
            // The first round warms up and does not count.
            let mut t: Vec<f64> = slowest.iter().skip(3 + way).step_by(3).copied().collect();
            t.sort_by(f64::total_cmp);
            t[t.len() / 2]
        };
        Ok(Times { ours: median(0), compute: median(1), comm: median(2) })
    }
}

/// `1 - sum(t_ours - t_compute) / sum(t_comm)`, at most 1. Whatever makes an operation longer than
/// its arithmetic counts as communication that shows, packing and copies included; the share is
/// negative if that is more than the communication alone, as on a host with fewer cores than lanes.
fn share(parts: &[Times]) -> Option<f64> {
    let shown: f64 = parts.iter().map(|t| t.ours - t.compute).sum();
    let comm: f64 = parts.iter().map(|t| t.comm).sum();
    (comm > 0.0).then(|| (1.0 - shown / comm).min(1.0))
}

/// Collective over the world: the share of the communication of a layer that is hidden behind its
/// arithmetic, equal on all ranks. `None` if nothing is communicated.
///
/// # Errors
/// The fault of a team.
pub fn hidden_share(m: &Model) -> Result<Option<f64>> {
    let clock = Clock(&m.comm.world);
    let mut parts = Vec::new();
    if m.comm.tp.size() > 1 {
        parts.extend(projections::measure(&clock, m)?);
    }
    if m.comm.cp.size() > 1 {
        parts.extend(attention::measure(&clock, m)?);
    }
    if m.comm.world.size() > 1 {
        parts.extend(experts::measure(&clock, m)?);
    }
    Ok(share(&parts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewire_symm::{World, WorldCfg};

    #[test]
    fn the_share_is_of_all_communication_and_never_above_one() {
        let t = |ours, compute, comm| Times { ours, compute, comm };
        assert_eq!(share(&[]), None);
        assert_eq!(share(&[t(10.0, 10.0, 4.0)]), Some(1.0));
        assert_eq!(share(&[t(14.0, 10.0, 4.0)]), Some(0.0));
        assert_eq!(share(&[t(11.0, 10.0, 4.0)]), Some(0.75));
        // The long communication that shows outweighs the short one that does not.
        assert_eq!(share(&[t(10.0, 10.0, 1.0), t(16.0, 10.0, 7.0)]), Some(0.25));
        assert_eq!(share(&[t(9.0, 10.0, 4.0)]), Some(1.0));
        assert_eq!(share(&[t(18.0, 10.0, 4.0)]), Some(-1.0));
    }

    /// The slowest rank counts, each way by itself, and every rank learns it.
    #[test]
    fn a_time_is_that_of_the_slowest_rank() {
        let times = World::run_threads(2, WorldCfg::default(), |world| {
            let team = world.everyone("clock")?;
            let me = u64::from(world.rank().get());
            let nap = |ms: u64| {
                move || {
                    std::thread::sleep(std::time::Duration::from_millis(ms));
                    Ok(())
                }
            };
            Clock(&team).measure(&nap(40 * me), &nap(20 * (1 - me)), &nap(0))
        })
        .unwrap();
        assert_eq!(times[0], times[1]);
        let t = times[0];
        assert!(t.ours >= 40e3 && t.compute >= 20e3 && t.comm < t.ours, "{t:?}");
    }
}
