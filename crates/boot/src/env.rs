//! The place of this process in its job, from flags or from the launcher's variables.

mod vars;

use std::collections::BTreeMap;

use tilewire_core::{Rank, Result};

use self::vars::Vars;

/// The launcher that started the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// The caller said so.
    Flags,
    /// `tilewire run`, or a hand-set `TILEWIRE_RANK`.
    Tilewire,
    /// `torchrun`, or another that sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's or Intel MPI's `mpiexec`.
    Mpich,
    /// A launcher that speaks PMIx.
    Pmix,
    /// `srun`.
    Slurm,
    /// Nobody: one process.
    Single,
}

/// The meeting point of the ranks.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum Rendezvous {
    /// Nowhere: the world has one rank.
    Solo,
    /// Our store at host and port. Rank 0 serves it, unless the launcher does.
    Tcp(String, u16),
    /// Our store at the abstract Unix socket of this name. Rank 0 serves it.
    Unix(String),
    /// The store of torch at host and port, served by `torchrun`'s agent.
    TorchStore(String, u16),
}

/// Place of a process in its job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// My world rank.
    pub rank: Rank,
    /// Ranks in the world.
    pub size: usize,
    /// My rank among those of this host.
    pub local_rank: Rank,
    /// Ranks on this host.
    pub local_size: usize,
    /// The launcher that started this process.
    pub launcher: Launcher,
    /// The meeting point of the ranks.
    pub rendezvous: Rendezvous,
    /// Name of the job: equal on all ranks, different for jobs at the same time.
    pub job: String,
}

/// The caller's statements about the place, and what of the process is needed to find it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Flags {
    /// World rank; needs `size` and, unless that is 1, `store`.
    pub rank: Option<u32>,
    /// World size.
    pub size: Option<usize>,
    /// Address of our store as `host:port`.
    pub store: Option<String>,
    /// Name of the job.
    pub job: Option<String>,
    /// Our parent process: names the job where the launcher does not.
    pub parent_pid: Option<u32>,
    /// Our user.
    pub uid: u32,
}

impl Flags {
    /// No flags, with what the kernel knows of this process.
    pub fn of_process() -> Self {
        Self {
            parent_pid: rustix::process::getppid().map(|p| p.as_raw_nonzero().get() as u32),
            uid: rustix::process::getuid().as_raw(),
            ..Self::default()
        }
    }
}

/// Finds the place. Pure: the same flags and variables give the same answer.
///
/// The first of these that is present decides: flags, `TILEWIRE_RANK`, torchrun, Open MPI,
/// MPICH or Intel MPI, PMIx, Slurm. Otherwise it is a single process.
///
/// # Errors
/// `Config` naming the variable if what is present is incomplete, not a number, or contradicts
/// itself.
///
/// ```
/// # use tilewire_boot::{Flags, Launcher, detect};
/// let vars = [("TILEWIRE_RANK", "1/4@127.0.0.1:7000")];
/// let vars = vars.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
/// let place = detect(&Flags::default(), &vars)?;
/// assert_eq!((place.rank.get(), place.size, place.launcher), (1, 4, Launcher::Tilewire));
/// # Ok::<(), tilewire_core::Error>(())
/// ```
pub fn detect(flags: &Flags, vars: &BTreeMap<String, String>) -> Result<Place> {
    let v = Vars { map: vars, flags };
    let has = |name: &str| vars.contains_key(name);
    if flags.rank.is_some() || flags.size.is_some() {
        v.by_flags()
    } else if has("TILEWIRE_RANK") {
        v.by_tilewire()
    } else if has("RANK") || (has("WORLD_SIZE") && has("LOCAL_RANK")) {
        v.by_torchrun()
    } else if has("OMPI_COMM_WORLD_RANK") || has("OMPI_COMM_WORLD_SIZE") {
        v.by_open_mpi()
    } else if has("PMI_RANK") || has("PMI_SIZE") {
        v.by_mpich()
    } else if has("PMIX_RANK") {
        v.by_pmix()
    } else if has("SLURM_PROCID") && (has("SLURM_STEP_ID") || has("SLURM_STEPID")) {
        v.by_slurm()
    } else {
        // A batch script also has SLURM_PROCID, but no step: it is one process.
        Ok(Place {
            rank: Rank::new(0),
            size: 1,
            local_rank: Rank::new(0),
            local_size: 1,
            launcher: Launcher::Single,
            rendezvous: Rendezvous::Solo,
            job: flags.job.clone().unwrap_or_else(|| "solo".to_owned()),
        })
    }
}

#[cfg(test)]
mod tests;
