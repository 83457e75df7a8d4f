//! What a schema grows to: the engine merges whatever holds of one value together, alternative by alternative.

use serde_json::{Map, Value};
use std::collections::HashMap;

use crate::grammar::error::GrammarError;
use crate::grammar::limits::MAX_MERGED;

/// A schema's size, and the most alternatives of any place in it.
#[derive(Debug, Clone, Copy)]
struct Extent {
    size: usize,
    width: usize,
}

/// Refuses schemas whose parts multiply out to too much.
pub(super) fn check(root: &Value, definitions: &Map<String, Value>) -> Result<(), GrammarError> {
    let mut measure = Measure {
        definitions,
        known: HashMap::new(),
    };
    measure.extent(root)?;
    for name in definitions.keys() {
        measure.definition(name)?;
    }
    Ok(())
}

struct Measure<'a> {
    definitions: &'a Map<String, Value>,
    /// `None` while it is being measured: a schema within itself is merged once.
    known: HashMap<&'a str, Option<Extent>>,
}

const ONE: Extent = Extent { size: 1, width: 1 };

impl<'a> Measure<'a> {
    fn definition(&mut self, name: &'a str) -> Result<Extent, GrammarError> {
        if let Some(known) = self.known.get(name) {
            return Ok(known.unwrap_or(ONE));
        }
        self.known.insert(name, None);
        let extent = match self.definitions.get(name) {
            Some(schema) => self.extent(schema)?,
            None => ONE,
        };
        self.known.insert(name, Some(extent));
        Ok(extent)
    }

    fn extent(&mut self, schema: &'a Value) -> Result<Extent, GrammarError> {
        let Value::Object(members) = schema else {
            return Ok(ONE);
        };
        let mut parts = Vec::new();
        let mut own = ONE;
        for (name, value) in members {
            match (name.as_str(), value) {
                ("allOf", Value::Array(schemas)) => {
                    for schema in schemas {
                        parts.push(self.extent(schema)?);
                    }
                }
                ("anyOf" | "oneOf", Value::Array(schemas)) => {
                    let inner = self.together(schemas.iter())?;
                    parts.push(Extent {
                        width: inner.width.max(schemas.len()),
                        ..inner
                    });
                }
                ("enum", Value::Array(values)) => parts.push(constants(values)),
                ("const", value) => parts.push(constants(std::slice::from_ref(value))),
                ("$ref", Value::String(reference)) if members.len() > 1 => {
                    let name = reference.rsplit('/').next().unwrap_or_default();
                    parts.push(self.definition(name)?);
                }
                ("properties" | "patternProperties", Value::Object(schemas)) => {
                    own = joined(own, self.together(schemas.values())?);
                }
                ("prefixItems", Value::Array(schemas)) => {
                    own = joined(own, self.together(schemas.iter())?);
                }
                ("items" | "additionalProperties", schema) => {
                    own = joined(own, self.extent(schema)?);
                }
                _ => {}
            }
        }
        merged(own, &parts)
    }

    fn together(
        &mut self,
        schemas: impl Iterator<Item = &'a Value>,
    ) -> Result<Extent, GrammarError> {
        let mut sum = Extent { size: 0, width: 1 };
        for schema in schemas {
            sum = joined(sum, self.extent(schema)?);
        }
        Ok(sum)
    }
}

fn joined(a: Extent, b: Extent) -> Extent {
    Extent {
        size: a.size.saturating_add(b.size),
        width: a.width.max(b.width),
    }
}

/// Parts that hold of the same value: each alternative of one with each of the others.
fn merged(own: Extent, parts: &[Extent]) -> Result<Extent, GrammarError> {
    let mut width = own.width;
    let mut size = own.size;
    for part in parts {
        width = width.saturating_mul(part.width);
        size = size.saturating_add(part.size);
    }
    // A single part is not merged with anything.
    let several = parts.len() + usize::from(own.size > 1) > 1;
    let total = if several {
        size.saturating_mul(width)
    } else {
        size
    };
    if total > MAX_MERGED {
        return Err(GrammarError::at(
            "#",
            "what allOf, anyOf and the keywords beside them say together is too large",
        ));
    }
    Ok(Extent {
        size: total.max(size),
        width,
    })
}

/// Strings, numbers and the like stay one however often they are merged; lists and objects are schemas.
fn constants(values: &[Value]) -> Extent {
    let mut size = 0usize;
    let mut num_nested = 0;
    for value in values {
        let nested = nested_size(value);
        size += nested;
        num_nested += usize::from(nested > 1);
    }
    Extent {
        size: size.max(1),
        width: num_nested.max(1),
    }
}

fn nested_size(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(nested_size).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(nested_size).sum::<usize>(),
        _ => 1,
    }
}
