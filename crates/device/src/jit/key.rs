//! The inputs that determine a kernel, and its name in caches.

use std::fmt;

/// Changes when the way kernels are compiled or stored changes.
const FORMAT: &str = "tilewire kernel 1";

/// Everything that decides what the machine code is, but for the compiler's version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelSpec {
    /// Name for messages.
    pub name: String,
    /// The whole text: kernels include nothing.
    pub text: String,
    /// Definitions, in order.
    pub defines: Vec<(String, u64)>,
    /// Architecture, as in `sm_90a`.
    pub arch: String,
}

/// Digest of a [`KernelSpec`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Key(u128);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl KernelSpec {
    /// Options of the compiler: equal for all kernels.
    ///
    /// Without the compiler's own cache (CUDA 12.9 and newer): what comes from there has no log, so
    /// that spills would go unseen, and this crate keeps what it compiles.
    pub(crate) const OPTIONS: [&'static str; 3] =
        ["--std=c++17", "--ptxas-options=-v", "--no-cache"];

    /// The digest.
    pub fn key(&self) -> Key {
        let mut hash = blake3::Hasher::new();
        // With their lengths: no two lists of fields run together to the same bytes.
        let mut field = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        };
        field(FORMAT);
        Self::OPTIONS.iter().for_each(|o| field(o));
        field(&self.name);
        field(&self.text);
        field(&self.arch);
        for (name, value) in &self.defines {
            field(name);
            field(&value.to_string());
        }
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash.finalize().as_bytes()[..16]);
        Key(u128::from_be_bytes(bytes))
    }
}
