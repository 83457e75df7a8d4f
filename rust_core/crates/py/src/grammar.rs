//! Compiled grammars for Python.

use std::collections::HashMap;
use std::sync::Arc;

use oneloop_core::grammar::{self, Constraint, GrammarSpec, JsonStyle};
use oneloop_core::{Automaton, SharedGrammar};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::Int;
use crate::error::{GrammarError, grammar_error};
use crate::vocab::Vocabulary;

/// What the tokens of a sequence must be, compiled: shared by all sequences that keep to it.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct Grammar {
    pub(crate) inner: SharedGrammar,
    /// `None`: made of a table.
    compiled: Option<Arc<grammar::Grammar>>,
}

#[pymethods]
impl Grammar {
    /// A grammar by table: `states[s]` maps the tokens that may come in state s to the state after them.
    #[staticmethod]
    fn from_automaton(states: Vec<HashMap<u32, u32>>) -> PyResult<Self> {
        let automaton = Automaton::new(states).map_err(PyValueError::new_err)?;
        Ok(Self {
            inner: SharedGrammar(Arc::new(automaton)),
            compiled: None,
        })
    }

    /// The state before the first token.
    fn matcher(&self) -> PyResult<GrammarMatcher> {
        let Some(compiled) = &self.compiled else {
            return Err(PyValueError::new_err(
                "only compiled grammars have matchers",
            ));
        };
        Ok(GrammarMatcher {
            inner: compiled.matcher(),
            vocab_size: compiled.vocab_size(),
        })
    }
}

/// Compiles grammars for one vocabulary.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct GrammarCompiler {
    inner: grammar::GrammarCompiler,
}

#[pymethods]
impl GrammarCompiler {
    #[new]
    #[pyo3(signature = (vocabulary, eos_token_ids), text_signature = "(vocabulary, eos_token_ids)")]
    fn new(py: Python<'_>, vocabulary: &Vocabulary, eos_token_ids: Vec<Int>) -> PyResult<Self> {
        let ids: Result<Vec<u32>, _> = eos_token_ids
            .into_iter()
            .map(|id| u32::try_from(id.0))
            .collect();
        let ids = ids.map_err(|_| GrammarError::new_err("eos_token_ids: an id is out of range"))?;
        let vocabulary = Arc::clone(&vocabulary.inner);
        let inner = py.detach(|| grammar::GrammarCompiler::new(vocabulary, &ids));
        Ok(Self {
            inner: inner.map_err(|error| grammar_error(&error))?,
        })
    }

    /// The grammar, compiled without the GIL in bounded time.
    #[pyo3(signature = (kind, source, *, compact = false, whitespace_pattern = None, closed_objects = false),
           text_signature = "($self, kind, source, *, compact=False, whitespace_pattern=None, closed_objects=False)")]
    fn compile(
        &self,
        py: Python<'_>,
        kind: &str,
        source: Source,
        compact: bool,
        whitespace_pattern: Option<String>,
        closed_objects: bool,
    ) -> PyResult<Grammar> {
        let style = JsonStyle {
            compact,
            whitespace_pattern,
            closed_objects,
        };
        let spec = spec(kind, source, style)?;
        let inner = py
            .detach(|| self.inner.compile(spec))
            .map_err(|error| grammar_error(&error))?;
        let compiled = Arc::new(inner);
        Ok(Grammar {
            inner: SharedGrammar(Arc::clone(&compiled) as _),
            compiled: Some(compiled),
        })
    }
}

/// A grammar's text, or the texts to choose from.
#[derive(FromPyObject)]
enum Source {
    Text(String),
    Texts(Vec<String>),
}

fn spec(kind: &str, source: Source, style: JsonStyle) -> PyResult<GrammarSpec> {
    match (kind, source) {
        ("json_schema", Source::Text(text)) => Ok(GrammarSpec::JsonSchema(text, style)),
        ("json_object", Source::Text(_)) => Ok(GrammarSpec::JsonObject(style)),
        ("regex", Source::Text(text)) => Ok(GrammarSpec::Regex(text)),
        ("choice", Source::Texts(texts)) => Ok(GrammarSpec::Choice(texts)),
        ("grammar", Source::Text(text)) => Ok(GrammarSpec::Grammar(text)),
        ("structural_tag", Source::Text(text)) => Ok(GrammarSpec::StructuralTag(text, style)),
        (kind, _) => Err(PyValueError::new_err(format!(
            "no kind of grammar, or not with this source: {kind:?}"
        ))),
    }
}

/// A grammar's state in one sequence, for tests and tools: engines pass the `Grammar` itself.
#[pyclass(module = "oneloop_core")]
pub(crate) struct GrammarMatcher {
    inner: grammar::GrammarMatcher,
    vocab_size: usize,
}

#[pymethods]
impl GrammarMatcher {
    /// Which tokens may come next: bit i % 32 of the little-endian 32-bit word i / 32.
    fn mask<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut mask = vec![0u32; self.vocab_size.div_ceil(32)];
        py.detach(|| self.inner.fill_mask(&mut mask))
            .map_err(GrammarError::new_err)?;
        PyBytes::new_with(py, mask.len() * 4, |bytes| {
            let places = bytes.chunks_exact_mut(4);
            places
                .zip(&mask)
                .for_each(|(place, word)| place.copy_from_slice(&word.to_le_bytes()));
            Ok(())
        })
    }

    /// Goes on with a token that the mask allows.
    fn advance(&mut self, py: Python<'_>, token_id: Int) -> PyResult<()> {
        let token = u32::try_from(token_id.0).map_err(|_| {
            GrammarError::new_err(format!("token id {} is out of range", token_id.0))
        })?;
        py.detach(|| self.inner.advance(token))
            .map_err(|failure| GrammarError::new_err(failure.to_string()))
    }

    /// Goes on with the tokens as far as they are allowed; returns how many were.
    fn accept(&mut self, py: Python<'_>, token_ids: Vec<u32>) -> PyResult<usize> {
        py.detach(move || self.inner.accept(&token_ids))
            .map_err(GrammarError::new_err)
    }

    /// Whether the text may end here.
    fn may_end(&mut self) -> bool {
        self.inner.may_end()
    }

    /// Whether nothing may follow.
    fn is_over(&self) -> bool {
        self.inner.is_over()
    }

    /// The same state again.
    fn fork(&self) -> Self {
        Self {
            inner: self.inner.duplicate(),
            vocab_size: self.vocab_size,
        }
    }
}
