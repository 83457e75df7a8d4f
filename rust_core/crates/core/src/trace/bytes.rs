//! Numbers as bytes: LEB128, zigzag, and the checksum of a frame.

/// Appends an unsigned number, seven bits a byte, least significant first.
pub(super) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a signed number: 0, -1, 1, -2, … as 0, 1, 2, 3, …
pub(super) fn put_signed(out: &mut Vec<u8>, value: i64) {
    put(out, ((value << 1) ^ (value >> 63)) as u64);
}

/// What is left of a frame's payload. Every `take` fails with the name of what it was to be.
#[derive(Debug)]
pub(super) struct Input<'a> {
    rest: &'a [u8],
}

/// What is wrong with a payload.
pub(super) type Problem = String;

impl<'a> Input<'a> {
    pub(super) fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    pub(super) fn len(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn byte(&mut self, what: &str) -> Result<u8, Problem> {
        let (&byte, rest) = self.rest.split_first().ok_or_else(|| missing(what))?;
        self.rest = rest;
        Ok(byte)
    }

    pub(super) fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Problem> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or_else(|| missing(what))?;
        self.rest = rest;
        Ok(*bytes)
    }

    pub(super) fn number(&mut self, what: &str) -> Result<u64, Problem> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(format!("{what} is longer than 64 bits"))
    }

    pub(super) fn signed(&mut self, what: &str) -> Result<i64, Problem> {
        let value = self.number(what)?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// A number that is at most `max`.
    pub(super) fn at_most(&mut self, max: u32, what: &str) -> Result<u32, Problem> {
        let value = self.number(what)?;
        match u32::try_from(value) {
            Ok(value) if value <= max => Ok(value),
            _ => Err(format!("{what} is {value}, more than {max}")),
        }
    }
}

fn missing(what: &str) -> Problem {
    format!("it ends where {what} was to come")
}

/// CRC-32 as of zlib (reflected polynomial 0xEDB88320).
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    let update =
        |crc: u32, &byte: &u8| CRC_TABLE[((crc ^ u32::from(byte)) & 0xff) as usize] ^ (crc >> 8);
    !bytes.iter().fold(u32::MAX, update)
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = index as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0xedb8_8320
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_checksum_is_zlib_s() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn numbers_are_short_where_they_are_small() {
        let len = |value| {
            let mut out = Vec::new();
            put(&mut out, value);
            out.len()
        };
        assert_eq!([0, 127, 128, 1 << 17, u64::MAX].map(len), [1, 1, 2, 3, 10]);
    }

    #[test]
    fn what_is_no_number_is_refused() {
        assert!(Input::new(&[0x80]).number("x").unwrap_err().contains('x'));
        assert!(Input::new(&[0xff; 11]).number("x").is_err());
        assert!(Input::new(&[5]).at_most(4, "x").is_err());
        assert!(Input::new(&[1, 2]).bytes::<3>("x").is_err());
    }

    proptest! {
        #[test]
        fn numbers_come_back(unsigned: u64, signed: i64) {
            let mut out = Vec::new();
            put(&mut out, unsigned);
            put_signed(&mut out, signed);
            let mut input = Input::new(&out);
            prop_assert_eq!(input.number("a"), Ok(unsigned));
            prop_assert_eq!(input.signed("b"), Ok(signed));
            prop_assert_eq!(input.len(), 0);
        }
    }
}
