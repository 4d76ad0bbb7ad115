//! The choices that a plan makes at `prepare`, equal on all ranks.

use std::sync::OnceLock;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tilewire_core::{Error, ErrorKind, Result};
use tilewire_symm::{Heap, LiveTeam};

use super::backend::{CollectiveBackend, is_on_device, not_on, usual};
use super::check::not_prepared;
use super::kernel::GemmBackend;
use super::overlap::{Algo, Explain, MOST_CANDIDATE_CHUNKS, OverlapConfig, Via};

/// Collective: returns the candidate with the least largest cost over all ranks. Of equal
/// candidates it returns the first in rank 0's list.
///
/// # Errors
/// `Mismatch` if the ranks have other candidates.
pub(crate) fn fastest<C>(team: &LiveTeam, costs: &[(C, f64)]) -> Result<C>
where
    C: Copy + PartialEq + Serialize + DeserializeOwned,
{
    let mine = serde_json::to_vec(costs)
        .map_err(|e| Error::internal(format!("costs of configurations as JSON: {e}")))?;
    let lists = team.exchange("config", &mine)?;
    let mut lists = lists.iter().enumerate().map(|(i, bytes)| {
        serde_json::from_slice::<Vec<(C, f64)>>(bytes).map_err(|e| {
            Error::new(ErrorKind::Protocol, format!("costs of rank {i} cannot be read: {e}"))
        })
    });
    let mut worst = lists.next().transpose()?.unwrap_or_default();
    for list in lists {
        let list = list?;
        for (config, most) in &mut worst {
            let cost = list.iter().find(|(c, _)| c == config).map(|(_, us)| *us);
            *most = most.max(cost.ok_or_else(|| {
                Error::new(
                    ErrorKind::Mismatch,
                    "the ranks have different candidates to choose from",
                )
            })?);
        }
    }
    let best = worst.iter().min_by(|a, b| a.1.total_cmp(&b.1)).map(|(c, _)| *c);
    best.ok_or_else(|| Error::internal("there is no candidate to choose"))
}

/// The tile configuration of a plan: given by the caller, or chosen at `prepare`.
pub(crate) struct Choice {
    given: Option<OverlapConfig>,
    used: OnceLock<OverlapConfig>,
}

impl Choice {
    /// Makes the choice of a plan on `heap`. On a device GEMMs choose their tiles themselves, and
    /// the caller's tiles have no effect.
    ///
    /// # Errors
    /// `InvalidArgument` for a bad configuration; `Unsupported` for an algorithm that
    /// the backend has no path for, or that puts between GPUs that do not reach each other.
    pub fn new(given: Option<OverlapConfig>, heap: &Heap) -> Result<Self> {
        let given = given.map(|c| fit(c, heap)).transpose()?;
        let given = match (usual(heap), given) {
            (CollectiveBackend::Put, given) => given,
            (_, None) => Some(OverlapConfig::by_nccl()),
            (_, Some(c)) if c.via == Via::Nccl => Some(c),
            (_, Some(c)) => {
                let what =
                    format!("schedule `{}` between GPUs that do not reach each other", c.algo);
                let instead = "use sequential_nccl, or leave the choice to `prepare`";
                return Err(not_on(heap, &what, instead));
            }
        };
        let used = OnceLock::new();
        if let Some(c) = given {
            used.get_or_init(|| c);
        }
        Ok(Self { given, used })
    }

    /// Returns the library or kernel that computes the products on a device.
    pub fn kernel(&self) -> GemmBackend {
        self.given.map_or_else(GemmBackend::default, |c| c.kernel)
    }

    /// Returns whether the configuration in use may be one that `is` accepts: the caller's, or any
    /// where `prepare` chooses.
    pub fn may_be(&self, is: impl FnOnce(&OverlapConfig) -> bool) -> bool {
        self.given.as_ref().is_none_or(is)
    }

    /// Returns the most chunks of a shard. On a device each of them has a flag of its own.
    pub fn max_chunks(&self) -> usize {
        self.given.map_or(MOST_CANDIDATE_CHUNKS, |c| c.sub_chunks)
    }

    /// Returns the caller's choice as text for the fingerprint.
    pub fn text(&self) -> String {
        self.given.map_or("auto".to_owned(), |c| c.to_string())
    }

    /// Collective: settles the configuration. Without one from the caller it is the fastest for the
    /// slowest rank.
    pub(super) fn settle(
        &self,
        team: &LiveTeam,
        device: bool,
        explain: impl FnOnce() -> Explain,
    ) -> Result<()> {
        if self.used.get().is_none() {
            let mut list = explain().candidates;
            list.retain(|c| !device || on_devices(c.config.algo));
            let costs: Vec<_> = list.iter().map(|c| (c.config, c.predicted_us)).collect();
            let chosen = fastest(team, &costs)?;
            self.used.get_or_init(|| chosen);
        }
        Ok(())
    }

    /// Returns the configuration in use.
    pub fn get(&self) -> Result<OverlapConfig> {
        self.used.get().copied().ok_or_else(not_prepared)
    }
}

/// Returns a configuration as the executor of `heap` carries it out.
fn fit(c: OverlapConfig, heap: &Heap) -> Result<OverlapConfig> {
    c.check()?;
    match (is_on_device(heap), c.via) {
        (false, Via::Puts) => Ok(c),
        (false, _) => Err(not_on(heap, "NCCL", "make the heap on the `vmm` backend")),
        // Tiles are the kernel's own.
        (true, _) if on_devices(c.algo) => {
            let of = OverlapConfig::of(c.algo, c.sub_chunks);
            Ok(OverlapConfig { via: c.via, kernel: c.kernel, ..of })
        }
        (true, _) => Err(not_on(
            heap,
            &format!("schedule `{}`", c.algo),
            "use pipelined, ring, sequential or sequential_nccl, or leave the choice to `prepare`",
        )),
    }
}

/// Returns whether the schedule has a path on CUDA devices.
fn on_devices(algo: Algo) -> bool {
    matches!(algo, Algo::Pipelined | Algo::Ring | Algo::Sequential)
}

#[cfg(test)]
mod tests {
    use tilewire_symm::{World, WorldCfg};

    use super::*;

    /// Checks the choice by the slowest rank: alone, rank 0 would take 'a', the fastest there.
    #[test]
    fn the_choice_is_the_best_for_the_slowest_rank() {
        let costs = [[('a', 1.0), ('b', 2.0), ('c', 9.0)], [('a', 9.0), ('c', 1.0), ('b', 3.0)]];
        let chosen = World::run_threads(2, WorldCfg::for_tests(), |world| {
            let team = world.everyone("choice")?;
            let best = fastest(&team, &costs[team.rank().idx()])?;
            // A rank without a candidate of the other.
            let few = if team.rank().idx() == 0 { &costs[0][..] } else { &costs[1][..2] };
            assert!(fastest(&team, few).unwrap_err().is_mismatch());
            Ok(best)
        });
        assert_eq!(chosen.unwrap(), ['b', 'b']);
    }
}
