//! Bulk overlap of `tilewire bench`: a product beside a collective, together and one after the
//! other.

use tilewire::ops::bulk::{BulkInputs, BulkPlan};
use tilewire::ops::collective::{CollectiveDesc, CollectiveKind, CollectivePlan, ReduceOp};
use tilewire::ops::gemm::{GemmDesc, GemmInputs, GemmPlan};
use tilewire::prelude::*;

use super::device::{Bench, value};
use super::products::{tflops, w_of, x_of};
use crate::rows::{Row, Spreads};

impl Bench<'_> {
    /// Beside each collective that a layer has beside a product: the gathered input, the scattered
    /// gradient.
    pub(super) fn bulk_rows(&self) -> Result<Vec<Row>> {
        ["all_gather", "reduce_scatter"].into_iter().map(|c| self.bulk_row(c)).collect()
    }

    fn bulk_row(&self, collective: &str) -> Result<Row> {
        let (m, n, k) = self.sizes();
        let (dtype, me, mine) = (self.o.dtype, self.team.rank().idx(), self.my_rows()?);
        let (kind, taken, given) = match collective {
            "all_gather" => (CollectiveKind::AllGather(Shards::Even), mine.clone(), 0..m),
            _ => (CollectiveKind::ReduceScatter(Shards::Even, ReduceOp::Sum), 0..m, mine),
        };
        let desc = CollectiveDesc { kind, m, cols: n, dtype };
        let product = GemmDesc::nt(m, n, k, dtype);
        let plan = BulkPlan::new(product, desc.clone(), &self.heap)?;
        let (gemm, comm) = (GemmPlan::new(product)?, CollectivePlan::new(desc, &self.heap)?);
        plan.prepare(&self.stream)?;
        gemm.prepare(&self.stream)?;
        comm.prepare(&self.stream)?;
        let out = self.poisoned(dtype, Shape::d2(m, n))?;
        let y = self.poisoned(dtype, Shape::d2(given.len(), n))?;
        let operands = (self.exact(x_of(me), 0..m)?, self.exact(w_of(me), 0..n)?);
        // The gathered matrix is one, that of rank 0; of the sum each rank has its own.
        let of = if collective == "all_gather" { 0 } else { me };
        let values: Vec<f32> = (taken.start * n..taken.end * n).map(|i| value(of, i)).collect();
        let x = self.place(&values, Shape::d2(taken.len(), n))?;
        let bulk = |(a, b): &(Tensor, Tensor), x: &Tensor| {
            let gemm = GemmInputs::new(a, b, out.clone());
            let t = BulkInputs { gemm, m, x: x.clone(), y: y.clone() };
            plan.launch(&self.stream, t)?.join(&self.stream).map(|_| ())
        };
        bulk(&operands, &x)?;
        self.stream.synchronize()?;
        self.team.check()?;
        let ranks = if collective == "all_gather" { 0..1 } else { 0..self.team.size() };
        let want = |i: usize| ranks.clone().map(|r| value(r, given.start * n + i)).sum::<f32>();
        let got = y.to_f32()?;
        let moved = got.iter().enumerate().filter(|(i, v)| **v != want(*i)).count() as u64;
        let bad = moved + self.count_wrong(&out, 0..m, &[(x_of(me), w_of(me))])?;
        let (noise, x) = ((self.noise(m, k)?, self.noise(n, k)?), self.noise(taken.len(), n)?);
        let alone = || {
            let t = GemmInputs::new(&noise.0, &noise.1, out.clone());
            gemm.launch(&self.stream, t)?.join(&self.stream).map(|_| ())
        };
        let moves = || comm.launch(&self.stream, m, &x, &y)?.join(&self.stream).map(|_| ());
        let seq = || alone().and_then(|()| moves());
        let both = || bulk(&noise, &x);
        let times = self.in_turn(&[&alone, &moves, &seq, &both], || Ok(()))?;
        let [gemm, comm, seq, ours] = times[..] else {
            return Err(Error::internal("four ways have four times"));
        };
        let note = tflops(self.flop(), ours.us);
        let name = format!("bulk/{collective}");
        let row = self.row(&name, self.shape_text(), ours, self.wrong(bad)?, note)?;
        self.heap.collect()?;
        Ok(Row {
            t_gemm_us: Some(gemm.us),
            t_comm_us: Some(comm.us),
            t_seq_us: Some(seq.us),
            spread_us: Spreads {
                gemm: Some(gemm.spread),
                comm: Some(comm.spread),
                seq: Some(seq.spread),
                ours: Some(ours.spread),
            },
            ..row
        })
    }
}
