//! What is valid exactly where a schema is not, said as a schema again, wherever that can be said.

use serde_json::{Map, Value, json};

use super::Walk;
use super::values::{all_but, all_of, any_of, without};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_FOLLOWED, MAX_REWRITTEN};

const ALL_TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
/// Alternatives of a negated `oneOf`, items of a list of which one must differ.
const MAX_PAIRED: usize = 8;
/// Names of properties that one pattern stands for.
const MAX_NAMES: usize = 32;

impl Walk<'_> {
    /// The complement of a client's schema, as a client could write it. Refuses, at the walk's place, what it cannot say.
    pub(super) fn complement(&mut self, schema: &Value) -> Result<Value, GrammarError> {
        self.complement_below(schema, 0)
    }

    /// So many parts of schemas more are written down for another time.
    pub(super) fn spend(&mut self, num_parts: usize) -> Result<(), GrammarError> {
        self.num_rewritten += num_parts;
        if self.num_rewritten > MAX_REWRITTEN {
            return self.refuse("what the schema says in if, not, oneOf and the like is too large");
        }
        Ok(())
    }

    /// `depth`: schemas around this one, and references that were followed.
    fn complement_below(&mut self, schema: &Value, depth: usize) -> Result<Value, GrammarError> {
        if depth > MAX_FOLLOWED {
            return self.refuse("what is negated here contains itself, or too much");
        }
        self.spend(1)?;
        let members = match schema {
            Value::Bool(allows) => return Ok(Value::Bool(!allows)),
            Value::Object(members) => members,
            _ => return self.refuse("a schema must be an object, true or false"),
        };
        let mut alternatives = Vec::new();
        for (name, value) in members {
            self.check_known(name, value)?;
            let found = match name.as_str() {
                "type" => self.other_types(value)?,
                "const" => self.other_values(std::slice::from_ref(value))?,
                "enum" => match value.as_array() {
                    Some(values) => self.other_values(values)?,
                    None => return self.refuse("enum must be a list of values"),
                },
                "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                    outside(name, value, members)
                }
                "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
                | "maxProperties" => self.other_count(name, value)?,
                "properties"
                | "required"
                | "additionalProperties"
                | "patternProperties"
                | "propertyNames"
                | "dependentRequired"
                | "dependentSchemas"
                | "dependencies" => self.other_objects(name, value, depth)?,
                "items" | "prefixItems" | "additionalItems" | "contains" | "uniqueItems" => {
                    self.other_lists(name, value, members, depth)?
                }
                "allOf" | "anyOf" | "oneOf" | "not" | "if" | "$ref" => {
                    self.other_combination(name, value, members, depth)?
                }
                "pattern"
                | "format"
                | "multipleOf"
                | "unevaluatedItems"
                | "unevaluatedProperties"
                | "$dynamicRef"
                | "$recursiveRef" => {
                    if super::keywords::asks_nothing(name, value) {
                        continue;
                    }
                    return self.unsayable(name);
                }
                _ => continue,
            };
            alternatives.push(found);
        }
        Ok(any_of(alternatives))
    }

    fn unsayable<T>(&self, name: &str) -> Result<T, GrammarError> {
        self.refuse(format!(
            "{name} is not supported where a schema is negated; say it otherwise"
        ))
    }

    fn other_types(&self, value: &Value) -> Result<Value, GrammarError> {
        self.types(value)?;
        let names: Vec<&str> = match value {
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            name => name.as_str().into_iter().collect(),
        };
        if names.contains(&"integer") && !names.contains(&"number") {
            return self.unsayable("the type integer");
        }
        let others: Vec<&str> = ALL_TYPES
            .into_iter()
            .filter(|name| !names.contains(name))
            .collect();
        Ok(if others.is_empty() {
            Value::Bool(false)
        } else {
            json!({ "type": others })
        })
    }

    fn other_values(&self, values: &[Value]) -> Result<Value, GrammarError> {
        match all_but(values) {
            Some(schema) => Ok(schema),
            None => self.unsayable("such a constant"),
        }
    }

    fn other_count(&self, name: &str, value: &Value) -> Result<Value, GrammarError> {
        let (kind, unit) = match &name[3..] {
            "Length" => ("string", "Length"),
            "Items" => ("array", "Items"),
            unit => ("object", unit),
        };
        let Some(count) = value
            .as_f64()
            .filter(|count| *count >= 0.0 && count.fract() == 0.0 && *count < 1e15)
        else {
            return self.refuse(format!("{name} must be an integer, at least 0"));
        };
        let count = count as u64;
        Ok(if name.starts_with("max") {
            json!({"type": kind, format!("min{unit}"): count + 1})
        } else if count == 0 {
            Value::Bool(false)
        } else {
            json!({"type": kind, format!("max{unit}"): count - 1})
        })
    }

    fn other_objects(
        &mut self,
        name: &str,
        value: &Value,
        depth: usize,
    ) -> Result<Value, GrammarError> {
        let mut alternatives = Vec::new();
        match (name, value) {
            ("properties", Value::Object(properties)) => {
                for (name, schema) in properties {
                    let other = self.complement_below(schema, depth + 1)?;
                    if other != Value::Bool(false) {
                        alternatives.push(with(name, &other));
                    }
                }
            }
            ("required", Value::Array(names)) => {
                alternatives.extend(names.iter().filter_map(Value::as_str).map(without));
            }
            ("dependentRequired" | "dependentSchemas" | "dependencies", Value::Object(map)) => {
                for (name, asked) in map {
                    let asked = dependent(asked);
                    let other = self.complement_below(&asked, depth + 1)?;
                    alternatives.push(all_of(vec![has(name), json!({"type": "object"}), other]));
                }
            }
            ("propertyNames", names) => {
                if let Some(outside) = only_outside(names) {
                    let has_one = outside.iter().filter_map(Value::as_str);
                    alternatives.extend(
                        has_one.map(|name| all_of(vec![json!({"type": "object"}), has(name)])),
                    );
                } else if names == &Value::Bool(false) {
                    alternatives.push(json!({"type": "object", "minProperties": 1}));
                } else if !super::keywords::asks_nothing(name, names) {
                    return self.unsayable(name);
                }
            }
            ("patternProperties", Value::Object(map)) => {
                for (pattern, schema) in map.iter().filter(|(_, schema)| !allows_all(schema)) {
                    let Some(names) = self.names_of(pattern)? else {
                        return self.refuse(format!(
                            "patternProperties is not supported where a schema is negated, but for patterns of at most \
                             {MAX_NAMES} names (\"^(a|b)$\"); name the properties instead"
                        ));
                    };
                    let other = self.complement_below(schema, depth + 1)?;
                    self.spend(names.len() * size(&other))?;
                    if other != Value::Bool(false) {
                        alternatives.extend(names.iter().map(|name| with(name, &other)));
                    }
                }
            }
            ("additionalProperties", schema) if allows_all(schema) => {}
            _ => return self.unsayable(name),
        }
        Ok(any_of(alternatives))
    }

    /// The names that a pattern of properties stands for; `None` where they are many.
    fn names_of(&self, pattern: &str) -> Result<Option<Vec<String>>, GrammarError> {
        crate::grammar::pattern::texts(pattern, MAX_NAMES)
            .map_err(|error| error.located(|| self.place()))
    }

    fn other_lists(
        &mut self,
        name: &str,
        value: &Value,
        members: &Map<String, Value>,
        depth: usize,
    ) -> Result<Value, GrammarError> {
        let prefix = members.get("prefixItems").or(members.get("items"));
        let num_first = prefix.and_then(Value::as_array).map_or(0, Vec::len);
        match (name, value) {
            ("prefixItems" | "items", Value::Array(schemas)) => {
                let mut alternatives = Vec::new();
                for (index, schema) in schemas.iter().enumerate() {
                    let other = self.complement_below(schema, depth + 1)?;
                    if other != Value::Bool(false) {
                        alternatives.push(with_item(index, &other));
                    }
                }
                Ok(any_of(alternatives))
            }
            ("uniqueItems", Value::Bool(false)) => Ok(Value::Bool(false)),
            ("additionalItems", _) if num_first == 0 => Ok(Value::Bool(false)),
            ("items" | "additionalItems", Value::Bool(false)) => {
                Ok(json!({"type": "array", "minItems": num_first + 1}))
            }
            ("items" | "additionalItems", schema) if allows_all(schema) => Ok(Value::Bool(false)),
            ("items" | "additionalItems", schema) => {
                let Some(max) = members.get("maxItems").and_then(Value::as_u64) else {
                    return self.unsayable("items without maxItems");
                };
                if max > (num_first + MAX_PAIRED) as u64 {
                    return self.unsayable("items with a large maxItems");
                }
                let other = self.complement_below(schema, depth + 1)?;
                let places = num_first..max as usize;
                Ok(any_of(
                    places.map(|index| with_item(index, &other)).collect(),
                ))
            }
            ("contains", schema) => match members.get("minContains").and_then(Value::as_f64) {
                _ if members.contains_key("maxContains") => self.unsayable("maxContains"),
                None | Some(1.0) => {
                    let other = self.complement_below(schema, depth + 1)?;
                    Ok(json!({"type": "array", "items": other}))
                }
                Some(0.0) => Ok(Value::Bool(false)),
                Some(_) => self.unsayable("minContains"),
            },
            _ => self.unsayable(name),
        }
    }

    fn other_combination(
        &mut self,
        name: &str,
        value: &Value,
        members: &Map<String, Value>,
        depth: usize,
    ) -> Result<Value, GrammarError> {
        match (name, value) {
            ("not", schema) => {
                self.spend(size(schema))?;
                Ok(schema.clone())
            }
            ("$ref", reference) => {
                let target = self.at(name, |walk| walk.resolved(reference))?.1;
                self.complement_below(target, depth + 1)
            }
            ("if", condition) => {
                let mut alternatives = Vec::new();
                if let Some(then) = members.get("then") {
                    self.spend(size(condition))?;
                    let other = self.complement_below(then, depth + 1)?;
                    alternatives.push(all_of(vec![condition.clone(), other]));
                }
                if let Some(otherwise) = members.get("else") {
                    let is_not = self.complement_below(condition, depth + 1)?;
                    let other = self.complement_below(otherwise, depth + 1)?;
                    alternatives.push(all_of(vec![is_not, other]));
                }
                Ok(any_of(alternatives))
            }
            (_, Value::Array(schemas)) => {
                let mut others = Vec::with_capacity(schemas.len());
                for schema in schemas {
                    others.push(self.complement_below(schema, depth + 1)?);
                }
                Ok(match name {
                    "allOf" => any_of(others),
                    "anyOf" => all_of(others),
                    _ if schemas.len() > MAX_PAIRED => return self.unsayable("a long oneOf"),
                    _ => {
                        let mut alternatives = vec![all_of(others)];
                        self.spend(schemas.len() * size(value))?;
                        for (index, first) in schemas.iter().enumerate() {
                            let pair = |second: &Value| all_of(vec![first.clone(), second.clone()]);
                            alternatives.extend(schemas[index + 1..].iter().map(pair));
                        }
                        any_of(alternatives)
                    }
                })
            }
            _ => self.refuse(format!("{name} must be a list of schemas")),
        }
    }
}

/// Values within a value, with itself.
pub(super) fn size(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Object(members) => 1 + members.values().map(size).sum::<usize>(),
        _ => 1,
    }
}

/// What a property asks for that is there: a schema, from a list of names too.
pub(super) fn dependent(asked: &Value) -> Value {
    match asked {
        Value::Array(_) => json!({ "required": asked }),
        Value::String(_) => json!({ "required": [asked] }),
        schema => schema.clone(),
    }
}

/// The constants of `{"not": {"enum": […]}}`.
fn only_outside(schema: &Value) -> Option<Vec<Value>> {
    let members = schema.as_object().filter(|members| members.len() == 1)?;
    let inner = members.get("not")?.as_object();
    let inner = inner.filter(|members| members.len() == 1)?;
    match (inner.get("const"), inner.get("enum")) {
        (Some(value), None) => Some(vec![value.clone()]),
        (None, Some(Value::Array(values))) => Some(values.clone()),
        _ => None,
    }
}

fn allows_all(schema: &Value) -> bool {
    schema == &Value::Bool(true) || schema.as_object().is_some_and(Map::is_empty)
}

/// Objects with this property.
pub(super) fn has(name: &str) -> Value {
    json!({ "required": [name] })
}

fn with(name: &str, schema: &Value) -> Value {
    json!({
        "type": "object", "required": [name],
        "properties": {name: schema}, "additionalProperties": true,
    })
}

/// Lists whose item at this place is valid by the schema.
pub(super) fn with_item(index: usize, schema: &Value) -> Value {
    let mut prefix = vec![Value::Bool(true); index];
    prefix.push(schema.clone());
    json!({"type": "array", "prefixItems": prefix, "minItems": index + 1})
}

/// Numbers on the other side of a bound. Draft 4's `"exclusiveMinimum": true` belongs to the bound beside it.
fn outside(name: &str, value: &Value, members: &Map<String, Value>) -> Value {
    let is_strict = |name: &str| members.get(name) == Some(&Value::Bool(true));
    let other = match (name, value) {
        (_, Value::Bool(_)) => return Value::Bool(false),
        ("minimum", _) if is_strict("exclusiveMinimum") => "maximum",
        ("maximum", _) if is_strict("exclusiveMaximum") => "minimum",
        ("minimum", _) => "exclusiveMaximum",
        ("maximum", _) => "exclusiveMinimum",
        ("exclusiveMinimum", _) => "maximum",
        _ => "minimum",
    };
    json!({"type": "number", other: value})
}
