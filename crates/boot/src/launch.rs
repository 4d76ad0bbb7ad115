//! Starts the ranks of a job on this host, shows their output, and cleans up after them.

mod group;
mod mark;
mod pump;
mod restart;
mod warden;
mod watch;

use std::ffi::OsString;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use signal_hook::consts::SIGXFSZ;
use tilewire_core::{Error, Rank, Result};

use self::group::RankProcess;
use self::mark::{Known, Mark};
use self::pump::Pump;
use self::restart::Restarts;
use self::warden::Warden;
pub use self::warden::watch as watch_launcher;
use self::watch::{Round, Signals, Watch};
use crate::mesh::MAX_RANKS;
use crate::secret::{Secret, hex, random_bytes};
use crate::secret_fd::{CHOSEN, Handed};
use crate::tcp_store::{StoreAddr, StoreServer};

/// Variables that keep every library off NVLink multicast, with their values.
pub const NO_MULTICAST: [(&str, &str); 4] = [
    ("NCCL_NVLS_ENABLE", "0"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("CUBLASMP_DISABLE_MULTICAST", "1"),
];

/// `tilewire run -n N -- program args`: what to start, and how.
///
/// Every rank gets the variables of `torchrun`, `TILEWIRE_RANK`, a fresh secret, the four variables
/// that keep libraries off NVLink multicast, and `NCCL_GRAPH_REGISTER=0`, without which NCCL is not
/// opened. The secret comes by a descriptor that wrappers hand on and the rank keeps from its own
/// children; one that the user has set in `TILEWIRE_SECRET` is taken instead, and comes by that
/// variable. The launcher serves the store that ranks meet at; `MASTER_PORT` is another port, free
/// for torch. Each rank is the leader of a session and process group of its own, has no standard
/// input, and is killed by the kernel if the launcher dies. If a rank fails, the others are ended:
/// TERM, and KILL after the grace time.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Number of ranks, 1 to 64.
    pub n: usize,
    /// The program, looked up in `PATH`.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// More variables for the ranks. Ours win over them.
    pub env: Vec<(OsString, OsString)>,
    /// Ends the job after this time.
    pub timeout: Option<Duration>,
    /// Time between TERM and KILL. Default 3 s.
    pub grace: Duration,
    /// Shows the lines of the ranks without `[r3] ` in front.
    pub no_prefix: bool,
    /// A program that calls [`watch_launcher`], and its arguments: it ends the job if the launcher
    /// dies, also what ranks have started, what left their sessions, and what has cleared its
    /// environment. Default none: then the kernel kills the ranks alone.
    pub warden: Vec<OsString>,
    /// Failures that are answered by a restart. Ranks that have ended, however, are then started
    /// anew, and those that come back by [`crate::Rejoin`] get a new place to meet at. What a lost
    /// rank has left running, in another session, too, is ended before. An error that would come
    /// again is not answered: a rank's that ends with status 2 before it has come to meet the
    /// others, as programs do that are started wrongly, and one of [`crate::Rejoin::give_up`].
    /// Default 0.
    pub max_restarts: u32,
    /// Ranks that have neither ended nor come back so long after a failure are killed, and started
    /// anew, too. Default 10 s.
    pub regroup: Duration,
    /// Passes SIGINT, SIGTERM and SIGHUP on to the ranks, and ends the job; passes SIGUSR1 on, and
    /// goes on. Default true. The process ignores these signals after the run: end it then.
    pub forward_signals: bool,
}

/// The end of a rank's process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RankStatus {
    /// With this status.
    Exited(i32),
    /// By this signal.
    Signaled(i32),
}

impl RankStatus {
    /// True for status 0.
    pub fn success(self) -> bool {
        self == Self::Exited(0)
    }

    /// The status as a shell shows it: 128 + signal for a signal.
    pub fn code(self) -> i32 {
        match self {
            Self::Exited(c) => c,
            Self::Signaled(s) => 128 + s,
        }
    }
}

/// The rank whose failure caused the others'. Of those that fail within 100 ms a signal is taken
/// before an exit, an error of a rank's own before that of a wait for a silent rank, and this
/// before one that reports what befell a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The rank that failed.
    pub rank: Rank,
    /// Its end.
    pub status: RankStatus,
    /// The rank that its error blames, if it names one.
    pub culprit: Option<Rank>,
    /// The last lines, at most 20, of its standard error.
    pub last_stderr: Vec<String>,
}

/// The end of a job.
#[derive(Clone, Debug)]
pub struct ExitReport {
    /// Exit code for the launcher: 0, that of the first failure, 124 after the time limit, or
    /// 128 + signal if a signal ended the launcher (0 after SIGTERM if all ranks ended well).
    pub code: i32,
    /// Status of each rank.
    pub ranks: Vec<RankStatus>,
    /// The first rank that failed by itself.
    pub first_failure: Option<Failure>,
    /// Restarts of the job.
    pub restarts: u32,
    /// Ranks that did not end within the grace time, and were killed: they were stopped, or stuck.
    pub stuck: Vec<Rank>,
    /// The time limit was reached.
    pub timed_out: bool,
    /// The signal that ended the launcher.
    pub interrupted: Option<i32>,
    /// Processes that ranks left behind in their sessions, and that were ended.
    pub stragglers: usize,
    /// Bytes of the ranks' output that were dropped, because nobody read ours for a second after
    /// they had ended.
    pub lost_output: u64,
    /// Duration of the job.
    pub elapsed: Duration,
}

impl ExitReport {
    /// Returns what the end of the job shows beside the first failure, each in a sentence: the rank
    /// that was waited for, limits that ended a rank, ranks that had to be killed.
    pub fn findings(&self) -> Vec<String> {
        let mut all = Vec::new();
        if let Some(f) = &self.first_failure {
            let rank = f.rank.get();
            if let Some(c) = f.culprit.filter(|c| *c != f.rank) {
                all.push(format!("rank {rank} failed because of rank {}", c.get()));
            }
            let out = f.last_stderr.iter().rev().find(|l| l.contains("memory allocation of"));
            if let (RankStatus::Signaled(6), Some(line)) = (f.status, out) {
                all.push(format!(
                    "rank {rank} was aborted: out of memory under a limit of the address space \
                     (raise `ulimit -v`) or of the machine: {line}"
                ));
            }
            if f.status == RankStatus::Signaled(SIGXFSZ) {
                all.push(format!(
                    "rank {rank} wrote beyond the limit of file sizes (raise `ulimit -f`)"
                ));
            }
        }
        let stuck = self.stuck.iter().map(|r| r.get());
        all.extend(stuck.map(|r| format!("rank {r} did not end when asked to, and was killed")));
        all
    }
}

impl Launch {
    /// `n` ranks of `program`, with the defaults.
    pub fn new(n: usize, program: impl Into<OsString>) -> Self {
        Self {
            n,
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            timeout: None,
            grace: Duration::from_secs(3),
            no_prefix: false,
            warden: Vec::new(),
            max_restarts: 0,
            regroup: Duration::from_secs(10),
            forward_signals: true,
        }
    }

    /// Runs the job with the output of the ranks on standard output and standard error.
    ///
    /// Returns when all ranks have ended and nothing of them is left. The calling thread must be
    /// one that lives that long, as it does here: the kernel kills the ranks when it ends.
    ///
    /// # Errors
    /// `InvalidArgument` for a bad `n`, `Unavailable` if the program cannot be started, `Io`. A
    /// rank that fails is not an error: it is in the report.
    pub fn run(&self) -> Result<ExitReport> {
        self.run_to(Box::new(std::io::stdout()), Box::new(std::io::stderr()))
    }

    /// As [`Launch::run`], with the output of the ranks elsewhere. Each line is one `write`.
    ///
    /// # Errors
    /// As [`Launch::run`].
    pub fn run_to(
        &self,
        out: Box<dyn Write + Send>,
        err: Box<dyn Write + Send>,
    ) -> Result<ExitReport> {
        if self.n == 0 || self.n > MAX_RANKS {
            let msg = format!("a job has 1 to {MAX_RANKS} ranks, not {}", self.n);
            return Err(Error::invalid(msg).op("run"));
        }
        let start = Instant::now();
        let job = hex(&random_bytes()?);
        let mut parts = Parts::new(&job, self.chosen_secret().as_deref())?;
        // Dropped last: until then it would clean up for a launcher that has died.
        let _warden = Warden::start(&self.warden, &job)?;
        let signals = Signals::new(self.forward_signals)?;
        let mut restarts = Restarts::new(self.max_restarts, &job)?;
        let vars = self.shared_vars(&parts, restarts.as_ref())?;
        let mut ranks = Vec::new();
        for rank in Rank::all(self.n) {
            match self.start(rank, &parts, &vars) {
                Ok(p) => ranks.push(p),
                Err(e) => {
                    group::end_all(&mut ranks, Duration::ZERO, None);
                    return Err(e);
                }
            }
        }
        let pump = Pump::start(&mut ranks, !self.no_prefix, out, err)?;
        let mut watch = Watch::new(self, start);
        let watched = loop {
            let has_met = |r| parts.store.has_come(r);
            match watch.run(&mut ranks, &signals, restarts.as_mut(), &has_met) {
                Err(e) => break Err(e),
                Ok(Round::End) => break Ok(()),
                Ok(Round::Restart) => {
                    let Some(r) = &mut restarts else { break Ok(()) };
                    let done = self.restart((&mut parts, r), &mut watch, &mut ranks, &pump);
                    if let Err(e) = done {
                        break Err(e);
                    }
                }
            }
        };
        let grace = watch.grace_left();
        let stragglers = group::end_all(&mut ranks, grace, None);
        let shown = pump.finish();
        watched?;
        let report = watch.report(&ranks, shown, parts.stragglers + stragglers);
        Ok(ExitReport { restarts: restarts.map_or(0, |r| r.done), ..report })
    }

    /// Starts the ranks that have ended anew, and tells those that wait where all meet.
    fn restart(
        &self,
        (parts, restarts): (&mut Parts, &mut Restarts),
        watch: &mut Watch<'_>,
        ranks: &mut [RankProcess],
        pump: &Pump,
    ) -> Result<()> {
        restarts.done += 1;
        restarts.since = None;
        let lost: Vec<usize> = (0..ranks.len()).filter(|i| ranks[*i].status.is_some()).collect();
        let names: Vec<_> = lost.iter().map(ToString::to_string).collect();
        pump.note(&format!(
            "tilewire run: {}; restart {} of {}: {} of {} ranks are started anew: {}",
            watch.why(),
            restarts.done,
            restarts.most,
            lost.len(),
            ranks.len(),
            names.join(", ")
        ));
        // A store where nobody has met: what an earlier round has left there misleads nobody.
        parts.store = Parts::store(&parts.secret)?;
        let vars = self.shared_vars(parts, Some(restarts))?;
        for i in lost {
            let rank = Rank::new(i as u32);
            // What the lost rank has left may hold what the new one needs: a device, a port.
            let all = Known::rank(&parts.job, rank.get());
            parts.stragglers += group::end_all(&mut ranks[i..=i], self.grace, Some(&all));
            ranks[i] = self.start(rank, parts, &vars)?;
            pump.add(i, &mut ranks[i])?;
            restarts.ready.remove(&i);
        }
        for (i, stream) in std::mem::take(&mut restarts.ready) {
            restarts.answer(stream, &self.place(Rank::new(i as u32), &parts.store));
        }
        watch.restarted();
        Ok(())
    }

    fn start(&self, rank: Rank, parts: &Parts, shared: &[(String, String)]) -> Result<RankProcess> {
        let (vars, mark) =
            (self.vars(rank, &parts.store, shared), Mark::of(&parts.job, rank.get()));
        let started = RankProcess::start(self, &vars, (mark, parts.handed.clone()));
        started.map_err(|e| e.op("run").rank(rank))
    }

    /// Returns the secret that the user has set for the ranks.
    fn chosen_secret(&self) -> Option<String> {
        let ours = self.env.iter().rev().find(|(k, _)| k == CHOSEN).map(|(_, v)| v.clone());
        let value = ours.or_else(|| std::env::var_os(CHOSEN))?;
        Some(value.to_string_lossy().into_owned())
    }

    /// Returns what all ranks get alike.
    fn shared_vars(
        &self,
        parts: &Parts,
        restarts: Option<&Restarts>,
    ) -> Result<Vec<(String, String)>> {
        let io = |e| Error::io("looking for a free port", e);
        let free = std::net::TcpListener::bind("127.0.0.1:0").map_err(io)?;
        let port = free.local_addr().map_err(io)?.port();
        let run_id = hex(&random_bytes()?[..8]);
        let n = self.n.to_string();
        let mut vars = vec![
            ("WORLD_SIZE", n.clone()),
            ("LOCAL_WORLD_SIZE", n),
            ("GROUP_RANK", "0".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("TORCHELASTIC_RUN_ID", run_id),
            // No agent serves torch's store here: torch's rank 0 has to.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
        ];
        vars.extend(NO_MULTICAST.map(|(k, v)| (k, v.to_owned())));
        // Without it NCCL is not opened (`device/src/cuda/nccl_api.rs`).
        vars.push(("NCCL_GRAPH_REGISTER", "0".to_owned()));
        vars.push((mark::JOB, parts.job.clone()));
        let ours = vars.into_iter().map(|(k, v)| (k.to_owned(), v));
        let ours = ours.chain(parts.handed.iter().map(|h| h.variable()));
        Ok(ours.chain(restarts.into_iter().flat_map(Restarts::variables)).collect())
    }

    fn vars(
        &self,
        rank: Rank,
        store: &StoreServer,
        shared: &[(String, String)],
    ) -> Vec<(String, String)> {
        let mut vars = shared.to_vec();
        let mut put = |k: &str, v: String| vars.push((k.to_owned(), v));
        put(mark::RANK, rank.get().to_string());
        put("LOCAL_RANK", rank.get().to_string());
        put("TILEWIRE_RANK", self.place(rank, store));
        vars
    }

    /// The place of a rank, as `TILEWIRE_RANK` has it.
    fn place(&self, rank: Rank, store: &StoreServer) -> String {
        format!("{}/{}@{}", rank.get(), self.n, store.addr())
    }
}

/// The parts of a job that its launcher serves.
struct Parts {
    job: String,
    secret: Secret,
    /// The descriptor by which ranks get the secret, unless the user has chosen it.
    handed: Option<Arc<Handed>>,
    /// The meeting point of the ranks; after a restart another one.
    store: StoreServer,
    /// Processes that were ended before a restart.
    stragglers: usize,
}

impl Parts {
    fn new(job: &str, chosen: Option<&str>) -> Result<Self> {
        let (secret, handed) = Handed::for_job(chosen)?;
        let store = Self::store(&secret)?;
        Ok(Self { job: job.to_owned(), secret, handed, store, stragglers: 0 })
    }

    fn store(secret: &Secret) -> Result<StoreServer> {
        StoreServer::bind(&StoreAddr::Tcp("127.0.0.1".to_owned(), 0), secret)
    }
}

#[cfg(test)]
mod tests;
