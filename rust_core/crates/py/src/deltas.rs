//! What a commit returns: one object for the batch, and one per sequence that Python asks for.

use std::sync::atomic::{AtomicUsize, Ordering};

use oneloop_core::StopReason;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::prompt::PromptLogprobs;

/// All deltas of one commit, in the order of the step's samples.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct Deltas {
    inner: oneloop_core::Deltas,
}

impl Deltas {
    pub(crate) fn inner(&self) -> &oneloop_core::Deltas {
        &self.inner
    }
}

impl From<oneloop_core::Deltas> for Deltas {
    fn from(inner: oneloop_core::Deltas) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl Deltas {
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn __iter__(slf: Bound<'_, Self>) -> DeltaIterator {
        DeltaIterator {
            deltas: slf.unbind(),
            next: AtomicUsize::new(0),
        }
    }
}

#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct DeltaIterator {
    deltas: Py<Deltas>,
    next: AtomicUsize,
}

#[pymethods]
impl DeltaIterator {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Option<Delta> {
        let position = self.next.fetch_add(1, Ordering::Relaxed);
        if position < self.deltas.get().inner.len() {
            return Some(Delta {
                deltas: self.deltas.clone_ref(py),
                position,
            });
        }
        // Stay at the end however often it is asked.
        self.next.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

/// (id, log-probability): the sampled token, then the top ones.
type TokenLogprobs = Vec<(i32, f32)>;

/// What one step added to one sequence.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct Delta {
    deltas: Py<Deltas>,
    position: usize,
}

impl Delta {
    pub(crate) fn new(deltas: Py<Deltas>, position: usize) -> Self {
        Self { deltas, position }
    }

    fn batch(&self) -> &oneloop_core::Deltas {
        &self.deltas.get().inner
    }

    fn entry(&self) -> &oneloop_core::Delta {
        &self.batch().entries()[self.position]
    }
}

#[pymethods]
impl Delta {
    /// Handle that `submit()` returned.
    #[getter]
    fn request(&self) -> u64 {
        self.entry().request
    }

    /// Which of the request's n sequences.
    #[getter]
    fn index(&self) -> u32 {
        self.entry().index
    }

    #[getter]
    fn text(&self) -> &str {
        self.batch().text(self.entry())
    }

    #[getter]
    fn token_ids(&self) -> &[i32] {
        self.batch().token_ids(self.entry())
    }

    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.entry()
            .finish_reason
            .map(oneloop_core::FinishReason::as_str)
    }

    /// The stop token id or stop string that matched; None for EOS and for everything else.
    #[getter]
    fn stop_reason<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match &self.entry().stop_reason {
            None => Ok(None),
            Some(StopReason::Token(id)) => id
                .into_pyobject(py)
                .map(|id| Some(id.into_any()))
                .map_err(Into::into),
            Some(StopReason::Text(text)) => text
                .into_pyobject(py)
                .map(|text| Some(text.into_any()))
                .map_err(Into::into),
        }
    }

    /// Per token: (rank of the sampled token, [(sampled id, logprob), (top id, logprob)…]); None when not asked.
    #[getter]
    fn logprobs(&self) -> Option<Vec<(i32, TokenLogprobs)>> {
        let tokens = self.batch().logprobs(self.entry())?;
        Some(
            tokens
                .map(|token| {
                    let pairs = token
                        .token_ids
                        .iter()
                        .copied()
                        .zip(token.logprobs.iter().copied());
                    (token.rank, pairs.collect())
                })
                .collect(),
        )
    }

    /// Prompt tokens taken from the prefix cache at the first admission.
    #[getter]
    fn num_cached_tokens(&self) -> u32 {
        self.entry().num_cached_tokens
    }

    /// Seconds from submit to first admission; only in a sequence's first delta.
    #[getter]
    fn queue_s(&self) -> Option<f64> {
        self.entry().queue_s
    }

    /// Message, when `finish_reason` is "error".
    #[getter]
    fn error(&self) -> Option<&str> {
        self.entry().error.as_ref().map(|failure| &*failure.message)
    }

    /// Whether the request is at fault, when `finish_reason` is "error".
    #[getter]
    fn is_request_at_fault(&self) -> bool {
        let error = self.entry().error.as_ref();
        error.is_some_and(|failure| failure.is_of_request)
    }

    /// Of the prompt's tokens, where asked for; only in the first delta of the request's sequence 0.
    #[getter]
    fn prompt_logprobs(&self) -> Option<PromptLogprobs> {
        let inner = self.entry().told.as_ref()?.prompt_logprobs.clone()?;
        Some(PromptLogprobs { inner })
    }

    /// Of a text that beam search found.
    #[getter]
    fn cumulative_logprob(&self) -> Option<f64> {
        self.entry().told.as_ref()?.cumulative_logprob
    }

    /// The pooled hidden state, 32-bit floats in the machine's order, where asked for.
    #[getter]
    fn pooled<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let values = self.entry().told.as_ref()?.pooled.as_ref()?;
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect();
        Some(PyBytes::new(py, &bytes))
    }

    fn __repr__(&self) -> String {
        let entry = self.entry();
        let (text, ids) = (self.text(), self.token_ids());
        let finish = entry
            .finish_reason
            .map_or("None", oneloop_core::FinishReason::as_str);
        format!(
            "Delta(request={}, index={}, text={text:?}, token_ids={ids:?}, finish_reason={finish})",
            entry.request, entry.index
        )
    }
}
