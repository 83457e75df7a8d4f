//! Log-probabilities of a prompt as JSON: in front of a completion's own, where the prompt is echoed, and as the list
//! that the field `prompt_logprobs` asks for.

use std::cmp::Ordering;

use super::json::push_json_integer;
use super::logprobs::{LogprobsEncoder, push_logprob, push_name};
use super::vocab::Vocabulary;
use crate::prompt::PromptLogprobs;

impl LogprobsEncoder {
    /// Adds an echoed prompt, whose first token has no log-probability. Nothing was added before.
    ///
    /// `num_hidden`: tokens at its start without a place in the echoed text. For chat, whose prompts are not echoed,
    /// nothing happens.
    pub fn add_prompt(&mut self, prompt: &[i32], logprobs: &PromptLogprobs, num_hidden: usize) {
        let num_top = self.num_top;
        let Some((lists, texts)) = self.lists() else {
            return;
        };
        for (place, &id) in prompt.iter().enumerate() {
            let scored = place.checked_sub(1).and_then(|at| logprobs.get(at));
            let shown = match place.cmp(&num_hidden) {
                Ordering::Less => &[],
                Ordering::Equal => texts.first_piece(id),
                Ordering::Greater => texts.piece(id),
            };
            match scored {
                Some(scored) => {
                    let pair = |(&id, &logprob): (&i32, &f32)| (id, f64::from(logprob));
                    let mut pairs = scored.token_ids.iter().zip(scored.logprobs).map(pair);
                    let own = pairs.next().unwrap_or((id, f64::NAN));
                    lists.push_shown(texts, shown, own, pairs.take(num_top));
                }
                None => lists.push_unscored(texts, shown, id),
            }
        }
        lists.end_text();
    }
}

/// `[null, {"<id>": {"logprob": …, "rank": …, "decoded_token": …}, …}, …]`: an object per token, the token itself
/// first, then the `num_top` likeliest ones. The first token has none.
pub fn prompt_logprobs_json(
    vocabulary: &Vocabulary,
    logprobs: &PromptLogprobs,
    num_top: usize,
) -> Vec<u8> {
    let mut out = b"[null".to_vec();
    for token in (0..logprobs.len()).filter_map(|index| logprobs.get(index)) {
        out.extend_from_slice(b",{");
        let own = token.token_ids.first();
        let pairs = token.token_ids.iter().zip(token.logprobs);
        for (place, (&id, &logprob)) in pairs.take(num_top + 1).enumerate() {
            let rank = if place == 0 { token.rank } else { place as i32 };
            if place > 0 {
                if Some(&id) == own {
                    continue;
                }
                out.push(b',');
            }
            out.push(b'"');
            push_json_integer(&mut out, id.unsigned_abs().into());
            out.extend_from_slice(b"\":{\"logprob\":");
            push_logprob(&mut out, f64::from(logprob));
            out.extend_from_slice(b",\"rank\":");
            push_json_integer(&mut out, rank.unsigned_abs().into());
            out.extend_from_slice(b",\"decoded_token\":");
            push_name(&mut out, vocabulary.piece(id as u32).unwrap_or_default());
            out.push(b'}');
        }
        out.push(b'}');
    }
    out.push(b']');
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::text::LogprobsForm;

    fn vocabulary(strip: bool) -> Vocabulary {
        let pieces: [&[u8]; 6] = [b"<s>", b" a", b"b", b"\xe2\x82", b"\xac", b"\"q"];
        Vocabulary::new(pieces, &[0], strip).expect("a small vocabulary")
    }

    fn scored() -> PromptLogprobs {
        let mut logprobs = PromptLogprobs::new(4, 1);
        logprobs.push(1, &[1, 1], &[-0.5, -0.5]);
        logprobs.push(7, &[3, 2], &[-9.0, -0.25]);
        logprobs.push(2, &[4, 5], &[-2.0, -1.0]);
        logprobs
    }

    fn echoed(num_hidden: usize, strip: bool) -> String {
        let vocabulary = Arc::new(vocabulary(strip));
        let mut encoder = LogprobsEncoder::new(vocabulary, LogprobsForm::Completion, 1, true);
        encoder.add_prompt(&[0, 1, 3, 4], &scored(), num_hidden);
        encoder.add((2, -0.125), std::iter::once((2, -0.125)));
        let mut out = Vec::new();
        encoder.take_into(&mut out);
        String::from_utf8(out).expect("JSON")
    }

    #[test]
    fn the_first_token_of_an_echo_has_no_numbers_and_offsets_run_on() {
        let expected = concat!(
            r#"{"text_offset":[0,0,2,2,3],"token_logprobs":[null,-0.5,-9.0,-2.0,-0.125],"#,
            r#""tokens":["<s>"," a","bytes:\\xe2\\x82","bytes:\\xac","b"],"#,
            r#""top_logprobs":[null,{" a":-0.5},{"b":-0.25,"bytes:\\xe2\\x82":-9.0},"#,
            r#"{"\"q":-1.0,"bytes:\\xac":-2.0},{"b":-0.125}]}"#
        );
        assert_eq!(echoed(1, false), expected);
        assert!(echoed(0, false).starts_with(r#"{"text_offset":[0,3,5,5,6],"#));
        assert!(echoed(1, true).starts_with(r#"{"text_offset":[0,0,1,1,2],"#));
    }

    #[test]
    fn a_token_is_named_once_with_its_own_rank() {
        let json = prompt_logprobs_json(&vocabulary(false), &scored(), 1);
        let expected = concat!(
            r#"[null,{"1":{"logprob":-0.5,"rank":1,"decoded_token":" a"}},"#,
            r#"{"3":{"logprob":-9.0,"rank":7,"decoded_token":"bytes:\\xe2\\x82"},"#,
            r#""2":{"logprob":-0.25,"rank":1,"decoded_token":"b"}},"#,
            r#"{"4":{"logprob":-2.0,"rank":2,"decoded_token":"bytes:\\xac"},"#,
            r#""5":{"logprob":-1.0,"rank":1,"decoded_token":"\"q"}}]"#
        );
        assert_eq!(String::from_utf8(json).expect("JSON"), expected);
    }
}
