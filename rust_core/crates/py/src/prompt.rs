//! Log-probabilities of a prompt's tokens.

use std::sync::Arc;

use oneloop_core::text::prompt_logprobs_json;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::vocab::Vocabulary;

/// Of each prompt token but the first, in order.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct PromptLogprobs {
    pub(crate) inner: Arc<oneloop_core::PromptLogprobs>,
}

/// (rank of the token, [(its id, logprob), (top id, logprob)…]).
type TokenLogprobs = (i32, Vec<(i32, f32)>);

#[pymethods]
impl PromptLogprobs {
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// Those of the prompt's tokens `start + 1` to `stop`, fewer where it ends before.
    #[pyo3(signature = (start = 0, stop = usize::MAX))]
    fn tokens(&self, start: usize, stop: usize) -> Vec<TokenLogprobs> {
        let tokens = (start..stop.min(self.inner.len())).filter_map(|index| self.inner.get(index));
        let pairs = tokens.map(|token| {
            let ids = token.token_ids.iter().copied();
            (
                token.rank,
                ids.zip(token.logprobs.iter().copied()).collect(),
            )
        });
        pairs.collect()
    }

    /// JSON as the field `prompt_logprobs` of a reply has it. Takes as long as it is: call it in a thread.
    fn json<'py>(
        &self,
        py: Python<'py>,
        vocabulary: &Vocabulary,
        num_top: usize,
    ) -> Bound<'py, PyBytes> {
        let json = py.detach(|| prompt_logprobs_json(&vocabulary.inner, &self.inner, num_top));
        PyBytes::new(py, &json)
    }
}
