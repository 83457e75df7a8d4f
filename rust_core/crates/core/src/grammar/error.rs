//! Why a grammar is refused.

use thiserror::Error;

/// A grammar that is refused: it is wrong, it asks for what cannot be kept exactly, or it is too large.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}{problem}", at(path))]
pub struct GrammarError {
    /// Where: a JSON pointer into a schema ("#/properties/name/pattern"), a line ("line 3"), or empty.
    pub path: String,
    /// What is wrong and what to do.
    pub problem: String,
    /// It was not looked at, as others take too much time or room: the same may be asked again.
    pub is_busy: bool,
}

impl GrammarError {
    pub(crate) fn new(problem: impl Into<String>) -> Self {
        Self::at(String::new(), problem)
    }

    pub(crate) fn at(path: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            problem: problem.into(),
            is_busy: false,
        }
    }

    /// Nothing is known against it.
    pub(crate) fn busy(problem: impl Into<String>) -> Self {
        Self {
            is_busy: true,
            ..Self::new(problem)
        }
    }

    /// The same, where it had no place yet.
    pub(crate) fn located(mut self, path: impl FnOnce() -> String) -> Self {
        if self.path.is_empty() {
            self.path = path();
        }
        self
    }
}

fn at(path: &str) -> String {
    if path.is_empty() {
        String::new()
    } else {
        format!("{path}: ")
    }
}
