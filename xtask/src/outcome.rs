//! The outcome of a stage, and the checks that it left out: each has a reason, and each reason a
//! limit, so that tests cannot stop running unseen.

use std::collections::BTreeMap;

use tilewire_testing::Lack;

/// The outcome of a stage: how many checks passed, failed and were left out, and bytes downloaded.
#[derive(Default)]
pub struct Outcome {
    pub passed: usize,
    pub failed: usize,
    pub skipped: Skips,
    pub downloaded: u64,
    /// Names and last lines of failed checks, for the end of the run: the output of a stage is
    /// long, and parts of it run beside each other.
    pub failures: Vec<String>,
}

/// The most lines of a failure that are repeated at the end, and the most characters of each.
const LINES: usize = 20;
const CHARS: usize = 200;

impl Outcome {
    /// Keeps the last lines of the output of a failed check.
    pub fn explain(&mut self, what: &str, said: &str) {
        let lines: Vec<_> = said.lines().map(str::trim_end).filter(|l| !l.is_empty()).collect();
        let from = lines.len().saturating_sub(LINES);
        let last = lines[from..].iter().map(|l| l.chars().take(CHARS).collect());
        let all: Vec<String> = [what.to_owned()].into_iter().chain(last).collect();
        self.failures.push(all.join("\n    "));
    }

    /// One check that was left out.
    pub fn skip(reason: &str) -> Self {
        let mut o = Self::default();
        o.skipped.add(reason, 1);
        o
    }

    pub fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.downloaded += other.downloaded;
        self.failures.extend_from_slice(&other.failures);
        other.skipped.0.iter().for_each(|(reason, n)| self.skipped.add(reason, *n));
    }
}

/// Checks that were left out, by reason.
#[derive(Default)]
pub struct Skips(pub BTreeMap<String, usize>);

/// The reason of checks whose tool is not installed and cannot be fetched.
pub const NOT_INSTALLED: &str = "cannot be installed here";
/// The reason of tests that Python's runner leaves out.
pub const BY_PYTEST: &str = "left out by pytest";
/// The first words of the reason in `#[ignore = "run by ..."]` for the part of a test that has a
/// process of its own.
const ROLE: &str = "run by ";

/// The most checks of one stage that may be left out, by reason. A test for GPUs raises its number
/// here, and a reason that is not here may not be given. Those behind the first are met on machines
/// with GPUs: their numbers are those of the tests that can give the reason.
fn most(reason: &str) -> usize {
    let of_tests = [
        (Lack::Gpu, 182),
        (Lack::Gpus, 49),
        (Lack::Sm90, 12),
        (Lack::Nccl, 15),
        (Lack::Nvshmem, 1),
        (Lack::CublasLt, 2),
        (Lack::Nvtx, 1),
        (Lack::Nvrtc, 6),
        (Lack::Compiler, 5),
        (Lack::Watch, 6),
        (Lack::Namespaces, 5),
        (Lack::Root, 1),
    ];
    let found = of_tests.iter().find(|(lack, _)| lack.to_string() == reason);
    match (found, reason) {
        (Some((_, most)), _) => *most,
        (_, NOT_INSTALLED) => 3,
        (_, BY_PYTEST) => 3,
        (_, r) if r.starts_with(ROLE) => 5,
        _ => 0,
    }
}

impl Skips {
    pub fn add(&mut self, reason: &str, n: usize) {
        if n > 0 {
            *self.0.entry(reason.to_owned()).or_default() += n;
        }
    }

    pub fn total(&self) -> usize {
        self.0.values().sum()
    }

    /// `104: no GPU; 2: run by the tests below`, the most first.
    pub fn text(&self) -> String {
        let mut all: Vec<_> = self.0.iter().collect();
        all.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
        all.iter().map(|(reason, n)| format!("{n}: {reason}")).collect::<Vec<_>>().join("; ")
    }

    /// Reasons that were given more often than they may be.
    pub fn too_many(&self) -> Vec<String> {
        let over = self.0.iter().filter(|(reason, n)| **n > most(reason));
        over.map(|(reason, n)| {
            format!("{n} skipped, the most is {}: {reason} (xtask/src/outcome.rs)", most(reason))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_of_a_failure_are_kept() {
        let mut o = Outcome::default();
        let said: Vec<_> = (0..100).map(|i| format!("{i} {}\n", "x".repeat(500))).collect();
        o.explain("a test", &said.join("\n"));
        let mut total = Outcome::default();
        total.add(&o);
        let lines: Vec<_> = total.failures[0].lines().collect();
        assert_eq!((lines.len(), lines[0], &lines[1][..7]), (LINES + 1, "a test", "    80 "));
        assert!(lines.iter().all(|l| l.len() <= CHARS + 4), "{lines:?}");
    }

    #[test]
    fn a_reason_that_is_given_too_often_is_named() {
        let mut s = Skips::default();
        assert!(s.too_many().is_empty() && s.text().is_empty());
        let gpu = Lack::Gpu.to_string();
        s.add(&gpu, most(&gpu));
        s.add("run by the tests below", 2);
        assert!(s.too_many().is_empty(), "{:?}", s.too_many());
        assert_eq!(s.text(), format!("{}: no GPU; 2: run by the tests below", most(&gpu)));
        s.add(&gpu, 1);
        assert!(
            s.too_many().len() == 1 && s.too_many()[0].contains("no GPU"),
            "{:?}",
            s.too_many()
        );
        s.add("I did not feel like it", 1);
        assert_eq!(s.too_many().len(), 2, "a reason that nobody knows");
    }
}
