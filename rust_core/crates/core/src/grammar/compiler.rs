//! Grammars compiled in bounded time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};

use super::error::GrammarError;
use super::limits::{COMPILE_STACK_BYTES, COMPILE_TIMEOUT, MAX_ABANDONED, engine_limits};
use super::matcher::Grammar;
use super::spec::GrammarSpec;
use super::tags::SpecialTokens;
use super::tokens;
use crate::guard::caught;
use crate::text::Vocabulary;

/// Kinds of tokens that are looked at as one where a grammar allows all of the kind: in text most masks are then a few
/// words joined, instead of a walk through the vocabulary. The line separators are left out because a pattern's `.` is
/// none of them; the counts are small because a kind must fit into what `maxLength` or `{1,200}` still leaves.
const SLICES: [&str; 5] = [
    r"[\x20\x0A\x0D\x09]+",
    r#"[^"\\\x00-\x1F\x7F\u{2028}\u{2029}]{1,10}"#,
    r#"[^"\\\x00-\x1F\x7F\u{2028}\u{2029}]{1,30}"#,
    r#"[^"\\\x00-\x1F\x7F\u{2028}\u{2029}]+"#,
    r"[A-Za-z\x20]{1,16}",
];

/// Compiles grammars for one vocabulary. Made once: it builds a trie of all tokens, which takes some 100 ms.
pub struct GrammarCompiler {
    inner: Arc<Inner>,
    timeout: Duration,
}

struct Inner {
    factory: ParserFactory,
    vocabulary: Arc<Vocabulary>,
    special: SpecialTokens,
    /// Compilations that nobody waits for any more.
    num_abandoned: AtomicUsize,
}

impl GrammarCompiler {
    /// `eos_token_ids`: what may follow where a grammar may end.
    pub fn new(vocabulary: Arc<Vocabulary>, eos_token_ids: &[u32]) -> Result<Self, GrammarError> {
        let trie = tokens::token_trie(&vocabulary, eos_token_ids)?;
        let capabilities = InferenceCapabilities::default();
        let slices = SLICES.map(str::to_owned);
        let mut factory = ParserFactory::new(&trie, capabilities, &slices)
            .map_err(|error| GrammarError::new(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = engine_limits();
        Ok(Self {
            inner: Arc::new(Inner {
                factory,
                special: SpecialTokens::new(&vocabulary, eos_token_ids),
                vocabulary,
                num_abandoned: AtomicUsize::new(0),
            }),
            timeout: COMPILE_TIMEOUT,
        })
    }

    /// The same with another limit of time, for tests.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Compiles `spec`, in a thread of its own, within [`COMPILE_TIMEOUT`]. Blocks meanwhile.
    pub fn compile(&self, spec: GrammarSpec) -> Result<Grammar, GrammarError> {
        spec.check_size()?;
        if self.inner.num_abandoned.load(Ordering::Relaxed) >= MAX_ABANDONED {
            return Err(GrammarError::busy(
                "too many grammars are being compiled that take too long; try again later",
            ));
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let inner = Arc::clone(&self.inner);
        let work = move || {
            let result = inner.compile(&spec);
            if let Err(unsent) = sender.send(result) {
                drop(unsent);
                inner.num_abandoned.fetch_sub(1, Ordering::Relaxed);
            }
        };
        thread::Builder::new()
            .name("oneloop-grammar".to_owned())
            .stack_size(COMPILE_STACK_BYTES)
            .spawn(work)
            .map_err(|error| GrammarError::busy(format!("no thread could be started: {error}")))?;
        match receiver.recv_timeout(self.timeout) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => self.abandon(receiver),
            Err(RecvTimeoutError::Disconnected) => Err(GrammarError::new(
                "the compilation broke off without a result",
            )),
        }
    }

    fn abandon(
        &self,
        receiver: mpsc::Receiver<Result<Grammar, GrammarError>>,
    ) -> Result<Grammar, GrammarError> {
        self.inner.num_abandoned.fetch_add(1, Ordering::Relaxed);
        // It may have ended just now.
        if let Ok(result) = receiver.try_recv() {
            self.inner.num_abandoned.fetch_sub(1, Ordering::Relaxed);
            return result;
        }
        drop(receiver);
        Err(GrammarError::new(format!(
            "compiling the grammar takes more than {:.1} s; make it simpler",
            self.timeout.as_secs_f32()
        )))
    }
}

impl Inner {
    fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        caught(|| self.compile_unguarded(spec)).unwrap_or_else(|message| {
            let first = message.lines().next().unwrap_or_default().to_owned();
            Err(GrammarError::new(format!(
                "the grammar cannot be compiled ({first})"
            )))
        })
    }

    fn compile_unguarded(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let grammar = spec.engine_grammar(&self.special)?;
        let mut parser = self
            .factory
            .create_parser(grammar)
            .map_err(|error| refused(&format!("{error:#}")))?;
        if let Some(warning) = parser.grammar_warnings().first() {
            return Err(refused(warning));
        }
        let grammar = Grammar::new(Matcher::new(Ok(parser)), &self.vocabulary);
        grammar
            .check_first_token()
            .map_err(|problem| refused(&problem))?;
        Ok(grammar)
    }
}

/// The engine's words, without what it shows of its insides.
fn refused(message: &str) -> GrammarError {
    let message = message.split("\n<backtrace>").next().unwrap_or_default();
    let mut short: String = message.chars().take(400).collect();
    if short.len() < message.len() {
        short.push('…');
    }
    GrammarError::new(short)
}
