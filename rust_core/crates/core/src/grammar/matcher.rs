//! A compiled grammar, and its state in one sequence.

use std::sync::{Mutex, PoisonError};

use llguidance::Matcher;

use super::constraint::{Constraint, ConstraintSource};
use crate::delta::Failure;
use crate::text::Vocabulary;

const NOTHING_FOLLOWS: &str =
    "the grammar allows nothing here (it contradicts itself, or comes to no end)";

/// How the engine begins to say that a limit of its work is reached.
const TOO_MUCH: [&str; 2] = ["lexer error", "Parser Error"];

/// A compiled grammar. Sequences share nothing that one of them could break for the others.
pub struct Grammar {
    /// Before the first token.
    first: Mutex<Matcher>,
    vocab_size: usize,
}

impl Grammar {
    pub(super) fn new(first: Matcher, vocabulary: &Vocabulary) -> Self {
        Self {
            first: Mutex::new(first),
            vocab_size: vocabulary.len(),
        }
    }

    /// Whether any token can be the first. Also makes ready what all sequences need for theirs.
    pub(super) fn check_first_token(&self) -> Result<(), String> {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let mut mask = vec![0; self.vocab_size.div_ceil(32)];
        fill(&mut first, &mut mask)
    }

    /// The state before the first token.
    pub fn matcher(&self) -> GrammarMatcher {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        GrammarMatcher {
            matcher: first.deep_clone(),
        }
    }

    /// Ids that masks speak of.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}

impl ConstraintSource for Grammar {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(self.matcher())
    }
}

/// A grammar's state in one sequence.
pub struct GrammarMatcher {
    matcher: Matcher,
}

impl GrammarMatcher {
    /// Whether the text may end here.
    pub fn may_end(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or(false) || self.is_over()
    }

    /// Goes on with the tokens as far as they are allowed; returns how many were.
    pub fn accept(&mut self, tokens: &[u32]) -> Result<usize, String> {
        self.matcher
            .try_consume_tokens(tokens)
            .map_err(|error| short(&error.to_string()))
    }

    /// The same state again.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        Self {
            matcher: self.matcher.deep_clone(),
        }
    }
}

impl Constraint for GrammarMatcher {
    fn fill_mask(&mut self, mask: &mut [u32]) -> Result<(), String> {
        fill(&mut self.matcher, mask)
    }

    fn advance(&mut self, token: u32) -> Result<(), Failure> {
        self.matcher.consume_token(token).map_err(|error| {
            let message = error.to_string();
            Failure {
                is_of_request: TOO_MUCH.iter().any(|begin| message.starts_with(begin)),
                message: stuck(&message).into(),
            }
        })
    }

    fn is_over(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.duplicate())
    }
}

fn fill(matcher: &mut Matcher, mask: &mut [u32]) -> Result<(), String> {
    let allowed = matcher
        .compute_mask_or_eos()
        .map_err(|error| stuck(&error.to_string()))?;
    let words = allowed.as_slice();
    let len = mask.len().min(words.len());
    mask[..len].copy_from_slice(&words[..len]);
    if mask.iter().all(|&word| word == 0) {
        return Err(NOTHING_FOLLOWS.to_owned());
    }
    Ok(())
}

/// What a sequence that cannot go on is told. The engine's codes are put into words.
fn stuck(message: &str) -> String {
    if message.starts_with("NoExtension") {
        return NOTHING_FOLLOWS.to_owned();
    }
    format!("the grammar cannot go on: {}", short(message))
}

fn short(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    line.chars().take(200).collect()
}
