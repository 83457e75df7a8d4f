//! GBNF (the EBNF of llama.cpp and others), made into Lark.
//!
//! A rule that does not come back to itself becomes a terminal, so that it means exactly what it says. Between terminals
//! the grammar engine reads the longest: what only a shorter reading would allow is not generated, but nothing else is.

use std::collections::HashMap;
use std::fmt::Write;

use super::error::GrammarError;
use super::lark::closing;
use super::limits::{MAX_COUNT, MAX_EBNF_DEPTH, MAX_RULES};
use super::pattern;

/// Whether the text is GBNF rather than Lark: it defines its rules with `::=`.
pub(super) fn is_ebnf(text: &str) -> bool {
    let mut rest = text;
    while let Some(index) = rest.find(['"', '\'', '#', '[', ':']) {
        rest = &rest[index..];
        if rest.starts_with("::=") {
            return true;
        }
        let skipped = match rest.as_bytes()[0] {
            b'"' => closing(rest, '"'),
            b'#' => rest.find('\n'),
            b'[' => closing(rest, ']'),
            _ => None,
        };
        rest = &rest[skipped.unwrap_or(1)..];
    }
    false
}

#[derive(Debug)]
enum Expression {
    /// One terminal, as an expression of the engine.
    Text(String),
    /// A rule, by its number.
    Rule(usize),
    Sequence(Vec<Expression>),
    Choice(Vec<Expression>),
    Repeat(Box<Expression>, u32, Option<u32>),
}

/// The same grammar in Lark.
pub(super) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut parser = Parser {
        text,
        next: 0,
        depth: 0,
        rules: Vec::new(),
        names: HashMap::new(),
    };
    parser
        .run()
        .map_err(|error| error.located(|| parser.place()))?;
    let Some(&root) = parser.names.get("root") else {
        return Err(GrammarError::new("there is no rule \"root\""));
    };
    let mut rules = Vec::with_capacity(parser.rules.len());
    for (name, expression) in parser.rules {
        let Some(expression) = expression else {
            return Err(GrammarError::new(format!("rule {name:?} is not defined")));
        };
        rules.push(expression);
    }
    Ok(written(&rules, root))
}

struct Parser<'a> {
    text: &'a str,
    next: usize,
    depth: usize,
    /// By number: name, and what it stands for once that was seen.
    rules: Vec<(&'a str, Option<Expression>)>,
    names: HashMap<&'a str, usize>,
}

impl<'a> Parser<'a> {
    fn place(&self) -> String {
        let line = self.text[..self.next].matches('\n').count() + 1;
        format!("line {line}")
    }

    fn rest(&self) -> &'a str {
        &self.text[self.next..]
    }

    /// White space and comments.
    fn skip(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start();
            self.next += rest.len() - trimmed.len();
            if !trimmed.starts_with('#') {
                return;
            }
            self.next += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        self.next += if found { text.len() } else { 0 };
        found
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let length = rest
            .find(|letter: char| {
                !(letter.is_ascii_alphanumeric() || letter == '-' || letter == '_')
            })
            .unwrap_or(rest.len());
        if length == 0 || rest.starts_with(|letter: char| letter.is_ascii_digit() || letter == '-')
        {
            return None;
        }
        self.next += length;
        Some(&rest[..length])
    }

    fn number_of(&mut self, name: &'a str) -> Result<usize, GrammarError> {
        if let Some(&number) = self.names.get(name) {
            return Ok(number);
        }
        if self.rules.len() >= MAX_RULES {
            return Err(GrammarError::new(format!("more than {MAX_RULES} rules")));
        }
        self.rules.push((name, None));
        self.names.insert(name, self.rules.len() - 1);
        Ok(self.rules.len() - 1)
    }

    fn run(&mut self) -> Result<(), GrammarError> {
        self.skip();
        while !self.rest().is_empty() {
            let Some(name) = self.name() else {
                return Err(GrammarError::new("the name of a rule was expected"));
            };
            self.skip();
            if !self.take("::=") {
                return Err(GrammarError::new("::= was expected"));
            }
            let number = self.number_of(name)?;
            if self.rules[number].1.is_some() {
                return Err(GrammarError::new(format!("rule {name:?} is defined twice")));
            }
            let expression = self.choice()?;
            self.rules[number].1 = Some(expression);
            self.skip();
        }
        Ok(())
    }

    fn choice(&mut self) -> Result<Expression, GrammarError> {
        let mut branches = vec![self.sequence()?];
        self.skip();
        while self.take("|") {
            branches.push(self.sequence()?);
            self.skip();
        }
        Ok(Expression::Choice(branches))
    }

    fn sequence(&mut self) -> Result<Expression, GrammarError> {
        let mut parts = Vec::new();
        loop {
            self.skip();
            let Some(atom) = self.atom()? else {
                return Ok(Expression::Sequence(parts));
            };
            parts.push(self.repeated(atom)?);
        }
    }

    /// `None` where the sequence ends: at `|`, `)`, the end, or the next rule.
    fn atom(&mut self) -> Result<Option<Expression>, GrammarError> {
        let rest = self.rest();
        Ok(match rest.chars().next() {
            None | Some('|' | ')') => None,
            Some(quote @ ('"' | '\'')) => Some(Expression::Text(self.quoted(quote)?)),
            Some('[') => {
                let length = closing(rest, ']')
                    .ok_or_else(|| GrammarError::new("a [ is not closed on its line"))?;
                let class = pattern::bracket_class(&rest[1..length - 1])?;
                self.next += length;
                Some(Expression::Text(class))
            }
            Some('.') => {
                self.next += 1;
                Some(Expression::Text("(?s:.)".to_owned()))
            }
            Some('(') => Some(self.group()?),
            Some(letter) => {
                let start = self.next;
                let Some(name) = self.name() else {
                    return Err(GrammarError::new(format!("{letter:?} was not expected")));
                };
                let end = self.next;
                self.skip();
                if self.rest().starts_with("::=") {
                    self.next = start;
                    None
                } else {
                    self.next = end;
                    Some(Expression::Rule(self.number_of(name)?))
                }
            }
        })
    }

    fn group(&mut self) -> Result<Expression, GrammarError> {
        self.depth += 1;
        if self.depth > MAX_EBNF_DEPTH {
            return Err(GrammarError::new(format!(
                "more than {MAX_EBNF_DEPTH} brackets within brackets"
            )));
        }
        self.next += 1;
        let inner = self.choice()?;
        if !self.take(")") {
            return Err(GrammarError::new("a ( is not closed"));
        }
        self.depth -= 1;
        Ok(inner)
    }

    /// A text in quotes: the escapes of a pattern, and nothing else that means anything in one.
    fn quoted(&mut self, quote: char) -> Result<String, GrammarError> {
        let rest = self.rest();
        let length = closing(rest, quote)
            .ok_or_else(|| GrammarError::new(format!("a {quote} is not closed on its line")))?;
        self.next += length;
        let mut out = String::new();
        let mut letters = rest[1..length - 1].chars();
        while let Some(letter) = letters.next() {
            if letter != '\\' {
                out.push_str(&pattern::literal(letter.encode_utf8(&mut [0; 4])));
                continue;
            }
            let digits = match letters.clone().next() {
                Some('x') => 3,
                Some('u') => 5,
                _ => 1,
            };
            let escape: String = letters.by_ref().take(digits).collect();
            if matches!(
                escape.as_str(),
                "d" | "D" | "w" | "W" | "s" | "S" | "b" | "B" | "p" | "P" | "c"
            ) {
                return Err(GrammarError::new(format!(
                    "\\{escape} is no escape in a text"
                )));
            }
            out.push_str(&pattern::full(&format!("\\{escape}"))?);
        }
        Ok(out)
    }

    fn repeated(&mut self, atom: Expression) -> Result<Expression, GrammarError> {
        let (min, max) = match self.rest().chars().next() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.counted(atom),
            _ => return Ok(atom),
        };
        self.next += 1;
        self.repeated(Expression::Repeat(Box::new(atom), min, max))
    }

    fn counted(&mut self, atom: Expression) -> Result<Expression, GrammarError> {
        let wrong = || GrammarError::new("{n}, {n,} or {n,m} was expected");
        let length = self.rest().find('}').ok_or_else(wrong)?;
        let text = &self.rest()[1..length];
        let count = |text: &str| {
            let count = text.trim().parse::<u32>().map_err(|_| wrong())?;
            if u64::from(count) > MAX_COUNT {
                return Err(GrammarError::new(format!(
                    "a count may be at most {MAX_COUNT}"
                )));
            }
            Ok(count)
        };
        let (min, max) = match text.split_once(',') {
            None => (count(text)?, Some(count(text)?)),
            Some((min, max)) if max.trim().is_empty() => (count(min)?, None),
            Some((min, max)) => (count(min)?, Some(count(max)?)),
        };
        if max.is_some_and(|max| max < min) {
            return Err(GrammarError::new("the counts are out of order"));
        }
        self.next += length + 1;
        Ok(Expression::Repeat(Box::new(atom), min, max))
    }
}

/// The rules in Lark: `T…` terminals, `r…` rules that come back to themselves.
fn written(rules: &[Expression], root: usize) -> String {
    let recursive = recursive_rules(rules);
    let mut lark = format!("start: {}\n", name(&recursive, root));
    for (number, expression) in rules.iter().enumerate() {
        lark.push_str(&name(&recursive, number));
        lark.push_str(": ");
        push(&mut lark, expression, &recursive);
        lark.push('\n');
    }
    lark
}

fn name(recursive: &[bool], number: usize) -> String {
    format!("{}{number}", if recursive[number] { "r" } else { "T" })
}

fn push(out: &mut String, expression: &Expression, recursive: &[bool]) {
    match expression {
        Expression::Text(text) if text.is_empty() => out.push_str("\"\""),
        Expression::Text(text) => {
            out.push('/');
            out.push_str(text);
            out.push('/');
        }
        Expression::Rule(number) => out.push_str(&name(recursive, *number)),
        Expression::Sequence(parts) if parts.is_empty() => out.push_str("\"\""),
        Expression::Sequence(parts) => {
            for (index, part) in parts.iter().enumerate() {
                if index > 0 {
                    out.push(' ');
                }
                push(out, part, recursive);
            }
        }
        Expression::Choice(branches) => {
            out.push('(');
            for (index, branch) in branches.iter().enumerate() {
                if index > 0 {
                    out.push_str(" | ");
                }
                push(out, branch, recursive);
            }
            out.push(')');
        }
        Expression::Repeat(inner, min, max) => {
            out.push('(');
            push(out, inner, recursive);
            let max = max.map(|max| max.to_string()).unwrap_or_default();
            let _ = write!(out, "){{{min},{max}}}");
        }
    }
}

/// By number: whether a rule can reach one that comes back to itself.
fn recursive_rules(rules: &[Expression]) -> Vec<bool> {
    // What is left when rules without unfinished references are taken away again and again.
    let references: Vec<Vec<usize>> = rules.iter().map(referred).collect();
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
    let mut num_open: Vec<usize> = vec![0; rules.len()];
    for (number, used) in references.iter().enumerate() {
        num_open[number] = used.len();
        for &other in used {
            users[other].push(number);
        }
    }
    let mut recursive = vec![true; rules.len()];
    let mut finished: Vec<usize> = (0..rules.len())
        .filter(|&number| num_open[number] == 0)
        .collect();
    while let Some(number) = finished.pop() {
        recursive[number] = false;
        for &user in &users[number] {
            num_open[user] -= 1;
            if num_open[user] == 0 {
                finished.push(user);
            }
        }
    }
    recursive
}

/// The rules an expression names, as often as it does.
fn referred(expression: &Expression) -> Vec<usize> {
    let mut found = Vec::new();
    let mut waiting = vec![expression];
    while let Some(expression) = waiting.pop() {
        match expression {
            Expression::Text(_) => {}
            Expression::Rule(number) => found.push(*number),
            Expression::Sequence(parts) | Expression::Choice(parts) => waiting.extend(parts),
            Expression::Repeat(inner, ..) => waiting.push(inner),
        }
    }
    found
}
