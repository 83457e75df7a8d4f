//! The vocabulary as the grammar engine knows it: a trie of all tokens' bytes.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::error::GrammarError;
use crate::text::Vocabulary;

/// Longer tokens are never allowed: the trie cannot hold them, and no tokenizer needs them.
const MAX_TOKEN_BYTES: usize = 1000;
/// Ids have 24 bits in the trie.
const MAX_VOCABULARY: usize = (1 << 24) - 1;

/// The trie. Special tokens stand under a byte that is in no text, so that no text leads to them.
pub(super) fn token_trie(
    vocabulary: &Vocabulary,
    eos_token_ids: &[u32],
) -> Result<TokEnv, GrammarError> {
    let num_tokens = vocabulary.len();
    if num_tokens == 0 || num_tokens > MAX_VOCABULARY {
        return Err(GrammarError::new(format!(
            "a vocabulary of {num_tokens} tokens cannot be used with grammars"
        )));
    }
    if eos_token_ids.is_empty() {
        return Err(GrammarError::new(
            "the model names no token that ends a text, so that no grammar can end",
        ));
    }
    if let Some(id) = eos_token_ids.iter().find(|&&id| id as usize >= num_tokens) {
        return Err(GrammarError::new(format!(
            "the end token {id} is not in the vocabulary (0 … {})",
            num_tokens - 1
        )));
    }
    let words: Vec<Vec<u8>> = (0..num_tokens as u32)
        .map(|id| word(vocabulary, id, eos_token_ids.contains(&id)))
        .collect();
    let info = TokRxInfo::new(num_tokens as u32, eos_token_ids[0]);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(eos_token_ids);
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

fn word(vocabulary: &Vocabulary, id: u32, ends: bool) -> Vec<u8> {
    let piece = vocabulary.piece(id).unwrap_or_default();
    if ends || vocabulary.is_special(id) {
        return [
            &[TokTrie::SPECIAL_TOKEN_MARKER],
            format!("<{id}>").as_bytes(),
        ]
        .concat();
    }
    // A piece with the marker is no text: it could only be taken for a special token.
    if piece.len() > MAX_TOKEN_BYTES || piece.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
        return Vec::new();
    }
    piece.to_vec()
}
