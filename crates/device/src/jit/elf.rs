//! A check that a file of machine code is complete. The driver takes an address without a length
//! and reads as far as the headers of the file say: behind the end of a truncated file that is
//! memory of something else.

/// Bytes of the header of the file.
const HEADER: usize = 64;

/// Of a section that has no bytes in the file.
const NOBITS: u32 = 8;

/// True if `code` is an ELF file of 64 bits, least byte first, whose tables and sections lie within
/// it.
pub(crate) fn is_whole(code: &[u8]) -> bool {
    let u16_at = |at: usize| read(code, at).map(u16::from_le_bytes);
    let header = || -> Option<bool> {
        // Of a file without tables nothing else is looked at.
        if code.len() < HEADER || !code.starts_with(b"\x7fELF\x02\x01") {
            return Some(false);
        }
        let segments = table(code, 32, (u16_at(54)?, u16_at(56)?))?;
        let sections = table(code, 40, (u16_at(58)?, u16_at(60)?))?;
        let parts = |rows: Vec<&[u8]>, kind: usize, (offset, size): (usize, usize)| {
            rows.into_iter().all(|row| {
                let part = || -> Option<bool> {
                    let none = kind == 4 && u32::from_le_bytes(read(row, kind)?) == NOBITS;
                    let (at, len) = (u64_at(row, offset)?, u64_at(row, size)?);
                    Some(none || within(code, at, len).is_some())
                };
                part() == Some(true)
            })
        };
        // The kind of a segment is its first word, and says nothing about its bytes.
        Some(parts(segments, 0, (8, 32)) && parts(sections, 4, (24, 32)))
    };
    header() == Some(true)
}

fn read<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    read(bytes, at).map(u64::from_le_bytes)
}

/// Bytes `at..at + len`.
fn within(code: &[u8], at: u64, len: u64) -> Option<&[u8]> {
    let (at, end) = (usize::try_from(at).ok()?, usize::try_from(at.checked_add(len)?).ok()?);
    code.get(at..end)
}

/// The rows of the table whose offset stands at `at`: bytes of a row, and their number.
fn table(code: &[u8], at: usize, (size, num): (u16, u16)) -> Option<Vec<&[u8]>> {
    if num == 0 {
        return Some(Vec::new());
    }
    let all = within(code, u64_at(code, at)?, u64::from(size) * u64::from(num))?;
    // Rows that are too short for their fields are found where these are read.
    (size > 0).then(|| all.chunks_exact(size.into()).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A header, a section of 8 bytes, one without bytes, and the table of both at the end.
    pub(in crate::jit) fn file() -> Vec<u8> {
        let mut f = vec![0; 72 + 2 * 64];
        f[..6].copy_from_slice(b"\x7fELF\x02\x01");
        f[40..48].copy_from_slice(&72u64.to_le_bytes());
        f[58..60].copy_from_slice(&64u16.to_le_bytes());
        f[60..62].copy_from_slice(&2u16.to_le_bytes());
        let mut section = |row: usize, kind: u32, at: u64, len: u64| {
            let row = &mut f[72 + 64 * row..][..64];
            row[4..8].copy_from_slice(&kind.to_le_bytes());
            row[24..32].copy_from_slice(&at.to_le_bytes());
            row[32..40].copy_from_slice(&len.to_le_bytes());
        };
        section(0, 1, 64, 8);
        section(1, NOBITS, 64, 1 << 40);
        f
    }

    #[test]
    fn fuzz_kernel_elf() {
        let mut segments = file();
        // The table of sections, read as one of segments.
        segments[32..40].copy_from_slice(&72u64.to_le_bytes());
        segments[54..56].copy_from_slice(&56u16.to_le_bytes());
        segments[56..58].copy_from_slice(&1u16.to_le_bytes());
        tilewire_testing::fuzz!("kernel_elf", vec![file(), segments], |b| {
            let whole = is_whole(b);
            let more = [b, &[0]].concat();
            assert!(!whole || is_whole(&more), "what is behind the end of a file is no part of it");
            // It has all bytes that it needs: without the last one of them it is cut off.
            let least = (0..=b.len()).find(|n| is_whole(&b[..*n]));
            assert_eq!(whole, least.is_some_and(|n| n >= HEADER));
            whole
        });
    }

    #[test]
    fn a_file_that_is_cut_off_is_not_whole() {
        let f = file();
        assert!(is_whole(&f));
        for len in 0..f.len() {
            assert!(!is_whole(&f[..len]), "{len} of {} bytes", f.len());
        }
        // Sections that reach behind the end, or around it.
        for (at, len) in [(64u64, 200u64), (u64::MAX, 1), (1 << 40, 8)] {
            let mut f = file();
            f[72 + 24..72 + 32].copy_from_slice(&at.to_le_bytes());
            f[72 + 32..72 + 40].copy_from_slice(&len.to_le_bytes());
            assert!(!is_whole(&f), "{at} {len}");
        }
        let mut other = file();
        other[5] = 2;
        assert!(!is_whole(&other), "most byte first");
        let mut bare = file();
        bare[60] = 0;
        assert!(is_whole(&bare) && is_whole(&bare[..HEADER]), "no tables");
        assert!(!is_whole(&bare[..HEADER - 1]), "a header that is cut off");
        let mut short = file();
        short[58] = 16;
        assert!(!is_whole(&short), "rows without their fields");
    }
}
