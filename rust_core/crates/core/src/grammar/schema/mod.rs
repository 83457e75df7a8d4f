//! JSON Schema, held against what the grammar engine keeps exactly, and written anew with nothing else in it.
//!
//! The engine skips keywords that it does not know, and some that it knows it keeps only nearly. So it never sees a client's
//! schema: what is passed on is made here, of keywords it implements, with patterns in its own syntax and references
//! resolved. Everything that could be lost on the way is refused, with its place.

mod alternatives;
mod arrays;
mod complement;
mod constants;
mod discriminated;
mod disjoint;
mod formats;
mod keywords;
mod merging;
mod numbers;
mod objects;
mod references;
mod rewriting;
mod strings;
#[cfg(test)]
mod tests;
mod text;
mod unevaluated;
mod values;

use std::cell::Cell;
use std::fmt;

use serde_json::{Map, Value};

use super::error::GrammarError;
use super::limits::{MAX_ENUM_VALUES, MAX_PROOFS, MAX_SCHEMA_DEPTH, MAX_SUBSCHEMAS};

pub(super) use text::text;

/// How a schema's JSON is spelled.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JsonStyle {
    /// No white space between tokens.
    pub compact: bool,
    /// What may stand between two tokens, instead of a space or a line's end with indentation.
    pub whitespace_pattern: Option<String>,
    /// Objects that say nothing of additional properties have none.
    pub closed_objects: bool,
}

/// The schema for the grammar engine, its options under `x-guidance`.
pub(super) fn engine_schema(text: &str, style: &JsonStyle) -> Result<Value, GrammarError> {
    let schema: Value = serde_json::from_str(text)
        .map_err(|error| GrammarError::at("#", format!("the schema is no JSON: {error}")))?;
    normalized(&schema, style)
}

/// The same for a schema that is parsed already.
pub(super) fn normalized(schema: &Value, style: &JsonStyle) -> Result<Value, GrammarError> {
    if !schema.is_object() && !schema.is_boolean() {
        return Err(GrammarError::at(
            "#",
            "a schema must be an object, true or false",
        ));
    }
    let mut walk = Walk::new(schema, style.closed_objects)?;
    let mut root = walk
        .schema(schema)
        .map_err(|error| error.located(|| walk.place()))?;
    let mut definitions = walk.definitions()?;
    walk.check_whole()?;
    alternatives::resolve(&mut root, &mut definitions);
    merging::check(&root, &definitions)?;
    if let Value::Bool(allows) = root {
        root = if allows {
            any()
        } else {
            return Err(unsatisfiable());
        };
    }
    if let Value::Object(members) = &mut root {
        if !definitions.is_empty() {
            members.insert("$defs".to_owned(), Value::Object(definitions));
        }
        members.insert(
            "x-guidance".to_owned(),
            engine_options(style, walk.plain_escapes)?,
        );
    }
    Ok(root)
}

/// A schema for any JSON value that is no boolean itself.
fn any() -> Value {
    Value::Object(Map::new())
}

fn unsatisfiable() -> GrammarError {
    GrammarError::at("#", "the schema allows nothing")
}

/// The engine's options: nothing lenient, no approximations, bounded white space.
fn engine_options(style: &JsonStyle, plain_escapes: bool) -> Result<Value, GrammarError> {
    let mut options = Map::new();
    options.insert(
        "whitespace_flexible".to_owned(),
        Value::Bool(!style.compact),
    );
    if !style.compact {
        let whitespace = match &style.whitespace_pattern {
            Some(pattern) => super::pattern::whitespace(pattern)
                .map_err(|error| error.located(|| "whitespace_pattern".to_owned()))?,
            None => super::limits::WHITESPACE.to_owned(),
        };
        options.insert("whitespace_pattern".to_owned(), Value::String(whitespace));
    }
    if plain_escapes {
        let escapes = Value::String("nrbtf\\\"".to_owned());
        options.insert("json_allowed_escapes".to_owned(), escapes);
    }
    Ok(Value::Object(options))
}

/// One walk over a client's schema.
pub(super) struct Walk<'a> {
    /// The whole document.
    document: &'a Value,
    closed_objects: bool,
    /// Where the walk is, from the document's root.
    path: Vec<String>,
    /// Schemas within schemas, here.
    depth: usize,
    num_subschemas: usize,
    num_enum_values: usize,
    /// Parts of schemas that were written in other words.
    num_rewritten: usize,
    /// What may still be spent on proofs.
    proofs_left: Cell<u32>,
    references: references::References<'a>,
    numbers: numbers::Seen,
    /// Every character of a string is spelled in one way only: no escapes by number. Needed where keys are told apart by
    /// how they are spelled (see `objects`).
    plain_escapes: bool,
    /// A constant with a control character that has no escape but by number, and its place.
    control_character: Option<String>,
}

impl<'a> Walk<'a> {
    fn new(document: &'a Value, closed_objects: bool) -> Result<Self, GrammarError> {
        Ok(Self {
            document,
            closed_objects,
            path: vec!["#".to_owned()],
            depth: 0,
            num_subschemas: 0,
            num_enum_values: 0,
            num_rewritten: 0,
            proofs_left: Cell::new(MAX_PROOFS),
            references: references::References::new(document)?,
            numbers: numbers::Seen::default(),
            plain_escapes: false,
            control_character: None,
        })
    }

    fn place(&self) -> String {
        self.path.join("/")
    }

    fn refuse<T>(&self, problem: impl Into<String>) -> Result<T, GrammarError> {
        Err(GrammarError::at(self.place(), problem))
    }

    /// Runs `step` with the walk one member further down.
    ///
    /// Where it fails the walk stays there, so that the error can be located.
    fn at<T>(
        &mut self,
        name: impl fmt::Display,
        step: impl FnOnce(&mut Self) -> Result<T, GrammarError>,
    ) -> Result<T, GrammarError> {
        self.path.push(references::escaped(&name.to_string()));
        let result = step(self)?;
        self.path.pop();
        Ok(result)
    }

    /// A schema, anew.
    fn schema(&mut self, schema: &Value) -> Result<Value, GrammarError> {
        self.num_subschemas += 1;
        if self.num_subschemas > MAX_SUBSCHEMAS {
            return self.refuse(format!(
                "a schema may have at most {MAX_SUBSCHEMAS} subschemas"
            ));
        }
        match schema {
            Value::Bool(_) => Ok(schema.clone()),
            Value::Object(members) => {
                self.depth += 1;
                if self.depth > MAX_SCHEMA_DEPTH {
                    return self.refuse(format!(
                        "more than {MAX_SCHEMA_DEPTH} schemas within schemas"
                    ));
                }
                let made = self.keywords(members)?;
                self.depth -= 1;
                Ok(Value::Object(made))
            }
            _ => self.refuse("a schema must be an object, true or false"),
        }
    }

    fn schemas(&mut self, value: &Value) -> Result<Value, GrammarError> {
        let Some(schemas) = value.as_array().filter(|schemas| !schemas.is_empty()) else {
            return self.refuse("must be a list of schemas, not an empty one");
        };
        let mut made = Vec::with_capacity(schemas.len());
        for (index, schema) in schemas.iter().enumerate() {
            made.push(self.at(index, |walk| walk.schema(schema))?);
        }
        Ok(Value::Array(made))
    }

    fn count_enum_values(&mut self, more: usize) -> Result<(), GrammarError> {
        self.num_enum_values += more;
        if self.num_enum_values > MAX_ENUM_VALUES {
            return self.refuse(format!(
                "the enums of a schema may have at most {MAX_ENUM_VALUES} values together"
            ));
        }
        Ok(())
    }

    /// The schemas that were referred to, each under its number.
    fn definitions(&mut self) -> Result<Map<String, Value>, GrammarError> {
        let mut made = Map::new();
        while let Some((name, place, target)) = self.references.next_pending() {
            self.path = vec![place];
            self.depth = 0;
            let schema = self
                .schema(target)
                .map_err(|error| error.located(|| self.place()))?;
            made.insert(name, schema);
        }
        Ok(made)
    }

    /// What can only be said once everything was seen.
    fn check_whole(&self) -> Result<(), GrammarError> {
        self.numbers.check()?;
        match &self.control_character {
            Some(place) if self.plain_escapes => Err(GrammarError::at(
                place.clone(),
                "control characters in a constant are supported only where every object of the schema says \
                 \"additionalProperties\": false",
            )),
            _ => Ok(()),
        }
    }
}
