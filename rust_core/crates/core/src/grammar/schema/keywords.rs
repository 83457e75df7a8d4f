//! Which keywords there are, and what becomes of each.

use serde_json::{Map, Value};

use super::Walk;
use crate::grammar::error::GrammarError;

const TYPES: [&str; 7] = [
    "null", "boolean", "integer", "number", "string", "array", "object",
];

/// Keywords that restrict what is valid and cannot be kept (by any draft).
const UNSUPPORTED: [&str; 19] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "disallow",
    "divisibleBy",
    "else",
    "extends",
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

/// Every keyword that says what is valid: those above, and those that are kept.
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

impl<'a> Walk<'a> {
    /// The keywords of a schema, anew.
    pub(super) fn keywords(
        &mut self,
        members: &'a Map<String, Value>,
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
            if let Some(value) = self.applicator(name, value)? {
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
        Ok(made)
    }

    fn check_known(&mut self, name: &str, value: &Value) -> Result<(), GrammarError> {
        if name == "$schema" {
            return self.at(name, |walk| walk.draft(value));
        }
        if UNSUPPORTED.contains(&name) && !asks_nothing(name, value) {
            return self.at(name, |walk| {
                walk.refuse("this keyword is not supported; leave it out, or say it otherwise")
            });
        }
        // An unknown keyword says nothing, by the specification. One that differs in letters' case only was meant.
        let same = |known: &&str| known.eq_ignore_ascii_case(name) && *known != name;
        if let Some(known) = UNSUPPORTED.iter().chain(&KEPT).find(|known| same(known)) {
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

    fn types(&self, value: &'a Value) -> Result<Value, GrammarError> {
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
    fn applicator(&mut self, name: &str, value: &'a Value) -> Result<Option<Value>, GrammarError> {
        let made = match name {
            "anyOf" | "allOf" | "oneOf" => self.at(name, |walk| walk.schemas(value))?,
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

/// Whether a keyword that is not supported has a value with which it restricts nothing.
fn asks_nothing(name: &str, value: &Value) -> bool {
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
