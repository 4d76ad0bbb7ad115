//! A bias of the type of the results gives the bits of an f32 bias of the same values, in every
//! operation that adds one, on the host and on devices.

use tilewire_core::{DType, Result, Rng, Shape};
use tilewire_device::{Buffer, Stream, Tensor};
use tilewire_ops::ag_gemm::{AgGemmDesc, AgGemmInputs, AgGemmPlan};
use tilewire_ops::common::{Algo, OverlapConfig};
use tilewire_ops::gemm::{Activation, Epilogue, GemmDesc, GemmInputs, GemmPlan};
use tilewire_ops::gemm_ar::{GemmArDesc, GemmArPlan};
use tilewire_ops::gemm_rs::{GemmRsDesc, GemmRsInputs, GemmRsPlan};
use tilewire_ops::grouped_gemm::{GroupedDesc, GroupedFprop, GroupedGemmPlan, Splits};
use tilewire_symm::Heap;

const M: usize = 24;
const N: usize = 40;
const K: usize = 16;
const GROUPS: usize = 3;

/// Tensors beside a heap, with equal numbers in each call.
struct Side<'a> {
    heap: &'a Heap,
    stream: &'a Stream,
    dtype: DType,
}

impl Side<'_> {
    fn random(&self, seed: u64, dtype: DType, shape: Shape) -> Result<Tensor> {
        let mut rng = Rng::new(seed);
        let values: Vec<f32> = (0..shape.num_elems()).map(|_| rng.normal()).collect();
        Tensor::from_f32(&values, dtype, shape)?.to(&self.heap.device())
    }

    fn matrix(&self, seed: u64, rows: usize, cols: usize) -> Result<Tensor> {
        self.random(seed, self.dtype, Shape::d2(rows, cols))
    }

    /// The same numbers as the type of the results, and as f32.
    fn biases(&self, shape: Shape) -> Result<[Tensor; 2]> {
        let narrow = self.random(9, self.dtype, shape)?;
        let wide = Tensor::from_f32(&narrow.to_f32()?, DType::F32, shape)?;
        Ok([narrow, wide.to(&self.heap.device())?])
    }

    /// Both biases must give the same bits, and other bits than twice the bias.
    fn compare(
        &self,
        what: &str,
        shape: Shape,
        out: [usize; 2],
        launch: impl Fn(Tensor, Tensor) -> Result<()>,
    ) -> Result<()> {
        let run = |bias: Tensor| {
            let out = Tensor::poisoned_on(&self.heap.device(), self.dtype, Shape::new(&out)?)?;
            self.heap.team().agree(true)?;
            launch(bias, out.clone())?;
            self.stream.synchronize()?;
            self.heap.team().check()?;
            out.download()
        };
        let [narrow, wide] = self.biases(shape)?;
        let other = wide.to_f32()?.iter().map(|v| 2.0 * v).collect::<Vec<_>>();
        let other = Tensor::from_f32(&other, self.dtype, shape)?.to(&self.heap.device())?;
        let (narrow, wide, other) = (run(narrow)?, run(wide)?, run(other)?);
        assert!(narrow == wide, "{what} of {}", self.dtype);
        assert!(narrow != other, "{what} of {}: the bias is not used", self.dtype);
        Ok(())
    }

    fn products(&self) -> Result<()> {
        for activation in [Activation::None, Activation::SwiGlu] {
            let epilogue = Epilogue { bias: true, activation, ..Epilogue::NONE };
            let plan = GemmPlan::new(GemmDesc { epilogue, ..GemmDesc::nt(M, N, K, self.dtype) })?;
            plan.prepare(self.stream)?;
            let (a, b) = (self.matrix(1, M, K)?, self.matrix(2, N, K)?);
            let cols = activation.out_cols(N);
            self.compare("gemm", Shape::d1(N), [M, cols], |bias, out| {
                let t = GemmInputs { bias: Some(bias), ..GemmInputs::new(&a, &b, out) };
                plan.launch(self.stream, t).map(drop)
            })?;
        }
        let plan = GroupedGemmPlan::new(GroupedDesc::new(GROUPS, M, N, K, self.dtype))?;
        plan.prepare(self.stream)?;
        let w = self.matrix(2, GROUPS * N, K)?;
        let splits = Tensor::from_slice(&[7i64, 0, 17], Shape::d1(GROUPS))?;
        let splits = splits.to(&self.heap.device())?;
        let x = self.matrix(1, M, K)?;
        self.compare("grouped_gemm", Shape::d2(GROUPS, N), [M, N], |bias, out| {
            let (splits, w) = (Splits::counts(&splits), (&w).into());
            let x = (&x).into();
            let t = GroupedFprop { x, w, bias: Some(bias), splits, out, aux_out: None };
            plan.fprop(self.stream, t).map(drop)
        })
    }

    fn team_products(&self, algo: Algo) -> Result<()> {
        let (size, me) = (self.heap.team().size(), self.heap.team().rank().idx() as u64);
        let (s, config) = (self.stream, || Some(OverlapConfig::of(algo, 2)));
        let epilogue = Epilogue { bias: true, ..Epilogue::NONE };
        let desc = AgGemmDesc { epilogue, ..AgGemmDesc::new(M, N, K, self.dtype) };
        let plan = AgGemmPlan::new(desc, self.heap, config())?;
        plan.prepare(s)?;
        let (x, w) = (self.matrix(3 + me, M / size, K)?, self.matrix(2, N, K)?);
        self.compare("ag_gemm", Shape::d1(N), [M, N], |bias, out| {
            let t =
                AgGemmInputs { bias: Some(bias), ..AgGemmInputs::new(x.clone(), w.clone(), out) };
            plan.launch(s, M, t).map(drop)
        })?;
        let desc = GemmRsDesc { bias: true, ..GemmRsDesc::new(M, N, K, self.dtype) };
        let x = self.matrix(3 + me, M, K)?;
        let inputs = |bias, out| {
            let t = GemmRsInputs::new(x.clone(), w.clone(), out);
            GemmRsInputs { bias: Some(bias), ..t }
        };
        let plan = GemmRsPlan::new(desc.clone(), self.heap, config())?;
        plan.prepare(s)?;
        self.compare("gemm_rs", Shape::d1(N), [M / size, N], |bias, out| {
            plan.launch(s, M, inputs(bias, out)).map(drop)
        })?;
        let plan = GemmArPlan::new(GemmArDesc(desc), self.heap, config())?;
        plan.prepare(s)?;
        self.compare("gemm_ar", Shape::d1(N), [M, N], |bias, out| {
            plan.launch(s, M, inputs(bias, out)).map(drop)
        })
    }
}

/// All of it on the memory of `heap`, whose team has 2 or 3 members.
pub fn same_bits(heap: &Heap, stream: &Stream, dtype: DType) -> Result<()> {
    let side = Side { heap, stream, dtype };
    side.products()?;
    [Algo::Pipelined, Algo::Sequential].into_iter().try_for_each(|algo| side.team_products(algo))
}
