//! The way of a rank back into its job, where the launcher starts lost ranks anew.
//!
//! A rank that has lost a peer connects to the launcher's socket, whose abstract name and token are
//! in its environment, and writes `token rank restarts` and a line feed. Once every rank has either
//! done so or ended, the launcher starts the ended ones anew and answers the others with
//! `restarts place` and a line feed: `place` is what `TILEWIRE_RANK` holds for a new rank, and
//! names a store where nobody has met before. If the launcher gives up, the connection ends.
//!
//! A rank whose error would come again writes `token rank restarts final` instead, and ends.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use tilewire_core::{Error, ErrorKind, Rank, Result};

use crate::env::{Flags, Place, detect};

/// `name:token` of the launcher's socket, in the environment of its ranks.
pub(crate) const VARIABLE: &str = "_TILEWIRE_REJOIN";
/// The number of restarts before a rank was started, in its environment.
pub(crate) const RESTARTS: &str = "_TILEWIRE_RESTARTS";

/// Behind the other words of a rank whose error would come again.
pub(crate) const FINAL: &str = " final";

/// The longest answer.
const MAX_ANSWER: u64 = 512;
/// The longest wait for it: the launcher waits for other ranks, and kills those that are late.
const PATIENCE: Duration = Duration::from_secs(120);

/// The launcher's offer to take a rank back after the loss of others.
#[derive(Clone, Debug)]
pub struct Rejoin {
    name: String,
    token: String,
    restarts: u32,
}

impl Rejoin {
    /// The offer in this process's environment; none where lost ranks are not started anew.
    ///
    /// # Errors
    /// `Config` if the variables are not those of a launcher.
    pub fn from_env() -> Result<Option<Self>> {
        let bad = |what: &str| Error::new(ErrorKind::Config, format!("{what} is not a launcher's"));
        let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
        let text = text.into_string().map_err(|_| bad(VARIABLE))?;
        let (name, token) = text.split_once(':').ok_or_else(|| bad(VARIABLE))?;
        let restarts = std::env::var(RESTARTS).map_or(Ok(0), |n| n.parse());
        let restarts = restarts.map_err(|_| bad(RESTARTS))?;
        Ok(Some(Self { name: name.to_owned(), token: token.to_owned(), restarts }))
    }

    /// Restarts of the job so far: above 0 it goes on from its last checkpoint.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Waits until the lost ranks are started anew; returns the place of `rank` among them. Leave
    /// the old world first: drop all that belongs to it.
    ///
    /// # Errors
    /// `Unavailable` if the launcher has gone or restarts no more.
    pub fn again(&mut self, rank: Rank) -> Result<Place> {
        let gone = |e: std::io::Error| {
            let text = format!("the launcher does not start the lost ranks anew: {e}");
            Error::new(ErrorKind::Unavailable, text).cause(e)
        };
        let stream = self.hello(rank, "").map_err(gone)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(gone)?;
        let mut answer = String::new();
        BufReader::new(stream.take(MAX_ANSWER)).read_line(&mut answer).map_err(gone)?;
        let Some((restarts, place)) = read(&answer) else {
            let text = "the launcher does not start the lost ranks anew: no restart is left";
            return Err(Error::new(ErrorKind::Unavailable, text));
        };
        self.restarts = restarts;
        place_of(place)
    }

    /// Tells the launcher that `rank` ends by an error that would come again, as that of a bad
    /// argument does: then the job ends, however many restarts are left.
    pub fn give_up(&self, rank: Rank) {
        // A launcher that has gone restarts nothing.
        self.hello(rank, FINAL).ok();
    }

    fn hello(&self, rank: Rank, more: &str) -> std::io::Result<UnixStream> {
        let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&self.name)?)?;
        let words = format!("{} {} {}{more}\n", self.token, rank.get(), self.restarts);
        stream.write_all(words.as_bytes())?;
        Ok(stream)
    }
}

/// The launcher's answer: restarts, and the text of the place. None if it is cut off.
fn read(answer: &str) -> Option<(u32, &str)> {
    let (restarts, place) = answer.strip_suffix('\n')?.split_once(' ')?;
    Some((restarts.parse().ok()?, place))
}

fn place_of(text: &str) -> Result<Place> {
    let vars = [("TILEWIRE_RANK".to_owned(), text.to_owned())].into();
    detect(&Flags::of_process(), &vars)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Rendezvous;

    #[test]
    fn fuzz_rejoin_answer() {
        let seeds = ["1 1/4@127.0.0.1:7000\n", "12 0/2@[::1]:65535\n", "1 0/1@localhost:1\n"];
        let seeds = seeds.map(|s| s.as_bytes().to_vec()).to_vec();
        tilewire_testing::fuzz!("rejoin_answer", seeds, |b| {
            let Some((restarts, text)) = std::str::from_utf8(b).ok().and_then(read) else {
                return false;
            };
            assert_eq!(read(&format!("{restarts} {text}\n")), Some((restarts, text)));
            let cut = std::str::from_utf8(&b[..b.len() - 1]).unwrap();
            assert_eq!(read(cut).is_some(), cut.ends_with('\n'), "half an answer is none");
            let Ok(place) = place_of(text) else { return false };
            let Place { rank, size, .. } = place;
            assert!(rank.idx() < size && place.local_rank.idx() < place.local_size);
            if let Rendezvous::Tcp(host, port) = &place.rendezvous {
                let again = place_of(&format!("{}/{size}@{host}:{port}", rank.get()));
                assert_eq!(again.unwrap(), place);
            }
            true
        });
    }

    /// The launcher may end while it writes: what there is of the port is another port.
    #[test]
    fn an_answer_that_is_cut_off_is_none() {
        assert_eq!(read("1 1/4@127.0.0.1:7000\n"), Some((1, "1/4@127.0.0.1:7000")));
        assert_eq!(read("1 1/4@127.0.0.1:70"), None);
    }
}
