//! Schemas of strings, for texts that stand without quotes.

use serde_json::{Map, Value};

use super::formats;
use super::keywords::{is_kept, is_unsupported};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_COUNT, MAX_ENUM_VALUES};
use crate::grammar::pattern;

/// The strings of a schema.
pub(in crate::grammar) struct Text {
    /// Of a terminal in Lark, in brackets where it is not one atom.
    pub(in crate::grammar) expression: String,
    /// Whether the empty text may be one of them.
    pub(in crate::grammar) is_nullable: bool,
}

const ABOUT_STRINGS: [&str; 8] = [
    "type",
    "const",
    "enum",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "anyOf",
];

/// The strings that a schema allows, which may only speak of strings. Its other values are nothing.
pub(in crate::grammar) fn text(schema: &Value) -> Result<Text, GrammarError> {
    read(schema, "#", 0)
}

fn read(schema: &Value, at: &str, depth: usize) -> Result<Text, GrammarError> {
    let empty = Map::new();
    let members = match schema {
        Value::Bool(true) => &empty,
        Value::Object(members) if depth < 8 => members,
        _ => {
            return Err(GrammarError::at(
                at,
                "must be an object, or true, not too deep within others",
            ));
        }
    };
    let is_known =
        |name: &str| ABOUT_STRINGS.contains(&name) || !(is_kept(name) || is_unsupported(name));
    if let Some(name) = members.keys().find(|name| !is_known(name)) {
        return Err(GrammarError::at(
            format!("{at}/{name}"),
            "is not supported for texts",
        ));
    }
    if members.get("type").is_some_and(|name| name != "string") {
        return Err(GrammarError::at(
            format!("{at}/type"),
            "must be \"string\" for texts",
        ));
    }
    let mut parts = Vec::new();
    let mut is_nullable = true;
    for (name, value) in members {
        let place = format!("{at}/{name}");
        let part = match name.as_str() {
            "const" => constants(std::slice::from_ref(value), &place)?,
            "enum" => constants(value.as_array().map_or(&[], Vec::as_slice), &place)?,
            "pattern" => pattern_of(value, &place)?,
            "format" => format_of(value, &place)?,
            "anyOf" => any_of(value, &place, depth)?,
            _ => continue,
        };
        is_nullable &= part.is_nullable;
        parts.push(part.expression);
    }
    let low = count(members, "minLength", at)?.unwrap_or(0);
    let high = count(members, "maxLength", at)?;
    is_nullable &= low == 0;
    if low > 0 || high.is_some() {
        let high = high.map_or(String::new(), |count| count.to_string());
        parts.push(format!("/(?s:.{{{low},{high}}})/"));
    }
    if parts.is_empty() {
        parts.push("/(?s:.*)/".to_owned());
    }
    Ok(Text {
        expression: format!("({})", parts.join(" & ")),
        is_nullable,
    })
}

fn constants(values: &[Value], at: &str) -> Result<Text, GrammarError> {
    let texts: Option<Vec<_>> = values.iter().map(Value::as_str).collect();
    let texts = texts.filter(|texts| (1..=MAX_ENUM_VALUES).contains(&texts.len()));
    let Some(texts) = texts else {
        return Err(GrammarError::at(
            at,
            format!("must be 1 to {MAX_ENUM_VALUES} strings"),
        ));
    };
    let literals: Vec<_> = texts.iter().map(|text| pattern::literal(text)).collect();
    Ok(Text {
        expression: format!("/(?:{})/", literals.join("|")),
        is_nullable: texts.contains(&""),
    })
}

fn pattern_of(value: &Value, at: &str) -> Result<Text, GrammarError> {
    let Some(text) = value.as_str() else {
        return Err(GrammarError::at(at, "must be a string"));
    };
    let found = pattern::found(text).map_err(|error| error.located(|| at.to_owned()))?;
    Ok(Text {
        expression: format!("/(?:{})/", found.expression),
        is_nullable: found.is_nullable,
    })
}

fn format_of(value: &Value, at: &str) -> Result<Text, GrammarError> {
    let Some(name) = value.as_str() else {
        return Err(GrammarError::at(at, "must be a string"));
    };
    match formats::bare(name) {
        Some(expression) => Ok(Text {
            expression,
            is_nullable: false,
        }),
        None if formats::is_defined(name) => Err(GrammarError::at(
            at,
            format!("{name} is not supported for texts"),
        )),
        None => Ok(Text {
            expression: "/(?s:.*)/".to_owned(),
            is_nullable: true,
        }),
    }
}

fn any_of(value: &Value, at: &str, depth: usize) -> Result<Text, GrammarError> {
    let schemas = value.as_array().filter(|schemas| !schemas.is_empty());
    let Some(schemas) = schemas else {
        return Err(GrammarError::at(
            at,
            "must be a list of schemas, not an empty one",
        ));
    };
    let mut alternatives = Vec::with_capacity(schemas.len());
    let mut is_nullable = false;
    for (index, schema) in schemas.iter().enumerate() {
        let each = read(schema, &format!("{at}/{index}"), depth + 1)?;
        is_nullable |= each.is_nullable;
        alternatives.push(each.expression);
    }
    Ok(Text {
        expression: format!("({})", alternatives.join(" | ")),
        is_nullable,
    })
}

fn count(members: &Map<String, Value>, name: &str, at: &str) -> Result<Option<u64>, GrammarError> {
    let Some(value) = members.get(name) else {
        return Ok(None);
    };
    let number = value
        .as_f64()
        .filter(|value| value.fract() == 0.0 && (0.0..=MAX_COUNT as f64).contains(value));
    match number {
        Some(number) => Ok(Some(number as u64)),
        None => Err(GrammarError::at(
            format!("{at}/{name}"),
            format!("must be an integer, at most {MAX_COUNT}"),
        )),
    }
}
