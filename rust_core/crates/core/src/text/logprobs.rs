//! Log-probabilities in the two forms that chat and completions show them in, as JSON.
//!
//! Texts come from the vocabulary's bytes, never from decoded text: a token may be a part of a character.

use std::io::Write;
use std::ops::Range;
use std::str::from_utf8;
use std::sync::Arc;

use super::json::{push_json_integer, push_json_string};
use super::utf8::Utf8Tail;
use super::vocab::Vocabulary;

/// What stands for values that JSON cannot say: infinities, and what is no number.
const MIN_LOGPROB: f64 = -9999.0;

/// How a reply shows log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogprobsForm {
    /// `{"content": […]}`: an object per token, its bytes joining up to the text's.
    Chat,
    /// Four parallel lists; `text_offset` counts characters and runs on from event to event.
    Completion,
}

/// One sequence's log-probabilities on their way to its client. What was added is taken once.
#[derive(Debug)]
pub struct LogprobsEncoder {
    texts: TokenTexts,
    pub(super) num_top: usize,
    tokens: Tokens,
}

/// What was added and not taken yet.
#[derive(Debug)]
enum Tokens {
    /// The entries, with commas between them.
    Chat(Vec<u8>),
    Completion(Box<Lists>),
}

impl LogprobsEncoder {
    /// `num_top`: most alternatives shown per token. `skip_special`: special tokens add nothing to the text.
    pub fn new(
        vocabulary: Arc<Vocabulary>,
        form: LogprobsForm,
        num_top: usize,
        skip_special: bool,
    ) -> Self {
        let tokens = match form {
            LogprobsForm::Chat => Tokens::Chat(Vec::new()),
            LogprobsForm::Completion => Tokens::Completion(Box::default()),
        };
        Self {
            texts: TokenTexts {
                vocabulary,
                skip_special,
            },
            num_top,
            tokens,
        }
    }

    /// Adds a token: the sampled id with its log-probability, and the likeliest ones, best first.
    pub fn add(&mut self, sampled: (i32, f64), top: impl Iterator<Item = (i32, f64)>) {
        let top = top.take(self.num_top);
        match &mut self.tokens {
            Tokens::Chat(entries) => self.texts.push_chat(entries, sampled, top),
            Tokens::Completion(lists) => lists.push(&self.texts, sampled, top),
        }
    }

    /// The lists of a completion, and texts for them.
    pub(super) fn lists(&mut self) -> Option<(&mut Lists, &TokenTexts)> {
        match &mut self.tokens {
            Tokens::Chat(_) => None,
            Tokens::Completion(lists) => Some((lists, &self.texts)),
        }
    }

    /// Appends the JSON value of all tokens since the last take.
    pub fn take_into(&mut self, out: &mut Vec<u8>) {
        match &mut self.tokens {
            Tokens::Chat(entries) => {
                out.extend_from_slice(b"{\"content\":[");
                out.append(entries);
                out.extend_from_slice(b"]}");
            }
            Tokens::Completion(lists) => lists.take_into(out),
        }
    }
}

/// Texts of single tokens.
#[derive(Debug)]
pub(super) struct TokenTexts {
    vocabulary: Arc<Vocabulary>,
    skip_special: bool,
}

impl TokenTexts {
    /// The token's bytes. A model's rows beyond the vocabulary (padding) have none.
    pub(super) fn piece(&self, id: i32) -> &[u8] {
        let id = u32::try_from(id).ok();
        id.and_then(|id| self.vocabulary.piece(id))
            .unwrap_or_default()
    }

    /// What the token adds to a whole text that begins with it.
    pub(super) fn first_piece(&self, id: i32) -> &[u8] {
        let piece = self.piece(id);
        if self.vocabulary.strips_leading_space() {
            piece.strip_prefix(b" ").unwrap_or(piece)
        } else {
            piece
        }
    }

    /// What the token adds to the text.
    fn shown_piece(&self, id: i32) -> &[u8] {
        let is_special = u32::try_from(id).is_ok_and(|id| self.vocabulary.is_special(id));
        if self.skip_special && is_special {
            &[]
        } else {
            self.piece(id)
        }
    }

    /// Appends an entry of chat's list, with its comma where one goes before it.
    fn push_chat(
        &self,
        entries: &mut Vec<u8>,
        sampled: (i32, f64),
        top: impl Iterator<Item = (i32, f64)>,
    ) {
        separate(entries);
        self.push_alternative(entries, sampled);
        entries.extend_from_slice(b",\"top_logprobs\":[");
        for (place, alternative) in top.enumerate() {
            if place > 0 {
                entries.push(b',');
            }
            self.push_alternative(entries, alternative);
            entries.push(b'}');
        }
        entries.extend_from_slice(b"]}");
    }

    /// Appends one token as chat shows it, but for the closing brace.
    fn push_alternative(&self, out: &mut Vec<u8>, (id, logprob): (i32, f64)) {
        out.extend_from_slice(b"{\"token\":");
        push_name(out, self.piece(id));
        out.extend_from_slice(b",\"logprob\":");
        push_logprob(out, logprob);
        out.extend_from_slice(b",\"bytes\":[");
        for (place, &byte) in self.shown_piece(id).iter().enumerate() {
            if place > 0 {
                out.push(b',');
            }
            push_json_integer(out, byte.into());
        }
        out.push(b']');
    }
}

/// The lists of a completion, without their brackets.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// Characters of the text before the next token, and the incomplete one at its end.
    offset: u64,
    tail: Utf8Tail,
    text_offset: Vec<u8>,
    token_logprobs: Vec<u8>,
    tokens: Vec<u8>,
    top_logprobs: Vec<u8>,
    /// Room to work in: a token's text; where the names of one object lie.
    text: String,
    names: Vec<Range<usize>>,
}

impl Lists {
    fn push(
        &mut self,
        texts: &TokenTexts,
        sampled: (i32, f64),
        top: impl Iterator<Item = (i32, f64)>,
    ) {
        self.push_shown(texts, texts.shown_piece(sampled.0), sampled, top);
    }

    /// As `push`, for a token that adds `shown` to the text.
    pub(super) fn push_shown(
        &mut self,
        texts: &TokenTexts,
        shown: &[u8],
        sampled: (i32, f64),
        top: impl Iterator<Item = (i32, f64)>,
    ) {
        let (id, logprob) = sampled;
        self.push_text(texts, shown, id);
        separate(&mut self.token_logprobs);
        push_logprob(&mut self.token_logprobs, logprob);
        self.push_object(texts, top.chain(std::iter::once(sampled)));
    }

    /// A token without log-probabilities.
    pub(super) fn push_unscored(&mut self, texts: &TokenTexts, shown: &[u8], id: i32) {
        self.push_text(texts, shown, id);
        for list in [&mut self.token_logprobs, &mut self.top_logprobs] {
            separate(list);
            list.extend_from_slice(b"null");
        }
    }

    /// What follows is another text, whose characters do not go on with this one's last bytes.
    pub(super) fn end_text(&mut self) {
        self.text.clear();
        self.tail.flush(&mut self.text);
        self.offset += self.text.chars().count() as u64;
    }

    /// The token's name, and where the text stands before it.
    fn push_text(&mut self, texts: &TokenTexts, shown: &[u8], id: i32) {
        separate(&mut self.text_offset);
        push_json_integer(&mut self.text_offset, self.offset);
        self.text.clear();
        self.tail.push(shown, &mut self.text);
        self.offset += self.text.chars().count() as u64;
        separate(&mut self.tokens);
        push_name(&mut self.tokens, texts.piece(id));
    }

    /// An object of texts and log-probabilities. Of equal texts the first stays.
    fn push_object(&mut self, texts: &TokenTexts, entries: impl Iterator<Item = (i32, f64)>) {
        let out = &mut self.top_logprobs;
        separate(out);
        out.push(b'{');
        self.names.clear();
        for (id, logprob) in entries {
            let before = out.len();
            if !self.names.is_empty() {
                out.push(b',');
            }
            let start = out.len();
            push_name(out, texts.piece(id));
            let name = start..out.len();
            let mut others = self.names.iter();
            if others.any(|other| out[other.clone()] == out[name.clone()]) {
                out.truncate(before);
                continue;
            }
            self.names.push(name);
            out.push(b':');
            push_logprob(out, logprob);
        }
        out.push(b'}');
    }

    fn take_into(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"text_offset\":[");
        out.append(&mut self.text_offset);
        out.extend_from_slice(b"],\"token_logprobs\":[");
        out.append(&mut self.token_logprobs);
        out.extend_from_slice(b"],\"tokens\":[");
        out.append(&mut self.tokens);
        out.extend_from_slice(b"],\"top_logprobs\":[");
        out.append(&mut self.top_logprobs);
        out.extend_from_slice(b"]}");
    }
}

/// A comma behind what is there.
fn separate(list: &mut Vec<u8>) {
    if !list.is_empty() {
        list.push(b',');
    }
}

/// Appends a token's text as a JSON string; a part of a character is written `bytes:\xe2\x82`.
pub(super) fn push_name(out: &mut Vec<u8>, piece: &[u8]) {
    if let Ok(text) = from_utf8(piece) {
        return push_json_string(out, text);
    }
    out.extend_from_slice(b"\"bytes:");
    for byte in piece {
        // A Vec takes whatever is written.
        let _ = write!(out, "\\\\x{byte:02x}");
    }
    out.push(b'"');
}

/// Appends a log-probability as Python's `repr` writes it: the fewest digits that mean this number, and of those the
/// nearest, a tie going to the even digit (the standard library's formatting rounds ties up).
pub(super) fn push_logprob(out: &mut Vec<u8>, logprob: f64) {
    let shown = if logprob.is_finite() {
        logprob.max(MIN_LOGPROB)
    } else {
        MIN_LOGPROB
    };
    let mut buffer = ryu::Buffer::new();
    let digits = buffer.format_finite(shown).as_bytes();
    if shown.abs() < 1e-4 && shown != 0.0 {
        return push_small(out, digits);
    }
    match digits.iter().position(|&byte| byte == b'e') {
        // From 1e16 on, as Python, which writes the sign.
        Some(mark) => {
            out.extend_from_slice(&digits[..=mark]);
            out.push(b'+');
            out.extend_from_slice(&digits[mark + 1..]);
        }
        None => out.extend_from_slice(digits),
    }
}

/// Appends a number below 1e-4 from ryu's digits: Python has an exponent in all of them, of two digits or more.
fn push_small(out: &mut Vec<u8>, digits: &[u8]) {
    let (sign, digits) = digits.split_at(usize::from(digits[0] == b'-'));
    out.extend_from_slice(sign);
    if let Some(significant) = digits.strip_prefix(b"0.0000") {
        out.push(significant[0]);
        if significant.len() > 1 {
            out.push(b'.');
            out.extend_from_slice(&significant[1..]);
        }
        return out.extend_from_slice(b"e-05");
    }
    let end = digits.len();
    if digits[end - 2] == b'-' {
        out.extend_from_slice(&digits[..end - 1]);
        out.push(b'0');
        out.push(digits[end - 1]);
    } else {
        out.extend_from_slice(digits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary() -> Arc<Vocabulary> {
        let pieces: [&[u8]; 6] = [
            b" a",
            b"\xe6\x97",
            b"\xa5",
            b"</s>",
            b"\"\n",
            b"bytes:\\xa5",
        ];
        Arc::new(Vocabulary::new(pieces, &[3], false).unwrap())
    }

    fn encoder(form: LogprobsForm, num_top: usize, skip_special: bool) -> LogprobsEncoder {
        LogprobsEncoder::new(vocabulary(), form, num_top, skip_special)
    }

    fn taken(encoder: &mut LogprobsEncoder) -> String {
        let mut out = Vec::new();
        encoder.take_into(&mut out);
        String::from_utf8(out).unwrap()
    }

    fn number(value: f64) -> String {
        let mut out = Vec::new();
        push_logprob(&mut out, value);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn numbers_are_pythons() {
        for (value, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (-1.0, "-1.0"),
            (f64::from(-0.1f32), "-0.10000000149011612"),
            (-0.0001, "-0.0001"),
            (-0.000_099_9, "-9.99e-05"),
            (-0.00001, "-1e-05"),
            (f64::from(-1e-5f32), "-9.999999747378752e-06"),
            (f64::from(-771.244_2f32), "-771.2442016601562"),
            (-1.5e-7, "-1.5e-07"),
            (-2.5e-10, "-2.5e-10"),
            (-5e-324, "-5e-324"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1.5e100, "1.5e+100"),
            (-9998.5, "-9998.5"),
            (-1e5, "-9999.0"),
            (f64::NEG_INFINITY, "-9999.0"),
            (f64::INFINITY, "-9999.0"),
            (f64::NAN, "-9999.0"),
        ] {
            assert_eq!(number(value), expected);
        }
    }

    #[test]
    fn chat_shows_what_a_token_adds() {
        let mut encoder = encoder(LogprobsForm::Chat, 1, true);
        encoder.add((4, -0.5), [(1, -0.25), (0, -1.0)].into_iter());
        encoder.add((3, -1.0), std::iter::empty());
        assert_eq!(
            taken(&mut encoder),
            r#"{"content":[{"token":"\"\n","logprob":-0.5,"bytes":[34,10],"top_logprobs":["#
                .to_owned()
                + r#"{"token":"bytes:\\xe6\\x97","logprob":-0.25,"bytes":[230,151]}]},"#
                + r#"{"token":"</s>","logprob":-1.0,"bytes":[],"top_logprobs":[]}]}"#
        );
        assert_eq!(taken(&mut encoder), r#"{"content":[]}"#);
    }

    #[test]
    fn rows_that_are_no_token_have_no_text() {
        let mut encoder = encoder(LogprobsForm::Chat, 1, false);
        encoder.add((6, -0.5), [(-1, -0.5)].into_iter());
        let nothing = r#"{"token":"","logprob":-0.5,"bytes":[]"#;
        assert_eq!(
            taken(&mut encoder),
            format!(r#"{{"content":[{nothing},"top_logprobs":[{nothing}}}]}}]}}"#)
        );
    }

    #[test]
    fn offsets_count_characters_when_they_are_complete() {
        let mut encoder = encoder(LogprobsForm::Completion, 0, true);
        for id in [0, 1, 2, 3, 4] {
            encoder.add((id, -1.0), std::iter::empty());
        }
        let all = taken(&mut encoder);
        assert!(
            all.starts_with(r#"{"text_offset":[0,2,2,3,3],"token_logprobs":[-1.0,-1.0,"#),
            "{all}"
        );
        encoder.add((0, -1.0), std::iter::empty());
        assert!(taken(&mut encoder).starts_with(r#"{"text_offset":[5],"#));
    }

    #[test]
    fn of_equal_texts_the_likeliest_stays() {
        let mut encoder = encoder(LogprobsForm::Completion, 3, true);
        encoder.add((0, -3.0), [(5, -0.5), (2, -1.0), (0, -3.0)].into_iter());
        let all = taken(&mut encoder);
        let object = r#"{"bytes:\\xa5":-0.5," a":-3.0}"#;
        assert!(
            all.ends_with(&format!(r#""tokens":[" a"],"top_logprobs":[{object}]}}"#)),
            "{all}"
        );
    }
}
