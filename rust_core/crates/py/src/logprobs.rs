//! Log-probabilities as JSON: one encoder for what goes through Python and for what the relay sends by itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oneloop_core::text::{self, LogprobsForm};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::prompt::PromptLogprobs;
use crate::vocab::Vocabulary;

/// The encoder, as its Python owner and the relay's lane hold it.
pub(crate) type Shared = Arc<Mutex<text::LogprobsEncoder>>;

/// For as long as a lane encodes, or one call from Python.
pub(crate) fn lock(shared: &Shared) -> MutexGuard<'_, text::LogprobsEncoder> {
    // Bytes and counters: nothing can be left half done by a panic that would not show in this reply alone.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// (rank, [(sampled id, logprob), (top id, logprob)…]) of one token.
type TokenLogprobs = (i32, Vec<(i32, f64)>);

/// One choice's log-probabilities in the form of chat or of completions.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct LogprobsEncoder {
    pub(crate) inner: Shared,
}

#[pymethods]
impl LogprobsEncoder {
    #[new]
    #[pyo3(signature = (vocabulary, form, *, num_top, skip_special_tokens))]
    fn new(
        vocabulary: &Vocabulary,
        form: &str,
        num_top: usize,
        skip_special_tokens: bool,
    ) -> PyResult<Self> {
        let form = match form {
            "chat" => LogprobsForm::Chat,
            "completion" => LogprobsForm::Completion,
            other => {
                return Err(PyValueError::new_err(format!(
                    "form: {other:?} is neither \"chat\" nor \"completion\""
                )));
            }
        };
        let vocabulary = Arc::clone(&vocabulary.inner);
        let encoder = text::LogprobsEncoder::new(vocabulary, form, num_top, skip_special_tokens);
        Ok(Self {
            inner: Arc::new(Mutex::new(encoder)),
        })
    }

    /// Encode the next tokens.
    fn add(&self, tokens: Vec<TokenLogprobs>) -> PyResult<()> {
        if let Some(position) = tokens.iter().position(|(_, ranked)| ranked.is_empty()) {
            return Err(PyValueError::new_err(format!(
                "tokens[{position}]: without the sampled token"
            )));
        }
        let mut encoder = lock(&self.inner);
        for (_, ranked) in tokens {
            let mut ranked = ranked.into_iter();
            if let Some(sampled) = ranked.next() {
                encoder.add(sampled, ranked);
            }
        }
        Ok(())
    }

    /// Encode an echoed prompt, before anything else. Takes as long as it is: call it in a thread.
    #[allow(clippy::needless_pass_by_value)] // a Python argument
    fn add_prompt(
        &self,
        py: Python<'_>,
        prompt_token_ids: Vec<i32>,
        logprobs: &PromptLogprobs,
        num_hidden: usize,
    ) {
        let (encoder, logprobs) = (&self.inner, &logprobs.inner);
        py.detach(|| lock(encoder).add_prompt(&prompt_token_ids, logprobs, num_hidden));
    }

    /// JSON of all tokens since the last take.
    fn take<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let mut out = Vec::new();
        lock(&self.inner).take_into(&mut out);
        PyBytes::new(py, &out)
    }
}
