//! The assembler's log of a kernel, parsed.

/// Resources of one kernel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KernelUse {
    /// Name of the kernel.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that a thread spills to memory, stores and loads.
    pub spill_bytes: u32,
    /// Static shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Matrix instructions were put one behind the other: the kernel would be slow.
    pub serialised: bool,
}

/// Reads the messages of `--ptxas-options=-v`.
pub fn kernel_uses(log: &str) -> Vec<KernelUse> {
    let mut uses: Vec<KernelUse> = Vec::new();
    for line in log.lines() {
        if let Some(name) = line.split("Compiling entry function '").nth(1) {
            let name = name.split('\'').next().unwrap_or_default().to_owned();
            uses.push(KernelUse { name, ..KernelUse::default() });
        }
        let Some(last) = uses.last_mut() else { continue };
        let before = |word: &str| {
            let number = line.split(word).next()?.rsplit(|c: char| !c.is_ascii_digit());
            number.into_iter().next()?.parse::<u32>().ok()
        };
        if line.contains("bytes spill stores") {
            let stores = before(" bytes spill stores").unwrap_or(0);
            // Functions that were not inlined are reported behind their kernel, each on a line of
            // its own.
            last.spill_bytes += stores + before(" bytes spill loads").unwrap_or(0);
        }
        if line.contains(" registers") {
            last.registers = before(" registers").unwrap_or(0);
            if line.contains(" bytes smem") {
                last.shared_bytes = before(" bytes smem").unwrap_or(0);
            }
        }
        // C7510 and its kin: wgmma serialised.
        last.serialised |= line.contains("wgmma") && line.contains("serializ");
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_spills_and_shared_memory_are_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'tw_a' for 'sm_90a'\n\
            ptxas info    : Function properties for tw_a\n    \
            8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Function properties for tw_called\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem\n\
            ptxas info    : Compiling entry function 'tw_b' for 'sm_90a'\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 12 registers, used 0 barriers\n\
            ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n";
        let [a, b] = &kernel_uses(log)[..] else { panic!() };
        let want = KernelUse {
            name: "tw_a".into(),
            registers: 255,
            spill_bytes: 16,
            shared_bytes: 1024,
            serialised: false,
        };
        assert_eq!(*a, want);
        assert_eq!((&*b.name, b.registers, b.spill_bytes, b.serialised), ("tw_b", 12, 0, true));
        assert!(kernel_uses("").is_empty());
    }
}
