//! The launcher's secret comes by an inherited descriptor, not by the environment, which every
//! program that a rank starts would have, and show.
//!
//! The descriptor is that of a sealed memfd. Wrappers between launcher and rank (`sh -c`,
//! `unshare`, `numactl`) hand it on with their other descriptors. The rank marks it close-on-exec
//! once it has read it. A variable names it, with its inode: the number may mean another file by
//! then.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd, pread};
use tilewire_core::{Error, ErrorKind, Result, inject};

use crate::env::{Launcher, Place};
use crate::secret::Secret;

/// The variable: `descriptor:inode`.
pub(crate) const VARIABLE: &str = "_TILEWIRE_SECRET_FD";

/// The variable of a secret that a user has chosen.
pub(crate) const CHOSEN: &str = "TILEWIRE_SECRET";

/// The most bytes of a secret that are read.
const MAX_SECRET: usize = 4096;

/// Numbers of descriptors that scripts do not use by hand, unless the limit is lower.
const NUMBERS: [i32; 4] = [900, 200, 60, 10];

/// The secret that this process has read, with its variable: it may join several times.
static READ: Mutex<Option<(String, Secret)>> = Mutex::new(None);

/// The launcher's end.
pub(crate) struct Handed {
    fd: OwnedFd,
    inode: u64,
}

impl Handed {
    /// # Errors
    /// `Io` or `Exhausted` of the system.
    fn new(secret: &Secret) -> Result<Self> {
        inject::step("memfd_create")?;
        let io = |e: rustix::io::Errno| Error::io("making the memory for the secret", e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let low = memfd_create("tilewire-secret", flags).map_err(io)?;
        let mut file = std::fs::File::from(low);
        let wrote = file.write_all(secret.reveal().as_bytes());
        wrote.map_err(|e| Error::io("writing the secret", e))?;
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(io)?;
        let low = OwnedFd::from(file);
        let high = NUMBERS.iter().find_map(|n| rustix::io::fcntl_dupfd_cloexec(&low, *n).ok());
        let fd = high.unwrap_or(low);
        let inode = fstat(&fd).map_err(io)?.st_ino;
        Ok(Self { fd, inode })
    }

    /// The secret for a job: one that the user has chosen goes by the environment as it came, a
    /// fresh one by a descriptor. `chosen`: the value of [`CHOSEN`].
    pub fn for_job(chosen: Option<&str>) -> Result<(Secret, Option<Arc<Self>>)> {
        if let Some(text) = chosen {
            return Ok((Secret::from_hex(text)?, None));
        }
        let secret = Secret::random()?;
        let handed = Self::new(&secret)?;
        Ok((secret, Some(Arc::new(handed))))
    }

    /// The variable for the ranks.
    pub fn variable(&self) -> (String, String) {
        (VARIABLE.to_owned(), format!("{}:{}", self.fd.as_raw_fd(), self.inode))
    }

    /// Makes the child that calls this inherit the descriptor: between fork and exec.
    pub fn keep(&self) -> std::io::Result<()> {
        Ok(fcntl_setfd(&self.fd, FdFlags::empty())?)
    }
}

/// The secret that the launcher hands to this process. None if it hands none.
///
/// # Errors
/// `Config` if it does, and the descriptor is not here: a wrapper has closed it.
pub(crate) fn of_launcher(place: &Place) -> Result<Option<Secret>> {
    // Ranks of another launcher inside a job of ours: the variable is not for them.
    if place.launcher != Launcher::Tilewire {
        return Ok(None);
    }
    of_process()
}

/// As [`of_launcher`], whoever started this process.
pub(crate) fn of_process() -> Result<Option<Secret>> {
    let Ok(value) = std::env::var(VARIABLE) else { return Ok(None) };
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((of, secret)) = &*read
        && *of == value
    {
        return Ok(Some(secret.clone()));
    }
    let secret = take(&value)?;
    *read = Some((value, secret.clone()));
    Ok(Some(secret))
}

fn take(value: &str) -> Result<Secret> {
    let lost = |why: &str| {
        let text = format!("the launcher's secret does not reach this process: {why}");
        Error::new(ErrorKind::Config, text).hint(
            "a program between `tilewire run` and this one has closed the descriptor: set \
             TILEWIRE_SECRET to 32 or more hex digits for `tilewire run`, and it goes by the \
             environment",
        )
    };
    let number = value.split_once(':').and_then(|(n, i)| Some((n.parse().ok()?, i.parse().ok()?)));
    let (number, inode): (i32, u64) =
        number.ok_or_else(|| lost(&format!("{VARIABLE} is not descriptor:inode")))?;
    let gone = || lost(&format!("descriptor {number} is not that of the launcher"));
    let fd = duplicate(number).ok_or_else(gone)?;
    let sealed = fcntl_get_seals(&fd).is_ok_and(|s| s.contains(SealFlags::WRITE));
    if !sealed || !fstat(&fd).is_ok_and(|s| s.st_ino == inode) {
        return Err(gone());
    }
    let mut text = vec![0; MAX_SECRET];
    // From its beginning, and without moving the position: others read it as well.
    let len = pread(&fd, &mut text, 0).map_err(|e| Error::io("reading the secret", e))?;
    let text = std::str::from_utf8(&text[..len]).map_err(|_| gone())?;
    let secret = Secret::from_hex(text)?;
    close_on_exec(number);
    Ok(secret)
}

/// An own, close-on-exec duplicate of a descriptor that may not be open.
#[allow(unsafe_code)]
fn duplicate(number: i32) -> Option<OwnedFd> {
    // SAFETY: the kernel checks the number. Only a new descriptor is made; nothing that belongs to
    // others changes.
    let new = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    // SAFETY: the kernel has just made this descriptor for us; nobody else knows its number.
    (new >= 0).then(|| unsafe { OwnedFd::from_raw_fd(new) })
}

/// Programs that this process starts from now on do not get the descriptor.
#[allow(unsafe_code)]
fn close_on_exec(number: i32) {
    // SAFETY: the kernel checks the number. It has just been that of the launcher's memfd, which
    // nobody in this process owns or closes; it stays open, and only its flag changes.
    unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(fd: &OwnedFd) -> FdFlags {
        rustix::io::fcntl_getfd(fd).unwrap()
    }

    #[test]
    fn the_reader_gets_the_secret_and_closes_it_to_its_children() {
        let secret = Secret::random().unwrap();
        let handed = Handed::new(&secret).unwrap();
        assert_eq!(flags(&handed.fd), FdFlags::CLOEXEC);
        handed.keep().unwrap();
        assert_eq!(flags(&handed.fd), FdFlags::empty());
        let value = handed.variable().1;
        for _ in 0..2 {
            assert_eq!(take(&value).unwrap(), secret);
            assert_eq!(flags(&handed.fd), FdFlags::CLOEXEC);
        }
        let wrote = rustix::io::pwrite(&handed.fd, b"0", 0);
        assert_eq!(wrote.unwrap_err(), rustix::io::Errno::PERM);
    }

    #[test]
    fn another_file_at_the_number_is_not_the_secret() {
        let handed = Handed::new(&Secret::random().unwrap()).unwrap();
        let number = handed.fd.as_raw_fd();
        for value in [
            format!("{number}:{}", handed.inode + 1),
            format!("1000000:{}", handed.inode),
            format!("-1:{}", handed.inode),
            format!("0:{}", handed.inode),
            "x".to_owned(),
        ] {
            let e = take(&value).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Config, "{e}");
            assert!(e.get_hint().unwrap().contains(CHOSEN), "{e}");
        }
        assert_eq!(flags(&handed.fd), FdFlags::CLOEXEC);
    }
}
