//! Bytes to text while the bytes are still arriving.
//!
//! The result of all pushes and the flush is what a one-shot decode of the concatenated bytes gives: every maximal
//! subpart of a malformed sequence becomes one U+FFFD (Unicode 16, section 3.9, table 3-8; Python's `errors="replace"`).

use std::str::from_utf8;

const REPLACEMENT: char = '\u{fffd}';

/// The incomplete character at the end of the bytes seen so far: at most three bytes.
#[derive(Debug, Default, Clone)]
pub(super) struct Utf8Tail {
    bytes: [u8; 4],
    len: u8,
}

impl Utf8Tail {
    /// Appends to `out` the text that became final with these bytes.
    #[inline]
    pub(super) fn push(&mut self, piece: &[u8], out: &mut String) {
        if self.len == 0
            && let Ok(text) = from_utf8(piece)
        {
            out.push_str(text);
        } else {
            self.push_slow(piece, out);
        }
    }

    /// No more bytes follow: an incomplete character becomes one U+FFFD.
    pub(super) fn flush(&mut self, out: &mut String) {
        if self.len > 0 {
            self.len = 0;
            out.push(REPLACEMENT);
        }
    }

    #[cold]
    fn push_slow(&mut self, piece: &[u8], out: &mut String) {
        let mut rest = self.complete(piece, out);
        while !rest.is_empty() {
            let error = match from_utf8(rest) {
                Ok(text) => return out.push_str(text),
                Err(error) => error,
            };
            let (valid, bad) = rest.split_at(error.valid_up_to());
            out.push_str(from_utf8(valid).unwrap_or_default());
            let Some(len) = error.error_len() else {
                self.bytes[..bad.len()].copy_from_slice(bad);
                self.len = bad.len() as u8;
                return;
            };
            out.push(REPLACEMENT);
            rest = &bad[len..];
        }
    }

    /// Feeds bytes one by one to the incomplete character until it is complete or proves malformed; returns the rest.
    fn complete<'a>(&mut self, piece: &'a [u8], out: &mut String) -> &'a [u8] {
        for (index, &byte) in piece.iter().enumerate() {
            if self.len == 0 {
                return &piece[index..];
            }
            self.bytes[usize::from(self.len)] = byte;
            match from_utf8(&self.bytes[..=usize::from(self.len)]) {
                Ok(text) => {
                    out.push_str(text);
                    self.len = 0;
                }
                Err(error) if error.error_len().is_none() => self.len += 1,
                // What was held back is a maximal subpart; this byte starts anew.
                Err(_) => {
                    out.push(REPLACEMENT);
                    self.len = 0;
                    return &piece[index..];
                }
            }
        }
        &[]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte that opens or breaks a case of the UTF-8 table.
    const EDGES: [u8; 22] = [
        0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1,
        0xed, 0xee, 0xf0, 0xf1, 0xf4, 0xf5, 0xff,
    ];

    fn stream(bytes: &[u8], cuts: usize) -> String {
        let mut tail = Utf8Tail::default();
        let mut out = String::new();
        let mut start = 0;
        for end in 1..=bytes.len() {
            if end == bytes.len() || cuts >> (end - 1) & 1 == 1 {
                tail.push(&bytes[start..end], &mut out);
                start = end;
            }
        }
        tail.flush(&mut out);
        out
    }

    #[test]
    fn all_edge_quadruples_at_all_cuts_equal_the_one_shot_decode() {
        for code in 0..EDGES.len().pow(4) {
            let bytes: [u8; 4] =
                std::array::from_fn(|i| EDGES[code / EDGES.len().pow(i as u32) % EDGES.len()]);
            let expected = String::from_utf8_lossy(&bytes);
            for cuts in 0..8 {
                assert_eq!(stream(&bytes, cuts), expected, "{bytes:x?} cut at {cuts:b}");
            }
        }
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let mut tail = Utf8Tail::default();
        let mut out = String::new();
        for (index, byte) in "\u{1f600}".bytes().enumerate() {
            assert_eq!(out, "", "after {index} bytes");
            tail.push(&[byte], &mut out);
        }
        assert_eq!(out, "\u{1f600}");
    }
}
