//! Python arguments that may hold anything: numbers of any size.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::error::refuse;

/// An int. One beyond 64 bits becomes the nearest i64, which is out of range wherever a range is checked.
#[derive(Clone, Copy)]
pub(crate) struct Int(pub(crate) i64);

impl<'py> FromPyObject<'_, 'py> for Int {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<i64>() {
            Ok(value) => Ok(Self(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            Err(error) => Err(error),
        }
    }
}

impl Int {
    /// The value of an argument of `submit` that cannot be negative.
    pub(crate) fn unsigned(self, field: &'static str) -> PyResult<u64> {
        u64::try_from(self.0).map_err(|_| refuse(field, &format!("{} is negative", self.0)))
    }
}

/// A float. An int too large for one becomes an infinity, which every check refuses.
#[derive(Clone, Copy)]
pub(crate) struct Float(pub(crate) f64);

impl<'py> FromPyObject<'_, 'py> for Float {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<f64>() {
            Ok(value) => Ok(Self(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? {
                    f64::NEG_INFINITY
                } else {
                    f64::INFINITY
                }))
            }
            Err(error) => Err(error),
        }
    }
}
