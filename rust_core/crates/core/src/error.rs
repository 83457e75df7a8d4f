//! What the core refuses, and why.

use thiserror::Error;

/// Every error of this crate. The binding maps each variant to one exception class.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// A request that [`Inbox::submit`](crate::Inbox::submit) refuses.
    #[error("{field}: {problem}")]
    Request {
        /// The offending argument.
        field: &'static str,
        /// What is wrong with it, with the numbers.
        problem: String,
    },
    /// A configuration that cannot work.
    #[error("{field}: {problem}")]
    Config {
        /// The offending field of [`CoreConfig`](crate::CoreConfig).
        field: &'static str,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// A slab buffer of the wrong size or alignment, or a step that is not the oldest in flight.
    #[error("{0}")]
    Slab(String),
    /// A conservation law does not hold: always a bug of ours.
    #[error("{0}")]
    Audit(String),
    /// [`Core::poison`](crate::Core::poison) was called: every request has ended and no more are accepted.
    #[error("the scheduler core stopped after an internal error ({0}); restart the engine")]
    Poisoned(String),
    /// A panic while a snapshot was taken: the core goes on.
    #[error("the scheduler cannot be shown because of an internal error ({0})")]
    Snapshot(String),
    /// A panic while a request was checked: nothing else is touched by it.
    #[error("the request could not be checked because of an internal error ({0})")]
    Internal(String),
}

impl Error {
    pub(crate) fn request(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Request {
            field,
            problem: problem.into(),
        }
    }

    pub(crate) fn config(field: &'static str, problem: impl Into<String>) -> Self {
        Self::Config {
            field,
            problem: problem.into(),
        }
    }
}
