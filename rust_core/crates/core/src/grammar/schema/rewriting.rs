//! Keywords that the engine does not know, said in those that it does.
//!
//! Each becomes a schema, as a client could have written it, that holds beside the others. What has no such schema, or only
//! one that is too large, is refused.

use serde_json::{Map, Value, json};

use super::Walk;
use super::complement::{dependent, has, size, with_item};
use super::disjoint::equal;
use super::keywords::asks_nothing;
use super::values::{all_of, any_of};
use crate::grammar::error::GrammarError;
use crate::grammar::limits::{MAX_ARRANGED, MAX_CONTAINED, MAX_COUNTED_ITEMS};

impl Walk<'_> {
    /// What these keywords ask for, by keyword; `unevaluated…` are not among them.
    pub(super) fn rewritten(
        &mut self,
        members: &Map<String, Value>,
    ) -> Result<Vec<(&'static str, Value)>, GrammarError> {
        let mut parts = Vec::new();
        if let Some(schema) = members.get("not") {
            parts.push(("not", self.at("not", |walk| walk.complement(schema))?));
        }
        if let Some(condition) = members.get("if") {
            let schema = self.at("if", |walk| walk.conditional(condition, members))?;
            parts.push(("if", schema));
        }
        for name in ["dependentRequired", "dependentSchemas", "dependencies"] {
            if let Some(value) = members.get(name).filter(|value| !asks_nothing(name, value)) {
                let found = self.at(name, |walk| walk.dependencies(value))?;
                parts.extend(found.into_iter().map(|schema| (name, schema)));
            }
        }
        if let Some(names) = members.get("propertyNames")
            && !asks_nothing("propertyNames", names)
        {
            let schema = self.at("propertyNames", |walk| walk.named(names))?;
            parts.push(("propertyNames", schema));
        }
        if let Some(schema) = members.get("contains") {
            let schema = self.at("contains", |walk| walk.containing(schema, members))?;
            parts.push(("contains", schema));
        }
        match members.get("uniqueItems") {
            None | Some(Value::Bool(false)) => {}
            Some(Value::Bool(true)) => {
                let schema = self.at("uniqueItems", |walk| walk.unique(members))?;
                parts.push(("uniqueItems", schema));
            }
            Some(_) => {
                return self.at("uniqueItems", |walk| walk.refuse("must be true or false"));
            }
        }
        parts.retain(|(_, schema)| schema != &Value::Bool(true));
        Ok(parts)
    }

    /// `if`, `then` and `else`: either the one and what follows from it, or not, and what follows from that.
    fn conditional(
        &mut self,
        condition: &Value,
        members: &Map<String, Value>,
    ) -> Result<Value, GrammarError> {
        let consequence = |name: &str| members.get(name).cloned().unwrap_or(Value::Bool(true));
        let (then, otherwise) = (consequence("then"), consequence("else"));
        if then == Value::Bool(true) && otherwise == Value::Bool(true) {
            return Ok(Value::Bool(true));
        }
        let is_not = self.complement(condition)?;
        self.spend(size(condition) + size(&then) + size(&otherwise))?;
        Ok(any_of(vec![
            all_of(vec![condition.clone(), then]),
            all_of(vec![is_not, otherwise]),
        ]))
    }

    /// For each property: it is not there, or it is, with what it asks for.
    fn dependencies(&mut self, value: &Value) -> Result<Vec<Value>, GrammarError> {
        let Some(map) = value.as_object() else {
            return self.refuse("must be an object");
        };
        self.spend(size(value))?;
        let each = map.iter().map(|(name, asked)| {
            let absent = json!({"properties": {name: false}, "additionalProperties": true});
            any_of(vec![absent, all_of(vec![has(name), dependent(asked)])])
        });
        Ok(each.collect())
    }

    /// Objects whose keys are valid by the schema.
    fn named(&mut self, names: &Value) -> Result<Value, GrammarError> {
        let members = match names {
            Value::Bool(_) => return Ok(json!({"additionalProperties": false})),
            Value::Object(members) => members,
            _ => return self.refuse("a schema must be an object, true or false"),
        };
        let mut kept = None;
        for (name, value) in members {
            self.check_known(name, value)?;
            let schema = match (name.as_str(), value) {
                ("type", Value::String(kind)) if kind == "string" => continue,
                ("const", Value::String(_)) => only(std::slice::from_ref(value)),
                ("enum", Value::Array(values)) => only(values),
                ("pattern", Value::String(pattern)) => matching(pattern),
                ("maxLength", Value::Number(_)) if members.contains_key("minLength") => continue,
                ("minLength" | "maxLength", Value::Number(_)) => {
                    let count = |name: &str| members.get(name).and_then(Value::as_u64);
                    let min = count("minLength").unwrap_or(0);
                    let max = count("maxLength").map_or(String::new(), |max| max.to_string());
                    matching(&format!("^[\\s\\S]{{{min},{max}}}$"))
                }
                ("not", schema) => match schema.as_object().map(|inner| (inner.len(), inner)) {
                    Some((1, inner)) if inner.contains_key("const") => {
                        barred(&[inner["const"].clone()])
                    }
                    Some((1, inner)) if inner["enum"].is_array() => {
                        barred(inner["enum"].as_array().map_or(&[], Vec::as_slice))
                    }
                    _ => return self.refuse_names(name),
                },
                ("$ref", reference) => {
                    let target = self.at("$ref", |walk| walk.resolved(reference))?.1;
                    self.spend(1)?;
                    if target.get("$ref").is_some() {
                        return self.refuse_names("$ref to a reference");
                    }
                    self.named(target)?
                }
                (name, _) if super::keywords::is_kept(name) => return self.refuse_names(name),
                _ => continue,
            };
            if kept.replace(schema).is_some() {
                return self.refuse("two keywords about names at once are not supported");
            }
        }
        Ok(kept.unwrap_or(Value::Bool(true)))
    }

    fn refuse_names<T>(&self, name: &str) -> Result<T, GrammarError> {
        self.refuse(format!(
            "{name} is not supported here; names may have one of pattern, enum, const, and a length"
        ))
    }

    /// Lists with so many items that are valid by the schema, which are looked for in their first places: lists that have
    /// the first of them further behind are left out, though they are valid.
    fn containing(
        &mut self,
        schema: &Value,
        members: &Map<String, Value>,
    ) -> Result<Value, GrammarError> {
        let count = |name: &str| members.get(name).and_then(Value::as_f64);
        let (min, max) = (count("minContains").unwrap_or(1.0), count("maxContains"));
        if min <= 0.0 && max.is_none() {
            return Ok(Value::Bool(true));
        }
        let longest = bound(members);
        match schema {
            Value::Bool(false) if min >= 1.0 => return Ok(no_lists()),
            Value::Bool(true) => {
                let mut counts = json!({"minItems": min});
                if let Some(max) = max {
                    counts["maxItems"] = max.into();
                }
                return Ok(counts);
            }
            _ => {}
        }
        if min <= 1.0 && max.is_none() {
            let num_places = longest.unwrap_or(usize::MAX).min(MAX_COUNTED_ITEMS);
            self.spend(num_places * size(schema))?;
            let places = (0..num_places).map(|index| with_item(index, schema));
            return Ok(none_if_empty(any_of(places.collect())));
        }
        if longest.is_none_or(|longest| longest > MAX_CONTAINED) && min > MAX_CONTAINED as f64 {
            return self.refuse(format!(
                "minContains is supported up to {MAX_CONTAINED}, beyond the first of which maxItems leaves no place"
            ));
        }
        // Who counts none above must know of the others that they do not count.
        let other = match max {
            Some(_) => self.complement(schema)?,
            None => Value::Bool(true),
        };
        let num_places = match max {
            Some(max) if max < 1.0 => 0,
            _ => longest.unwrap_or(usize::MAX).min(MAX_CONTAINED),
        };
        let fits = |count: u32| {
            let is_enough = f64::from(count) >= min;
            is_enough && max.map_or(f64::from(count) < min + 1.0, |max| f64::from(count) <= max)
        };
        self.spend((size(schema) + size(&other)) << num_places)?;
        let chosen = (0u32..1 << num_places).filter(|places| fits(places.count_ones()));
        let each = chosen.map(|places| {
            let item = |index| {
                if places >> index & 1 == 1 {
                    schema
                } else {
                    &other
                }
            };
            let prefix: Vec<&Value> = (0..num_places).map(item).collect();
            let num_needed = u32::BITS - places.leading_zeros();
            json!({"type": "array", "prefixItems": prefix, "items": other, "minItems": num_needed})
        });
        Ok(none_if_empty(any_of(each.collect())))
    }

    /// Lists without two equal items.
    fn unique(&mut self, members: &Map<String, Value>) -> Result<Value, GrammarError> {
        let longest = bound(members);
        if longest.is_some_and(|longest| longest < 2) {
            return Ok(Value::Bool(true));
        }
        if let Some(places) = places(members, longest) {
            let pairs_differ = (0..places.len()).all(|index| {
                places[..index]
                    .iter()
                    .all(|other| self.disjoint(other, &places[index]))
            });
            if pairs_differ {
                return Ok(Value::Bool(true));
            }
        }
        let items = members
            .get("items")
            .filter(|_| !members.contains_key("prefixItems"));
        let Some(values) = items.and_then(|items| self.finite_values(items)) else {
            return self.refuse(
                "is supported where the items are of few constants (enum), or no two places of the list can hold the \
                 same value",
            );
        };
        let longest = longest.map_or(values.len(), |longest| longest.min(values.len()));
        let num_arranged = (0..longest).try_fold(1usize, |product, taken| {
            Some(product * (values.len() - taken)).filter(|product| *product <= MAX_ARRANGED)
        });
        if num_arranged.is_none() {
            return self.refuse(format!(
                "the items can be arranged in more than {MAX_ARRANGED} ways; allow fewer constants, or fewer items"
            ));
        }
        let mut arranged = Vec::new();
        arrange(&values, longest, &mut Vec::new(), &mut arranged);
        Ok(none_if_empty(any_of(arranged)))
    }

    /// The constants that are valid by a schema, and maybe others; `None` where there are more than a few.
    fn finite_values(&self, schema: &Value) -> Option<Vec<Value>> {
        let mut members = schema.as_object()?;
        if let Some(reference) = members.get("$ref") {
            members = self.resolved(reference).ok()?.1.as_object()?;
        }
        let mut found: Vec<Value> = Vec::new();
        let given = match (members.get("const"), members.get("enum")) {
            (Some(value), _) => std::slice::from_ref(value),
            (None, Some(Value::Array(values))) => values,
            _ if members.get("type") == Some(&json!("boolean")) => {
                return Some(vec![json!(false), json!(true)]);
            }
            _ => return None,
        };
        for value in given {
            if !found.iter().any(|other| equal(other, value)) {
                found.push(value.clone());
            }
        }
        Some(found)
    }
}

/// The schema of each place of a list that has so many at most.
fn places(members: &Map<String, Value>, longest: Option<usize>) -> Option<Vec<Value>> {
    let longest = longest.filter(|longest| *longest <= MAX_CONTAINED)?;
    let (first, rest) = match (members.get("prefixItems"), members.get("items")) {
        (Some(Value::Array(first)), rest) => (first.as_slice(), rest),
        (None, Some(Value::Array(first))) => (first.as_slice(), members.get("additionalItems")),
        (_, rest) => (&[][..], rest),
    };
    let place = |index: usize| {
        first
            .get(index)
            .or(rest)
            .cloned()
            .unwrap_or(Value::Bool(true))
    };
    Some((0..longest).map(place).collect())
}

/// How many items a list may have, by its own keywords.
fn bound(members: &Map<String, Value>) -> Option<usize> {
    let max = members.get("maxItems").and_then(Value::as_f64);
    let closed = match (members.get("prefixItems"), members.get("items")) {
        (Some(Value::Array(first)), Some(Value::Bool(false))) => Some(first.len()),
        (None, Some(Value::Bool(false))) => Some(0),
        (None, Some(Value::Array(first)))
            if members.get("additionalItems") == Some(&Value::Bool(false)) =>
        {
            Some(first.len())
        }
        _ => None,
    };
    let max = max
        .filter(|max| (0.0..1e9).contains(max))
        .map(|max| max as usize);
    match (max, closed) {
        (Some(max), Some(closed)) => Some(max.min(closed)),
        (max, closed) => max.or(closed),
    }
}

fn no_lists() -> Value {
    json!({"type": ["null", "boolean", "number", "string", "object"]})
}

/// What is said of lists says nothing of other values.
fn none_if_empty(lists: Value) -> Value {
    any_of(vec![lists, no_lists()])
}

/// All orders of `num_left` more of the values, each with its beginnings.
fn arrange(values: &[Value], num_left: usize, taken: &mut Vec<usize>, out: &mut Vec<Value>) {
    if num_left == 0 {
        let items: Vec<Value> = taken
            .iter()
            .map(|&index| json!({"const": values[index]}))
            .collect();
        out.push(json!({"type": "array", "prefixItems": items, "items": false}));
        return;
    }
    for index in 0..values.len() {
        if !taken.contains(&index) {
            taken.push(index);
            arrange(values, num_left - 1, taken, out);
            taken.pop();
        }
    }
}

/// Objects with keys among these.
fn only(names: &[Value]) -> Value {
    let names = names.iter().filter_map(Value::as_str);
    let properties: Map<String, Value> = names.map(|name| (name.to_owned(), true.into())).collect();
    json!({"properties": properties, "additionalProperties": false})
}

/// Objects without these keys.
fn barred(names: &[Value]) -> Value {
    let names = names.iter().filter_map(Value::as_str);
    let properties: Map<String, Value> =
        names.map(|name| (name.to_owned(), false.into())).collect();
    json!({"properties": properties, "additionalProperties": true})
}

/// Objects whose keys match.
fn matching(pattern: &str) -> Value {
    json!({"patternProperties": {pattern: true}, "additionalProperties": false})
}
