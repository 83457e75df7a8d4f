//! Grammars in text: llguidance's dialect of Lark, held against what must not come from a client; GBNF is made into it.

use serde_json::{Deserializer, Value};

use super::ebnf;
use super::error::GrammarError;
use super::limits::{MAX_LARK_DEPTH, MAX_RULES};
use super::schema::{self, JsonStyle};

/// The grammar as the engine takes it.
///
/// Refused is what reaches beyond text (special tokens, other grammars), what changes the engine's options, and rule
/// attributes that only work for callers who cut text off afterwards. A `%json` schema is checked as any other.
pub(super) fn checked(text: &str) -> Result<String, GrammarError> {
    if text.trim().is_empty() {
        return Err(GrammarError::new("a grammar must not be empty"));
    }
    if ebnf::is_ebnf(text) {
        return ebnf::to_lark(text);
    }
    let mut scan = Scan {
        text,
        next: 0,
        depth: 0,
        num_rules: 0,
        out: String::with_capacity(text.len()),
    };
    scan.run().map_err(|error| error.located(|| scan.place()))?;
    Ok(scan.out)
}

struct Scan<'a> {
    text: &'a str,
    next: usize,
    depth: usize,
    num_rules: usize,
    out: String,
}

impl Scan<'_> {
    fn place(&self) -> String {
        let line = self.text[..self.next.min(self.text.len())]
            .matches('\n')
            .count()
            + 1;
        format!("line {line}")
    }

    fn rest(&self) -> &str {
        &self.text[self.next..]
    }

    /// Copies `length` bytes.
    fn copy(&mut self, length: usize) {
        self.out.push_str(&self.text[self.next..self.next + length]);
        self.next += length;
    }

    fn run(&mut self) -> Result<(), GrammarError> {
        let mut at_line_start = true;
        while let Some(letter) = self.rest().chars().next() {
            let is_space = letter.is_whitespace();
            match letter {
                '"' => self.quoted('"')?,
                '/' if self.rest().starts_with("//") => self.comment(),
                '#' => self.comment(),
                '/' => self.regex()?,
                '%' => self.directive()?,
                '<' => {
                    return Err(GrammarError::new(
                        "special tokens (<…>) cannot be used; write text in quotes",
                    ));
                }
                '@' => return Err(GrammarError::new("other grammars (@…) cannot be used")),
                '[' if at_line_start => self.attributes()?,
                '(' | '[' | '{' => self.open(letter.len_utf8())?,
                ')' | ']' | '}' => self.close()?,
                ':' => {
                    self.num_rules += 1;
                    if self.num_rules > MAX_RULES {
                        return Err(GrammarError::new(format!("more than {MAX_RULES} rules")));
                    }
                    self.copy(1);
                }
                letter => self.copy(letter.len_utf8()),
            }
            // A definition's name is all that may come before its attributes.
            at_line_start = match letter {
                '\n' => true,
                letter if is_space || letter.is_alphanumeric() || "_-?!".contains(letter) => {
                    at_line_start
                }
                _ => false,
            };
        }
        if self.depth > 0 {
            return Err(GrammarError::new("a bracket is not closed"));
        }
        Ok(())
    }

    fn open(&mut self, length: usize) -> Result<(), GrammarError> {
        self.depth += 1;
        if self.depth > MAX_LARK_DEPTH {
            return Err(GrammarError::new(format!(
                "more than {MAX_LARK_DEPTH} brackets within brackets"
            )));
        }
        self.copy(length);
        Ok(())
    }

    fn close(&mut self) -> Result<(), GrammarError> {
        self.depth = self
            .depth
            .checked_sub(1)
            .ok_or_else(|| GrammarError::new("a bracket is closed that was not opened"))?;
        self.copy(1);
        Ok(())
    }

    fn comment(&mut self) {
        self.next += self.rest().find('\n').unwrap_or(self.rest().len());
    }

    fn quoted(&mut self, quote: char) -> Result<(), GrammarError> {
        let length = closing(self.rest(), quote)
            .ok_or_else(|| GrammarError::new(format!("a {quote} is not closed on its line")))?;
        self.copy(length);
        Ok(())
    }

    fn regex(&mut self) -> Result<(), GrammarError> {
        let length = closing(self.rest(), '/')
            .ok_or_else(|| GrammarError::new("a /regex/ is not closed on its line"))?;
        let body = &self.rest()[..length];
        // The engine's own notation for look-ahead, which would let bytes through that the grammar does not mean.
        if body.contains("<stop>") {
            return Err(GrammarError::new(
                "a group of a regex cannot be named \"stop\"",
            ));
        }
        self.copy(length);
        Ok(())
    }

    fn directive(&mut self) -> Result<(), GrammarError> {
        let length = 1 + self.rest()[1..]
            .find(|letter: char| !letter.is_ascii_alphanumeric())
            .unwrap_or(self.rest().len() - 1);
        match &self.rest()[..length] {
            "%json" => self.json(length),
            "%ignore" | "%import" | "%regex" | "%lark" | "%if" => {
                self.copy(length);
                Ok(())
            }
            other => Err(GrammarError::new(format!("{other} cannot be used"))),
        }
    }

    fn json(&mut self, length: usize) -> Result<(), GrammarError> {
        let mut values = Deserializer::from_str(&self.rest()[length..]).into_iter::<Value>();
        let schema = match values.next() {
            Some(Ok(schema)) => schema,
            Some(Err(error)) => return Err(GrammarError::new(format!("%json: {error}"))),
            None => return Err(GrammarError::new("%json needs a schema")),
        };
        let end = length + values.byte_offset();
        let schema = schema::normalized(&schema, &JsonStyle::default())?;
        self.out.push_str("%json ");
        self.out.push_str(&schema.to_string());
        self.next += end;
        Ok(())
    }

    /// `name[lazy]: …`
    fn attributes(&mut self) -> Result<(), GrammarError> {
        let length = self
            .rest()
            .find(']')
            .ok_or_else(|| GrammarError::new("a bracket is not closed"))?;
        let is_definition = self.rest()[length + 1..].trim_start().starts_with(':');
        if !is_definition {
            return self.open(1);
        }
        let attributes = self.rest()[1..length].trim();
        if attributes != "lazy" && !attributes.is_empty() {
            return Err(GrammarError::new(
                "of rule attributes only [lazy] is supported",
            ));
        }
        self.copy(length + 1);
        Ok(())
    }
}

/// Length of a text in quotes up to its end; `None` where its line or the text ends before.
pub(super) fn closing(text: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    for (index, letter) in text.char_indices().skip(1) {
        match letter {
            '\n' => return None,
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            letter if letter == quote => return Some(index + letter.len_utf8()),
            _ => {}
        }
    }
    None
}
