//! Our own store between processes: a server and its clients, over TCP or an abstract Unix socket.
//!
//! Nothing is served before both ends have proved that they know the secret: hello (nonce) ->
//! challenge (nonce, proof) -> proof -> welcome, with keyed hashes over both nonces. On a Unix
//! socket both ends also check that the other runs as the same user.

mod client;
mod conn;
mod other_secret;
mod server;
mod user;
mod wire;

use std::fmt;

pub use client::StoreClient;
pub(crate) use other_secret::Watched;
pub use server::StoreServer;
pub(crate) use wire::Who;

/// The address that a [`StoreServer`] listens on.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub enum StoreAddr {
    /// Host and port; port 0 lets the kernel choose.
    Tcp(String, u16),
    /// Name of an abstract Unix socket: reachable from this host's network namespace only.
    Abstract(String),
}

impl fmt::Display for StoreAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Abstract(name) => write!(f, "unix socket @{name}"),
        }
    }
}

#[cfg(test)]
mod tests;
