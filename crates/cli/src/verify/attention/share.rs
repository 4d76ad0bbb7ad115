//! The oracle's results, computed by the first rank on all processors and sent to the others.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tilewire::prelude::*;
use tilewire_oracle::Mat;
use tilewire_oracle::attention::{AttnGrads, AttnOut, Bias};

use super::super::Ctx;
use super::magnitude::Magnitudes;
use super::problem::Want;

/// Interval at which the first rank reports that it still computes, so that no wait meets its
/// deadline.
const BEAT: Duration = Duration::from_secs(1);

/// Bytes of a piece, of which an exchange takes no more than a megabyte: the bytes of all pieces
/// precede each.
const PIECE: usize = 1 << 19;

/// Returns what `want` says on the first rank. Collective.
///
/// # Errors
/// The fault of the team; `Internal` if the oracle panicked.
pub fn share(ctx: &Ctx, want: impl FnOnce() -> Want + Send) -> Result<Want> {
    if ctx.team.rank() != Rank::new(0) {
        let mut bytes = Vec::new();
        loop {
            let all = ctx.team.exchange("oracle", &[])?;
            let Some((whole, piece)) = all.first().and_then(|b| b.split_first_chunk()) else {
                continue;
            };
            bytes.extend_from_slice(piece);
            if bytes.len() as u64 >= u64::from_ne_bytes(*whole) {
                return Reader::new(&bytes).want();
            }
        }
    }
    let (give, take) = mpsc::channel();
    thread::scope(|s| {
        // A receiver that is gone has met a fault of the team, which it reports.
        thread::Builder::new()
            .spawn_scoped(s, move || drop(give.send(want())))
            .map_err(|e| Error::io("starting the thread of the oracle", e))?;
        loop {
            match take.recv_timeout(BEAT) {
                Ok(want) => {
                    let bytes = bytes_of(&want);
                    let whole = (bytes.len() as u64).to_ne_bytes();
                    for piece in bytes.chunks(PIECE) {
                        ctx.team.exchange("oracle", &[&whole, piece].concat())?;
                    }
                    return Ok(want);
                }
                Err(RecvTimeoutError::Timeout) => drop(ctx.team.exchange("oracle", &[])?),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal("the oracle ended without a result"));
                }
            }
        }
    })
}

fn put(out: &mut Vec<u8>, m: &Mat) {
    out.extend([m.rows, m.cols].iter().flat_map(|n| (*n as u64).to_ne_bytes()));
    out.extend(m.data.iter().flat_map(|v| v.to_ne_bytes()));
}

fn put_some(out: &mut Vec<u8>, m: Option<&Mat>) {
    out.push(u8::from(m.is_some()));
    m.into_iter().for_each(|m| put(out, m));
}

/// In the order in which [`Reader::want`] reads them.
fn bytes_of(w: &Want) -> Vec<u8> {
    let mut out = Vec::new();
    let (g, m) = (&w.grads, &w.mag);
    for m in [&w.out.o, &w.out.lse, &g.dq, &g.dk, &g.dv, &m.o, &m.lse, &m.dq, &m.dk, &m.dv] {
        put(&mut out, m);
    }
    let bias = g.dbias.as_ref();
    // How it is cut into heads, and its elements.
    let heads = bias.map(|b| {
        Mat::from_rows(1, 3, |_, o| {
            o.copy_from_slice(&[b.heads, b.sq, b.skv].map(|n| n as f64));
        })
    });
    let sink = g.dsink.as_ref().map(|s| Mat::new(1, s.len(), s.clone()));
    for m in [&heads, &bias.map(|b| b.data.clone()), &sink, &m.dbias, &m.dsink] {
        put_some(&mut out, m.as_ref());
    }
    out
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let short = || Error::internal("the oracle's results arrived incomplete");
        let (part, rest) = self.rest.split_at_checked(len).ok_or_else(short)?;
        self.rest = rest;
        Ok(part)
    }

    fn mat(&mut self) -> Result<Mat> {
        let word = |b: &[u8]| b.try_into().map_or([0; 8], |b: [u8; 8]| b);
        let shape: Vec<usize> =
            self.take(16)?.chunks(8).map(|b| u64::from_ne_bytes(word(b)) as usize).collect();
        let (rows, cols) = (shape[0], shape[1]);
        let data = self.take(8 * rows * cols)?.chunks(8);
        Ok(Mat::new(rows, cols, data.map(|b| f64::from_ne_bytes(word(b))).collect()))
    }

    fn some(&mut self) -> Result<Option<Mat>> {
        match self.take(1)? {
            [0] => Ok(None),
            _ => self.mat().map(Some),
        }
    }

    fn want(mut self) -> Result<Want> {
        let out = AttnOut { o: self.mat()?, lse: self.mat()? };
        let (dq, dk, dv) = (self.mat()?, self.mat()?, self.mat()?);
        let (o, lse) = (self.mat()?, self.mat()?);
        let mags = [self.mat()?, self.mat()?, self.mat()?];
        let (heads, elements, sink) = (self.some()?, self.some()?, self.some()?);
        let dbias = heads.zip(elements).map(|(n, data)| {
            let n = |i: usize| n.data[i] as usize;
            Bias { heads: n(0), sq: n(1), skv: n(2), data }
        });
        let grads = AttnGrads { dq, dk, dv, dbias, dsink: sink.map(|s| s.data) };
        let [dq, dk, dv] = mags;
        let mag = Magnitudes { o, lse, dq, dk, dv, dbias: self.some()?, dsink: self.some()? };
        Ok(Want { out, grads, mag })
    }
}

#[cfg(test)]
mod tests {
    use tilewire::core::Rng;

    use super::*;

    #[test]
    fn what_is_given_is_what_was_computed() {
        let mut rng = Rng::new(3);
        let mut m = |r, c| Mat::random(&mut rng, r, c);
        for extras in [false, true] {
            let mag = Magnitudes {
                o: m(3, 4),
                lse: m(2, 3),
                dq: m(3, 2),
                dk: m(5, 2),
                dv: m(5, 4),
                dbias: extras.then(|| m(6, 5)),
                dsink: extras.then(|| m(1, 2)),
            };
            let mut lse = m(2, 3);
            *lse.at_mut(1, 1) = f64::NEG_INFINITY;
            let dbias = extras.then(|| Bias { heads: 2, sq: 3, skv: 5, data: m(6, 5) });
            let dsink = extras.then(|| vec![1.5, -2.0]);
            let grads = AttnGrads { dq: m(3, 2), dk: m(5, 2), dv: m(0, 4), dbias, dsink };
            let want = Want { out: AttnOut { o: m(3, 4), lse }, grads, mag };
            let bytes = bytes_of(&want);
            let got = Reader::new(&bytes).want().unwrap();
            assert!(got.out == want.out && got.grads == want.grads);
            assert_eq!(bytes_of(&got), bytes);
            assert!(Reader::new(&bytes[..bytes.len() - 1]).want().is_err());
        }
    }
}
