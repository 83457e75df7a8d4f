//! Regular expressions as clients write them (ECMA-262, as JSON Schema has it, and what Python shares with it), made into
//! expressions that mean the same to the grammar engine.
//!
//! The engine reads Rust's syntax: other escapes, other classes, sets within classes, no anchors but at the edges. So a
//! pattern is parsed here and written anew; what cannot be kept exactly is refused.

mod anchor;
mod class;
mod parse;
mod write;

use super::error::GrammarError;
pub(crate) use class::Class;

/// A parsed pattern.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    /// One character.
    Class(Class),
    /// One after the other; empty: the empty text.
    Concat(Vec<Node>),
    /// One of them.
    Alt(Vec<Node>),
    /// A group, capturing or not.
    Group(Box<Node>),
    /// So many times; `None`: no upper bound.
    Repeat(Box<Node>, u32, Option<u32>),
    /// `^`
    Start,
    /// `$`
    End,
}

impl Node {
    /// Whether it matches the empty text; for nodes without anchors.
    fn is_nullable(&self) -> bool {
        match self {
            Self::Class(_) => false,
            Self::Concat(nodes) => nodes.iter().all(Self::is_nullable),
            Self::Alt(nodes) => nodes.iter().any(Self::is_nullable),
            Self::Group(node) => node.is_nullable(),
            Self::Repeat(node, min, _) => *min == 0 || node.is_nullable(),
            Self::Start | Self::End => true,
        }
    }
}

/// The expression, without anchors, of all texts in which `pattern` is found (`pattern` of JSON Schema), as they stand in
/// JSON: some control characters are left out.
pub(crate) fn search(pattern: &str) -> Result<String, GrammarError> {
    let node = parse::parse(pattern)?;
    let mut node = anchor::without_anchors(node, false, false)?;
    class::spare_quotes(&mut node)?;
    Ok(write::write(&node))
}

/// Texts in which a pattern is found.
pub(crate) struct Found {
    /// Without anchors.
    pub(crate) expression: String,
    /// Whether the empty text is one of them.
    pub(crate) is_nullable: bool,
}

/// All texts in which `pattern` is found (`pattern` of JSON Schema), as they stand outside of JSON.
pub(crate) fn found(pattern: &str) -> Result<Found, GrammarError> {
    let node = parse::parse(pattern)?;
    let node = anchor::without_anchors(node, false, false)?;
    Ok(Found {
        expression: write::write(&node),
        is_nullable: node.is_nullable(),
    })
}

/// The expression, without anchors, of all texts that `pattern` matches from end to end.
pub(crate) fn full(pattern: &str) -> Result<String, GrammarError> {
    let node = parse::parse(pattern)?;
    let node = anchor::without_anchors(node, true, true)?;
    Ok(write::write(&node))
}

/// The expression of what `pattern` matches from end to end, when nothing but JSON's white space may be in it and it is
/// not empty. Whatever else it matches could stand between two tokens of JSON and spoil it.
pub(crate) fn whitespace(pattern: &str) -> Result<String, GrammarError> {
    let node = parse::parse(pattern)?;
    let mut node = anchor::without_anchors(node, true, true)?;
    class::keep_whitespace(&mut node)?;
    Ok(write::write(&node))
}

/// The expression of one class in brackets, given without them (`^a-z`).
pub(crate) fn bracket_class(text: &str) -> Result<String, GrammarError> {
    let node = parse::parse(&format!("[{text}]"))?;
    Ok(write::write(&node))
}

/// The expression of exactly this text.
pub(crate) fn literal(text: &str) -> String {
    let mut out = String::new();
    text.chars()
        .for_each(|letter| write::push_char(&mut out, letter));
    out
}

#[cfg(test)]
mod tests;
