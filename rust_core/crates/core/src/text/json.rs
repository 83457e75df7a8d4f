//! Text and numbers as JSON, byte for byte as Python's orjson writes them.

const HEX: &[u8; 16] = b"0123456789abcdef";

/// Appends `text` with its quotes. Escaped is only what JSON demands: quotes, backslashes and control characters.
pub fn push_json_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let bytes = text.as_bytes();
    let mut written = 0;
    for (position, &byte) in bytes.iter().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.extend_from_slice(&bytes[written..position]);
        written = position + 1;
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0x08 => out.extend_from_slice(b"\\b"),
            b'\t' => out.extend_from_slice(b"\\t"),
            b'\n' => out.extend_from_slice(b"\\n"),
            0x0c => out.extend_from_slice(b"\\f"),
            b'\r' => out.extend_from_slice(b"\\r"),
            _ => {
                out.extend_from_slice(b"\\u00");
                out.extend_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 0xf)]]);
            }
        }
    }
    out.extend_from_slice(&bytes[written..]);
    out.push(b'"');
}

/// Appends a whole number.
pub fn push_json_integer(out: &mut Vec<u8>, value: u64) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    let mut rest = value;
    loop {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

#[cfg(test)]
mod tests {
    use super::{push_json_integer, push_json_string};

    fn json(text: &str) -> String {
        let mut out = Vec::new();
        push_json_string(&mut out, text);
        String::from_utf8_lossy(&out).into_owned()
    }

    #[test]
    fn whole_numbers() {
        for value in [0, 7, 10, 99, 100, 1_234_567_890, u64::MAX] {
            let mut out = Vec::new();
            push_json_integer(&mut out, value);
            assert_eq!(String::from_utf8_lossy(&out), value.to_string());
        }
    }

    #[test]
    fn only_what_must_be_is_escaped() {
        assert_eq!(json(""), r#""""#);
        assert_eq!(json("a\"b\\c/d"), r#""a\"b\\c/d""#);
        assert_eq!(
            json("\0\u{8}\t\n\u{b}\u{c}\r\u{1f} \u{7f}"),
            "\"\\u0000\\b\\t\\n\\u000b\\f\\r\\u001f \u{7f}\""
        );
        assert_eq!(json("日本\n🙂\u{2028}é"), "\"日本\\n🙂\u{2028}é\"");
    }
}
