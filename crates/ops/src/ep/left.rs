//! Copies of the bytes that launches have left in the areas of a rank, for the test that holds both
//! executors equal.

use tilewire_core::Result;
use tilewire_device::Buffer;
use tilewire_symm::{OpCtx, SymBuf};

use super::EpPlan;
use super::device;
use super::schedule::{Area, Cut, Schedule};

/// Bytes at one place of an area.
#[doc(hidden)]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EpLeft {
    /// Name of its content.
    pub what: &'static str,
    /// The rank that writes to the place.
    pub writer: usize,
    /// Token, or chunk; 0 where one place serves all.
    pub token: usize,
    /// All that it may hold.
    pub bytes: Vec<u8>,
}

impl EpPlan {
    /// Returns the contents of the areas of this rank while nothing is in flight, by the finest
    /// cut.
    ///
    /// # Errors
    /// The errors of the device.
    #[doc(hidden)]
    pub fn left(&self) -> Result<Vec<EpLeft>> {
        let (d, at) = (&self.base.desc, Schedule::new(&self.base.desc));
        let (counts, tokens) = (self.part_of(&self.base.counts)?, self.part_of(&self.base.tokens)?);
        let (returns, flags) = (self.part_of(&self.base.returns)?, self.part_of(&self.base.flags)?);
        let mut all = Vec::new();
        let mut add = |what, writer, token, from: &[u8], at: usize, len: usize| {
            all.push(EpLeft { what, writer, token, bytes: from[at..at + len].to_vec() });
        };
        let size = d.experts_per_rank.len();
        for w in 0..size {
            for launch in 0..2 {
                let from = at.counts(launch, w);
                add("counts", w, launch as usize, &counts, from, at.count_bytes());
            }
            for t in 0..d.max_tokens {
                let r = at.record(w, t);
                add("copies", w, t, &tokens, at.meta(r), 16 * d.top_k);
                add("scales", w, t, &tokens, at.scales(r), 4 * d.num_scales);
                add("row", w, t, &tokens, at.row(r), d.hidden * d.dtype.size().min(d.out.size()));
                add("return", w, t, &returns, at.returned(r), d.hidden * d.out.size());
                add("gradients", w, t, &returns, at.grads(r), 4 * d.top_k);
            }
            for (area, cut, credit, arrival) in [
                (Area::Tokens, Cut::push(d), "credit of tokens", "arrival of tokens"),
                (Area::Returns, Cut::returns(d), "credit of returns", "arrival of returns"),
            ] {
                add(credit, w, 0, &flags, at.credit(area, w), 8);
                for c in 0..cut.chunks {
                    add(arrival, w, c, &flags, at.arrival(area, &cut, w, c), 8);
                }
            }
        }
        Ok(all)
    }

    fn part_of(&self, buf: &SymBuf) -> Result<Vec<u8>> {
        let core = &self.base.cores[0];
        if let Some(lane) = core.lane() {
            return device::whole(lane, buf)?.download();
        }
        let mut bytes = vec![0; buf.len_bytes()];
        let ctx = OpCtx::new(core.heap(), core.op(), 0);
        // SAFETY: nothing is in flight, as the caller promises.
        unsafe { ctx.read_local(buf.range(0, bytes.len()), &mut bytes) };
        Ok(bytes)
    }
}
