//! FP8 with scales back to plain elements.

use tilewire_core::{Error, Result, convert_from_f32};
use tilewire_device::{Node, Pending, Stream, Tensor};

use super::{DequantDesc, Quantized, device};
use crate::common::Operand;
use crate::common::cuda::{Ready, together_on};
use crate::common::{apart, expect_tensor};

/// A dequantisation. Local: no team.
pub struct DequantPlan {
    desc: DequantDesc,
    ready: Ready<device::Dequant>,
}

impl DequantPlan {
    /// A plan for at most `desc.rows` rows.
    ///
    /// # Errors
    /// As [`DequantDesc::check`].
    pub fn new(desc: DequantDesc) -> Result<Self> {
        desc.check().map_err(|e| e.op("dequant"))?;
        Ok(Self { desc, ready: Ready::new() })
    }

    /// Returns the description.
    pub fn desc(&self) -> &DequantDesc {
        &self.desc
    }

    /// Makes what launches on streams of the device of `stream` need: nothing on the host, a kernel
    /// on a CUDA device.
    ///
    /// # Errors
    /// `InvalidArgument` during capture, or if the plan is prepared for another device;
    /// `Unavailable` without a compiler.
    pub fn prepare(&self, stream: &Stream) -> Result<()> {
        let make = |ctx: &_| device::Dequant::new(ctx, &self.desc);
        self.ready.prepare(stream, make).map_err(|e| e.op("dequant"))
    }

    /// In words, what a launch does.
    pub fn explain(&self) -> String {
        format!("dequant {}\nlocal", self.desc)
    }

    /// Queues `out = data * scale`; the number of rows is that of `out` (at most the plan's).
    ///
    /// # Errors
    /// `NotPrepared`; `InvalidArgument` for tensors that do not fit.
    pub fn launch(&self, stream: &Stream, q: &Quantized, out: &Tensor) -> Result<Pending<Tensor>> {
        let check = || {
            let ready = self.ready.on(stream)?;
            self.check_inputs(q, out)?;
            let tensors = [("q", Some(&q.data)), ("q scales", Some(&q.scales)), ("out", Some(out))];
            together_on(stream, &tensors).map(|()| ready)
        };
        if let Some((s, p)) = check().map_err(|e| e.op("dequant"))? {
            return s.in_launch(|| {
                let _span = s.span("dequant");
                p.launch(s, q, out).map_err(|e| e.op("dequant"))?;
                Pending::new(out.clone(), stream, None)
            });
        }
        let (operand, target) = (Operand::from(q), out.clone());
        stream.launch(Node::new("dequant", move || {
            operand.with_wide(|v| target.write(|b| convert_from_f32(target.dtype(), v, b)))?
        }))?;
        Pending::new(out.clone(), stream, None)
    }

    fn check_inputs(&self, q: &Quantized, out: &Tensor) -> Result<()> {
        let d = &self.desc;
        let rows = if out.shape().ndim() == 2 { out.shape().dim(0) } else { 0 };
        if rows > d.rows {
            return Err(Error::invalid("the launch has more rows than the plan was made for")
                .expected(format_args!("at most {}", d.rows))
                .seen(rows));
        }
        if q.layout != d.layout {
            return Err(Error::invalid("the scales have another layout")
                .expected(format_args!("{:?}", d.layout))
                .seen(format_args!("{:?}", q.layout)));
        }
        q.check("q", d.src, (rows, d.cols))?;
        expect_tensor("out", out, d.out, &[rows, d.cols])?;
        apart(&[("out", Some(out))], &[("q", Some(&q.data)), ("q scales", Some(&q.scales))])
    }
}
