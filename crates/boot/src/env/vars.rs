//! The environment variables of each launcher, read into a place.

use std::collections::BTreeMap;
use std::str::FromStr;

use tilewire_core::{Error, ErrorKind, Rank, Result};

use super::{Flags, Launcher, Place, Rendezvous};
use crate::mesh::MAX_RANKS;

/// The variables and flags, and what each launcher makes of them.
pub(super) struct Vars<'a> {
    pub map: &'a BTreeMap<String, String>,
    pub flags: &'a Flags,
}

/// A value together with the name of where it came from, for messages.
struct Named<'a, T>(&'a str, T);

fn bad(msg: String) -> Error {
    Error::new(ErrorKind::Config, msg).op("place")
}

fn number<T: FromStr>(name: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|_| bad(format!("{name}=`{text}` is not a number")))
}

/// Splits `host:port`; an IPv6 host stands in brackets.
pub(crate) fn host_port(name: &str, text: &str) -> Result<(String, u16)> {
    let wrong = || bad(format!("{name}: `{text}` is not host:port"));
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let port: u16 = number(name, port)?;
    if host.is_empty() || host.contains(['[', ']']) || port == 0 {
        return Err(wrong());
    }
    Ok((host.to_owned(), port))
}

impl Vars<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.map.get(name).map(String::as_str)
    }

    fn opt<T: FromStr>(&self, name: &str) -> Result<Option<T>> {
        self.get(name).map(|t| number(name, t)).transpose()
    }

    /// The number in `name`, which must be there because `because` is.
    fn need<T: FromStr>(&self, name: &str, because: &str) -> Result<T> {
        self.opt(name)?.ok_or_else(|| {
            bad(format!("{because} is set, but {name} is not"))
                .hint("a launcher sets both; unset the one that is left over")
        })
    }

    /// A checked place from rank and size, and local rank and size where they are known.
    fn place(
        &self,
        launcher: Launcher,
        rank: Named<'_, u32>,
        size: Named<'_, usize>,
        local: (Option<Named<'_, u32>>, Option<Named<'_, usize>>),
        meet: Meet,
    ) -> Result<Place> {
        let Named(rank_name, rank) = rank;
        let Named(size_name, size) = size;
        if size == 0 || rank as usize >= size {
            return Err(bad(format!(
                "{rank_name}={rank} and {size_name}={size} contradict each other: a rank is \
                 0 to size-1"
            )));
        }
        let local_size = match local.1 {
            Some(Named(name, n)) if n == 0 || n > size => {
                return Err(bad(format!(
                    "{name}={n} and {size_name}={size} contradict each other"
                )));
            }
            Some(Named(_, n)) => n,
            None => size,
        };
        let local_rank = match local.0 {
            Some(Named(name, r)) if r as usize >= local_size => {
                return Err(bad(format!("{name}={r} is not below the local size {local_size}")));
            }
            Some(Named(_, r)) => r,
            None if local_size == size => rank,
            None => {
                return Err(bad(format!(
                    "the local rank is not known: {size_name}={size}, {local_size} of them here"
                )));
            }
        };
        if local_size > MAX_RANKS {
            return Err(bad(format!(
                "this host has {local_size} ranks, but tilewire connects at most {MAX_RANKS}"
            )));
        }
        let solo = size == 1;
        Ok(Place {
            rank: Rank::new(rank),
            size,
            local_rank: Rank::new(local_rank),
            local_size,
            launcher,
            rendezvous: if solo { Rendezvous::Solo } else { meet.place },
            job: self.flags.job.clone().unwrap_or(meet.job),
        })
    }

    pub fn by_flags(&self) -> Result<Place> {
        let (Some(rank), Some(size)) = (self.flags.rank, self.flags.size) else {
            return Err(bad("a rank and a size must be given together".to_owned()));
        };
        let meet = match &self.flags.store {
            Some(s) => Meet::tcp(host_port("store", s)?),
            None if size <= 1 => Meet::solo(),
            None => {
                return Err(bad(format!(
                    "{size} ranks need the address of a store, and none is given"
                )));
            }
        };
        self.place(Launcher::Flags, Named("rank", rank), Named("size", size), (None, None), meet)
    }

    pub fn by_tilewire(&self) -> Result<Place> {
        const NAME: &str = "TILEWIRE_RANK";
        let text = self.get(NAME).unwrap_or_default();
        let wrong = || bad(format!("{NAME}=`{text}` is not rank/size@host:port"));
        let (place, store) = text.split_once('@').ok_or_else(wrong)?;
        let (rank, size) = place.split_once('/').ok_or_else(wrong)?;
        let (rank, size) = (number(NAME, rank)?, number(NAME, size)?);
        let meet = Meet::tcp(host_port(NAME, store)?);
        self.place(Launcher::Tilewire, Named(NAME, rank), Named(NAME, size), (None, None), meet)
    }

    pub fn by_torchrun(&self) -> Result<Place> {
        let rank = self.need("RANK", "WORLD_SIZE")?;
        let size = self.need("WORLD_SIZE", "RANK")?;
        let local_rank = self.need("LOCAL_RANK", "RANK")?;
        let local_size = self.opt("LOCAL_WORLD_SIZE")?;
        let meet = if size == 1 { Meet::solo() } else { self.meet_torch()? };
        let local = (
            Some(Named("LOCAL_RANK", local_rank)),
            local_size.map(|n| Named("LOCAL_WORLD_SIZE", n)),
        );
        let (rank, size) = (Named("RANK", rank), Named("WORLD_SIZE", size));
        self.place(Launcher::Torchrun, rank, size, local, meet)
    }

    /// The agent's store if there is one; otherwise ours, beside the port that torch will use.
    fn meet_torch(&self) -> Result<Meet> {
        let host = self
            .get("MASTER_ADDR")
            .ok_or_else(|| bad("RANK is set, but MASTER_ADDR is not".to_owned()))?;
        let port: u16 = self.need("MASTER_PORT", "MASTER_ADDR")?;
        let run = self.get("TORCHELASTIC_RUN_ID");
        let agent = self.get("TORCHELASTIC_USE_AGENT_STORE").unwrap_or("True");
        // After a restart the agent's store still holds what the ranks before said.
        let restart = self.get("TORCHELASTIC_RESTART_COUNT").unwrap_or("0");
        let job = format!("torchrun-{}-{port}-{restart}", run.unwrap_or("none"));
        if run.is_some() && agent.eq_ignore_ascii_case("true") {
            return Ok(Meet { place: Rendezvous::TorchStore(host.to_owned(), port), job });
        }
        Ok(Meet { place: Rendezvous::Tcp(host.to_owned(), next_port(port)?), job })
    }

    pub fn by_open_mpi(&self) -> Result<Place> {
        let because = "OMPI_COMM_WORLD_RANK";
        let rank = self.need("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
        let size = self.need("OMPI_COMM_WORLD_SIZE", because)?;
        let local_rank = self.need("OMPI_COMM_WORLD_LOCAL_RANK", because)?;
        let local_size = self.need("OMPI_COMM_WORLD_LOCAL_SIZE", because)?;
        let meet = self.meet_mpi("ompi", &["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"])?;
        let local = (
            Some(Named("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)),
            Some(Named("OMPI_COMM_WORLD_LOCAL_SIZE", local_size)),
        );
        let (rank, size) = (Named(because, rank), Named("OMPI_COMM_WORLD_SIZE", size));
        self.place(Launcher::OpenMpi, rank, size, local, meet)
    }

    pub fn by_mpich(&self) -> Result<Place> {
        let rank = self.need("PMI_RANK", "PMI_SIZE")?;
        let size = self.need("PMI_SIZE", "PMI_RANK")?;
        let local_rank = self.opt("MPI_LOCALRANKID")?.map(|r| Named("MPI_LOCALRANKID", r));
        let local_size = self.opt("MPI_LOCALNRANKS")?.map(|n| Named("MPI_LOCALNRANKS", n));
        let meet = self.meet_mpi("mpich", &["PMI_JOBID", "HYDRA_JOBID"])?;
        let (rank, size) = (Named("PMI_RANK", rank), Named("PMI_SIZE", size));
        self.place(Launcher::Mpich, rank, size, (local_rank, local_size), meet)
    }

    pub fn by_pmix(&self) -> Result<Place> {
        let rank = self.need("PMIX_RANK", "PMIX_NAMESPACE")?;
        let size = self.opt("PMIX_SIZE")?.ok_or_else(|| {
            bad("PMIX_RANK is set, but PMIX_SIZE is not".to_owned()).hint(
                "PMIx tells the size only to its own library: set \
                     TILEWIRE_RANK=rank/size@host:port",
            )
        })?;
        let local_rank = self.opt("PMIX_LOCAL_RANK")?.map(|r| Named("PMIX_LOCAL_RANK", r));
        let local_size = self.opt("PMIX_LOCAL_SIZE")?.map(|n| Named("PMIX_LOCAL_SIZE", n));
        let meet = self.meet_mpi("pmix", &["PMIX_NAMESPACE"])?;
        let (rank, size) = (Named("PMIX_RANK", rank), Named("PMIX_SIZE", size));
        self.place(Launcher::Pmix, rank, size, (local_rank, local_size), meet)
    }

    pub fn by_slurm(&self) -> Result<Place> {
        let because = "SLURM_PROCID";
        let rank = self.need("SLURM_PROCID", "SLURM_STEP_ID")?;
        let size_name = if self.get("SLURM_STEP_NUM_TASKS").is_some() {
            "SLURM_STEP_NUM_TASKS"
        } else {
            "SLURM_NTASKS"
        };
        let size: usize = self.need(size_name, because)?;
        let local_rank = self.need("SLURM_LOCALID", because)?;
        let nodes = match self.opt::<usize>("SLURM_STEP_NUM_NODES")? {
            Some(n) => Some(n),
            None => self.opt::<usize>("SLURM_NNODES")?,
        };
        let local_size = match nodes {
            None | Some(1) => Named("SLURM_NNODES", size),
            Some(_) => Named("SLURM_NTASKS_PER_NODE", self.need("SLURM_NTASKS_PER_NODE", because)?),
        };
        let step = self.get("SLURM_STEP_ID").or(self.get("SLURM_STEPID")).unwrap_or_default();
        let mut meet = self.meet_mpi("slurm", &["SLURM_JOB_ID", "SLURM_JOBID"])?;
        meet.append(step);
        let local = (Some(Named("SLURM_LOCALID", local_rank)), Some(local_size));
        let (rank, size) = (Named(because, rank), Named(size_name, size));
        self.place(Launcher::Slurm, rank, size, local, meet)
    }

    /// Ranks of MPI or Slurm: at `MASTER_ADDR` if that is set, else at a socket named after the
    /// job.
    fn meet_mpi(&self, kind: &str, ids: &[&str]) -> Result<Meet> {
        let id = ids.iter().find_map(|n| self.get(n)).map(str::to_owned);
        let id = match (id, self.flags.parent_pid) {
            (Some(id), _) => id,
            // On one host all ranks are children of the same daemon.
            (None, Some(pid)) => format!("parent{pid}"),
            (None, None) => {
                return Err(bad(format!(
                    "the job of {kind} has no name: neither {} nor the parent process is known",
                    ids.join(" nor ")
                )));
            }
        };
        let job = format!("{kind}-{}", clean(&id));
        if let Some(host) = self.get("MASTER_ADDR") {
            let port: u16 = self.opt("MASTER_PORT")?.unwrap_or(29500);
            return Ok(Meet { place: Rendezvous::Tcp(host.to_owned(), next_port(port)?), job });
        }
        let name = format!("tilewire-store-{}-{job}", self.flags.uid);
        Ok(Meet { place: Rendezvous::Unix(name), job })
    }
}

/// `MASTER_PORT` belongs to torch; ours is the next.
fn next_port(port: u16) -> Result<u16> {
    port.checked_add(1).ok_or_else(|| {
        bad(format!("MASTER_PORT={port} is the last port, but tilewire's store needs the next one"))
    })
}

/// Only characters that are safe in names, and not too many.
fn clean(id: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    if id.len() <= 32 {
        id.chars().map(safe).collect()
    } else {
        blake3::hash(id.as_bytes()).to_hex().chars().take(32).collect()
    }
}

struct Meet {
    place: Rendezvous,
    job: String,
}

impl Meet {
    fn solo() -> Self {
        Self { place: Rendezvous::Solo, job: "solo".to_owned() }
    }

    fn tcp((host, port): (String, u16)) -> Self {
        Self { job: format!("tcp-{}-{port}", clean(&host)), place: Rendezvous::Tcp(host, port) }
    }

    /// Makes the job of a step different from those of the other steps.
    fn append(&mut self, step: &str) {
        let step = clean(step);
        self.job = format!("{}.{step}", self.job);
        if let Rendezvous::Unix(name) = &mut self.place {
            *name = format!("{name}.{step}");
        }
    }
}
