//! How large a grammar may be, and how long it may take.

use std::time::Duration;

use llguidance::api::ParserLimits;

/// Bytes of a schema, a regex with all that is around it, a list of choices, or the text of a grammar.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;
/// From the first look at a grammar to the end of its compilation.
pub const COMPILE_TIMEOUT: Duration = Duration::from_millis(1800);
/// Compilations that ran out of time and have not noticed yet; while there are so many, nothing is compiled.
pub(crate) const MAX_ABANDONED: usize = 4;
/// Recursion over schemas and rules is as deep as they are nested. Only what is touched takes memory.
pub(crate) const COMPILE_STACK_BYTES: usize = 256 << 20;

/// Subschemas of a schema.
pub(crate) const MAX_SUBSCHEMAS: usize = 4096;
/// Properties of one object.
pub(crate) const MAX_PROPERTIES: usize = 1000;
/// Properties of an object that says how many it must or may have: each of them becomes an alternative.
pub(crate) const MAX_COUNTED_PROPERTIES: usize = 64;
/// Members of all `enum`s of a schema together, and choices.
pub(crate) const MAX_ENUM_VALUES: usize = 4096;
/// Schemas within schemas, not counting references.
pub(crate) const MAX_SCHEMA_DEPTH: usize = 48;
/// Schemas within schemas, with references, that are followed to turn a schema round or to compare two.
pub(crate) const MAX_FOLLOWED: usize = 16;
/// Parts of schemas that are written in other words (`if`, `not`, `oneOf` …), all together.
pub(crate) const MAX_REWRITTEN: usize = 50_000;
/// Pairs of a `oneOf`'s alternatives that may hold together.
pub(crate) const MAX_OVERLAPS: usize = 2048;
/// Pairs of schemas that are compared, and what a pair of patterns counts for.
pub(crate) const MAX_PROOFS: u32 = 40_000;
pub(crate) const PATTERN_PROOFS: u32 = 400;
/// What a proof that two patterns match no text in common may cost, in the engine's measure.
pub(crate) const MAX_PROOF_FUEL: u64 = 20_000;
/// Alternatives that `oneOf` or `unevaluated…` are said in.
pub(crate) const MAX_UNEVALUATED_CASES: usize = 32;
/// Lists that stand for a `uniqueItems`.
pub(crate) const MAX_ARRANGED: usize = 720;
/// First items of a list, of which `contains` finds one; where it says how many: of them each set is an alternative.
pub(crate) const MAX_COUNTED_ITEMS: usize = 32;
pub(crate) const MAX_CONTAINED: usize = 6;
/// What `allOf`, `$ref` beside other keywords, and the like may multiply out to, in subschemas.
pub(crate) const MAX_MERGED: usize = 500_000;
/// `minItems` and `maxItems`, `minLength` and `maxLength`, and the counts of a regex.
pub(crate) const MAX_COUNT: u64 = 100_000;
/// What no answer reaches: an upper bound from here on binds nothing.
pub(crate) const UNREACHABLE_COUNT: u64 = 1 << 31;
/// Integers up to here are exact in every JSON library.
pub(crate) const MAX_EXACT_NUMBER: f64 = 9_007_199_254_740_992.0;

/// Bytes of one pattern.
pub(crate) const MAX_PATTERN_BYTES: usize = 8 << 10;
/// Groups within groups.
pub(crate) const MAX_PATTERN_DEPTH: usize = 48;
/// Rules of a grammar in text.
pub(crate) const MAX_RULES: usize = 2048;
/// Brackets within brackets of a grammar in Lark: what the engine takes.
pub(crate) const MAX_LARK_DEPTH: usize = 28;
/// The same in GBNF, where a repeated one becomes two.
pub(crate) const MAX_EBNF_DEPTH: usize = 13;
/// Tags of a structural tag.
pub(crate) const MAX_TAGS: usize = 256;
/// Elements of a structural tag within elements.
pub(crate) const MAX_ELEMENT_DEPTH: usize = 16;

/// White space between two tokens of JSON: none, a space, or a line's end with the next one's indentation. So texts as
/// usual libraries write them are allowed, and a model that has lost its way cannot fill its answer with blank lines.
pub(crate) const WHITESPACE: &str = r"\x20|\r?\n[\x20\x09]{0,48}";

/// What the grammar engine may spend on building a grammar, and on one mask (some 20 ms, of which most take 0.05).
pub(crate) fn engine_limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 10_000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 30_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}
