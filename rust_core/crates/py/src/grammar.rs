//! `Grammar`: a compiled grammar for Python.

use std::collections::HashMap;
use std::sync::Arc;

use oneloop_core::{Automaton, SharedGrammar};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// What the tokens of a sequence must be, compiled.
#[pyclass(module = "oneloop_core", frozen)]
pub(crate) struct Grammar {
    pub(crate) inner: SharedGrammar,
}

#[pymethods]
impl Grammar {
    /// A grammar by table: `states[s]` maps the tokens that may come in state s to the state after them.
    #[staticmethod]
    fn from_automaton(states: Vec<HashMap<u32, u32>>) -> PyResult<Self> {
        let automaton = Automaton::new(states).map_err(PyValueError::new_err)?;
        Ok(Self {
            inner: SharedGrammar(Arc::new(automaton)),
        })
    }
}
