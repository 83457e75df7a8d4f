//! Bytes of every token of a tokenizer, in one flat table.

use thiserror::Error;

/// A table that cannot be a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VocabularyError {
    /// All pieces together must stay addressable by 32 bits.
    #[error("the pieces hold more than {max} bytes", max = u32::MAX)]
    TooLarge,
    /// A special id that is no id of the table.
    #[error("special_ids: {id} is not in [0, {len})")]
    SpecialOutOfRange {
        /// The offending id.
        id: u32,
        /// Number of pieces.
        len: usize,
    },
}

/// A token id that the vocabulary does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("token id {id} is not in [0, {len})")]
pub struct TokenOutOfRange {
    /// The offending id.
    pub id: u32,
    /// Number of pieces.
    pub len: usize,
}

/// Bytes of every token. Byte-level and byte-fallback tokenizers both come down to this table.
#[derive(Debug)]
pub struct Vocabulary {
    /// All pieces, one after the other.
    bytes: Vec<u8>,
    /// Piece i is `bytes[offsets[i]..offsets[i + 1]]`.
    offsets: Vec<u32>,
    /// One bit per id.
    special: Vec<u64>,
    strip_leading_space: bool,
}

impl Vocabulary {
    /// Builds the table. An empty piece stands for an id without text. `strip_leading_space`: see [`Self::decode`].
    pub fn new<P: AsRef<[u8]>>(
        pieces: impl IntoIterator<Item = P>,
        special_ids: &[u32],
        strip_leading_space: bool,
    ) -> Result<Self, VocabularyError> {
        let mut bytes = Vec::new();
        let mut offsets = vec![0u32];
        for piece in pieces {
            bytes.extend_from_slice(piece.as_ref());
            offsets.push(u32::try_from(bytes.len()).map_err(|_| VocabularyError::TooLarge)?);
        }
        let len = offsets.len() - 1;
        let mut special = vec![0u64; len.div_ceil(64)];
        for &id in special_ids {
            if id as usize >= len {
                return Err(VocabularyError::SpecialOutOfRange { id, len });
            }
            special[id as usize / 64] |= 1 << (id % 64);
        }
        bytes.shrink_to_fit();
        offsets.shrink_to_fit();
        Ok(Self {
            bytes,
            offsets,
            special,
            strip_leading_space,
        })
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether a whole text loses one leading space, see [`Self::decode`].
    pub fn strips_leading_space(&self) -> bool {
        self.strip_leading_space
    }

    /// Whether there is no id at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of one token; `None` when the id is out of range.
    #[inline]
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.offsets.get(id + 1)?;
        self.bytes.get(self.offsets[id] as usize..end as usize)
    }

    /// Whether `skip_special_tokens` drops this id. False for ids out of range.
    #[inline]
    pub fn is_special(&self, id: u32) -> bool {
        self.special
            .get(id as usize / 64)
            .is_some_and(|word| word >> (id % 64) & 1 == 1)
    }

    /// Text of a whole sequence: the UTF-8 of all pieces together, malformed parts as U+FFFD (one per maximal subpart).
    ///
    /// With `strip_leading_space` (`SentencePiece`'s dummy prefix) the text loses one leading space. Streams do not
    /// strip: they continue a prompt.
    pub fn decode(
        &self,
        ids: &[u32],
        skip_special_tokens: bool,
    ) -> Result<String, TokenOutOfRange> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            let piece = self.piece(id).ok_or(TokenOutOfRange {
                id,
                len: self.len(),
            })?;
            if !(skip_special_tokens && self.is_special(id)) {
                bytes.extend_from_slice(piece);
            }
        }
        let start = usize::from(self.strip_leading_space && bytes.first() == Some(&b' '));
        Ok(String::from_utf8_lossy(&bytes[start..]).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(strip: bool) -> Vocabulary {
        Vocabulary::new([" a", "b", "</s>", "", "\u{e9}"], &[2], strip).unwrap()
    }

    #[test]
    fn pieces_and_ranges() {
        let vocabulary = vocabulary(false);
        assert_eq!(vocabulary.len(), 5);
        assert_eq!(vocabulary.piece(0), Some(&b" a"[..]));
        assert_eq!(vocabulary.piece(3), Some(&b""[..]));
        assert_eq!(vocabulary.piece(4), Some("\u{e9}".as_bytes()));
        assert_eq!(vocabulary.piece(5), None);
        assert_eq!(vocabulary.piece(u32::MAX), None);
        assert!(
            vocabulary.is_special(2)
                && !vocabulary.is_special(1)
                && !vocabulary.is_special(u32::MAX)
        );
    }

    #[test]
    fn decode_skips_special_and_strips_once() {
        assert_eq!(vocabulary(false).decode(&[0, 2, 0], true).unwrap(), " a a");
        assert_eq!(vocabulary(true).decode(&[2, 0, 0], true).unwrap(), "a a");
        assert_eq!(vocabulary(true).decode(&[2, 0], false).unwrap(), "</s> a");
        assert_eq!(
            vocabulary(true).decode(&[9], true),
            Err(TokenOutOfRange { id: 9, len: 5 })
        );
    }

    #[test]
    fn special_ids_are_checked() {
        let error = Vocabulary::new(["a"], &[1], false).unwrap_err();
        assert_eq!(error, VocabularyError::SpecialOutOfRange { id: 1, len: 1 });
    }
}
