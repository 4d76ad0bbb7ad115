//! The shared secret of a job.

use std::fmt;

use tilewire_core::{Config, Error, ErrorKind, Result, inject};

use crate::secret_fd;

/// A secret that the ranks of one job share. Never printed by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    key: [u8; 32],
    /// As given: only to hand it on to children.
    hex: String,
    explicit: bool,
}

impl Secret {
    /// A fresh secret of 256 bits from the kernel.
    ///
    /// # Errors
    /// `Io` if the kernel's generator fails.
    pub fn random() -> Result<Self> {
        Self::from_hex(&hex(&random_bytes()?))
    }

    /// The secret given as hexadecimal digits, at least 32 of them (128 bits).
    ///
    /// # Errors
    /// `Config` if it is too short or has other characters; the text is not shown.
    pub fn from_hex(text: &str) -> Result<Self> {
        if text.len() < 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(Error::new(
                ErrorKind::Config,
                "a secret needs at least 32 hexadecimal digits",
            ));
        }
        let text = text.to_ascii_lowercase();
        Ok(Self {
            key: blake3::derive_key("tilewire 2026 job secret", text.as_bytes()),
            hex: text,
            explicit: true,
        })
    }

    /// A key that anybody who knows the job's name can compute.
    ///
    /// It keeps jobs apart, it does not keep strangers out: for use where the transport itself
    /// checks the peer's user id (Unix sockets with `SO_PEERCRED`).
    pub fn from_job(job: &str) -> Self {
        let key = blake3::derive_key("tilewire 2026 job name", job.as_bytes());
        Self { key, hex: hex(&key), explicit: false }
    }

    /// The secret for a meeting of this process at a store that is not the launcher's: that of
    /// `config`, else that of `tilewire run`, else [`Secret::from_job`].
    ///
    /// Where a program between `tilewire run` and this process has closed the descriptor of its
    /// secret, the log has a warning: ranks that all lack it still meet.
    ///
    /// # Errors
    /// As [`Secret::from_hex`].
    pub fn of_process(config: &Config, job: &str) -> Result<Self> {
        if let Some(text) = &config.secret {
            return Self::from_hex(text);
        }
        let handed = secret_fd::of_process().unwrap_or_else(|e| {
            log::warn!("{e}");
            None
        });
        Ok(handed.unwrap_or_else(|| Self::from_job(job)))
    }

    /// True if it was drawn or configured, false if it follows from the job's name.
    pub fn is_explicit(&self) -> bool {
        self.explicit
    }

    /// The hexadecimal digits, to hand the secret to a child process.
    pub fn reveal(&self) -> &str {
        &self.hex
    }

    /// Keyed hash of the parts; lengths are included, so that parts cannot run into each other.
    pub(crate) fn mac(&self, purpose: &str, parts: &[&[u8]]) -> blake3::Hash {
        let mut h = blake3::Hasher::new_keyed(&self.key);
        for part in std::iter::once(&purpose.as_bytes()).chain(parts) {
            h.update(&(part.len() as u64).to_le_bytes());
            h.update(part);
        }
        h.finalize()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.explicit { "Secret(..)" } else { "Secret(from the job's name)" })
    }
}

/// A 256-bit nonce.
pub(crate) type Nonce = [u8; 32];

/// 32 bytes from the kernel's generator.
pub(crate) fn random_bytes() -> Result<Nonce> {
    inject::step("getrandom")?;
    let mut out = [0u8; 32];
    let mut done = 0;
    while done < out.len() {
        match rustix::rand::getrandom(&mut out[done..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("getrandom", e)),
        }
    }
    Ok(out)
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut s, b| {
        // Writing to a String cannot fail.
        write!(s, "{b:02x}").ok();
        s
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_never_shows_it() {
        let s = Secret::random().unwrap();
        assert_eq!(format!("{s:?}"), "Secret(..)");
        assert_eq!(Secret::from_hex(s.reveal()).unwrap(), s);
        let e = Secret::from_hex("feedfeed").unwrap_err();
        assert!(!e.to_string().contains("feed"), "{e}");
        assert!(!Secret::from_job("j").is_explicit());
        let chosen = Config { secret: Some("ab".repeat(16)), ..Config::default() };
        let want = Secret::from_hex(&"ab".repeat(16)).unwrap();
        assert_eq!(Secret::of_process(&chosen, "j").unwrap(), want);
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let s = Secret::from_job("j");
        assert_ne!(s.mac("p", &[b"ab", b"c"]), s.mac("p", &[b"a", b"bc"]));
        assert_ne!(s.mac("p", &[b"a"]), s.mac("q", &[b"a"]));
        assert_ne!(s.mac("p", &[]), Secret::from_job("k").mac("p", &[]));
    }
}
