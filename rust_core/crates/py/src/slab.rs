//! The slab's layout as Python sees it, and the only door to memory that Python owns.
#![allow(unsafe_code)]

use oneloop_core::SLAB_ALIGNMENT;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::SlabError;

/// One array of the slab.
#[pyclass(module = "oneloop_core", frozen, get_all)]
pub(crate) struct Field {
    name: &'static str,
    dtype: &'static str,
    offset: usize,
    length: usize,
}

#[pymethods]
impl Field {
    fn __repr__(&self) -> String {
        let Self {
            name,
            dtype,
            offset,
            length,
        } = self;
        format!("Field(name='{name}', dtype='{dtype}', offset={offset}, length={length})")
    }
}

/// Where every array of the slab lies.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct SlabLayout {
    #[pyo3(get)]
    fields: Py<PyTuple>,
    #[pyo3(get)]
    num_bytes: usize,
    #[pyo3(get)]
    input_bytes: usize,
    #[pyo3(get)]
    mask_offset: usize,
}

#[pymethods]
impl SlabLayout {
    /// Name → index into the `header` field. A new dict each time.
    #[getter]
    #[allow(clippy::unused_self)] // a property of the layout for Python, whatever it is made of
    fn header<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let header = PyDict::new(py);
        for (index, name) in oneloop_core::HEADER_NAMES.iter().enumerate() {
            header.set_item(name, index)?;
        }
        Ok(header)
    }
}

impl SlabLayout {
    pub(crate) fn new(py: Python<'_>, layout: &oneloop_core::SlabLayout) -> PyResult<Self> {
        let fields = layout.fields.iter().map(|field| Field {
            name: field.name,
            dtype: field.dtype.as_str(),
            offset: field.offset,
            length: field.length,
        });
        let fields = fields
            .map(|field| Py::new(py, field))
            .collect::<PyResult<Vec<_>>>()?;
        Ok(Self {
            fields: PyTuple::new(py, fields)?.unbind(),
            num_bytes: layout.num_bytes,
            input_bytes: layout.input_bytes,
            mask_offset: layout.mask_offset,
        })
    }
}

/// A slab for the time of one call: the export keeps the memory alive and in place.
pub(crate) struct SlabBuffer {
    buffer: PyUntypedBuffer,
}

impl SlabBuffer {
    /// Checks what the core will rely on, so that an error names what the caller passed.
    pub(crate) fn new(object: &Bound<'_, PyAny>, num_bytes: usize) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(SlabError::new_err(
                "the slab is not contiguous; pass the whole allocation",
            ));
        }
        if buffer.len_bytes() != num_bytes {
            let given = buffer.len_bytes();
            return Err(SlabError::new_err(format!(
                "the slab has {given} bytes instead of {num_bytes}; allocate layout.num_bytes"
            )));
        }
        if !buffer.buf_ptr().addr().is_multiple_of(SLAB_ALIGNMENT) {
            return Err(SlabError::new_err(format!(
                "the slab does not start at a multiple of {SLAB_ALIGNMENT} bytes; align its allocation"
            )));
        }
        Ok(Self { buffer })
    }

    /// The bytes, to read.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: a C-contiguous export of `len_bytes` bytes that stays exported as long as `self`. The pointer is not
        // null: its address was found to be aligned and the length is that of a layout, which is never 0. Nobody
        // writes meanwhile: between the completion of a step and its commit the slab belongs to the core (invariant 4
        // of docs/architecture.md); should a caller break that, the bytes read are plain integers whose ranges the
        // core checks.
        unsafe {
            std::slice::from_raw_parts(self.buffer.buf_ptr().cast::<u8>(), self.buffer.len_bytes())
        }
    }

    /// The bytes, to write.
    pub(crate) fn bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        if self.buffer.readonly() {
            return Err(SlabError::new_err(
                "the slab is read-only; pass a writable buffer",
            ));
        }
        // SAFETY: as above, and the export is writable. A slab is passed to `schedule` only while no step uses it, so
        // no one else reads or writes these bytes during the call.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(
                self.buffer.buf_ptr().cast::<u8>(),
                self.buffer.len_bytes(),
            )
        })
    }
}
