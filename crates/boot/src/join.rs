//! From a place in a job to a connected mesh.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tilewire_core::{Config, Deadline, Error, ErrorKind, Result};

use crate::claim;
use crate::env::{Place, Rendezvous};
use crate::handshake::Identity;
use crate::links::LinkMesh;
use crate::mesh::Mesh;
use crate::secret::Secret;
use crate::secret_fd;
use crate::store::Store;
use crate::tcp_store::{StoreAddr, StoreClient, StoreServer, Watched, Who};
use crate::threads::ThreadMesh;
use crate::torch_store::TorchStore;

/// Worlds that this process has joined, by job: world `n` of one rank meets world `n` of the
/// others.
static JOINED: Mutex<Option<HashMap<String, Joined>>> = Mutex::new(None);

/// Meetings of one job.
#[derive(Clone, Copy, Default)]
struct Joined {
    /// Those of earlier programs of this rank that have ended, well or not, as the store says; not
    /// known before the store has been reached.
    before: Option<u64>,
    /// Those that this process has begun.
    begun: u64,
}

/// Stores that this process serves. They live as long as the process: a rank that is late may still
/// ask for something when rank 0 has long dropped its world.
static SERVED: Mutex<Vec<Arc<StoreServer>>> = Mutex::new(Vec::new());

/// Connects this process to the other ranks of its job, all on this host. Collective.
///
/// May be called many times; every rank must call it equally often. A rank may run several programs
/// one after the other: where the store outlives them, as a launcher's does, the first meeting of
/// each is behind the last one of the program before it. Rank 0 serves the store unless
/// the launcher does. Without a `secret` in `cfg` it is that of the launcher ([`Launch`]); without
/// one there, the key follows from the job's name: then it is the user id, checked on every Unix
/// socket, that keeps others out. Nothing lasts much longer than to `deadline`.
///
/// [`Launch`]: crate::Launch
///
/// # Errors
/// `Timeout` naming the store's address, or the ranks that did not come. `Unsupported` if the job
/// spans several hosts. `Config` if the launcher's secret does not reach this process. Otherwise
/// as [`LinkMesh::connect`] and [`StoreClient::connect`].
pub fn join_processes(place: &Place, cfg: &Config, deadline: Deadline) -> Result<Arc<dyn Mesh>> {
    if place.size == 1 {
        let solo = ThreadMesh::group(1)?.pop();
        return Ok(solo.ok_or_else(|| Error::internal("a group of one is empty"))?);
    }
    if place.local_size != place.size {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("only {} of {} ranks are on this host", place.local_size, place.size),
        )
        .op("join")
        .hint("all ranks of a world must be on one host"));
    }
    let secret = match &cfg.secret {
        Some(text) => Secret::from_hex(text)?,
        None => secret_fd::of_launcher(place)?.unwrap_or_else(|| Secret::from_job(&place.job)),
    };
    // Counted before anything can fail: ranks that call again after a failure, here or on another
    // rank, must mean the same meeting.
    let begun = begin(&place.job);
    let store = open(place, &secret, deadline).map_err(|e| e.op("join").rank(place.rank))?;
    let before = earlier(&*store, place, &secret).map_err(|e| e.op("join").rank(place.rank))?;
    let job = format!("{}.{}", place.job, before + begun);
    let met = LinkMesh::connect(&*store, &job, place.rank, place.size, &secret, deadline);
    // Only for a later program of this rank: this meeting is over whatever the store says.
    store.add(&ended_key(place), 1).ok();
    Ok(met.map_err(|e| if e.is_timeout() { with_refusals(e) } else { e })?)
}

/// The key of the number of meetings of a rank that have ended. A process that is killed in a
/// meeting does not count it: who takes its place comes to that meeting.
fn ended_key(place: &Place) -> String {
    format!("ended/{}/{}", place.job, place.rank.get())
}

/// Counts one more meeting that this process begins.
fn begin(job: &str) -> u64 {
    let mut joined = JOINED.lock().unwrap_or_else(PoisonError::into_inner);
    let joined = joined.get_or_insert_default().entry(job.to_owned()).or_default();
    joined.begun += 1;
    joined.begun
}

/// The meetings of earlier programs of this rank. The store is asked once: then it counts those of
/// this process as well.
///
/// # Errors
/// `Mismatch` if the program of the last one is in its world still. Errors of the store.
fn earlier(store: &dyn Store, place: &Place, secret: &Secret) -> Result<u64> {
    let joined = || JOINED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = joined().as_ref().and_then(|all| all.get(&place.job)?.before);
    let before = match known {
        Some(n) => n,
        None => store.add(&ended_key(place), 0)?.try_into().unwrap_or(0),
    };
    if known.is_none() && before > 0 {
        let job = format!("{}.{before}", place.job);
        let (rank, size) = (place.rank, place.size);
        claim::check_left(store, &Identity { job: &job, rank, size, secret })?;
    }
    let mut joined = joined();
    let of_job = joined.get_or_insert_default().entry(place.job.clone()).or_default();
    Ok(*of_job.before.get_or_insert(before))
}

/// Adds why the stores that this process serves have refused connections: those who did not come
/// may be among them.
fn with_refusals(e: Error) -> Error {
    let served = SERVED.lock().unwrap_or_else(PoisonError::into_inner);
    let reasons: Vec<_> = served.iter().filter_map(|s| s.reasons()).collect();
    if reasons.is_empty() {
        return e;
    }
    let text =
        format!("{}; at the store that this rank serves {}", e.message(), reasons.join(", "));
    e.reworded(text)
}

fn open(place: &Place, secret: &Secret, deadline: Deadline) -> Result<Box<dyn Store>> {
    let addr = match &place.rendezvous {
        Rendezvous::Tcp(host, port) => StoreAddr::Tcp(host.clone(), *port),
        Rendezvous::Unix(name) => StoreAddr::Abstract(name.clone()),
        Rendezvous::TorchStore(host, port) => {
            let prefix = format!("tilewire/{}", place.job);
            return Ok(Box::new(
                TorchStore::connect(host, *port, &prefix, deadline)?.ending(deadline),
            ));
        }
        Rendezvous::Solo => {
            let msg = format!("{} ranks need a rendezvous address, and none is given", place.size);
            return Err(Error::invalid(msg));
        }
    };
    let served = || SERVED.lock().unwrap_or_else(PoisonError::into_inner);
    // Others may come, with another secret, too, as soon as the server is there.
    let begin = Instant::now();
    if place.rank.get() == 0
        && let Some(server) = StoreServer::try_bind(&addr, secret)?
    {
        served().push(Arc::new(server));
    }
    let who = Who::new(place.rank.get(), place.size, &place.job);
    let client = StoreClient::connect_as(Some(who), &addr, secret, deadline)?.ending(deadline);
    // Now, or by an earlier meeting.
    let ours = served().iter().find(|s| *s.addr() == addr).cloned();
    Ok(match ours.filter(|_| place.rank.get() == 0) {
        Some(server) => Box::new(Watched::new(Box::new(client), server, who, begin)),
        None => Box::new(client),
    })
}
