//! Which keywords there are, and what becomes of each.

use serde_json::{Map, Value, json};

use super::values::all_of;
use super::{Walk, discriminated};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::MAX_OVERLAPS;

const TYPES: [&str; 7] = [
    "null", "boolean", "integer", "number", "string", "array", "object",
];

/// Keywords that restrict what is valid and cannot be kept (by any draft).
const UNSUPPORTED: [&str; 5] = [
    "$dynamicRef",
    "$recursiveRef",
    "disallow",
    "divisibleBy",
    "extends",
];

/// Those that the engine does not know, and that are said in others.
const REWRITTEN: [&str; 14] = [
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Those that it knows.
const KEPT: [&str; 29] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
    "$schema",
    "$id",
];

/// Of those, what is about no type in particular.
const ABOUT_ANY_TYPE: [&str; 3] = ["type", "$schema", "$id"];

/// Metaschemas whose keywords are read here.
const DRAFTS: [&str; 7] = [
    "json-schema.org/schema",
    "json-schema.org/draft-03/schema",
    "json-schema.org/draft-04/schema",
    "json-schema.org/draft-06/schema",
    "json-schema.org/draft-07/schema",
    "json-schema.org/draft/2019-09/schema",
    "json-schema.org/draft/2020-12/schema",
];

impl Walk<'_> {
    /// The keywords of a schema, anew.
    pub(super) fn keywords(
        &mut self,
        members: &Map<String, Value>,
    ) -> Result<Map<String, Value>, GrammarError> {
        for (name, value) in members {
            self.check_known(name, value)?;
        }
        let mut made = Map::new();
        // Its place in the object decides nothing, but the engine makes smaller grammars when it knows the type first.
        if let Some(types) = members.get("type") {
            made.insert(
                "type".to_owned(),
                self.at("type", |walk| walk.types(types))?,
            );
        }
        // Keys are generated in the order in which schemas are merged, which is the client's. But what is about one type
        // stays together: the engine reads additionalProperties with the properties that stand beside it.
        let mut is_first = true;
        for (name, value) in members {
            if name == "oneOf" {
                let schema = self.at(name, |walk| walk.one_of(value))?;
                add(&mut made, "allOf", Value::Array(vec![schema]));
            } else if let Some(value) = self.applicator(name, value)? {
                add(&mut made, name, value);
            } else if is_first
                && KEPT.contains(&name.as_str())
                && !ABOUT_ANY_TYPE.contains(&name.as_str())
            {
                is_first = false;
                self.strings(members, &mut made)?;
                self.numbers(members, &mut made)?;
                self.arrays(members, &mut made)?;
                self.objects(members, &mut made)?;
            }
        }
        self.add_rewritten(members, &mut made)?;
        Ok(made)
    }

    /// Adds what other keywords say, behind all else: properties keep the order in which the client has named them.
    fn add_rewritten(
        &mut self,
        members: &Map<String, Value>,
        made: &mut Map<String, Value>,
    ) -> Result<(), GrammarError> {
        let mut parts = self.rewritten(members)?;
        parts.push(("unevaluated", self.unevaluated(members)?));
        parts.retain(|(_, schema)| schema != &Value::Bool(true));
        // Only the client's own schemas are closed by default.
        let closed = std::mem::replace(&mut self.closed_objects, false);
        for (name, schema) in parts {
            let schema = self.at(name, |walk| walk.schema(&schema))?;
            add(made, "allOf", Value::Array(vec![schema]));
        }
        self.closed_objects = closed;
        Ok(())
    }

    fn all_of(&mut self, value: &Value) -> Result<Value, GrammarError> {
        match value
            .as_array()
            .map(|parts| (parts, discriminated::joined(parts)))
        {
            Some((parts, joined)) if joined.len() < parts.len() => {
                self.schemas(&Value::Array(joined))
            }
            _ => self.schemas(value),
        }
    }

    /// `oneOf`: alternatives that are seen to be disjoint are as good as an `anyOf`; others hold where those before and behind
    /// them do not.
    fn one_of(&mut self, value: &Value) -> Result<Value, GrammarError> {
        let made = self.schemas(value)?;
        let (Some(schemas), Value::Array(mut alternatives)) = (value.as_array(), made) else {
            return self.refuse("must be a list of schemas");
        };
        let mut overlapping = vec![Vec::new(); schemas.len()];
        let mut num_overlaps = 0;
        for (first, one) in schemas.iter().enumerate() {
            for (second, other) in schemas.iter().enumerate().skip(first + 1) {
                if !self.disjoint(one, other) {
                    num_overlaps += 1;
                    if num_overlaps > MAX_OVERLAPS {
                        return self.refuse("too many of its alternatives may hold together");
                    }
                    overlapping[first].push(second);
                    overlapping[second].push(first);
                }
            }
        }
        let mut others = Vec::with_capacity(schemas.len());
        let place = self.path.len();
        for (index, schema) in schemas.iter().enumerate() {
            let is_needed = !overlapping[index].is_empty();
            let other = if is_needed {
                self.complement(schema)
            } else {
                Ok(Value::Bool(true))
            };
            self.path.truncate(place);
            match other {
                Ok(other) => others.push(other),
                // The engine may see of them, once they are merged with what is beside them, that they are disjoint.
                Err(_) => return Ok(json!({"oneOf": alternatives})),
            }
        }
        let closed = std::mem::replace(&mut self.closed_objects, false);
        for (alternative, list) in alternatives.iter_mut().zip(&overlapping) {
            let mut parts = vec![alternative.take()];
            for &index in list {
                self.spend(1)?;
                parts.push(self.schema(&others[index])?);
            }
            *alternative = all_of(parts);
        }
        self.closed_objects = closed;
        Ok(json!({"anyOf": alternatives}))
    }

    pub(super) fn check_known(&mut self, name: &str, value: &Value) -> Result<(), GrammarError> {
        if name == "$schema" {
            return self.at(name, |walk| walk.draft(value));
        }
        if UNSUPPORTED.contains(&name) {
            return self.at(name, |walk| {
                walk.refuse("this keyword is not supported; leave it out, or say it otherwise")
            });
        }
        // An unknown keyword says nothing, by the specification. One that differs in letters' case only was meant.
        let same = |known: &&str| known.eq_ignore_ascii_case(name) && *known != name;
        let mut all = UNSUPPORTED.iter().chain(&REWRITTEN).chain(&KEPT);
        if let Some(known) = all.find(|known| same(known)) {
            return self.at(name, |walk| {
                walk.refuse(format!("unknown keyword; {known} was meant?"))
            });
        }
        Ok(())
    }

    fn draft(&self, value: &Value) -> Result<(), GrammarError> {
        let name = value.as_str().unwrap_or_default().trim_end_matches('#');
        let name = name.split_once("://").map_or(name, |(_, rest)| rest);
        if DRAFTS.contains(&name) {
            return Ok(());
        }
        self.refuse("only the drafts of json-schema.org are supported (draft-04 to 2020-12)")
    }

    pub(super) fn types(&self, value: &Value) -> Result<Value, GrammarError> {
        let known = |name: &Value| name.as_str().is_some_and(|name| TYPES.contains(&name));
        let fine = match value {
            Value::Array(names) => !names.is_empty() && names.iter().all(known) && distinct(names),
            name => known(name),
        };
        if !fine {
            return self.refuse(format!(
                "must be one of {}, or a list of such",
                TYPES.join(", ")
            ));
        }
        // An integer is a number: "number" beside it says all.
        Ok(match value {
            Value::Array(names) if names.contains(&Value::from("number")) => Value::Array(
                names
                    .iter()
                    .filter(|name| *name != "integer")
                    .cloned()
                    .collect(),
            ),
            value => value.clone(),
        })
    }

    /// The keywords that are about values of any type; `None` for the others.
    fn applicator(&mut self, name: &str, value: &Value) -> Result<Option<Value>, GrammarError> {
        let made = match name {
            "anyOf" => self.at(name, |walk| walk.schemas(value))?,
            "allOf" => self.at(name, |walk| walk.all_of(value))?,
            "const" => self.at(name, |walk| walk.constant(value))?,
            "enum" => self.at(name, |walk| walk.enumeration(value))?,
            "$ref" => self.at(name, |walk| walk.reference(value))?,
            _ => return Ok(None),
        };
        Ok(Some(made))
    }
}

/// Inserts a keyword; to an `allOf` that is there already, as a format leaves one, its parts are added.
fn add(made: &mut Map<String, Value>, name: &str, value: Value) {
    match (made.get_mut(name), value) {
        (Some(Value::Array(parts)), Value::Array(more)) if name == "allOf" => parts.extend(more),
        (_, value) => {
            made.insert(name.to_owned(), value);
        }
    }
}

/// Whether a keyword says what is valid.
pub(super) fn is_kept(name: &str) -> bool {
    KEPT.contains(&name) || REWRITTEN.contains(&name)
}

/// Whether a keyword says what is valid, and cannot be kept.
pub(super) fn is_unsupported(name: &str) -> bool {
    UNSUPPORTED.contains(&name)
}

/// Whether a keyword that is said in others has a value with which it restricts nothing.
pub(super) fn asks_nothing(name: &str, value: &Value) -> bool {
    match name {
        "uniqueItems" => value == &Value::Bool(false),
        "unevaluatedItems" | "unevaluatedProperties" | "propertyNames" => {
            value == &Value::Bool(true) || value.as_object().is_some_and(Map::is_empty)
        }
        "dependencies" | "dependentRequired" | "dependentSchemas" => {
            value.as_object().is_some_and(Map::is_empty)
        }
        _ => false,
    }
}

fn distinct(values: &[Value]) -> bool {
    values
        .iter()
        .enumerate()
        .all(|(index, value)| !values[..index].contains(value))
}
