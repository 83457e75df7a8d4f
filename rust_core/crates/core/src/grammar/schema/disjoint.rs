//! Whether two schemas cannot hold of one value. A proof or nothing: what is not seen to be disjoint may be.

use std::collections::{HashMap, HashSet};

use llguidance::derivre::{RegexAst, RegexBuilder};
use serde_json::Value;

use super::Walk;
use crate::grammar::limits::{MAX_FOLLOWED, MAX_PROOF_FUEL, PATTERN_PROOFS};
use crate::grammar::pattern;

/// Bits of the types that a value may have.
const TYPES: [(&str, u8); 7] = [
    ("null", 1),
    ("boolean", 2),
    ("integer", 4),
    ("number", 4),
    ("string", 8),
    ("array", 16),
    ("object", 32),
];
const ANY_TYPE: u8 = 63;
const NUMBER: u8 = 4;
const STRING: u8 = 8;
const ARRAY: u8 = 16;
const OBJECT: u8 = 32;

/// What certainly holds of every value that is valid by a schema.
#[derive(Default)]
struct Facts<'a> {
    types: u8,
    /// Of each list, the value is one.
    values: Vec<Vec<&'a Value>>,
    patterns: Vec<&'a str>,
    required: HashSet<&'a str>,
    properties: HashMap<&'a str, Vec<&'a Value>>,
    /// Bounds of numbers and of lists' lengths.
    ranges: HashMap<&'static str, (f64, f64)>,
    /// Alternatives, one of which holds.
    choices: Vec<&'a [Value]>,
}

impl Walk<'_> {
    /// Whether it is proven that no value is valid by both.
    pub(super) fn disjoint(&self, first: &Value, second: &Value) -> bool {
        self.apart(first, second, 0)
    }

    fn apart(&self, first: &Value, second: &Value, depth: usize) -> bool {
        if first == &Value::Bool(false) || second == &Value::Bool(false) {
            return true;
        }
        if depth > MAX_FOLLOWED || !self.may_prove(1) {
            return false;
        }
        let mut sides = [Facts::default(), Facts::default()];
        for (side, schema) in sides.iter_mut().zip([first, second]) {
            side.types = ANY_TYPE;
            self.note(side, schema, depth);
        }
        let [one, other] = &sides;
        let mut common = one.types & other.types;
        if common == 0 || no_common_value(one, other) {
            return true;
        }
        for (kind, are_apart) in [
            (NUMBER, ranges_apart(one, other, "number")),
            (STRING, common & STRING != 0 && self.texts_apart(one, other)),
            (ARRAY, ranges_apart(one, other, "Items")),
            (
                OBJECT,
                common & OBJECT != 0 && self.objects_apart(one, other, depth),
            ),
        ] {
            if are_apart {
                common &= !kind;
            }
        }
        common == 0
            || choice_is_apart(one, |schema| self.apart(schema, second, depth + 1))
            || choice_is_apart(other, |schema| self.apart(first, schema, depth + 1))
    }

    fn may_prove(&self, cost: u32) -> bool {
        let left = self.proofs_left.get();
        self.proofs_left.set(left.saturating_sub(cost));
        left >= cost
    }

    fn objects_apart(&self, one: &Facts<'_>, other: &Facts<'_>, depth: usize) -> bool {
        one.required.union(&other.required).any(|name| {
            let (Some(ones), Some(others)) = (one.properties.get(name), other.properties.get(name))
            else {
                let mut single = one
                    .properties
                    .get(name)
                    .into_iter()
                    .chain(other.properties.get(name));
                return single.any(|schemas| schemas.contains(&&Value::Bool(false)));
            };
            ones.iter().any(|first| {
                others
                    .iter()
                    .any(|second| self.apart(first, second, depth + 1))
            })
        })
    }

    /// Whether no text matches all patterns of both, and is a constant of both.
    fn texts_apart(&self, one: &Facts<'_>, other: &Facts<'_>) -> bool {
        let language = |facts: &Facts<'_>| -> Option<Vec<RegexAst>> {
            let mut parts = Vec::new();
            for text in &facts.patterns {
                parts.push(RegexAst::Regex(format!(
                    "(?:{})",
                    pattern::search(text).ok()?
                )));
            }
            for values in &facts.values {
                let texts = values.iter().filter_map(|value| value.as_str());
                parts.push(RegexAst::Or(
                    texts
                        .map(|text| RegexAst::Literal(text.to_owned()))
                        .collect(),
                ));
            }
            Some(parts)
        };
        let (Some(ones), Some(others)) = (language(one), language(other)) else {
            return false;
        };
        if ones.is_empty() || others.is_empty() || !self.may_prove(PATTERN_PROOFS) {
            return false;
        }
        let all = RegexAst::And(ones.into_iter().chain(others).collect());
        let mut builder = RegexBuilder::new();
        let Ok(expression) = builder.mk(&all) else {
            return false;
        };
        let machine = builder.to_regex_limited(expression, MAX_PROOF_FUEL);
        machine.is_ok_and(|mut machine| machine.always_empty())
    }

    fn note<'s>(&'s self, facts: &mut Facts<'s>, schema: &'s Value, depth: usize) {
        let Some(members) = schema.as_object().filter(|_| depth <= MAX_FOLLOWED) else {
            return;
        };
        for (name, value) in members {
            match (name.as_str(), value) {
                ("type", _) => facts.types &= type_bits(value),
                ("const", value) => facts.note_values(vec![value]),
                ("enum", Value::Array(values)) => facts.note_values(values.iter().collect()),
                ("pattern", Value::String(pattern)) => facts.patterns.push(pattern),
                ("required", Value::Array(names)) => {
                    facts
                        .required
                        .extend(names.iter().filter_map(Value::as_str));
                }
                ("properties", Value::Object(properties)) => {
                    for (name, schema) in properties {
                        facts.properties.entry(name).or_default().push(schema);
                    }
                }
                ("allOf", Value::Array(schemas)) => {
                    for schema in schemas {
                        self.note(facts, schema, depth + 1);
                    }
                }
                ("anyOf" | "oneOf", Value::Array(schemas)) => facts.choices.push(schemas),
                ("$ref", reference) => {
                    if let Ok((_, target)) = self.resolved(reference) {
                        self.note(facts, target, depth + 1);
                    }
                }
                _ => facts.note_bound(name, value),
            }
        }
    }
}

impl<'a> Facts<'a> {
    fn note_values(&mut self, values: Vec<&'a Value>) {
        self.types &= values
            .iter()
            .fold(0, |bits, value| bits | value_bits(value));
        self.values.push(values);
    }

    fn note_bound(&mut self, name: &str, value: &Value) {
        let (kind, is_min) = match name {
            "minimum" | "exclusiveMinimum" => ("number", true),
            "maximum" | "exclusiveMaximum" => ("number", false),
            "minItems" => ("Items", true),
            "maxItems" => ("Items", false),
            _ => return,
        };
        let Some(bound) = value.as_f64() else {
            return;
        };
        let range = self
            .ranges
            .entry(kind)
            .or_insert((f64::NEG_INFINITY, f64::INFINITY));
        if is_min {
            range.0 = range.0.max(bound);
        } else {
            range.1 = range.1.min(bound);
        }
    }
}

fn type_bits(value: &Value) -> u8 {
    let bits = |name: &Value| {
        let known = TYPES.iter().find(|(known, _)| name.as_str() == Some(known));
        known.map_or(ANY_TYPE, |(_, bits)| *bits)
    };
    match value {
        Value::Array(names) => names.iter().fold(0, |all, name| all | bits(name)),
        name => bits(name),
    }
}

fn value_bits(value: &Value) -> u8 {
    match value {
        Value::Null => 1,
        Value::Bool(_) => 2,
        Value::Number(_) => NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

/// Whether equal by JSON's measure: 1 is 1.0, and the order of members is nothing.
pub(super) fn equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one.as_f64() == other.as_f64(),
        (Value::Array(ones), Value::Array(others)) => {
            ones.len() == others.len()
                && ones
                    .iter()
                    .zip(others)
                    .all(|(one, other)| equal(one, other))
        }
        (Value::Object(ones), Value::Object(others)) => {
            ones.len() == others.len()
                && ones
                    .iter()
                    .all(|(name, one)| others.get(name).is_some_and(|other| equal(one, other)))
        }
        _ => one == other,
    }
}

fn no_common_value(one: &Facts<'_>, other: &Facts<'_>) -> bool {
    one.values.iter().any(|ones| {
        other.values.iter().any(|others| {
            !ones
                .iter()
                .any(|value| others.iter().any(|other| equal(value, other)))
        })
    })
}

fn ranges_apart(one: &Facts<'_>, other: &Facts<'_>, kind: &str) -> bool {
    let (Some(one_range), Some(other_range)) = (one.ranges.get(kind), other.ranges.get(kind))
    else {
        return false;
    };
    let (low, high) = (
        one_range.0.max(other_range.0),
        one_range.1.min(other_range.1),
    );
    // Where they touch, it may be that one of them does not include the bound: that is left open.
    low > high
}

/// Whether one of the lists of alternatives has none that could hold.
fn choice_is_apart(facts: &Facts<'_>, is_apart: impl Fn(&Value) -> bool) -> bool {
    facts
        .choices
        .iter()
        .any(|schemas| !schemas.is_empty() && schemas.iter().all(&is_apart))
}
