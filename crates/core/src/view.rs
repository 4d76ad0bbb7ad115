//! Borrowed tensors: how a caller's memory is described before anything touches it.

use crate::{DType, Element, Error, Result, Shape};

/// A read-only tensor in host memory: bytes, dtype, shape and strides (in elements).
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    dtype: DType,
    shape: Shape,
    contiguous: bool,
}

/// A writable tensor in host memory. Always contiguous.
#[derive(Debug)]
pub struct ViewMut<'a> {
    bytes: &'a mut [u8],
    dtype: DType,
    shape: Shape,
}

fn check_len(len_bytes: usize, dtype: DType, shape: &Shape) -> Result<()> {
    let need = shape.num_elems().saturating_mul(dtype.size());
    // No slice is as long as a saturated product.
    if len_bytes == need {
        return Ok(());
    }
    Err(Error::invalid(format!("a {dtype} tensor of shape {shape} does not fit its memory"))
        .expected(format_args!("{need} bytes"))
        .seen(format_args!("{len_bytes} bytes")))
}

impl<'a> View<'a> {
    /// A contiguous row-major tensor over `bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` if `bytes` is not exactly as long as `shape` needs.
    pub fn new(bytes: &'a [u8], dtype: DType, shape: Shape) -> Result<Self> {
        check_len(bytes.len(), dtype, &shape)?;
        Ok(Self { bytes, dtype, shape, contiguous: true })
    }

    /// A contiguous tensor over a typed slice.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn from_slice<T: Element>(data: &'a [T], shape: Shape) -> Result<Self> {
        Self::new(bytemuck::cast_slice(data), T::DTYPE, shape)
    }

    /// A tensor with explicit strides in elements, as a foreign framework describes it.
    ///
    /// # Errors
    /// `InvalidArgument` if the number of strides is not the number of dimensions, or if the last
    /// element lies outside `bytes`.
    pub fn strided(bytes: &'a [u8], dtype: DType, shape: Shape, strides: &[usize]) -> Result<Self> {
        if strides.len() != shape.ndim() {
            return Err(Error::invalid(format!("{} strides for shape {shape}", strides.len())));
        }
        let mut last = 0usize;
        for (&d, &s) in shape.dims().iter().zip(strides) {
            let step = d.saturating_sub(1).checked_mul(s).and_then(|x| last.checked_add(x));
            last = step.ok_or_else(|| Error::invalid("strides overflow"))?;
        }
        let need = if shape.num_elems() == 0 { 0 } else { (last + 1).saturating_mul(dtype.size()) };
        if need > bytes.len() {
            return Err(Error::invalid(format!("strides {strides:?} reach outside the memory"))
                .expected(format_args!("at least {need} bytes"))
                .seen(format_args!("{} bytes", bytes.len())));
        }
        // A dimension of extent 1 may carry any stride.
        let natural = shape.strides();
        let contiguous = shape.num_elems() == 0
            || (0..shape.ndim()).all(|i| shape.dim(i) == 1 || strides[i] == natural[i]);
        let bytes = if contiguous { &bytes[..shape.num_elems() * dtype.size()] } else { bytes };
        Ok(Self { bytes, dtype, shape, contiguous })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The bytes of a contiguous tensor.
    ///
    /// # Errors
    /// `InvalidArgument` if the tensor is not contiguous, naming it `what`.
    pub fn contiguous_bytes(&self, what: &str) -> Result<&'a [u8]> {
        if self.contiguous {
            return Ok(self.bytes);
        }
        Err(Error::invalid(format!("`{what}` is not contiguous"))
            .hint("make it contiguous first; tilewire never copies behind your back"))
    }

    /// The elements as a typed slice.
    ///
    /// # Errors
    /// `InvalidArgument` if the dtype differs, the memory is misaligned for `T` or the tensor is
    /// not contiguous; the message names the tensor `what`.
    pub fn as_slice<T: Element>(&self, what: &str) -> Result<&'a [T]> {
        if T::DTYPE != self.dtype {
            return Err(Error::invalid(format!("`{what}` has the wrong dtype"))
                .expected(T::DTYPE)
                .seen(self.dtype));
        }
        let bytes = self.contiguous_bytes(what)?;
        bytemuck::try_cast_slice(bytes).map_err(|_| {
            Error::invalid(format!("`{what}` is misaligned"))
                .expected(format_args!("an address divisible by {}", T::DTYPE.size()))
                .seen(format_args!("{:#x}", bytes.as_ptr().addr()))
        })
    }
}

impl<'a> ViewMut<'a> {
    /// A writable contiguous tensor over `bytes`.
    ///
    /// # Errors
    /// `InvalidArgument` if `bytes` is not exactly as long as `shape` needs.
    pub fn new(bytes: &'a mut [u8], dtype: DType, shape: Shape) -> Result<Self> {
        check_len(bytes.len(), dtype, &shape)?;
        Ok(Self { bytes, dtype, shape })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_dtype_alignment_and_strides_are_checked() {
        let data = [1.0f32; 7];
        assert!(View::from_slice(&data, Shape::d2(2, 3)).is_err());
        let v = View::from_slice(&data[..6], Shape::d2(2, 3)).unwrap();
        assert_eq!(v.as_slice::<f32>("x").unwrap().len(), 6);
        assert!(v.as_slice::<i32>("x").unwrap_err().to_string().contains("wrong dtype"));

        let bytes: &[u8] = bytemuck::cast_slice(&data);
        let odd = View::new(&bytes[1..25], DType::F32, Shape::d2(2, 3)).unwrap();
        assert!(odd.as_slice::<f32>("x").unwrap_err().to_string().contains("misaligned"));

        let t = View::strided(bytes, DType::F32, Shape::d2(3, 2), &[1, 3]).unwrap();
        assert!(t.contiguous_bytes("x").unwrap_err().to_string().contains("not contiguous"));
        assert!(View::strided(bytes, DType::F32, Shape::d2(3, 2), &[1, 6]).is_err());
        assert!(View::strided(bytes, DType::F32, Shape::d2(3, 2), &[1]).is_err());
        assert!(View::strided(bytes, DType::F32, Shape::d2(1, 3), &[99, 1]).is_ok());
    }

    #[test]
    fn zero_dim_and_empty() {
        let one = [2.5f32];
        let v = View::from_slice(&one, Shape::new(&[]).unwrap()).unwrap();
        assert_eq!(v.as_slice::<f32>("s").unwrap(), &[2.5]);
        assert!(View::from_slice::<f32>(&[], Shape::d2(0, 4)).is_ok());
    }
}
