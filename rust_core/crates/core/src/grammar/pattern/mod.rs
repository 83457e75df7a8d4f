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

    /// All texts that it matches, some maybe twice; `None` where they are more than `most`. For nodes without anchors.
    fn texts(&self, most: usize) -> Option<Vec<String>> {
        let found = match self {
            Self::Class(class) => {
                let letters = class.letters(most)?;
                letters.into_iter().map(String::from).collect()
            }
            Self::Concat(nodes) => nodes.iter().try_fold(vec![String::new()], |texts, node| {
                followed(&texts, node, most)
            })?,
            Self::Alt(nodes) => {
                let branches = nodes.iter().map(|node| node.texts(most));
                branches.collect::<Option<Vec<_>>>()?.concat()
            }
            Self::Group(node) => node.texts(most)?,
            Self::Repeat(node, min, max) => {
                let max = (*max).filter(|max| *max as usize <= most)?;
                let (mut texts, mut found) = (vec![String::new()], Vec::new());
                for count in 0..=max {
                    if count >= *min {
                        found.extend_from_slice(&texts);
                    }
                    if count < max {
                        texts = followed(&texts, node, most)?;
                    }
                }
                found
            }
            Self::Start | Self::End => vec![String::new()],
        };
        Some(found).filter(|found| found.len() <= most)
    }
}

/// Each of these texts with each that the node matches behind it.
fn followed(texts: &[String], node: &Node, most: usize) -> Option<Vec<String>> {
    let more = node.texts(most)?;
    if texts.len() * more.len() > most {
        return None;
    }
    let each = texts
        .iter()
        .flat_map(|text| more.iter().map(move |end| format!("{text}{end}")));
    Some(each.collect())
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

/// All texts in which `pattern` is found, in order; `None` where they are more than `most`.
pub(crate) fn texts(pattern: &str, most: usize) -> Result<Option<Vec<String>>, GrammarError> {
    let node = anchor::without_anchors(parse::parse(pattern)?, false, false)?;
    Ok(node.texts(most).map(|mut found| {
        found.sort();
        found.dedup();
        found
    }))
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
