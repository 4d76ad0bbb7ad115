//! The launcher's end of [`crate::Rejoin`]: which ranks wait for the lost ones.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use tilewire_core::{Error, Result};

use crate::peer;
use crate::rejoin::{FINAL, RESTARTS, VARIABLE};
use crate::secret::{hex, random_bytes};

/// The longest time that a connection has for its one line.
const HELLO: Duration = Duration::from_millis(100);
/// The longest line.
const MAX_HELLO: u64 = 256;

/// Restarts of a job: those that are left, and the ranks that wait for the next.
pub(super) struct Restarts {
    pub listener: UnixListener,
    name: String,
    token: String,
    pub most: u32,
    pub done: u32,
    /// Connections of ranks that have come back.
    pub ready: BTreeMap<usize, UnixStream>,
    /// Set from the first failure until the restart.
    pub since: Option<Instant>,
    /// A rank has said that its error would come again.
    pub is_given_up: bool,
}

impl Restarts {
    /// None if a job is not to be restarted.
    pub fn new(most: u32, job: &str) -> Result<Option<Self>> {
        if most == 0 {
            return Ok(None);
        }
        let io = |e| Error::io("making the socket for ranks that come back", e);
        let (name, token) = (format!("tilewire-rejoin-{job}"), hex(&random_bytes()?));
        let addr = SocketAddr::from_abstract_name(&name).map_err(io)?;
        let listener = UnixListener::bind_addr(&addr).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let ready = BTreeMap::new();
        Ok(Some(Self {
            listener,
            name,
            token,
            most,
            done: 0,
            ready,
            since: None,
            is_given_up: false,
        }))
    }

    /// Variables for ranks that are started now.
    pub fn variables(&self) -> [(String, String); 3] {
        let done = self.done.to_string();
        [
            (VARIABLE.to_owned(), format!("{}:{}", self.name, self.token)),
            (RESTARTS.to_owned(), done.clone()),
            ("TORCHELASTIC_RESTART_COUNT".to_owned(), done),
        ]
    }

    /// True if another failure can be answered by a restart.
    pub fn are_left(&self) -> bool {
        self.done < self.most
    }

    /// Takes the connections that have come; what is not a rank of this job is dropped.
    pub fn accept(&mut self, num_ranks: usize) {
        while let Ok((stream, _)) = self.listener.accept() {
            // Another user cannot hold up the launcher by saying nothing.
            let fd = OwnedFd::from(stream);
            if peer::check_user(&fd).is_err() {
                continue;
            }
            let stream = UnixStream::from(fd);
            let Some((rank, is_final)) = self.hello(&stream).filter(|h| h.0 < num_ranks) else {
                continue;
            };
            self.is_given_up |= is_final;
            if self.are_left() && !is_final {
                self.ready.insert(rank, stream);
                self.since.get_or_insert_with(Instant::now);
            }
        }
    }

    fn hello(&self, stream: &UnixStream) -> Option<(usize, bool)> {
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(HELLO)).ok()?;
        let mut line = String::new();
        BufReader::new(stream.take(MAX_HELLO)).read_line(&mut line).ok()?;
        rank_of(&line, &self.token, self.done)
    }

    /// Answers a rank that waits. It may have died meanwhile: then it is the next failure.
    pub fn answer(&self, mut stream: UnixStream, place: &str) {
        stream.write_all(format!("{} {place}\n", self.done).as_bytes()).ok();
    }
}

/// The rank that says hello, and whether it gives up, if it knows the token and is of the round
/// after `done` restarts: one of an earlier round has been given up. None if the line is cut off.
fn rank_of(line: &str, token: &str, done: u32) -> Option<(usize, bool)> {
    let line = line.strip_suffix('\n')?;
    let last = line.strip_suffix(FINAL);
    let mut words = last.unwrap_or(line).split(' ');
    let known = words.next()? == token;
    let (rank, restarts) = (words.next()?.parse().ok()?, words.next()?.parse());
    (known && restarts == Ok(done) && words.next().is_none()).then_some((rank, last.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuzz_rejoin_hello() {
        let seeds = ["0a1b2c 3 2\n", "0a1b2c 0 12\n", "0a1b2d 3 2\n", "0a1b2c 3 2 final\n"];
        let seeds = seeds.map(|s| s.as_bytes().to_vec()).to_vec();
        tilewire_testing::fuzz!("rejoin_hello", seeds, |b| {
            let Ok(line) = std::str::from_utf8(b) else { return false };
            let Some((rank, last)) = rank_of(line, "0a1b2c", 2) else { return false };
            assert!(line.starts_with("0a1b2c "), "without the token");
            assert_eq!(rank_of(&line[..line.len() - 1], "0a1b2c", 2), None, "half a line");
            let same = format!("0a1b2c {rank} 2{}\n", if last { FINAL } else { "" });
            assert_eq!(rank_of(&same, "0a1b2c", 2), Some((rank, last)));
            assert_eq!(rank_of(line, "0a1b2c", 3), None, "of an earlier round");
            true
        });
    }

    /// A rank may end while it writes: `1` of `12` restarts is another round.
    #[test]
    fn a_hello_that_is_cut_off_is_none() {
        assert_eq!(rank_of("0a 3 12\n", "0a", 12), Some((3, false)));
        assert_eq!(rank_of("0a 3 12 final\n", "0a", 12), Some((3, true)));
        assert_eq!(rank_of("0a 3 1", "0a", 1), None);
    }
}
