//! Several `if`s about the constants of one property (`{"if": {"properties": {"kind": {"const": …}}}, "then": …}`), taken
//! together: one alternative for each constant, where each by itself would double them.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::disjoint::equal;
use super::values::{all_but, all_of, any_of, without};

/// An `if` of that form.
struct Conditional<'a> {
    property: &'a str,
    values: &'a [Value],
    /// It does not hold of objects without the property.
    is_required: bool,
    then: &'a Value,
}

/// The parts of an `allOf`, those `if`s of which there are several put into one.
pub(super) fn joined(parts: &[Value]) -> Vec<Value> {
    let mut groups: BTreeMap<(&str, bool), Vec<Conditional<'_>>> = BTreeMap::new();
    for conditional in parts.iter().filter_map(read) {
        let key = (conditional.property, conditional.is_required);
        groups.entry(key).or_default().push(conditional);
    }
    groups.retain(|_, group| group.len() > 1);
    let is_grouped = |part: &Value| {
        read(part).is_some_and(|found| groups.contains_key(&(found.property, found.is_required)))
    };
    let mut made: Vec<Value> = Vec::with_capacity(parts.len());
    let mut grouped = Vec::new();
    for ((property, is_required), group) in &groups {
        match written(property, *is_required, group) {
            Some(schema) => grouped.push(schema),
            None => return parts.to_vec(),
        }
    }
    made.extend(parts.iter().filter(|part| !is_grouped(part)).cloned());
    made.extend(grouped);
    made
}

fn read(part: &Value) -> Option<Conditional<'_>> {
    let members = part.as_object()?;
    let mut names = members.keys();
    if !names.all(|name| matches!(name.as_str(), "if" | "then" | "$comment" | "description")) {
        return None;
    }
    let condition = members.get("if")?.as_object()?;
    let is_required = match (condition.len(), condition.get("required")) {
        (1, None) => false,
        (2, Some(_)) => true,
        _ => return None,
    };
    let (property, schema) = single(condition.get("properties")?)?;
    if is_required && condition.get("required") != Some(&json!([property])) {
        return None;
    }
    let (keyword, value) = single(schema)?;
    let values = match (keyword.as_str(), value) {
        ("const", value) => std::slice::from_ref(value),
        ("enum", Value::Array(values)) => values,
        _ => return None,
    };
    Some(Conditional {
        property,
        values,
        is_required,
        then: members.get("then")?,
    })
}

fn single(value: &Value) -> Option<(&String, &Value)> {
    let members: &Map<String, Value> = value.as_object()?;
    members.iter().next().filter(|_| members.len() == 1)
}

/// `None` where it cannot be said that a value is none of the constants.
fn written(property: &str, is_required: bool, group: &[Conditional<'_>]) -> Option<Value> {
    let mut constants: Vec<&Value> = Vec::new();
    for value in group.iter().flat_map(|conditional| conditional.values) {
        if !constants.iter().any(|known| equal(known, value)) {
            constants.push(value);
        }
    }
    let with = |schema: Value| {
        json!({
            "type": "object", "required": [property],
            "properties": {property: schema}, "additionalProperties": true,
        })
    };
    let mut alternatives = Vec::with_capacity(constants.len() + 3);
    for value in &constants {
        let speaks = |conditional: &&Conditional<'_>| {
            conditional.values.iter().any(|other| equal(other, value))
        };
        let mut all = vec![with(json!({ "const": value }))];
        all.extend(
            group
                .iter()
                .filter(speaks)
                .map(|conditional| conditional.then.clone()),
        );
        alternatives.push(all_of(all));
    }
    let others: Vec<Value> = constants.into_iter().cloned().collect();
    alternatives.push(with(all_but(&others)?));
    // Of what is no object each `if` holds.
    let all_then = all_of(
        group
            .iter()
            .map(|conditional| conditional.then.clone())
            .collect(),
    );
    let no_object = json!({"type": ["null", "boolean", "number", "string", "array"]});
    alternatives.push(all_of(vec![no_object, all_then.clone()]));
    alternatives.push(if is_required {
        without(property)
    } else {
        all_of(vec![without(property), all_then])
    });
    Some(any_of(alternatives))
}
