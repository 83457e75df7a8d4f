//! Which tokens may come next: grammars, allowed and forced tokens, as masks with a bit for each token.
//!
//! `rules` is what the scheduler sees. `compiler` makes grammars of what clients ask for, with llguidance, which never sees
//! a client's text as it came: schemas, patterns and grammars are checked and written anew, so that what the engine would
//! skip or keep only nearly is refused.

mod automaton;
mod compiler;
mod constraint;
mod ebnf;
mod error;
mod lark;
mod limits;
mod matcher;
mod pattern;
mod rules;
mod schema;
mod spec;
mod tags;
mod tokens;

pub use automaton::Automaton;
pub use compiler::GrammarCompiler;
pub use constraint::{Constraint, ConstraintSource};
pub use error::GrammarError;
pub use limits::{COMPILE_TIMEOUT, MAX_SOURCE_BYTES};
pub use matcher::{Grammar, GrammarMatcher};
pub use rules::SharedGrammar;
pub(crate) use rules::{Binding, RuleSpec, Rules, ThinkingLimit};
pub use schema::JsonStyle;
pub use spec::GrammarSpec;

/// Words of a mask.
pub(crate) fn mask_words(vocab_size: u32) -> usize {
    vocab_size.div_ceil(u32::BITS) as usize
}

/// Whether a token's bit is set.
pub(crate) fn has_bit(mask: &[u32], token: i32) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 != 0
}

/// Sets a token's bit.
pub(crate) fn set_bit(mask: &mut [u32], token: i32) {
    mask[token as usize / 32] |= 1 << (token % 32);
}

/// Clears a token's bit.
pub(crate) fn clear_bit(mask: &mut [u32], token: i32) {
    mask[token as usize / 32] &= !(1 << (token % 32));
}

/// Sets the bits of all tokens, and no others.
pub(crate) fn set_all(mask: &mut [u32], vocab_size: u32) {
    mask.fill(u32::MAX);
    clear_tail(mask, vocab_size);
}

/// Clears the bits that are no token's.
pub(crate) fn clear_tail(mask: &mut [u32], vocab_size: u32) {
    let spare = mask.len() as u32 * u32::BITS - vocab_size;
    if let Some(last) = mask.last_mut().filter(|_| spare > 0) {
        *last &= u32::MAX >> spare;
    }
}
