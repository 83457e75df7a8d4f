//! Token ids of a prompt, in whatever Python has them.
#![allow(unsafe_code)] // two calls per entry of a list

use pyo3::buffer::PyBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::Int;

/// Token ids from a buffer of 4-byte signed ints (one copy) or from any iterable of ints.
///
/// `too_large`: the error for an id beyond 32 bits and its position. Smaller ranges are the caller's to check.
pub(crate) fn token_ids(
    object: &Bound<'_, PyAny>,
    too_large: impl FnOnce(usize, i64) -> PyErr,
) -> PyResult<Vec<i32>> {
    if let Ok(list) = object.cast::<PyList>()
        && let Some(ids) = plain_list(list)
    {
        return Ok(ids);
    }
    if let Ok(buffer) = PyBuffer::<i32>::get(object) {
        return buffer.to_vec(object.py());
    }
    let mut ids = Vec::with_capacity(object.len().unwrap_or(0));
    for (position, item) in object.try_iter()?.enumerate() {
        let Int(id) = item?.extract()?;
        match i32::try_from(id) {
            Ok(id) => ids.push(id),
            Err(_) => return Err(too_large(position, id)),
        }
    }
    Ok(ids)
}

/// A list that holds nothing but ints of 32 bits, as tokenizers return it. `None` for all others.
///
/// A prompt may have 100,000 of them, and this is on the event loop: without counting references it takes a third.
fn plain_list(list: &Bound<'_, PyList>) -> Option<Vec<i32>> {
    let num_ids = list.len();
    let mut ids = Vec::with_capacity(num_ids);
    for position in 0..num_ids {
        // SAFETY: `list` is a list, the GIL is held, and nothing here runs Python code that could change the list, as an
        // entry is converted only when it is an int itself, not of a subclass. So the position is within it, and the
        // entry that it lends us stays.
        let (id, overflow) = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), position as ffi::Py_ssize_t);
            if ffi::PyLong_CheckExact(item) == 0 {
                return None;
            }
            let mut overflow = 0;
            let id = ffi::PyLong_AsLongAndOverflow(item, &raw mut overflow);
            (id, overflow)
        };
        if overflow != 0 {
            return None;
        }
        ids.push(i32::try_from(id).ok()?);
    }
    Some(ids)
}
