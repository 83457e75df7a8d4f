//! The vocabulary and the detokenizer alone.

use std::sync::Arc;

use oneloop_core::text::{self, StopSet};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::arguments::Int;
use crate::token_ids::token_ids;

/// Bytes of every token, made once per tokenizer and shared by all requests.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct Vocabulary {
    pub(crate) inner: Arc<text::Vocabulary>,
}

#[pymethods]
impl Vocabulary {
    #[new]
    #[pyo3(signature = (pieces, special_ids = Vec::new(), *, strip_leading_space = false),
           text_signature = "(pieces, special_ids=(), *, strip_leading_space=False)")]
    fn new(
        pieces: Vec<PyBackedBytes>,
        special_ids: Vec<Int>,
        strip_leading_space: bool,
    ) -> PyResult<Self> {
        let num_pieces = pieces.len();
        let special_ids = special_ids.into_iter().map(|Int(id)| {
            u32::try_from(id).map_err(|_| {
                PyValueError::new_err(format!("special_ids: {id} is not in [0, {num_pieces})"))
            })
        });
        let special_ids = special_ids.collect::<PyResult<Vec<u32>>>()?;
        let inner = text::Vocabulary::new(pieces, &special_ids, strip_leading_space)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// Bytes of one token.
    fn piece<'py>(&self, py: Python<'py>, token_id: Int) -> PyResult<Bound<'py, PyBytes>> {
        let piece = self.inner.piece(known_id(&self.inner, token_id)?);
        Ok(PyBytes::new(py, piece.unwrap_or_default()))
    }

    /// Text of a whole sequence; malformed UTF-8 becomes U+FFFD.
    #[pyo3(signature = (token_ids, *, skip_special_tokens = true))]
    fn decode(&self, token_ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> PyResult<String> {
        let out_of_range = |id: i64| index_error(&self.inner, id);
        let ids = self::token_ids(token_ids, |_, id| out_of_range(id))?;
        token_ids.py().detach(|| {
            let ids = ids
                .iter()
                .map(|&id| u32::try_from(id).map_err(|_| out_of_range(id.into())));
            let ids = ids.collect::<PyResult<Vec<u32>>>()?;
            let text = self.inner.decode(&ids, skip_special_tokens);
            text.map_err(|error| PyIndexError::new_err(error.to_string()))
        })
    }
}

fn index_error(vocabulary: &text::Vocabulary, id: i64) -> PyErr {
    PyIndexError::new_err(format!("token id {id} is not in [0, {})", vocabulary.len()))
}

fn known_id(vocabulary: &text::Vocabulary, Int(id): Int) -> PyResult<u32> {
    let known = u32::try_from(id)
        .ok()
        .filter(|&id| (id as usize) < vocabulary.len());
    known.ok_or_else(|| index_error(vocabulary, id))
}

/// The incremental detokenizer alone: push ids, get text.
#[pyclass(module = "oneloop_core")]
pub(crate) struct StreamDecoder {
    vocabulary: Arc<text::Vocabulary>,
    inner: text::StreamDecoder,
    out: String,
}

#[pymethods]
impl StreamDecoder {
    #[new]
    #[pyo3(signature = (vocabulary, *, skip_special_tokens = true, shown_special_ids = Vec::new(),
                        stop = Vec::new(), include_stop_str_in_output = false, min_tokens = 0),
           text_signature = "(vocabulary, *, skip_special_tokens=True, shown_special_ids=(), stop=(), \
                             include_stop_str_in_output=False, min_tokens=0)")]
    fn new(
        vocabulary: &Vocabulary,
        skip_special_tokens: bool,
        mut shown_special_ids: Vec<u32>,
        stop: Vec<String>,
        include_stop_str_in_output: bool,
        min_tokens: u32,
    ) -> PyResult<Self> {
        let stop = StopSet::new(stop, include_stop_str_in_output, min_tokens)
            .map_err(|error| PyValueError::new_err(format!("stop: {error}")))?;
        let vocabulary = Arc::clone(&vocabulary.inner);
        let inner = text::StreamDecoder::new(
            Arc::clone(&vocabulary),
            skip_special_tokens,
            Some(Arc::new(stop)),
        );
        shown_special_ids.sort_unstable();
        let shown = (!shown_special_ids.is_empty()).then(|| Arc::new(shown_special_ids));
        let inner = inner.showing(shown);
        Ok(Self {
            vocabulary,
            inner,
            out: String::new(),
        })
    }

    /// Text that became final with this token.
    fn push(&mut self, token_id: Int) -> PyResult<&str> {
        let id = known_id(&self.vocabulary, token_id)?;
        self.out.clear();
        self.inner.push(id, &mut self.out);
        Ok(&self.out)
    }

    /// What was held back.
    fn flush(&mut self) -> &str {
        self.out.clear();
        self.inner.flush(&mut self.out);
        &self.out
    }

    /// The stop string that ended the text, if any.
    #[getter]
    fn matched(&self) -> Option<&str> {
        self.inner.matched()
    }
}
