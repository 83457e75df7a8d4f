//! Sets of characters.

use super::Node;
use crate::grammar::error::GrammarError;

/// A set of characters, as ranges and as names of Unicode properties.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Class {
    /// Everything but what follows.
    pub(super) negated: bool,
    /// From … to, both in it.
    pub(super) ranges: Vec<(char, char)>,
    /// Sets to be united with the ranges: (complement, ranges).
    pub(super) sets: Vec<(bool, Vec<(char, char)>)>,
    /// `\p{…}` and `\P{…}`: (complement, name).
    pub(super) properties: Vec<(bool, String)>,
    /// The character 0 is not in it, whatever stands above.
    pub(super) without_nul: bool,
}

const DIGITS: &[(char, char)] = &[('0', '9')];
const WORDS: &[(char, char)] = &[('0', '9'), ('A', 'Z'), ('_', '_'), ('a', 'z')];
const SPACES: &[(char, char)] = &[
    ('\t', '\r'),
    (' ', ' '),
    ('\u{a0}', '\u{a0}'),
    ('\u{1680}', '\u{1680}'),
    ('\u{2000}', '\u{200a}'),
    ('\u{2028}', '\u{2029}'),
    ('\u{202f}', '\u{202f}'),
    ('\u{205f}', '\u{205f}'),
    ('\u{3000}', '\u{3000}'),
    ('\u{feff}', '\u{feff}'),
];
/// What a dot does not match: ECMA-262's line ends.
const LINE_ENDS: &[(char, char)] = &[('\n', '\n'), ('\r', '\r'), ('\u{2028}', '\u{2029}')];
const JSON_WHITESPACE: [char; 4] = [' ', '\n', '\r', '\t'];

impl Class {
    pub(super) fn of(letter: char) -> Self {
        Self {
            ranges: vec![(letter, letter)],
            ..Self::default()
        }
    }

    pub(super) fn dot() -> Self {
        Self {
            negated: true,
            ranges: LINE_ENDS.to_vec(),
            ..Self::default()
        }
    }

    /// All characters.
    pub(super) fn any() -> Self {
        Self {
            ranges: vec![('\0', char::MAX)],
            ..Self::default()
        }
    }

    /// Unites with the class of `\d`, `\D`, `\w`, `\W`, `\s` or `\S`; whether the letter names one.
    pub(super) fn add_escape(&mut self, letter: char) -> bool {
        let ranges = match letter.to_ascii_lowercase() {
            'd' => DIGITS,
            'w' => WORDS,
            's' => SPACES,
            _ => return false,
        };
        self.sets
            .push((letter.is_ascii_uppercase(), ranges.to_vec()));
        true
    }

    /// Its characters, some maybe twice; `None` where they are more than `most`, or not told here.
    pub(super) fn letters(&self, most: usize) -> Option<Vec<char>> {
        if self.negated || !self.properties.is_empty() || self.sets.iter().any(|(not, _)| *not) {
            return None;
        }
        let sets = self.sets.iter().flat_map(|(_, ranges)| ranges);
        let letters = self.ranges.iter().chain(sets).flat_map(|&(a, b)| a..=b);
        let found: Vec<char> = letters.take(most + 1).collect();
        Some(found).filter(|found| found.len() <= most)
    }

    /// Properties are taken for empty.
    fn contains(&self, letter: char) -> bool {
        let within =
            |ranges: &[(char, char)]| ranges.iter().any(|&(a, b)| a <= letter && letter <= b);
        let found =
            within(&self.ranges) || self.sets.iter().any(|(not, ranges)| *not != within(ranges));
        found != self.negated
    }
}

/// Takes the character 0 from every class without a quote or a backslash.
///
/// The engine writes a class with all control characters as all escapes of one letter, and so with `\"` and `\\`, in the class or
/// not. One character less keeps it from that; united with others such classes come to no more.
pub(super) fn spare_quotes(node: &mut Node) -> Result<(), GrammarError> {
    match node {
        Node::Class(class) => {
            let is_known = class.properties.is_empty();
            if is_known && class.contains('"') && class.contains('\\') {
                return Ok(());
            }
            if *class == Class::of('\0') {
                return Err(GrammarError::new(
                    "the character 0 is not supported in patterns",
                ));
            }
            class.without_nul = !is_known || class.contains('\0');
            Ok(())
        }
        Node::Concat(nodes) | Node::Alt(nodes) => nodes.iter_mut().try_for_each(spare_quotes),
        Node::Group(node) | Node::Repeat(node, ..) => spare_quotes(node),
        Node::Start | Node::End => Ok(()),
    }
}

/// Cuts every class down to JSON's white space. An error where nothing is left, or for names of properties.
pub(super) fn keep_whitespace(node: &mut Node) -> Result<(), GrammarError> {
    match node {
        Node::Class(class) => {
            if !class.properties.is_empty() {
                return Err(GrammarError::new(
                    "\\p is not supported in a pattern for white space",
                ));
            }
            let ranges: Vec<_> = JSON_WHITESPACE
                .into_iter()
                .filter(|&letter| class.contains(letter))
                .map(|letter| (letter, letter))
                .collect();
            if ranges.is_empty() {
                return Err(GrammarError::new(
                    "the pattern for white space matches something else than spaces, tabs and line ends, which would not be JSON",
                ));
            }
            *class = Class {
                ranges,
                ..Class::default()
            };
            Ok(())
        }
        Node::Concat(nodes) | Node::Alt(nodes) => nodes.iter_mut().try_for_each(keep_whitespace),
        Node::Group(node) | Node::Repeat(node, ..) => keep_whitespace(node),
        Node::Start | Node::End => Ok(()),
    }
}
