//! Fuzzing of decoders that read bytes of others.
//!
//! [`fuzz!`](crate::fuzz!) runs a decoder on seeds, then on mutations of them, by bolero's engine
//! for stable Rust: random, not led by coverage. Seeds come from the encoders, and from the files
//! of `corpus/NAME` of the crate: real inputs, and each input that once went wrong.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::ops::Bound;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[doc(hidden)]
pub use bolero;
use bolero::{Driver, ValueGenerator};

use crate::FUZZ_COUNTS;
use crate::allocations::counted;

/// Time of a target in the tests.
pub const TIME: Duration = Duration::from_secs(5);

/// Set to write a corpus for targets that have none.
const BLESS: &str = "TILEWIRE_BLESS";

/// Longest time for one input: a thousand times what any takes.
const LIMIT: Duration = Duration::from_secs(5);

/// Memory that a decoder may ask for, for each byte of its input: a byte of JSON (`[`) is a vector
/// of values.
const PER_BYTE: usize = 1 << 10;

/// Numbers at which arithmetic goes wrong.
const NUMBERS: [u64; 22] = [
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    255,
    256,
    4095,
    65535,
    65536,
    1 << 20,
    (1 << 30) + 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 53,
    1 << 62,
    (1 << 63) - 1,
    u64::MAX,
];

/// Texts that may stand in place of a number or a word of a text.
const WORDS: [&str; 18] = [
    "-1",
    "-9223372036854775808",
    "18446744073709551616",
    "1e308",
    "-1e308",
    "1e999",
    "0.5",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[[[[[[[[[[[[[[[",
    "\"\\u0000\"",
    "\u{fffd}",
    " ",
    "\n",
    "",
];

/// Bytes for a decoder; they are shown as a Rust literal.
pub struct Input(pub Vec<u8>);

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\" ({} bytes)", self.0.escape_ascii(), self.0.len())
    }
}

/// A target: seeds and counts.
#[derive(Debug)]
pub struct Target {
    name: &'static str,
    seeds: Vec<Vec<u8>>,
    /// Bytes of memory that it may ask for whatever the input.
    spare: usize,
    runs: AtomicU64,
    accepted: AtomicU64,
}

impl Target {
    /// A target with `seeds` and the files of `corpus`. With [`BLESS`] the seeds are written to a
    /// corpus that is not there yet: what this version encodes stays an input of later ones.
    ///
    /// # Panics
    /// If the folder or a file cannot be read, or there is no seed.
    pub fn new(name: &'static str, corpus: &Path, mut seeds: Vec<Vec<u8>>, spare: usize) -> Self {
        if std::env::var_os(BLESS).is_some() && !corpus.is_dir() {
            std::fs::create_dir_all(corpus).expect("a folder for the corpus");
            for (i, seed) in seeds.iter().enumerate() {
                std::fs::write(corpus.join(format!("encoded-{i}")), seed).expect("a seed");
            }
        }
        if corpus.is_dir() {
            let entries = std::fs::read_dir(corpus).expect("the corpus can be read");
            let mut files: Vec<_> = entries.map(|e| e.expect("an entry").path()).collect();
            files.sort();
            seeds.extend(files.iter().map(|f| std::fs::read(f).expect("a file of the corpus")));
        }
        assert!(!seeds.is_empty(), "{name} has no seed");
        Self { name, seeds, spare, runs: AtomicU64::new(0), accepted: AtomicU64::new(0) }
    }

    /// The seeds as they are.
    pub fn seeds(&self) -> impl Iterator<Item = &[u8]> {
        self.seeds.iter().map(Vec::as_slice)
    }

    /// Runs the decoder on one input. It returns whether the input was accepted.
    ///
    /// # Panics
    /// If the decoder panics, takes too long, or asks for memory that the input does not justify.
    pub fn run(&self, input: &[u8], decodes: impl FnOnce(&[u8]) -> bool) {
        let most = self.spare + PER_BYTE * input.len();
        let begun = Instant::now();
        let (accepted, bytes) = counted(input, most, decodes);
        let took = begun.elapsed();
        assert!(bytes <= most, "{} bytes of input took {bytes} bytes of memory", input.len());
        assert!(took < LIMIT, "{} bytes of input took {took:?}", input.len());
        self.runs.fetch_add(1, Ordering::Relaxed);
        self.accepted.fetch_add(accepted.into(), Ordering::Relaxed);
    }

    /// Checks that the decoder was seen from both sides, and notes the counts.
    ///
    /// # Panics
    /// If it accepted every input or none: then the target shows nothing. If the file of the
    /// counts cannot be written.
    pub fn end(&self) {
        let (runs, accepted) =
            (self.runs.load(Ordering::Relaxed), self.accepted.load(Ordering::Relaxed));
        assert!(0 < accepted && accepted < runs, "{}: {accepted} of {runs} accepted", self.name);
        let Some(file) = std::env::var_os(FUZZ_COUNTS) else { return };
        let to = OpenOptions::new().create(true).append(true).open(file);
        // In one piece: others write there, too.
        let line = format!("{}\t{runs}\t{accepted}\n", self.name);
        to.expect("the file opens").write_all(line.as_bytes()).expect("the file is written");
    }

    /// A generator of mutated seeds.
    pub fn mutations(&self) -> Mutations {
        Mutations { seeds: self.seeds.clone() }
    }
}

/// Generates mutations of seeds.
#[derive(Debug)]
pub struct Mutations {
    seeds: Vec<Vec<u8>>,
}

/// A number of `0..n`, 0 if `n` is 0.
fn below<D: Driver>(d: &mut D, n: usize) -> Option<usize> {
    d.gen_usize(Bound::Included(&0), Bound::Included(&n.saturating_sub(1)))
}

fn number<D: Driver>(d: &mut D) -> Option<u64> {
    let n = NUMBERS[below(d, NUMBERS.len())?];
    // Beside them, too: lengths of the input itself are small.
    Some(if below(d, 4)? == 0 { below(d, 300)? as u64 } else { n })
}

/// A place in `b`, and one that is not before it and near.
fn range<D: Driver>(d: &mut D, b: &[u8]) -> Option<(usize, usize)> {
    let at = below(d, b.len() + 1)?;
    let most = if below(d, 8)? == 0 { b.len() } else { 16 };
    Some((at, at + below(d, most.min(b.len() - at) + 1)?))
}

/// The word of digits, or else of letters, around `at`.
fn word(b: &[u8], at: usize) -> (usize, usize) {
    let Some(first) = b.get(at) else { return (at, at) };
    let alike = |x: &u8| {
        let number = |x: u8| x.is_ascii_digit();
        if number(*first) { number(*x) } else { x.is_ascii_alphanumeric() }
    };
    let from = b[..at].iter().rposition(|x| !alike(x)).map_or(0, |i| i + 1);
    let to = b[at..].iter().position(|x| !alike(x)).map_or(b.len(), |i| at + i);
    (from.min(at), to.max(at))
}

impl Mutations {
    fn seed<D: Driver>(&self, d: &mut D) -> Option<&[u8]> {
        Some(&self.seeds[below(d, self.seeds.len())?])
    }

    fn mutate<D: Driver>(&self, d: &mut D, b: &mut Vec<u8>) -> Option<()> {
        let (from, to) = range(d, b)?;
        let kind = below(d, 10)?;
        match kind {
            0 if from < b.len() => b[from] ^= 1 << below(d, 8)?,
            1 if from < b.len() => b[from] = below(d, 256)? as u8,
            2 => {
                let n = number(d)?.to_le_bytes();
                let len = [1, 2, 4, 8][below(d, 4)?].min(b.len() - from);
                b[from..from + len].copy_from_slice(&n[..len]);
            }
            3 => drop(b.drain(from..to)),
            4 => {
                let copy = b[from..to].to_vec();
                let at = below(d, b.len() + 1)?;
                b.splice(at..at, copy);
            }
            5 => b.truncate(from),
            6 => {
                let other = self.seed(d)?;
                let at = below(d, other.len() + 1)?;
                b.truncate(from);
                b.extend(&other[at..]);
            }
            7 | 8 => {
                // Of a text: a number or a word as a whole.
                let (from, to) = word(b, from);
                let text = number(d)?.to_string();
                let words = WORDS[below(d, WORDS.len())?];
                b.splice(from..to, (if kind == 7 { &text } else { words }).bytes());
            }
            _ => {
                let bytes: Option<Vec<u8>> =
                    (from..to).map(|_| Some(below(d, 256)? as u8)).collect();
                b.splice(from..from, bytes?);
            }
        }
        Some(())
    }
}

impl ValueGenerator for Mutations {
    type Output = Input;

    fn generate<D: Driver>(&self, d: &mut D) -> Option<Input> {
        let mut b = self.seed(d)?.to_vec();
        for _ in 0..=below(d, 4)? {
            self.mutate(d, &mut b)?;
        }
        Some(Input(b))
    }
}

/// Runs a decoder on seeds and their mutations, in a test named `fuzz_NAME`.
///
/// `fuzz!("NAME", seeds, |bytes| accepted)`, and for a decoder that asks for more than a MiB
/// whatever its input, `spare = BYTES` behind it. The closure asserts what must hold and returns
/// whether the input was accepted. It runs for [`TIME`](crate::fuzz::TIME); `cargo xtask fuzz`
/// sets another.
#[macro_export]
macro_rules! fuzz {
    ($name:literal, $seeds:expr, $decodes:expr) => {
        $crate::fuzz!($name, $seeds, $decodes, spare = 1 << 20)
    };
    ($name:literal, $seeds:expr, $decodes:expr, spare = $spare:expr) => {{
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/", $name);
        let corpus = ::std::path::Path::new(corpus);
        let target = $crate::fuzz::Target::new($name, corpus, $seeds, $spare);
        let decodes: fn(&[u8]) -> bool = $decodes;
        target.seeds().for_each(|input| target.run(input, decodes));
        $crate::fuzz::bolero::check!(name = $name)
            .with_test_time($crate::fuzz::TIME)
            .with_generator(target.mutations())
            .for_each(|input| target.run(&input.0, decodes));
        target.end();
    }};
}
