//! The plan of a transformer's layers.

use tilewire_core::Result;
use tilewire_device::{Node, Stream};

use super::desc::{
    AdamStep, AddNorm, CountStep, CrossEntropy, Embed, EmbedBwd, Heads, Init, LayersDesc, NormBwd,
    Router, RouterBwd, SquareSum,
};
use super::device::{On, Prepared};
use super::host;
use crate::common::Named;
use crate::common::cuda::{Ready, together_on};

mod sealed {
    pub trait Sealed {}
}

/// An operation that [`LayersPlan::run`] takes: the structs of this module.
pub trait Work: sealed::Sealed + Clone + Send + Sync + 'static {
    #[doc(hidden)]
    const NAME: &'static str;
    #[doc(hidden)]
    fn tensors(&self, d: &LayersDesc) -> Result<Vec<Named<'_>>>;
    #[doc(hidden)]
    fn on_host(&self) -> Result<()>;
    #[doc(hidden)]
    fn on_cuda(&self, on: On<'_>) -> Result<()>;
}

macro_rules! works {
    ($($work:ident $run:ident;)*) => {$(
        impl sealed::Sealed for $work {}
        impl Work for $work {
            const NAME: &'static str = stringify!($run);
            fn tensors(&self, d: &LayersDesc) -> Result<Vec<Named<'_>>> {
                self.checked(d)
            }
            fn on_host(&self) -> Result<()> {
                host::$run(self)
            }
            fn on_cuda(&self, on: On<'_>) -> Result<()> {
                on.$run(self)
            }
        }
    )*};
}

works! {
    Embed embed;
    EmbedBwd embed_bwd;
    AddNorm add_norm;
    NormBwd norm_bwd;
    Heads heads;
    Router router;
    RouterBwd router_bwd;
    CrossEntropy cross_entropy;
    SquareSum square_sum;
    AdamStep adam_step;
    CountStep count_step;
    Init init;
}

/// Kernels and workspace of the works of one model. Local: no team. Its works use one workspace, so
/// they belong on one stream, or on streams that wait for each other.
pub struct LayersPlan {
    desc: LayersDesc,
    ready: Ready<Prepared>,
}

impl LayersPlan {
    /// A plan for works of at most these sizes.
    ///
    /// # Errors
    /// As [`LayersDesc::check`].
    pub fn new(desc: LayersDesc) -> Result<Self> {
        desc.check().map_err(|e| e.op("layers"))?;
        Ok(Self { desc, ready: Ready::new() })
    }

    /// Sizes.
    pub fn desc(&self) -> &LayersDesc {
        &self.desc
    }

    /// Makes what the works need on the device of `stream`: nothing on the host, kernels and
    /// workspace on a CUDA device.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Unsupported` for sizes that no kernel takes; `Unavailable` without a compiler.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let make = |ctx: &_| Prepared::new(ctx, &self.desc);
        self.ready.prepare(stream, make).map_err(|e| e.op("layers"))
    }

    /// Queues `work`. Nothing is allocated on a device, so that it can be captured.
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for tensors that do not fit, or lie elsewhere.
    pub fn run<W: Work>(&self, stream: &Stream, work: &W) -> Result<()> {
        let queue = || -> Result<()> {
            let ready = self.ready.on(stream)?;
            together_on(stream, &work.tensors(&self.desc)?)?;
            match ready {
                Some((stream, kernels)) => stream.in_launch(|| {
                    let _span = stream.span(W::NAME);
                    crate::common::cuda::hold(stream, work.clone());
                    work.on_cuda(On { kernels, stream })
                }),
                None => {
                    let work = work.clone();
                    stream.launch(Node::new(W::NAME, move || work.on_host()))
                }
            }
        };
        queue().map_err(|e| e.op(W::NAME))
    }
}
