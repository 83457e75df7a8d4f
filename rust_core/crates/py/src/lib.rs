//! Python module `oneloop_core._core`: conversions, the GIL and exceptions around the pure crate, nothing else.

mod arguments;
mod config;
mod core;
mod deltas;
mod descriptor;
mod error;
mod grammar;
mod logprobs;
mod prompt;
mod relay;
mod slab;
mod snapshot;
mod token_ids;
mod trace;
mod vocab;
mod watcher;

#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::config::CoreConfig;
    #[pymodule_export]
    use crate::core::{Core, Stats};
    #[pymodule_export]
    use crate::deltas::{Delta, Deltas};
    #[pymodule_export]
    use crate::error::{
        AuditError, ConfigError, CoreError, CorePoisonedError, GrammarBusyError, GrammarError,
        RequestError, SlabError, TraceError,
    };
    #[pymodule_export]
    use crate::grammar::{Grammar, GrammarCompiler, GrammarMatcher};
    #[pymodule_export]
    use crate::logprobs::LogprobsEncoder;
    #[pymodule_export]
    use crate::prompt::PromptLogprobs;
    #[pymodule_export]
    use crate::relay::StreamRelay;
    #[pymodule_export]
    use crate::slab::{Field, SlabLayout};
    #[pymodule_export]
    use crate::trace::{TraceDifference, TraceReplay, TraceWriter};
    #[pymodule_export]
    use crate::vocab::{StreamDecoder, Vocabulary};
    #[pymodule_export]
    use crate::watcher::CompletionWatcher;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    const BUILD_PROFILE: &str = env!("ONELOOP_BUILD_PROFILE");
    #[pymodule_export]
    const MAX_LOGPROBS: u32 = oneloop_core::MAX_LOGPROBS;
}
