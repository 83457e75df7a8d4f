//! Log-probabilities of a prompt's tokens, as they are told: at once, with the first delta of its request.

use crate::delta::TokenLogprobs;

/// Of each prompt token but the first, in order: the token's own log-probability, then those of the likeliest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptLogprobs {
    num_columns: usize,
    ranks: Vec<i32>,
    token_ids: Vec<i32>,
    logprobs: Vec<f32>,
}

impl PromptLogprobs {
    /// For a prompt of `num_prompt` tokens with `num_top` likeliest ones each.
    pub(crate) fn new(num_prompt: usize, num_top: usize) -> Self {
        let (len, num_columns) = (num_prompt.saturating_sub(1), num_top + 1);
        Self {
            num_columns,
            ranks: Vec::with_capacity(len),
            token_ids: Vec::with_capacity(len * num_columns),
            logprobs: Vec::with_capacity(len * num_columns),
        }
    }

    /// Appends a token: a row of the slab, of which the first columns count.
    pub(crate) fn push(&mut self, rank: i32, token_ids: &[i32], logprobs: &[f32]) {
        self.ranks.push(rank);
        self.token_ids
            .extend_from_slice(&token_ids[..self.num_columns]);
        self.logprobs
            .extend_from_slice(&logprobs[..self.num_columns]);
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Whether the prompt has no second token.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Of the prompt's token `index + 1`. `None` behind the last.
    pub fn get(&self, index: usize) -> Option<TokenLogprobs<'_>> {
        let columns = index * self.num_columns..(index + 1) * self.num_columns;
        Some(TokenLogprobs {
            rank: *self.ranks.get(index)?,
            token_ids: &self.token_ids[columns.clone()],
            logprobs: &self.logprobs[columns],
        })
    }
}
