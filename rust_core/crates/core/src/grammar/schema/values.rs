//! Schemas of constants, and of everything but some constants.

use serde_json::{Map, Value, json};

/// Valid by it is whatever equals none of these values. `None` where an object among them makes that unsayable.
pub(super) fn all_but(values: &[Value]) -> Option<Value> {
    let strings: Vec<&str> = values.iter().filter_map(Value::as_str).collect();
    let numbers: Vec<f64> = values.iter().filter_map(Value::as_f64).collect();
    let has = |value: Value| values.contains(&value);
    let mut others = Vec::new();
    if !has(Value::Null) {
        others.push("null");
    }
    let mut alternatives = Vec::new();
    match (has(Value::Bool(false)), has(Value::Bool(true))) {
        (false, false) => others.push("boolean"),
        (false, true) => alternatives.push(json!({"const": false})),
        (true, false) => alternatives.push(json!({"const": true})),
        (true, true) => {}
    }
    if strings.is_empty() {
        others.push("string");
    } else {
        alternatives.push(json!({"type": "string", "pattern": other_text(&strings)}));
    }
    if numbers.is_empty() {
        others.push("number");
    } else {
        alternatives.extend(between(numbers));
    }
    for (kind, is_kind) in [
        ("array", Value::is_array as fn(&Value) -> bool),
        ("object", Value::is_object),
    ] {
        let of_kind: Vec<&Value> = values.iter().filter(|value| is_kind(value)).collect();
        if of_kind.is_empty() {
            others.push(kind);
            continue;
        }
        let each = of_kind.into_iter().map(other_container);
        let parts = each.collect::<Option<Vec<_>>>()?;
        alternatives.push(json!({"type": kind, "allOf": parts}));
    }
    if !others.is_empty() {
        alternatives.push(json!({"type": others}));
    }
    Some(any_of(alternatives))
}

/// One of these holds.
pub(super) fn any_of(mut alternatives: Vec<Value>) -> Value {
    alternatives.retain(|alternative| alternative != &Value::Bool(false));
    match alternatives.len() {
        0 => Value::Bool(false),
        1 => alternatives.remove(0),
        _ if alternatives.contains(&Value::Bool(true)) => Value::Bool(true),
        _ => json!({ "anyOf": alternatives }),
    }
}

/// All of these hold.
pub(super) fn all_of(mut parts: Vec<Value>) -> Value {
    parts.retain(|part| part != &Value::Bool(true));
    match parts.len() {
        0 => Value::Bool(true),
        1 => parts.remove(0),
        _ if parts.contains(&Value::Bool(false)) => Value::Bool(false),
        _ => json!({ "allOf": parts }),
    }
}

/// The intervals of numbers without these.
fn between(mut numbers: Vec<f64>) -> Vec<Value> {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers.dedup();
    let mut found = Vec::with_capacity(numbers.len() + 1);
    let mut below: Option<f64> = None;
    for number in numbers {
        let mut interval = Map::new();
        interval.insert("type".to_owned(), "number".into());
        if let Some(below) = below {
            interval.insert("exclusiveMinimum".to_owned(), below.into());
        }
        interval.insert("exclusiveMaximum".to_owned(), number.into());
        found.push(Value::Object(interval));
        below = Some(number);
    }
    found.extend(below.map(|below| json!({"type": "number", "exclusiveMinimum": below})));
    found
}

/// Lists or objects that differ from this one; what is neither is left out.
fn other_container(value: &Value) -> Option<Value> {
    match value {
        Value::Array(items) => {
            let count = items.len();
            let mut alternatives = vec![json!({"type": "array", "minItems": count + 1})];
            if count > 0 {
                alternatives.push(json!({"type": "array", "maxItems": count - 1}));
            }
            for (index, item) in items.iter().enumerate() {
                let mut prefix = vec![Value::Bool(true); index];
                prefix.push(all_but(std::slice::from_ref(item))?);
                alternatives
                    .push(json!({"type": "array", "prefixItems": prefix, "minItems": index + 1}));
            }
            Some(any_of(alternatives))
        }
        Value::Object(members) => {
            let names: Vec<&String> = members.keys().collect();
            let count = names.len();
            let mut alternatives =
                vec![json!({"type": "object", "required": names, "minProperties": count + 1})];
            for (name, member) in members {
                alternatives.push(without(name));
                let other = all_but(std::slice::from_ref(member))?;
                alternatives.push(json!({
                    "type": "object", "required": [name],
                    "properties": {name: other}, "additionalProperties": true,
                }));
            }
            Some(any_of(alternatives))
        }
        _ => None,
    }
}

/// Objects without this property.
pub(super) fn without(name: &str) -> Value {
    json!({"type": "object", "properties": {name: false}, "additionalProperties": true})
}

/// A pattern of all texts but these.
fn other_text(texts: &[&str]) -> String {
    let mut root = Branch::default();
    for text in texts {
        root.insert(text.chars());
    }
    let mut longer = String::new();
    root.push_leaving(&mut longer);
    if !root.has_begun() {
        return format!("^(?:{longer})[\\s\\S]*$");
    }
    let mut shorter = String::new();
    root.push_begun(&mut shorter);
    format!("^(?:(?:{longer})[\\s\\S]*|{shorter})$")
}

/// Texts by their first characters.
#[derive(Default)]
struct Branch {
    is_end: bool,
    children: Vec<(char, Branch)>,
}

impl Branch {
    fn insert(&mut self, mut text: impl Iterator<Item = char>) {
        let Some(first) = text.next() else {
            self.is_end = true;
            return;
        };
        let place = self
            .children
            .iter()
            .position(|(letter, _)| *letter == first);
        let place = place.unwrap_or_else(|| {
            self.children.push((first, Self::default()));
            self.children.len() - 1
        });
        self.children[place].1.insert(text);
    }

    /// What leaves all of the texts, with the character that does it.
    fn push_leaving(&self, out: &mut String) {
        if self.children.is_empty() {
            out.push_str("[\\s\\S]");
            return;
        }
        out.push_str("[^");
        for (letter, _) in &self.children {
            push_letter(out, *letter);
        }
        out.push(']');
        for (letter, child) in &self.children {
            out.push('|');
            push_letter(out, *letter);
            out.push_str("(?:");
            child.push_leaving(out);
            out.push(')');
        }
    }

    /// Their beginnings that are none of them. There is one.
    fn push_begun(&self, out: &mut String) {
        let inner: Vec<_> = self
            .children
            .iter()
            .filter(|(_, child)| child.has_begun())
            .collect();
        if inner.is_empty() {
            return;
        }
        out.push_str("(?:");
        for (index, (letter, child)) in inner.into_iter().enumerate() {
            if index > 0 {
                out.push('|');
            }
            push_letter(out, *letter);
            child.push_begun(out);
        }
        out.push_str(if self.is_end { ")" } else { ")?" });
    }

    /// Whether a text that begins here, or ends, is none of them.
    fn has_begun(&self) -> bool {
        !self.is_end || self.children.iter().any(|(_, child)| child.has_begun())
    }
}

/// A character as a pattern has it, within a class or not.
fn push_letter(out: &mut String, letter: char) {
    use std::fmt::Write;
    if letter.is_ascii_alphanumeric() || letter as u32 >= 0xA1 {
        out.push(letter);
    } else {
        let _ = write!(out, "\\x{:02x}", letter as u32);
    }
}
