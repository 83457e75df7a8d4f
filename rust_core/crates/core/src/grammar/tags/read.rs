//! Members of the elements of a structural tag.

use serde_json::{Map, Value};

use crate::grammar::error::GrammarError;
use crate::grammar::limits::MAX_TAGS;

/// A JSON object, held against the members that it may have.
pub(super) fn object<'a>(
    value: &'a Value,
    at: &str,
    known: &[&str],
) -> Result<&'a Map<String, Value>, GrammarError> {
    let Some(members) = value.as_object() else {
        return Err(GrammarError::at(at, "must be an object"));
    };
    known_members(members, at, known)?;
    Ok(members)
}

pub(super) fn known_members(
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

pub(super) fn text(
    members: &Map<String, Value>,
    name: &str,
    at: &str,
) -> Result<String, GrammarError> {
    match members.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        _ => Err(GrammarError::at(format!("{at}/{name}"), "must be a string")),
    }
}

/// A list of texts, none of them empty; an empty list only where the member is left out and may be.
pub(super) fn texts(
    members: &Map<String, Value>,
    name: &str,
    at: &str,
    is_needed: bool,
) -> Result<Vec<String>, GrammarError> {
    let value = members.get(name);
    if value.is_none() && !is_needed {
        return Ok(Vec::new());
    }
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
            format!("{at}/{name}"),
            "must be a list of texts, none of them empty",
        )),
    }
}

pub(super) fn flag(
    members: &Map<String, Value>,
    name: &str,
    at: &str,
) -> Result<bool, GrammarError> {
    match members.get(name) {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(_) => Err(GrammarError::at(
            format!("{at}/{name}"),
            "must be true or false",
        )),
    }
}

/// A list of 1 to `at_most` elements.
pub(super) fn list<'a>(
    members: &'a Map<String, Value>,
    name: &str,
    at: &str,
    at_most: usize,
) -> Result<&'a Vec<Value>, GrammarError> {
    let given = members.get(name).and_then(Value::as_array);
    given
        .filter(|list| (1..=at_most).contains(&list.len()))
        .ok_or_else(|| {
            GrammarError::at(
                format!("{at}/{name}"),
                format!("must be a list of 1 to {at_most}"),
            )
        })
}
