//! What a lane has to send, and the events that become of it.

use std::ops::Range;

use oneloop_core::TokenLogprobs;
use oneloop_core::text::{LogprobsEncoder, push_json_integer, push_json_string};

use crate::logprobs::{Shared, lock};

/// Bytes of events that are enough for one write: an ordinary connection's buffer takes them at once.
const LARGE_WRITE: usize = 16 << 10;

/// What a reply's text events are made of, beside text and log-probabilities.
pub(super) struct Frame {
    /// Before the text's JSON string.
    pub(super) before: Box<[u8]>,
    /// What goes between it and `after`.
    pub(super) logprobs: Option<Logprobs>,
    /// The end of an event, or what goes before its usage.
    pub(super) after: Box<[u8]>,
    /// What goes behind `after`.
    pub(super) usage: Option<Usage>,
    /// Whether the body goes in HTTP chunks.
    pub(super) is_chunked: bool,
}

/// How a reply's events show log-probabilities.
pub(super) struct Logprobs {
    /// Before their JSON value.
    pub(super) before: Box<[u8]>,
    pub(super) encoder: Shared,
}

/// How a reply's events show its usage so far: the total of tokens, and those of the output.
pub(super) struct Usage {
    /// Between the two.
    pub(super) between: Box<[u8]>,
    /// The end of an event.
    pub(super) after: Box<[u8]>,
    pub(super) num_prompt_tokens: u64,
    /// Of the output, before the lane was opened.
    pub(super) num_earlier_tokens: u64,
}

impl Usage {
    fn push(&self, out: &mut Vec<u8>, num_tokens: u64) {
        let num_output_tokens = self.num_earlier_tokens + num_tokens;
        push_json_integer(out, self.num_prompt_tokens + num_output_tokens);
        out.extend_from_slice(&self.between);
        push_json_integer(out, num_output_tokens);
        out.extend_from_slice(&self.after);
    }
}

impl Frame {
    /// Appends the first events of what waits, all of them in one chunk; stops once `LARGE_WRITE` bytes are there.
    pub(super) fn push(&self, out: &mut Vec<u8>, waiting: &mut Waiting) {
        // Room for the chunk's length, which is known only afterwards: sixteen digits and a line end.
        const HEAD: usize = 18;
        let start = out.len();
        if self.is_chunked {
            out.extend_from_slice(&[0; HEAD]);
        }
        let body = out.len();
        let mut count = 0;
        for (text, tokens, num_tokens) in waiting.events() {
            out.extend_from_slice(&self.before);
            push_json_string(out, text);
            if let Some(logprobs) = &self.logprobs {
                out.extend_from_slice(&logprobs.before);
                let encoder = &mut *lock(&logprobs.encoder);
                waiting.tokens.encode(tokens, encoder);
                encoder.take_into(out);
            }
            out.extend_from_slice(&self.after);
            if let Some(usage) = &self.usage {
                usage.push(out, num_tokens);
            }
            count += 1;
            if out.len() - body >= LARGE_WRITE {
                break;
            }
        }
        waiting.pop_front(count);
        if self.is_chunked {
            let head = format!("{:x}\r\n", out.len() - body);
            let unused = HEAD - head.len();
            out[start + unused..body].copy_from_slice(head.as_bytes());
            out.drain(start..start + unused);
            out.extend_from_slice(b"\r\n");
        }
    }
}

/// Texts of several steps, in one piece, and log-probabilities of their tokens where they were asked.
#[derive(Default)]
pub(super) struct Waiting {
    text: String,
    tokens: Tokens,
    events: Vec<End>,
}

/// Where an event ends.
#[derive(Clone, Copy, Default)]
struct End {
    /// In the text.
    text: u32,
    /// In the tokens whose log-probabilities are shown.
    tokens: u32,
    /// Tokens of the lane until here.
    num_tokens: u64,
}

impl Waiting {
    /// Adds what a step brought. Tokens without text (a part of a character) go with the next text.
    ///
    /// `num_tokens`: of the lane, with these.
    pub(super) fn push<'a>(
        &mut self,
        text: &str,
        num_tokens: u64,
        logprobs: Option<impl Iterator<Item = TokenLogprobs<'a>>>,
    ) {
        for token in logprobs.into_iter().flatten() {
            self.tokens.push(&token);
        }
        if !text.is_empty() {
            self.text.push_str(text);
            self.events.push(End {
                text: self.text.len() as u32,
                tokens: self.tokens.len(),
                num_tokens,
            });
        }
    }

    /// Whether no event waits.
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Makes one event of all that wait.
    pub(super) fn merge(&mut self) {
        let merged = self.events.len().saturating_sub(1);
        self.events.drain(..merged);
    }

    /// Gives the tokens to the encoder that are in no event: whoever goes on shows them with the next text.
    pub(super) fn leave_rest(&self, encoder: &mut LogprobsEncoder) {
        let start = self.events.last().map_or(0, |end| end.tokens);
        self.tokens.encode(start..self.tokens.len(), encoder);
    }

    /// Of each: its text, its tokens, and how many the lane has had until then.
    fn events(&self) -> impl Iterator<Item = (&str, Range<u32>, u64)> {
        let starts = std::iter::once(End::default()).chain(self.events.iter().copied());
        starts.zip(&self.events).map(|(start, end)| {
            let text = &self.text[start.text as usize..end.text as usize];
            (text, start.tokens..end.tokens, end.num_tokens)
        })
    }

    /// Forgets the first `count` events, at least one.
    fn pop_front(&mut self, count: usize) {
        let gone = self.events[count - 1];
        self.text.drain(..gone.text as usize);
        self.tokens.pop_front(gone.tokens);
        self.events.drain(..count);
        for end in &mut self.events {
            end.text -= gone.text;
            end.tokens -= gone.tokens;
        }
    }
}

/// Log-probabilities as they come, to be encoded when they are sent.
#[derive(Default)]
struct Tokens {
    /// Of each token the sampled id and the top ones.
    ids: Vec<i32>,
    values: Vec<f32>,
    /// Where each token's end.
    ends: Vec<u32>,
}

impl Tokens {
    fn push(&mut self, token: &TokenLogprobs<'_>) {
        self.ids.extend_from_slice(token.token_ids);
        self.values.extend_from_slice(token.logprobs);
        self.ends.push(self.ids.len() as u32);
    }

    fn len(&self) -> u32 {
        self.ends.len() as u32
    }

    /// Where a token's entries begin.
    fn start(&self, token: u32) -> u32 {
        token
            .checked_sub(1)
            .map_or(0, |before| self.ends[before as usize])
    }

    fn encode(&self, tokens: Range<u32>, encoder: &mut LogprobsEncoder) {
        for token in tokens {
            let entries = self.start(token) as usize..self.ends[token as usize] as usize;
            let ids = self.ids[entries.clone()].iter().copied();
            let values = self.values[entries].iter().copied().map(f64::from);
            let mut ranked = ids.zip(values);
            if let Some(sampled) = ranked.next() {
                encoder.add(sampled, ranked);
            }
        }
    }

    /// Forgets the first `count` tokens.
    fn pop_front(&mut self, count: u32) {
        let gone = self.start(count);
        self.ids.drain(..gone as usize);
        self.values.drain(..gone as usize);
        self.ends.drain(..count as usize);
        self.ends.iter_mut().for_each(|end| *end -= gone);
    }
}
