//! One sequence's text, token by token.

use std::sync::Arc;

use super::stop::StopSet;
use super::utf8::Utf8Tail;
use super::vocab::Vocabulary;

/// Incremental detokenizer of one sequence. 40 bytes without stop strings, and no allocation once its buffers are warm.
///
/// All pushed text followed by the flushed text equals the one-shot decode of the ids, cut at the stop string.
#[derive(Debug)]
pub struct StreamDecoder {
    vocabulary: Arc<Vocabulary>,
    stop: Option<Box<StopState>>,
    tail: Utf8Tail,
    skip_special_tokens: bool,
    /// Special ids that leave their text all the same, ascending.
    shown_special_ids: Option<Arc<Vec<u32>>>,
}

impl StreamDecoder {
    /// `stop`: compiled once per request; `None` where nothing can match (an empty list costs nothing either).
    pub fn new(
        vocabulary: Arc<Vocabulary>,
        skip_special_tokens: bool,
        stop: Option<Arc<StopSet>>,
    ) -> Self {
        let stop = stop
            .filter(|set| !set.strings().is_empty())
            .map(|set| Box::new(StopState::new(set)));
        Self {
            vocabulary,
            stop,
            tail: Utf8Tail::default(),
            skip_special_tokens,
            shown_special_ids: None,
        }
    }

    /// The same, but for these special ids, ascending, which leave their text though others leave none.
    #[must_use]
    pub fn showing(mut self, ids: Option<Arc<Vec<u32>>>) -> Self {
        self.shown_special_ids = ids;
        self
    }

    fn is_hidden(&self, token: u32) -> bool {
        self.skip_special_tokens
            && self.vocabulary.is_special(token)
            && self
                .shown_special_ids
                .as_ref()
                .is_none_or(|ids| ids.binary_search(&token).is_err())
    }

    /// Appends to `out` the text that became final with this token.
    ///
    /// Returns the index of the stop string that ended the text, if one did with this token; from then on nothing more
    /// is appended. Ids out of range stand for nothing (models pad their vocabulary), but count for `min_tokens`.
    #[inline]
    pub fn push(&mut self, token: u32, out: &mut String) -> Option<u32> {
        let piece = match self.vocabulary.piece(token) {
            Some(piece) if !self.is_hidden(token) => piece,
            _ => &[],
        };
        match &mut self.stop {
            None => {
                self.tail.push(piece, out);
                None
            }
            Some(stop) => stop.push(piece, &mut self.tail, out),
        }
    }

    /// The sequence has ended: appends what was held back, an incomplete character as U+FFFD.
    ///
    /// Returns a stop string that this U+FFFD completed. Appends nothing after a match or a former flush.
    pub fn flush(&mut self, out: &mut String) -> Option<u32> {
        match &mut self.stop {
            None => {
                self.tail.flush(out);
                None
            }
            Some(stop) => stop.flush(&mut self.tail, out),
        }
    }

    /// The stop string that ended the text.
    pub fn matched(&self) -> Option<&str> {
        let stop = self.stop.as_deref()?;
        stop.matched
            .map(|index| stop.set.strings()[index as usize].as_str())
    }
}

/// Search for stop strings and the text that waits for its outcome.
#[derive(Debug)]
struct StopState {
    set: Arc<StopSet>,
    /// The end of the text, not yet handed out: after each push exactly the longest live prefix of a stop string.
    held: String,
    /// The automaton's state after `held`.
    state: u32,
    num_tokens: u32,
    matched: Option<u32>,
}

impl StopState {
    fn new(set: Arc<StopSet>) -> Self {
        Self {
            set,
            held: String::new(),
            state: 0,
            num_tokens: 0,
            matched: None,
        }
    }

    fn push(&mut self, piece: &[u8], tail: &mut Utf8Tail, out: &mut String) -> Option<u32> {
        if self.matched.is_some() {
            return None;
        }
        self.num_tokens = self.num_tokens.saturating_add(1);
        let seen = self.held.len();
        tail.push(piece, &mut self.held);
        self.scan(seen, out)
    }

    fn flush(&mut self, tail: &mut Utf8Tail, out: &mut String) -> Option<u32> {
        if self.matched.is_some() {
            return None;
        }
        let seen = self.held.len();
        tail.flush(&mut self.held);
        let matched = self.scan(seen, out);
        out.push_str(&self.held);
        self.held.clear();
        self.state = 0;
        matched
    }

    /// Searches `held[seen..]`, the new text, and hands out what can be no part of a stop string any more.
    ///
    /// The search ends at the first position where a stop string ends; of several that end there the longest wins, so
    /// no stop string is left in the text before the cut.
    fn scan(&mut self, seen: usize, out: &mut String) -> Option<u32> {
        let fresh = &self.held.as_bytes()[seen..];
        if self.state != 0 || !self.set.starts_none(fresh) {
            let gate_open = self.num_tokens > self.set.min_tokens;
            for (index, &byte) in fresh.iter().enumerate() {
                self.state = self.set.next(self.state, byte);
                if gate_open && let Some(matched) = self.set.matched(self.state) {
                    let stop_len = self.set.strings()[matched as usize].len();
                    self.finish(matched, seen + index + 1, stop_len, out);
                    return Some(matched);
                }
            }
        }
        // Text that ends with its stop string has nothing to hide.
        let num_held = if self.set.include_in_output {
            0
        } else {
            self.set.live_len(self.state)
        };
        self.hand_out(self.held.len() - num_held, out);
        None
    }

    fn finish(&mut self, matched: u32, end: usize, stop_len: usize, out: &mut String) {
        let cut = if self.set.include_in_output {
            end
        } else {
            end - stop_len
        };
        self.hand_out(cut, out);
        self.held = String::new();
        self.matched = Some(matched);
    }

    fn hand_out(&mut self, len: usize, out: &mut String) {
        out.push_str(&self.held[..len]);
        self.held.drain(..len);
    }
}
