//! The exceptions, and which error of the core becomes which.

use oneloop_core::Error;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    oneloop_core,
    CoreError,
    PyException,
    "Base of every error the core raises."
);
create_exception!(
    oneloop_core,
    RequestError,
    CoreError,
    "A request the core refuses. `field` names the argument of `Core.submit`, `message` says what is wrong."
);
create_exception!(
    oneloop_core,
    ConfigError,
    CoreError,
    "A `CoreConfig` that cannot work; the message names the field and the remedy."
);
create_exception!(
    oneloop_core,
    SlabError,
    CoreError,
    "A slab buffer of the wrong size or alignment, or a step out of order."
);
create_exception!(
    oneloop_core,
    AuditError,
    CoreError,
    "A conservation law does not hold (always a bug of ours)."
);
create_exception!(
    oneloop_core,
    CorePoisonedError,
    CoreError,
    "A panic was caught; every request has ended with an error and the core accepts no more."
);

create_exception!(
    oneloop_core,
    TraceError,
    CoreError,
    "A schedule trace that cannot be read: no trace, of another version, cut off or damaged."
);

create_exception!(
    oneloop_core,
    GrammarError,
    CoreError,
    "A grammar that is refused, or that cannot go on. `path` says where in it, `problem` what is wrong."
);

create_exception!(
    oneloop_core,
    GrammarBusyError,
    CoreError,
    "A grammar was not looked at, as others take too much time; the same may be asked again."
);

/// The exception for a grammar that is refused, or has to wait.
pub(crate) fn grammar_error(error: &oneloop_core::grammar::GrammarError) -> PyErr {
    if error.is_busy {
        return GrammarBusyError::new_err(error.to_string());
    }
    Python::attach(|py| {
        let raised = GrammarError::new_err(error.to_string());
        let value = raised.value(py);
        match value
            .setattr("path", &error.path)
            .and_then(|()| value.setattr("problem", &error.problem))
        {
            Ok(()) => raised,
            Err(failed) => failed,
        }
    })
}

/// The exception for a trace that cannot be read.
pub(crate) fn trace_error(error: &oneloop_core::TraceError) -> PyErr {
    TraceError::new_err(error.to_string())
}

/// The exception for an error of the core.
#[allow(clippy::needless_pass_by_value)] // made for map_err
pub(crate) fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::Request { field, .. } => request_error(field, message),
        Error::Config { .. } => ConfigError::new_err(message),
        Error::Slab(_) => SlabError::new_err(message),
        Error::Audit(_) => AuditError::new_err(message),
        Error::Poisoned(_) => CorePoisonedError::new_err(message),
        Error::Internal(_) | Error::Snapshot(_) => CoreError::new_err(message),
    }
}

/// A `RequestError` about one argument of `Core.submit`.
pub(crate) fn refuse(field: &'static str, problem: &str) -> PyErr {
    request_error(field, format!("{field}: {problem}"))
}

fn request_error(field: &'static str, message: String) -> PyErr {
    Python::attach(|py| {
        let error = RequestError::new_err(message.clone());
        let value = error.value(py);
        match value
            .setattr("field", field)
            .and_then(|()| value.setattr("message", message))
        {
            Ok(()) => error,
            Err(failed) => failed,
        }
    })
}
