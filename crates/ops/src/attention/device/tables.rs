//! The tables of a launch: written with it, or made of offsets when it runs.

use tilewire_core::Result;
use tilewire_device::Tensor;
use tilewire_device::cuda::CudaStream;

use super::offsets::{Segments, Side};
use super::queue::{Prepared, Sides};
use crate::attention::AttentionDesc;

impl Prepared {
    /// Queues the tables of queries, in tiles of `tile` rows, and of keys of a forward pass.
    pub(super) fn forward_tables(
        &self,
        stream: &CudaStream,
        d: &AttentionDesc,
        rows: Segments,
        tile: u64,
    ) -> Result<[Side; 2]> {
        match rows {
            Segments::Known((q, kv)) => {
                let other = self.write(stream, 2, kv, 1)?;
                Ok([self.write(stream, 0, q, tile)?, other])
            }
            Segments::ByOffsets(o, shards) => {
                let (by, refused) = self.by_offsets();
                let places = [self.place(0, tile), self.place(2, 1)];
                by.tables(stream, d, (&o, &shards), (places, refused))
            }
        }
    }

    /// Queues what makes the results of a launch NaN if its offsets cannot be used.
    pub fn refuse<'a>(
        &self,
        stream: &CudaStream,
        outs: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<()> {
        let (by, refused) = self.by_offsets();
        by.results(stream, refused, outs)
    }

    /// Returns `[1]` i32, not 0 if offsets of any launch cannot be used.
    pub fn status(&self) -> &Tensor {
        &self.kernels.by_offsets.any
    }

    /// Queues the tables of a backward pass. They serve until the next ones are queued.
    pub fn tables(&self, stream: &CudaStream, d: &AttentionDesc, rows: Segments) -> Result<Sides> {
        let (of_q, of_kv) = self.kernels.backward.rows();
        match rows {
            Segments::Known((q, kv)) => {
                let keys = self.write(stream, 2, kv, of_kv)?;
                Ok(Sides { keys, queries: self.write(stream, 1, q, of_q)? })
            }
            Segments::ByOffsets(o, shards) => {
                let (by, refused) = self.by_offsets();
                let at = (self.places(), refused);
                let [queries, keys] = by.tables(stream, d, (&o, &shards), at)?;
                Ok(Sides { queries, keys })
            }
        }
    }
}
