//! `oneOf` of references: the engine has to see of any two alternatives that they cannot both hold, and follows none.

use serde_json::{Map, Value, json};

/// References to references that are followed.
const MAX_FOLLOWED: usize = 8;

/// Gives every `oneOf` with references among its alternatives a definition of its own, in which they are replaced by what
/// they refer to. As a definition each is there once, also where a schema contains itself.
pub(super) fn resolve(root: &mut Value, definitions: &mut Map<String, Value>) {
    let mut found = Vec::new();
    lift(root, &mut found);
    for definition in definitions.values_mut() {
        lift(definition, &mut found);
    }
    let resolved: Vec<Value> = found
        .into_iter()
        .map(|mut alternatives| {
            for alternative in &mut alternatives {
                follow(alternative, definitions);
            }
            json!({ "oneOf": alternatives })
        })
        .collect();
    for (number, definition) in resolved.into_iter().enumerate() {
        definitions.insert(name(number), definition);
    }
}

fn name(number: usize) -> String {
    format!("one{number}")
}

/// Puts a reference in the place of each such `oneOf`, innermost first; their alternatives are appended to `found`.
fn lift(value: &mut Value, found: &mut Vec<Vec<Value>>) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| lift(item, found)),
        Value::Object(members) => {
            for (name, member) in members.iter_mut() {
                if name != "const" && name != "enum" {
                    lift(member, found);
                }
            }
            if members.contains_key("$ref") {
                return;
            }
            // Below "properties" it may be a name; then it is no list.
            if let Some(Value::Array(alternatives)) = members.get("oneOf")
                && alternatives
                    .iter()
                    .any(|alternative| reference(alternative).is_some())
            {
                found.push(alternatives.clone());
                let place = Value::String(format!("#/$defs/{}", name(found.len() - 1)));
                // In its place: keys come in the order in which schemas are merged.
                *members = std::mem::take(members)
                    .into_iter()
                    .map(|(name, member)| match name.as_str() {
                        "oneOf" => ("$ref".to_owned(), place.clone()),
                        _ => (name, member),
                    })
                    .collect();
            }
        }
        _ => {}
    }
}

/// The name of the definition that a schema is but a reference to.
fn reference(schema: &Value) -> Option<&str> {
    let members = schema.as_object().filter(|members| members.len() == 1)?;
    members.get("$ref")?.as_str()?.rsplit('/').next()
}

fn follow(alternative: &mut Value, definitions: &Map<String, Value>) {
    for _ in 0..MAX_FOLLOWED {
        let Some(target) = reference(alternative).and_then(|name| definitions.get(name)) else {
            return;
        };
        *alternative = target.clone();
    }
}
