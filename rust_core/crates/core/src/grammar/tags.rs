//! Structural tags: free text in which whatever begins with a trigger is one of some tags, with its content by a schema.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::error::GrammarError;
use super::limits::MAX_TAGS;
use super::pattern;
use super::schema::{self, JsonStyle};
use crate::text::Vocabulary;

/// Special tokens by their text: in the fixed parts of a tag, that text means the token, as the model writes it.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    by_text: Vec<(String, u32)>,
}

impl SpecialTokens {
    pub(super) fn new(vocabulary: &Vocabulary, eos_token_ids: &[u32]) -> Self {
        let special = (0..vocabulary.len() as u32)
            .filter(|id| vocabulary.is_special(*id) && !eos_token_ids.contains(id));
        let by_text = special.filter_map(|id| {
            let text = std::str::from_utf8(vocabulary.piece(id)?).ok()?;
            (!text.is_empty()).then(|| (text.to_owned(), id))
        });
        Self {
            by_text: by_text.collect(),
        }
    }

    /// The first special token in the text: (where, its text's length, id); the longest where several begin.
    fn first_in(&self, text: &str) -> Option<(usize, usize, u32)> {
        let found = self
            .by_text
            .iter()
            .filter_map(|(name, id)| Some((text.find(name.as_str())?, name.len(), *id)));
        found.min_by_key(|&(start, length, _)| (start, usize::MAX - length))
    }

    /// A fixed text as Lark: expressions and tokens.
    fn lark(&self, mut text: &str) -> String {
        let mut out = String::new();
        while let Some((start, length, id)) = self.first_in(text) {
            push_literal(&mut out, &text[..start]);
            let _ = write!(out, " <[{id}]>");
            text = &text[start + length..];
        }
        push_literal(&mut out, text);
        out
    }
}

fn push_literal(out: &mut String, text: &str) {
    if !text.is_empty() {
        let _ = write!(out, " /{}/", pattern::literal(text));
    }
}

struct Tag {
    begin: String,
    /// As Lark.
    content: String,
    end: String,
}

struct Tags {
    all: Vec<Tag>,
    triggers: Vec<String>,
    /// The text begins with a tag.
    at_least_one: bool,
    /// Nothing follows the first tag.
    stop_after_first: bool,
}

/// The grammar of a structural tag, given as JSON.
pub(super) fn lark(
    text: &str,
    style: &JsonStyle,
    special: &SpecialTokens,
) -> Result<String, GrammarError> {
    let value: Value = serde_json::from_str(text).map_err(|error| {
        GrammarError::at("#", format!("the structural tag is no JSON: {error}"))
    })?;
    let format = value.get("format");
    match format
        .and_then(|format| format.get("type"))
        .and_then(Value::as_str)
    {
        Some("sequence" | "tags_with_separator" | "const_string") => {
            let mut start = String::new();
            push_element(
                &mut start,
                format.unwrap_or(&Value::Null),
                "#/format",
                style,
                special,
            )?;
            Ok(format!("start:{start}\n"))
        }
        _ => Ok(written(&read(&value, style)?, special)),
    }
}

/// A text, tags with a text between them, or some of these one after the other; appended as Lark.
fn push_element(
    out: &mut String,
    element: &Value,
    at: &str,
    style: &JsonStyle,
    special: &SpecialTokens,
) -> Result<(), GrammarError> {
    let Some(members) = element.as_object() else {
        return Err(GrammarError::at(at, "must be an object"));
    };
    match members.get("type").and_then(Value::as_str) {
        Some("const_string") => {
            known_members(members, at, &["type", "value"])?;
            out.push_str(&special.lark(&text(members, "value", at)?));
            Ok(())
        }
        Some("sequence") if !at.contains("/elements/") => {
            known_members(members, at, &["type", "elements"])?;
            let at = format!("{at}/elements");
            let elements = members.get("elements").and_then(Value::as_array);
            let Some(elements) = elements.filter(|list| (1..=MAX_TAGS).contains(&list.len()))
            else {
                return Err(GrammarError::at(
                    at,
                    format!("must be a list of 1 to {MAX_TAGS}"),
                ));
            };
            for (index, element) in elements.iter().enumerate() {
                push_element(out, element, &format!("{at}/{index}"), style, special)?;
            }
            Ok(())
        }
        Some("tags_with_separator") => push_separated(out, members, at, style, special),
        _ => Err(GrammarError::at(
            format!("{at}/type"),
            "only \"const_string\" and \"tags_with_separator\" are supported here, and \"sequence\" of them",
        )),
    }
}

/// Tags with a text between them, and nothing else.
fn push_separated(
    out: &mut String,
    members: &Map<String, Value>,
    at: &str,
    style: &JsonStyle,
    special: &SpecialTokens,
) -> Result<(), GrammarError> {
    let known = [
        "type",
        "tags",
        "separator",
        "at_least_one",
        "stop_after_first",
    ];
    known_members(members, at, &known)?;
    let tags = Tags {
        all: read_tags(members, at, "tags", style)?,
        triggers: Vec::new(),
        at_least_one: flag(members, "at_least_one", at)?,
        stop_after_first: flag(members, "stop_after_first", at)?,
    };
    let each: Vec<_> = (0..tags.all.len())
        .map(|index| rest(&tags, index, 0, special))
        .collect();
    let tag = format!("({})", each.join(" | "));
    let more = if tags.stop_after_first {
        String::new()
    } else {
        format!(
            " ({} {tag})*",
            special.lark(&text(members, "separator", at)?)
        )
    };
    let optional = if tags.at_least_one { "" } else { "?" };
    let _ = write!(out, " ({tag}{more}){optional}");
    Ok(())
}

fn text(members: &Map<String, Value>, name: &str, at: &str) -> Result<String, GrammarError> {
    match members.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        _ => Err(GrammarError::at(format!("{at}/{name}"), "must be a string")),
    }
}

fn read(value: &Value, style: &JsonStyle) -> Result<Tags, GrammarError> {
    let (members, at, list) = match value.get("format") {
        Some(format) => (format, "#/format", "tags"),
        None => (value, "#", "structures"),
    };
    let Some(members) = members.as_object() else {
        return Err(GrammarError::at(at, "must be an object"));
    };
    let kind = members.get("type").and_then(Value::as_str);
    let expected = if list == "tags" {
        "triggered_tags"
    } else {
        "structural_tag"
    };
    if kind.is_some_and(|kind| kind != expected) || (kind.is_none() && list == "tags") {
        return Err(GrammarError::at(
            format!("{at}/type"),
            format!("only \"{expected}\" is supported"),
        ));
    }
    known_members(
        members,
        at,
        &["type", list, "triggers", "at_least_one", "stop_after_first"],
    )?;
    let triggers = texts(members.get("triggers"), &format!("{at}/triggers"))?;
    let tags = read_tags(members, at, list, style)?;
    let begins = |tag: &Tag| {
        triggers
            .iter()
            .any(|trigger| tag.begin.starts_with(trigger.as_str()))
    };
    if let Some(index) = tags.iter().position(|tag| !begins(tag)) {
        return Err(GrammarError::at(
            format!("{at}/{list}/{index}/begin"),
            "begins with none of the triggers",
        ));
    }
    Ok(Tags {
        all: tags,
        triggers,
        at_least_one: flag(members, "at_least_one", at)?,
        stop_after_first: flag(members, "stop_after_first", at)?,
    })
}

fn read_tags(
    members: &Map<String, Value>,
    at: &str,
    list: &str,
    style: &JsonStyle,
) -> Result<Vec<Tag>, GrammarError> {
    let at = format!("{at}/{list}");
    let Some(given) = members.get(list).and_then(Value::as_array) else {
        return Err(GrammarError::at(at, "must be a list of tags"));
    };
    if given.is_empty() || given.len() > MAX_TAGS {
        return Err(GrammarError::at(
            at,
            format!("must have 1 to {MAX_TAGS} entries"),
        ));
    }
    let tags = given.iter().enumerate();
    tags.map(|(index, tag)| read_tag(tag, &format!("{at}/{index}"), style))
        .collect()
}

fn read_tag(tag: &Value, at: &str, style: &JsonStyle) -> Result<Tag, GrammarError> {
    let Some(members) = tag.as_object() else {
        return Err(GrammarError::at(at, "must be an object"));
    };
    known_members(members, at, &["type", "begin", "schema", "content", "end"])?;
    let content = match (members.get("schema"), members.get("content")) {
        (Some(schema), None) => json(schema, &format!("{at}/schema"), style)?,
        (None, Some(content)) => read_content(content, &format!("{at}/content"), style)?,
        _ => {
            return Err(GrammarError::at(
                at,
                "needs either \"schema\" or \"content\"",
            ));
        }
    };
    let begin = text(members, "begin", at)?;
    if begin.is_empty() {
        return Err(GrammarError::at(format!("{at}/begin"), "must not be empty"));
    }
    Ok(Tag {
        begin,
        content,
        end: text(members, "end", at)?,
    })
}

fn read_content(content: &Value, at: &str, style: &JsonStyle) -> Result<String, GrammarError> {
    let Some(members) = content.as_object() else {
        return Err(GrammarError::at(at, "must be an object"));
    };
    match members.get("type").and_then(Value::as_str) {
        Some("json_schema") => {
            known_members(members, at, &["type", "json_schema"])?;
            let schema = members.get("json_schema").unwrap_or(&Value::Null);
            json(schema, &format!("{at}/json_schema"), style)
        }
        Some("regex") => {
            known_members(members, at, &["type", "pattern"])?;
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
            Ok(format!("/(?:{expression})/"))
        }
        _ => Err(GrammarError::at(
            format!("{at}/type"),
            "only \"json_schema\" and \"regex\" are supported",
        )),
    }
}

fn json(schema: &Value, at: &str, style: &JsonStyle) -> Result<String, GrammarError> {
    let schema = schema::normalized(schema, style).map_err(|mut error| {
        error.path = error.path.replacen('#', at, 1);
        error
    })?;
    Ok(format!("%json {schema}"))
}

fn known_members(
    members: &Map<String, Value>,
    at: &str,
    known: &[&str],
) -> Result<(), GrammarError> {
    match members.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(GrammarError::at(
            format!("{at}/{name}"),
            "is not supported here",
        )),
        None => Ok(()),
    }
}

fn texts(value: Option<&Value>, at: &str) -> Result<Vec<String>, GrammarError> {
    let texts = value.and_then(Value::as_array).and_then(|texts| {
        let texts = texts
            .iter()
            .map(|text| text.as_str().filter(|text| !text.is_empty()));
        texts
            .map(|text| text.map(str::to_owned))
            .collect::<Option<Vec<_>>>()
    });
    match texts {
        Some(texts) if !texts.is_empty() && texts.len() <= MAX_TAGS => Ok(texts),
        _ => Err(GrammarError::at(
            at,
            "must be a list of texts, none of them empty",
        )),
    }
}

fn flag(members: &Map<String, Value>, name: &str, at: &str) -> Result<bool, GrammarError> {
    match members.get(name) {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(_) => Err(GrammarError::at(
            format!("{at}/{name}"),
            "must be true or false",
        )),
    }
}

/// The rules. `tag_i` is a tag from its beginning; `part_i` is free text up to a trigger, and what then has to follow.
fn written(tags: &Tags, special: &SpecialTokens) -> String {
    // A trigger that begins with another is never reached: the shorter one decides.
    let mut triggers: Vec<&str> = tags.triggers.iter().map(String::as_str).collect();
    triggers.sort_unstable_by_key(|trigger| trigger.len());
    let mut shortest: Vec<&str> = Vec::new();
    for trigger in triggers {
        if !shortest.iter().any(|other| trigger.starts_with(other)) {
            shortest.push(trigger);
        }
    }
    let mut lark = String::new();
    let mut parts = Vec::new();
    let (tokens, texts): (Vec<&str>, Vec<&str>) = shortest
        .iter()
        .partition(|trigger| matches!(special.first_in(trigger), Some((0, ..))));
    push_free_text(&mut lark, &texts);
    for (index, trigger) in texts.iter().enumerate() {
        let literal = pattern::literal(trigger);
        let _ = writeln!(
            lark,
            "lead_{index}[lazy]: LEAD_{index}\nLEAD_{index}: /(?s:.*){literal}/{}",
            without_trigger(&texts, "(?s:.+)")
        );
        parts.push(format!(
            "lead_{index} ({})",
            rests(tags, trigger, trigger.len(), special)
        ));
    }
    for trigger in &tokens {
        parts.push(format!("free ({})", rests(tags, trigger, 0, special)));
    }
    let whole: Vec<_> = (0..tags.all.len())
        .map(|index| rest(tags, index, 0, special))
        .collect();
    let _ = writeln!(lark, "tag: {}", whole.join("\n | "));
    let _ = writeln!(lark, "part: {}", parts.join("\n | "));
    let start = match (tags.at_least_one, tags.stop_after_first) {
        (true, true) => "tag",
        (true, false) => "tag part* free",
        (false, true) => "part | free",
        (false, false) => "part* free",
    };
    let _ = writeln!(lark, "start: {start}");
    lark
}

/// `free`: any text, or none, without a trigger in it.
fn push_free_text(lark: &mut String, triggers: &[&str]) {
    let but = without_trigger(triggers, "(?s:.*)");
    let _ = writeln!(lark, "free: FREE?\nFREE: /(?s:.+)/{but}");
}

/// What takes texts away that have a trigger, and then `behind`.
fn without_trigger(triggers: &[&str], behind: &str) -> String {
    if triggers.is_empty() {
        return String::new();
    }
    let literals: Vec<_> = triggers
        .iter()
        .map(|trigger| pattern::literal(trigger))
        .collect();
    format!(" & ~/(?s:.*)(?:{}){behind}/", literals.join("|"))
}

/// The tags of a trigger, without their first `skip` bytes.
fn rests(tags: &Tags, trigger: &str, skip: usize, special: &SpecialTokens) -> String {
    let of_trigger =
        (0..tags.all.len()).filter(|&index| tags.all[index].begin.starts_with(trigger));
    let rests: Vec<_> = of_trigger
        .map(|index| rest(tags, index, skip, special))
        .collect();
    rests.join(" | ")
}

fn rest(tags: &Tags, index: usize, skip: usize, special: &SpecialTokens) -> String {
    let tag = &tags.all[index];
    format!(
        "{} {} {}",
        special.lark(&tag.begin[skip..]),
        tag.content,
        special.lark(&tag.end)
    )
}
