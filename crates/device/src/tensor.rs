//! Owned tensors: shared memory with a dtype and a shape.

use std::sync::Arc;

use tilewire_core::memory::filled;
use tilewire_core::{
    DType, Element, Error, ErrorKind, Result, Shape, View, convert_from_f32, convert_to_f32,
};

use crate::cuda::{CudaContext, CudaMemory};
use crate::{Buffer, Memory};

/// The device whose memory holds a tensor.
#[derive(Clone, Default)]
pub enum Device {
    /// The CPU's memory.
    #[default]
    Host,
    /// A CUDA device's memory.
    Cuda(CudaContext),
}

/// The bytes underneath a tensor.
#[derive(Clone, Debug)]
enum Storage {
    Host(Memory),
    Cuda(CudaMemory),
}

impl Storage {
    fn host(m: Memory) -> Arc<Self> {
        Arc::new(Storage::Host(m))
    }

    fn len_bytes(&self) -> usize {
        match self {
            Storage::Host(m) => m.len_bytes(),
            Storage::Cuda(m) => m.len_bytes(),
        }
    }

    /// Address of the first byte. Memory of our own begins at a multiple of 64; lent memory need
    /// not.
    fn start(&self) -> u64 {
        match self {
            Storage::Host(m) => m.addr() as u64,
            Storage::Cuda(m) => m.addr(),
        }
    }
}

/// A contiguous row-major tensor in device memory. Clones share the memory.
///
/// ```
/// # use tilewire_device::Tensor;
/// # use tilewire_core::Shape;
/// let t = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], Shape::d2(2, 2))?;
/// assert_eq!(t.rows(1, 1)?.to_vec::<f32>()?, [3.0, 4.0]);
/// # Ok::<(), tilewire_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tensor {
    mem: Arc<Storage>,
    offset_bytes: usize,
    dtype: DType,
    shape: Shape,
}

impl Tensor {
    /// Zeros.
    pub fn zeros(dtype: DType, shape: Shape) -> Self {
        let mem = Storage::host(Memory::zeroed(shape.num_elems() * dtype.size()));
        Self { mem, offset_bytes: 0, dtype, shape }
    }

    /// NaN everywhere (see [`Memory::poisoned`]): what outputs should start as.
    pub fn poisoned(dtype: DType, shape: Shape) -> Self {
        let mem = Storage::host(Memory::poisoned(shape.num_elems() * dtype.size()));
        Self { mem, offset_bytes: 0, dtype, shape }
    }

    /// Zeros on `device`.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory.
    pub fn zeros_on(device: &Device, dtype: DType, shape: Shape) -> Result<Self> {
        Self::filled_on(device, dtype, shape, 0)
    }

    /// NaN everywhere, as [`Tensor::poisoned`], on `device`.
    ///
    /// # Errors
    /// As [`Tensor::zeros_on`].
    pub fn poisoned_on(device: &Device, dtype: DType, shape: Shape) -> Result<Self> {
        Self::filled_on(device, dtype, shape, DType::POISON)
    }

    fn filled_on(device: &Device, dtype: DType, shape: Shape, byte: u8) -> Result<Self> {
        let len = shape.num_elems().checked_mul(dtype.size()).ok_or_else(|| {
            Error::new(
                ErrorKind::Exhausted,
                format!("a {dtype} tensor of shape {shape} has more bytes than can be addressed"),
            )
        })?;
        match device {
            Device::Host => Self::over(Memory::try_filled(len, byte)?, 0, dtype, shape),
            Device::Cuda(ctx) => Self::over_cuda(CudaMemory::filled(ctx, len, byte)?, dtype, shape),
        }
    }

    /// A copy of `data`.
    ///
    /// # Errors
    /// `InvalidArgument` if `data` does not have as many elements as `shape`; `Exhausted` if
    /// memory lacks.
    pub fn from_slice<T: Element>(data: &[T], shape: Shape) -> Result<Self> {
        Self::from_view(&View::from_slice(data, shape)?)
    }

    /// A copy of a caller's tensor.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not contiguous; `Exhausted` if memory lacks.
    pub fn from_view(view: &View<'_>) -> Result<Self> {
        let bytes = view.contiguous_bytes("tensor")?;
        Ok(Self {
            mem: Storage::host(Memory::try_from_bytes(bytes)?),
            offset_bytes: 0,
            dtype: view.dtype(),
            shape: view.shape(),
        })
    }

    /// `values` rounded to `dtype`.
    ///
    /// # Errors
    /// `InvalidArgument` if there are not as many values as `shape` has elements; `Exhausted` if
    /// memory lacks.
    pub fn from_f32(values: &[f32], dtype: DType, shape: Shape) -> Result<Self> {
        if values.len() != shape.num_elems() {
            return Err(Error::invalid(format!(
                "{} values were given for shape {shape}",
                values.len()
            )));
        }
        let t = Self::zeros_on(&Device::Host, dtype, shape)?;
        t.write(|b| convert_from_f32(dtype, values, b))?;
        Ok(t)
    }

    /// A tensor over existing memory.
    ///
    /// # Errors
    /// `InvalidArgument` if it reaches past the memory or is misaligned for `dtype`.
    pub fn over(mem: Memory, offset_bytes: usize, dtype: DType, shape: Shape) -> Result<Self> {
        Self::over_storage(Storage::host(mem), offset_bytes, dtype, shape)
    }

    /// A tensor over existing memory of a CUDA device.
    ///
    /// # Errors
    /// As [`Tensor::over`].
    pub fn over_cuda(mem: CudaMemory, dtype: DType, shape: Shape) -> Result<Self> {
        Self::over_storage(Arc::new(Storage::Cuda(mem)), 0, dtype, shape)
    }

    fn over_storage(
        mem: Arc<Storage>,
        offset_bytes: usize,
        dtype: DType,
        shape: Shape,
    ) -> Result<Self> {
        let len = shape.num_elems().saturating_mul(dtype.size());
        let end = offset_bytes.saturating_add(len);
        // A piece of a device's memory may begin anywhere, and kernels read elements whole.
        let at = mem.start().wrapping_add(offset_bytes as u64);
        if end > mem.len_bytes() || !at.is_multiple_of(dtype.size() as u64) {
            return Err(Error::invalid(format!(
                "a {dtype} tensor {shape} at byte {offset_bytes} does not fit {} bytes",
                mem.len_bytes()
            )));
        }
        Ok(Self { mem, offset_bytes, dtype, shape })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.shape.num_elems() * self.dtype.size()
    }

    /// A copy on `device`, at once. No work in flight may write this tensor.
    ///
    /// # Errors
    /// `Exhausted` if there is not enough memory; what the device reports.
    pub fn to(&self, device: &Device) -> Result<Self> {
        let bytes = self.download()?;
        let mem = match device {
            Device::Host => Storage::host(Memory::try_from_bytes(&bytes)?),
            Device::Cuda(ctx) => Arc::new(Storage::Cuda(CudaMemory::from_bytes(ctx, &bytes)?)),
        };
        Ok(Self { mem, offset_bytes: 0, ..self.clone() })
    }

    /// Returns the device whose memory holds the elements.
    pub fn device(&self) -> Device {
        match &*self.mem {
            Storage::Host(_) => Device::Host,
            Storage::Cuda(m) => Device::Cuda(m.context().clone()),
        }
    }

    /// The bytes on a CUDA device, for kernels and copies.
    ///
    /// # Errors
    /// `InvalidArgument` for a tensor in the CPU's memory.
    pub fn cuda(&self) -> Result<CudaMemory> {
        match &*self.mem {
            Storage::Cuda(m) => m.slice(self.offset_bytes, self.len_bytes()),
            Storage::Host(_) => Err(Error::invalid("the tensor is in the CPU's memory")
                .hint("move it with `tensor.to(&device)` first")),
        }
    }

    /// True if both lie in one allocation, overlapping or not.
    pub fn shares_memory(&self, other: &Tensor) -> bool {
        match (&*self.mem, &*other.mem) {
            (Storage::Host(a), Storage::Host(b)) => a.same(b),
            (Storage::Cuda(a), Storage::Cuda(b)) => a.same(b),
            _ => false,
        }
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// `InvalidArgument` if the number of elements differs.
    pub fn reshape(&self, shape: Shape) -> Result<Self> {
        if shape.num_elems() != self.shape.num_elems() {
            return Err(Error::invalid(format!("cannot reshape {} to {shape}", self.shape)));
        }
        Ok(Self { shape, ..self.clone() })
    }

    /// Rows `first..first + num` of the outermost dimension, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` if they do not exist, or the tensor has no dimension.
    pub fn rows(&self, first: usize, num: usize) -> Result<Self> {
        let last = first.saturating_add(num);
        if self.shape.ndim() == 0 || last > self.shape.dim(0) {
            return Err(Error::invalid(format!(
                "rows {first}..{last} are not within a tensor of shape {}",
                self.shape
            )));
        }
        let mut dims = self.shape.dims().to_vec();
        let row_bytes = dims[1..].iter().product::<usize>() * self.dtype.size();
        dims[0] = num;
        Ok(Self {
            shape: Shape::new(&dims)?,
            offset_bytes: self.offset_bytes + first * row_bytes,
            ..self.clone()
        })
    }

    /// Runs `f` on the bytes; on a CUDA device on a copy of them.
    ///
    /// # Errors
    /// If work in flight is writing the memory; what the device reports.
    pub fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match &*self.mem {
            Storage::Host(m) => {
                let g = m.read("tensor")?;
                Ok(f(&g.bytes()[self.offset_bytes..][..self.len_bytes()]))
            }
            Storage::Cuda(_) => Ok(f(&self.cuda()?.download()?)),
        }
    }

    /// Runs `f` on the bytes, writable; on a CUDA device on a copy that is then put back.
    ///
    /// # Errors
    /// If work in flight is using the memory; what the device reports.
    pub fn write<R>(&self, f: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let len = self.len_bytes();
        match &*self.mem {
            Storage::Host(m) => {
                let mut g = m.write("tensor")?;
                Ok(f(&mut g.bytes_mut()[self.offset_bytes..][..len]))
            }
            Storage::Cuda(_) => {
                let memory = self.cuda()?;
                let mut bytes = memory.download()?;
                let r = f(&mut bytes);
                memory.upload(&bytes).map(|()| r)
            }
        }
    }

    /// Copies the elements out.
    ///
    /// # Errors
    /// `InvalidArgument` if `T` is not the dtype, or if work in flight is writing the memory;
    /// `Exhausted` if memory lacks.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::invalid("the tensor has the wrong dtype")
                .expected(T::DTYPE)
                .seen(self.dtype));
        }
        let mut v = filled(T::zeroed(), self.shape.num_elems())?;
        self.read(|b| {
            bytemuck::cast_slice_mut(&mut v).copy_from_slice(b);
            v
        })
    }

    /// Copies the elements out, widened to f32.
    ///
    /// # Errors
    /// If work in flight is writing the memory; `Exhausted` if memory lacks.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut v = filled(0.0, self.shape.num_elems())?;
        self.read(|b| convert_to_f32(self.dtype, b, &mut v))?;
        Ok(v)
    }

    /// True if an element of one lies on an element of the other.
    pub fn overlaps(&self, other: &Tensor) -> bool {
        let ((of_a, a), (of_b, b)) = (self.span(), other.span());
        of_a == of_b && a.start < b.end && b.start < a.end
    }

    /// Returns the kind of memory that holds the elements, the CPU's or the devices', and their
    /// range of addresses: spans of the same memory can be compared and sorted. Two owners may know
    /// the same memory.
    #[doc(hidden)]
    pub fn span(&self) -> (usize, std::ops::Range<u64>) {
        let of = match &*self.mem {
            Storage::Host(_) => 1,
            Storage::Cuda(_) => 0,
        };
        let start = self.mem.start() + self.offset_bytes as u64;
        (of, start..start + self.len_bytes() as u64)
    }

    /// Fills every byte with [`DType::POISON`].
    ///
    /// # Errors
    /// If work in flight is using the memory.
    pub fn poison(&self) -> Result<()> {
        self.write(|b| b.fill(DType::POISON))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_and_bounds_are_checked() {
        let t = Tensor::from_f32(&[0., 1., 2., 3., 4., 5.], DType::BF16, Shape::d2(3, 2)).unwrap();
        let r = t.rows(1, 2).unwrap();
        r.write(|b| b.fill(0)).unwrap();
        assert_eq!(t.to_f32().unwrap(), [0., 1., 0., 0., 0., 0.]);
        assert!(t.rows(2, 2).is_err() && t.reshape(Shape::d1(5)).is_err());
        assert!(t.to_vec::<f32>().is_err());
        assert!(t.rows(2, usize::MAX - 1).is_err());
        let mut out = [7; 4];
        r.download_into(&mut out[..]).unwrap_err();
        t.rows(0, 2).unwrap().download_into(&mut out[..3]).unwrap_err();
        assert_eq!(out, [7; 4]);
        let two = t.reshape(Shape::d2(2, 3)).unwrap().rows(0, 1).unwrap();
        let mut out = [7; 6];
        two.download_into(&mut out).unwrap();
        assert_eq!(out[..], two.download().unwrap());
        assert_eq!(out[4..], [0, 0]);
    }

    /// Two loans of one storage, as views of a caller's tensor are.
    #[test]
    fn tensors_over_lent_memory_are_compared_by_address_and_aligned() {
        let mut buf = vec![0u64; 4];
        let ptr = buf.as_mut_ptr().cast::<u8>();
        let over = |at: usize, len: usize, dtype: DType| {
            // SAFETY: inside of `buf`, which outlives the loans and is not used meanwhile.
            let m = unsafe { Memory::lent(ptr.add(at), len, Arc::new(())) };
            Tensor::over(m, 0, dtype, Shape::d1(len / dtype.size()))
        };
        let (a, b) = (over(2, 8, DType::BF16).unwrap(), over(8, 16, DType::F32).unwrap());
        let c = over(10, 4, DType::F16).unwrap();
        assert!(a.overlaps(&b) && b.overlaps(&c) && !a.overlaps(&c));
        assert!(over(2, 8, DType::F32).is_err(), "an f32 at an odd address");
        a.write(|bytes| bytes.fill(0xFF)).unwrap();
        assert!(a.to_f32().unwrap().iter().all(|v| v.is_nan()));
        assert!(a.read(|_| b.write(|_| ()).is_err()).unwrap());
        drop((a, b, c));
        assert_eq!(buf[0].to_le_bytes()[2..], [0xFF; 6]);
    }

    /// Sizes whose bytes no number holds, and more memory than there is.
    #[test]
    fn a_tensor_that_fits_nowhere_is_an_error() {
        let most = Shape::d2(1 << 31, 1 << 31);
        let e = Tensor::over(Memory::zeroed(64), 0, DType::F32, most).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        let e = Tensor::over(Memory::zeroed(64), usize::MAX - 3, DType::U8, Shape::d1(64));
        assert_eq!(e.err().unwrap().kind(), ErrorKind::InvalidArgument);
        for shape in [most, Shape::d2(1 << 24, 1 << 30)] {
            let e = Tensor::zeros_on(&Device::Host, DType::F32, shape).err().unwrap();
            assert_eq!(e.kind(), ErrorKind::Exhausted, "{e}");
        }
        let t = Tensor::poisoned_on(&Device::Host, DType::BF16, Shape::d1(3)).unwrap();
        assert!(t.to_f32().unwrap().iter().all(|v| v.is_nan()));
    }
}
