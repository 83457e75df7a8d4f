//! Special tokens in the fixed parts of a tag.

use std::fmt::Write;

use crate::grammar::pattern;
use crate::text::Vocabulary;

/// Special tokens by their text: in the fixed parts of a tag, that text means the token, as the model writes it.
#[derive(Debug)]
pub(in crate::grammar) struct SpecialTokens {
    by_text: Vec<(String, u32)>,
}

impl SpecialTokens {
    pub(in crate::grammar) fn new(vocabulary: &Vocabulary, eos_token_ids: &[u32]) -> Self {
        let special = (0..vocabulary.len() as u32)
            .filter(|id| vocabulary.is_special(*id) && !eos_token_ids.contains(id));
        let by_text = special.filter_map(|id| {
            let text = std::str::from_utf8(vocabulary.piece(id)?).ok()?;
            (!text.is_empty()).then(|| (text.to_owned(), id))
        });
        Self {
            by_text: by_text.collect(),
        }
    }

    /// The first special token in the text: (where, its text's length, id); the longest where several begin.
    pub(super) fn first_in(&self, text: &str) -> Option<(usize, usize, u32)> {
        let found = self
            .by_text
            .iter()
            .filter_map(|(name, id)| Some((text.find(name.as_str())?, name.len(), *id)));
        found.min_by_key(|&(start, length, _)| (start, usize::MAX - length))
    }

    /// A fixed text as Lark: expressions and tokens.
    pub(super) fn lark(&self, mut text: &str) -> String {
        let mut out = String::new();
        while let Some((start, length, id)) = self.first_in(text) {
            push_literal(&mut out, &text[..start]);
            let _ = write!(out, " <[{id}]>");
            text = &text[start + length..];
        }
        push_literal(&mut out, text);
        out
    }
}

fn push_literal(out: &mut String, text: &str) {
    if !text.is_empty() {
        let _ = write!(out, " /{}/", pattern::literal(text));
    }
}
