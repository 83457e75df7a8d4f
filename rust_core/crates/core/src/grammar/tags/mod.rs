//! Structural tags: texts put together of fixed parts, parts by schemas and patterns, and free text.
//!
//! An element is written as an expression of Lark; what needs a name of its own goes to the rules behind it.

mod members;
mod read;
mod special;
mod text;
mod triggered;

use serde_json::Value;

use self::read::{list, object, text};
use super::error::GrammarError;
use super::limits::{MAX_ELEMENT_DEPTH, MAX_TAGS};
use super::pattern;
use super::schema::{self, JsonStyle};
pub(super) use special::SpecialTokens;

/// Elements, as messages list them.
const KINDS: &str = "\"any_text\", \"const_string\", \"json_schema\", \"members_with_separator\", \"or\", \"regex\", \"sequence\", \
                     \"tag\", \"tags_with_separator\", \"text\" and \"triggered_tags\"";

/// The grammar of a structural tag, given as JSON.
pub(super) fn lark(
    text: &str,
    style: &JsonStyle,
    special: &SpecialTokens,
) -> Result<String, GrammarError> {
    let value: Value = serde_json::from_str(text).map_err(|error| {
        GrammarError::at("#", format!("the structural tag is no JSON: {error}"))
    })?;
    let mut writer = Writer {
        style,
        special,
        rules: String::new(),
        num_names: 0,
        depth: 0,
    };
    let start = match value.get("format") {
        Some(format) => writer.element(format, "#/format", "")?,
        None => writer.older(&value)?,
    };
    Ok(format!("start: {start}\n{}", writer.rules))
}

/// A tag: a fixed text, and what follows it, as Lark.
struct Tag {
    begin: String,
    rest: String,
}

struct Writer<'a> {
    style: &'a JsonStyle,
    special: &'a SpecialTokens,
    /// Rules and terminals of the expressions written so far.
    rules: String,
    num_names: usize,
    /// Elements within elements, here.
    depth: usize,
}

impl Writer<'_> {
    /// A number for names of rules that nothing else has.
    fn number(&mut self) -> usize {
        self.num_names += 1;
        self.num_names
    }

    /// An element with a fixed text behind it. Elements whose end is only known by that text read it as well.
    fn element(&mut self, value: &Value, at: &str, end: &str) -> Result<String, GrammarError> {
        self.depth += 1;
        if self.depth > MAX_ELEMENT_DEPTH {
            return Err(GrammarError::at(
                at,
                format!("more than {MAX_ELEMENT_DEPTH} elements within elements"),
            ));
        }
        let kind = value.get("type").and_then(Value::as_str);
        let made = match kind {
            Some("or") => self.one_of(value, at, end),
            Some("sequence") => self.sequence(value, at, end),
            Some("tag") => {
                let tag = self.tag(value, at)?;
                Ok(format!(
                    "{}{}{}",
                    self.special.lark(&tag.begin),
                    tag.rest,
                    self.special.lark(end)
                ))
            }
            Some("text") => self.text(value, at, end),
            _ => {
                let inner = match kind {
                    Some("any_text") => self.any_text(value, at),
                    Some("const_string") => self.fixed(value, at),
                    Some("json_schema") => self.json(value, at),
                    Some("members_with_separator") => self.members(value, at),
                    Some("regex") => regex(value, at),
                    Some("tags_with_separator") => self.separated(value, at),
                    Some("triggered_tags") => self.triggered(value, at, "tags"),
                    _ => Err(GrammarError::at(
                        format!("{at}/type"),
                        format!("only {KINDS} are supported"),
                    )),
                }?;
                Ok(format!("{inner}{}", self.special.lark(end)))
            }
        };
        self.depth -= 1;
        made
    }

    fn sequence(&mut self, value: &Value, at: &str, end: &str) -> Result<String, GrammarError> {
        let members = object(value, at, &["type", "elements"])?;
        let elements = list(members, "elements", at, MAX_TAGS)?;
        let last = elements.len() - 1;
        let mut out = String::new();
        for (index, element) in elements.iter().enumerate() {
            let at = format!("{at}/elements/{index}");
            let end = if index == last { end } else { "" };
            out.push(' ');
            out.push_str(&self.element(element, &at, end)?);
        }
        Ok(out)
    }

    fn one_of(&mut self, value: &Value, at: &str, end: &str) -> Result<String, GrammarError> {
        let members = object(value, at, &["type", "elements"])?;
        let elements = list(members, "elements", at, MAX_TAGS)?;
        let mut alternatives = Vec::with_capacity(elements.len());
        for (index, element) in elements.iter().enumerate() {
            alternatives.push(self.element(element, &format!("{at}/elements/{index}"), end)?);
        }
        Ok(format!(" ({})", alternatives.join(" | ")))
    }

    fn fixed(&self, value: &Value, at: &str) -> Result<String, GrammarError> {
        let members = object(value, at, &["type", "value"])?;
        Ok(self.special.lark(&text(members, "value", at)?))
    }

    fn json(&self, value: &Value, at: &str) -> Result<String, GrammarError> {
        let members = object(value, at, &["type", "json_schema"])?;
        let schema = members.get("json_schema").unwrap_or(&Value::Null);
        self.by_schema(schema, &format!("{at}/json_schema"))
    }

    fn by_schema(&self, schema: &Value, at: &str) -> Result<String, GrammarError> {
        let schema = schema::normalized(schema, self.style).map_err(|error| moved(error, at))?;
        Ok(format!(" %json {schema}"))
    }

    /// `begin`, a schema or a content, and `end`.
    fn tag(&mut self, value: &Value, at: &str) -> Result<Tag, GrammarError> {
        let members = object(value, at, &["type", "begin", "schema", "content", "end"])?;
        let begin = text(members, "begin", at)?;
        if begin.is_empty() {
            return Err(GrammarError::at(format!("{at}/begin"), "must not be empty"));
        }
        let end = text(members, "end", at)?;
        let rest = match (members.get("schema"), members.get("content")) {
            (Some(schema), None) => {
                let content = self.by_schema(schema, &format!("{at}/schema"))?;
                format!("{content}{}", self.special.lark(&end))
            }
            (None, Some(content)) => self.element(content, &format!("{at}/content"), &end)?,
            _ => {
                return Err(GrammarError::at(
                    at,
                    "needs either \"schema\" or \"content\"",
                ));
            }
        };
        Ok(Tag { begin, rest })
    }

    /// A tag from its `skip`th byte on.
    fn rest(&self, tag: &Tag, skip: usize) -> String {
        format!("{}{}", self.special.lark(&tag.begin[skip..]), tag.rest)
    }
}

fn regex(value: &Value, at: &str) -> Result<String, GrammarError> {
    let members = object(value, at, &["type", "pattern"])?;
    let text = members
        .get("pattern")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let place = || format!("{at}/pattern");
    if text.is_empty() {
        return Err(GrammarError::at(
            place(),
            "must be a string, not an empty one",
        ));
    }
    let expression = pattern::full(text).map_err(|error| error.located(place))?;
    Ok(format!(" /(?:{expression})/"))
}

/// An error within a schema, placed in what the schema is a part of.
fn moved(mut error: GrammarError, at: &str) -> GrammarError {
    error.path = error.path.replacen('#', at, 1);
    error
}
