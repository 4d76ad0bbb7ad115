//! Device memory, reference counted.

use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use tilewire_core::{DType, Error, ErrorKind, Result};

/// One 64-byte line; buffers are made of whole lines so that every dtype is aligned.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A buffer on the host device. Clones share it; it is freed with the last one, so that work in
/// flight keeps its inputs alive.
///
/// Access is guarded as by a `RefCell`: many readers or one writer. A conflict is not waited out
/// but reported, because streams and events must already have ordered the accesses.
#[derive(Clone)]
pub struct Memory {
    lines: Arc<RwLock<Vec<Line>>>,
    len_bytes: usize,
}

/// Read access to a [`Memory`].
pub struct MemoryRead<'a>(RwLockReadGuard<'a, Vec<Line>>, usize);

/// Write access to a [`Memory`].
pub struct MemoryWrite<'a>(RwLockWriteGuard<'a, Vec<Line>>, usize);

impl Memory {
    fn filled(len_bytes: usize, byte: u8) -> Self {
        let lines = vec![Line([byte; 64]); len_bytes.div_ceil(64)];
        Self { lines: Arc::new(RwLock::new(lines)), len_bytes }
    }

    /// As `zeroed` and `poisoned`; an error where they would end the process.
    pub(crate) fn try_filled(len_bytes: usize, byte: u8) -> Result<Self> {
        let (num, mut lines) = (len_bytes.div_ceil(64), Vec::new());
        lines.try_reserve_exact(num).map_err(|e| {
            let text = format!("{len_bytes} bytes of the host's memory");
            Error::new(ErrorKind::Exhausted, text)
                .cause(e)
                .hint("use fewer ranks, or smaller sizes")
        })?;
        lines.resize(num, Line([byte; 64]));
        Ok(Self { lines: Arc::new(RwLock::new(lines)), len_bytes })
    }

    /// `len_bytes` of zeros.
    pub fn zeroed(len_bytes: usize) -> Self {
        Self::filled(len_bytes, 0)
    }

    /// `len_bytes` of [`DType::POISON`]: NaN in every floating type, so that an element that
    /// nobody wrote cannot pass for a result.
    pub fn poisoned(len_bytes: usize) -> Self {
        Self::filled(len_bytes, DType::POISON)
    }

    /// A copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let m = Self::zeroed(bytes.len());
        if let Ok(mut w) = m.write("new buffer") {
            w.bytes_mut().copy_from_slice(bytes);
        }
        m
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Read access; `what` names the buffer in the error.
    ///
    /// # Errors
    /// `InvalidArgument` if a node is writing it at this moment: a stream or event edge is missing.
    pub fn read(&self, what: &str) -> Result<MemoryRead<'_>> {
        match self.lines.try_read() {
            Ok(g) => Ok(MemoryRead(g, self.len_bytes)),
            Err(TryLockError::Poisoned(p)) => Ok(MemoryRead(p.into_inner(), self.len_bytes)),
            Err(TryLockError::WouldBlock) => Err(race(what, "read", "written")),
        }
    }

    /// Write access; `what` names the buffer in the error.
    ///
    /// # Errors
    /// `InvalidArgument` if a node is reading or writing it at this moment.
    pub fn write(&self, what: &str) -> Result<MemoryWrite<'_>> {
        match self.lines.try_write() {
            Ok(g) => Ok(MemoryWrite(g, self.len_bytes)),
            Err(TryLockError::Poisoned(p)) => Ok(MemoryWrite(p.into_inner(), self.len_bytes)),
            Err(TryLockError::WouldBlock) => Err(race(what, "written", "used")),
        }
    }

    /// True if both are the same buffer.
    pub fn same(&self, other: &Memory) -> bool {
        Arc::ptr_eq(&self.lines, &other.lines)
    }

    /// A number that no other buffer has while this one lives; never zero.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.lines).addr()
    }
}

fn race(what: &str, wanted: &str, busy: &str) -> Error {
    Error::invalid(format!("`{what}` was to be {wanted} while work in flight has it {busy}"))
        .hint("wait for the Pending, or join it to the stream, before touching the buffer")
}

impl MemoryRead<'_> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.0)[..self.1]
    }
}

impl MemoryWrite<'_> {
    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.0)[..self.1]
    }
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Memory({} bytes)", self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_are_errors_not_waits() {
        let m = Memory::poisoned(100);
        let r = m.read("x").unwrap();
        assert!(r.bytes().iter().all(|&b| b == 0xFF) && r.bytes().len() == 100);
        assert!(m.read("x").is_ok());
        assert!(m.write("x").is_err_and(|e| e.to_string().contains("`x`")));
        drop(r);
        let w = m.write("x").unwrap();
        assert!(m.read("x").is_err());
        drop(w);
    }
}
