//! A small vocabulary, and texts held against grammars token by token.

use std::sync::Arc;

use oneloop_core::grammar::{
    Constraint, Grammar, GrammarCompiler, GrammarError, GrammarMatcher, GrammarSpec, JsonStyle,
};
use oneloop_core::text::Vocabulary;

/// Ends a text.
pub(crate) const END: u32 = 256;
/// A special token in whose place no text may come.
pub(crate) const CALL: u32 = 257;

/// All bytes, an end, a special token, and some longer tokens that cross the borders of JSON's.
pub(crate) fn vocabulary() -> Arc<Vocabulary> {
    let mut pieces: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let more = [
        "</s>", "[CALL]", "{\"", "\":", "\": ", "\",\"", "\"}", "true", "ab", "foo", "  ", "[CALL",
        "10", "", "ab",
    ];
    pieces.extend(more.map(|piece| piece.as_bytes().to_vec()));
    Arc::new(Vocabulary::new(pieces, &[END, CALL], false).unwrap())
}

pub(crate) fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(vocabulary(), &[END]).unwrap()
}

pub(crate) fn schema(text: &str) -> GrammarSpec {
    GrammarSpec::JsonSchema(text.to_owned(), JsonStyle::default())
}

pub(crate) fn compiled(spec: GrammarSpec) -> Grammar {
    compiler().compile(spec).unwrap()
}

pub(crate) fn refused(spec: GrammarSpec) -> GrammarError {
    let shown = format!("{spec:?}");
    match compiler().compile(spec) {
        Err(error) => error,
        Ok(_) => panic!("not refused: {shown:.300}"),
    }
}

/// The tokens that may come next.
pub(crate) fn allowed(matcher: &mut GrammarMatcher) -> Vec<u32> {
    let mut mask = vec![0; vocabulary().len().div_ceil(32)];
    matcher.fill_mask(&mut mask).unwrap();
    let set = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
    (0..vocabulary().len() as u32).filter(set).collect()
}

/// Whether the text, byte by byte and then as an end, is allowed by mask and grammar alike.
pub(crate) fn accepts(grammar: &Grammar, text: &str) -> bool {
    accepts_tokens(grammar, &text.bytes().map(u32::from).collect::<Vec<_>>())
}

pub(crate) fn accepts_tokens(grammar: &Grammar, tokens: &[u32]) -> bool {
    let mut matcher = grammar.matcher();
    for &token in tokens {
        let is_allowed = allowed(&mut matcher).contains(&token);
        let mut tried = matcher.duplicate();
        assert_eq!(
            tried.accept(&[token]).unwrap() == 1,
            is_allowed,
            "mask and grammar differ at {token}"
        );
        if !is_allowed {
            return false;
        }
        matcher.advance(token).unwrap();
    }
    let ends = allowed(&mut matcher).contains(&END);
    assert_eq!(matcher.may_end(), ends);
    ends
}
