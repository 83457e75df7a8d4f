//! From the text of a pattern to its nodes.

use super::{Class, Node};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_COUNT, MAX_PATTERN_BYTES, MAX_PATTERN_DEPTH};

pub(super) fn parse(pattern: &str) -> Result<Node, GrammarError> {
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err(GrammarError::new(format!(
            "a pattern may have at most {MAX_PATTERN_BYTES} bytes, got {}",
            pattern.len()
        )));
    }
    let mut parser = Parser {
        letters: pattern.chars().collect(),
        next: 0,
        depth: 0,
    };
    let node = parser.alternatives()?;
    match parser.peek() {
        None => Ok(node),
        Some(_) => parser.refuse("a ) without its ("),
    }
}

struct Parser {
    letters: Vec<char>,
    next: usize,
    depth: usize,
}

/// One member of a class in brackets.
enum Member {
    Char(char),
    /// It was added to the class already.
    Set,
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.letters.get(self.next).copied()
    }

    fn take(&mut self) -> Option<char> {
        let letter = self.peek()?;
        self.next += 1;
        Some(letter)
    }

    fn take_if(&mut self, letter: char) -> bool {
        let found = self.peek() == Some(letter);
        self.next += usize::from(found);
        found
    }

    fn refuse<T>(&self, problem: impl std::fmt::Display) -> Result<T, GrammarError> {
        Err(GrammarError::new(format!(
            "{problem} (at character {} of the pattern)",
            self.next
        )))
    }

    fn alternatives(&mut self) -> Result<Node, GrammarError> {
        let mut branches = vec![self.sequence()?];
        while self.take_if('|') {
            branches.push(self.sequence()?);
        }
        Ok(if branches.len() == 1 {
            branches.swap_remove(0)
        } else {
            Node::Alt(branches)
        })
    }

    fn sequence(&mut self) -> Result<Node, GrammarError> {
        let mut nodes = Vec::new();
        while let Some(letter) = self.peek() {
            if letter == '|' || letter == ')' {
                break;
            }
            let atom = self.atom()?;
            nodes.push(self.quantified(atom)?);
        }
        Ok(Node::Concat(nodes))
    }

    fn atom(&mut self) -> Result<Node, GrammarError> {
        let Some(letter) = self.take() else {
            return self.refuse("the pattern ends too early");
        };
        Ok(match letter {
            '^' => Node::Start,
            '$' => Node::End,
            '.' => Node::Class(Class::dot()),
            '(' => return self.group(),
            '[' => Node::Class(self.class()?),
            '\\' => Node::Class(self.escape()?),
            '*' | '+' | '?' => return self.refuse(format!("nothing to repeat before {letter}")),
            letter => Node::Class(Class::of(letter)),
        })
    }

    fn group(&mut self) -> Result<Node, GrammarError> {
        self.depth += 1;
        if self.depth > MAX_PATTERN_DEPTH {
            return self.refuse(format!(
                "more than {MAX_PATTERN_DEPTH} groups within groups"
            ));
        }
        if self.take_if('?') {
            self.group_kind()?;
        }
        let inner = self.alternatives()?;
        if !self.take_if(')') {
            return self.refuse("a ( without its )");
        }
        self.depth -= 1;
        Ok(Node::Group(Box::new(inner)))
    }

    /// What follows `(?`: only groups that change nothing about what is matched.
    fn group_kind(&mut self) -> Result<(), GrammarError> {
        if self.take_if(':') {
            return Ok(());
        }
        let python = self.take_if('P');
        if !self.take_if('<') {
            return self.refuse(if python {
                "(?P is supported as (?P<name>…) only"
            } else {
                "look-ahead, flags and other (?…) are not supported, but for (?:…) and (?<name>…)"
            });
        }
        let start = self.next;
        while let Some(letter) = self.take() {
            if letter == '>' && self.next > start + 1 {
                return Ok(());
            }
            if !(letter.is_alphanumeric() || letter == '_' || letter == '$') {
                break;
            }
        }
        self.refuse("look-behind is not supported, nor is this name of a group")
    }

    fn quantified(&mut self, atom: Node) -> Result<Node, GrammarError> {
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => match self.counts()? {
                Some(counts) => counts,
                None => return Ok(atom),
            },
            _ => return Ok(atom),
        };
        self.next += 1;
        if matches!(atom, Node::Start | Node::End) {
            return self.refuse("^ and $ cannot be repeated");
        }
        // Greedy or not makes no difference to which texts match.
        self.take_if('?');
        Ok(Node::Repeat(Box::new(atom), min, max))
    }

    /// The counts of `{n}`, `{n,}` or `{n,m}`, the closing brace not yet taken; `None` where the brace is only a brace.
    fn counts(&mut self) -> Result<Option<(u32, Option<u32>)>, GrammarError> {
        let Some(length) = self.letters[self.next..]
            .iter()
            .position(|&letter| letter == '}')
        else {
            return Ok(None);
        };
        let text: String = self.letters[self.next + 1..self.next + length]
            .iter()
            .collect();
        let (low, high) = match text.split_once(',') {
            Some((low, high)) => (low, Some(high)),
            None => (text.as_str(), None),
        };
        let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if low.is_empty() || !number(low) || !high.is_none_or(number) {
            return Ok(None);
        }
        let min = self.count(low)?;
        let max = match high {
            None => Some(min),
            Some("") => None,
            Some(high) => Some(self.count(high)?),
        };
        if max.is_some_and(|max| max < min) {
            return self.refuse(format!("the counts of {{{text}}} are out of order"));
        }
        self.next += length;
        Ok(Some((min, max)))
    }

    fn count(&self, text: &str) -> Result<u32, GrammarError> {
        match text.parse::<u32>() {
            Ok(count) if u64::from(count) <= MAX_COUNT => Ok(count),
            _ => self.refuse(format!("a count may be at most {MAX_COUNT}, got {text}")),
        }
    }

    /// What follows a backslash outside of brackets.
    fn escape(&mut self) -> Result<Class, GrammarError> {
        let mut class = Class::default();
        match self.escaped(&mut class, false)? {
            Member::Char(letter) => Ok(Class::of(letter)),
            Member::Set => Ok(class),
        }
    }

    /// What follows an opening bracket.
    fn class(&mut self) -> Result<Class, GrammarError> {
        let mut class = Class {
            negated: self.take_if('^'),
            ..Class::default()
        };
        if self.peek() == Some(']') {
            return self
                .refuse("[] and [^] are read in two ways; write \\] for the bracket itself");
        }
        loop {
            let Some(letter) = self.take() else {
                return self.refuse("a [ without its ]");
            };
            if letter == ']' {
                return Ok(class);
            }
            if letter == '[' && self.peek() == Some(':') {
                return self.refuse("[:…:] is not supported in patterns; write the characters");
            }
            let from = self.member(letter, &mut class)?;
            let ranged = self.peek() == Some('-')
                && self
                    .letters
                    .get(self.next + 1)
                    .is_some_and(|&behind| behind != ']');
            match from {
                Member::Char(from) if ranged => self.range(from, &mut class)?,
                Member::Char(letter) => class.ranges.push((letter, letter)),
                Member::Set if ranged => {
                    return self
                        .refuse("a set cannot begin a range; write \\- for the dash itself");
                }
                Member::Set => {}
            }
        }
    }

    fn range(&mut self, from: char, class: &mut Class) -> Result<(), GrammarError> {
        self.next += 1;
        let Some(letter) = self.take() else {
            return self.refuse("a [ without its ]");
        };
        match self.member(letter, class)? {
            Member::Char(to) if from <= to => {
                class.ranges.push((from, to));
                Ok(())
            }
            Member::Char(_) => self.refuse("the ends of a range are out of order"),
            Member::Set => self.refuse("a set cannot end a range; write \\- for the dash itself"),
        }
    }

    fn member(&mut self, letter: char, class: &mut Class) -> Result<Member, GrammarError> {
        if letter == '\\' {
            self.escaped(class, true)
        } else {
            Ok(Member::Char(letter))
        }
    }

    fn escaped(&mut self, class: &mut Class, in_brackets: bool) -> Result<Member, GrammarError> {
        let Some(letter) = self.take() else {
            return self.refuse("the pattern ends with a \\");
        };
        if class.add_escape(letter) {
            return Ok(Member::Set);
        }
        Ok(Member::Char(match letter {
            't' => '\t',
            'n' => '\n',
            'r' => '\r',
            'f' => '\u{c}',
            'v' => '\u{b}',
            'b' if in_brackets => '\u{8}',
            'b' | 'B' => return self.refuse("\\b and \\B (edges of words) are not supported"),
            '0' if !self.peek().is_some_and(|next| next.is_ascii_digit()) => '\0',
            '0'..='9' => return self.refuse("back-references are not supported"),
            'c' => match self.take() {
                Some(letter) if letter.is_ascii_alphabetic() => char::from(letter as u8 & 31),
                _ => return self.refuse("\\c needs a letter"),
            },
            'x' => self.hex(2)?,
            'u' => self.unicode()?,
            'p' | 'P' => {
                let name = self.property()?;
                class.properties.push((letter == 'P', name));
                return Ok(Member::Set);
            }
            letter if letter.is_alphanumeric() => {
                return self.refuse(format!("\\{letter} is not supported"));
            }
            letter => letter,
        }))
    }

    fn hex(&mut self, num_digits: usize) -> Result<char, GrammarError> {
        let number = self.hex_number(num_digits)?;
        match char::from_u32(number) {
            Some(letter) => Ok(letter),
            None => self.refuse("half of a surrogate pair is no character"),
        }
    }

    fn hex_number(&mut self, num_digits: usize) -> Result<u32, GrammarError> {
        let mut number = 0;
        for _ in 0..num_digits {
            match self.take().and_then(|letter| letter.to_digit(16)) {
                Some(digit) => number = number * 16 + digit,
                None => {
                    return self.refuse(format!("{num_digits} hexadecimal digits were expected"));
                }
            }
        }
        Ok(number)
    }

    fn unicode(&mut self) -> Result<char, GrammarError> {
        if self.take_if('{') {
            let start = self.next;
            while self.peek().is_some_and(|letter| letter != '}') && self.next < start + 7 {
                self.next += 1;
            }
            let text: String = self.letters[start..self.next].iter().collect();
            let letter = u32::from_str_radix(&text, 16).ok().and_then(char::from_u32);
            return match letter {
                Some(letter) if self.take_if('}') && !text.starts_with('+') => Ok(letter),
                _ => self.refuse("\\u{…} names no character"),
            };
        }
        let first = self.hex_number(4)?;
        if !(0xd800..0xdc00).contains(&first) {
            self.next -= 4;
            return self.hex(4);
        }
        if self.take_if('\\') && self.take_if('u') {
            let second = self.hex_number(4)?;
            if (0xdc00..0xe000).contains(&second) {
                let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                return char::from_u32(code).map_or_else(|| self.refuse("no character"), Ok);
            }
        }
        self.refuse("half of a surrogate pair is no character")
    }

    /// The name in `\p{…}`.
    fn property(&mut self) -> Result<String, GrammarError> {
        let start = self.next + 1;
        if !self.take_if('{') {
            return self.refuse("\\p needs a name in braces");
        }
        while self
            .peek()
            .is_some_and(|c| c.is_ascii_alphanumeric() || c == '_' || c == '=')
        {
            self.next += 1;
        }
        let name: String = self.letters[start..self.next].iter().collect();
        if name.is_empty() || name.len() > 64 || !self.take_if('}') {
            return self.refuse("\\p{…} names no property");
        }
        Ok(name)
    }
}
