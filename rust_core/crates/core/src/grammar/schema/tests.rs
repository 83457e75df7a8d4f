use serde_json::{Value, json};

use super::*;

fn made(schema: &Value) -> Value {
    let mut made = normalized(schema, &JsonStyle::default()).unwrap();
    made.as_object_mut().unwrap().remove("x-guidance");
    made
}

fn options(schema: &Value) -> Value {
    normalized(schema, &JsonStyle::default()).unwrap()["x-guidance"].clone()
}

fn problem(schema: &Value) -> String {
    normalized(schema, &JsonStyle::default())
        .expect_err(&schema.to_string())
        .to_string()
}

#[test]
fn only_keywords_that_are_kept_are_left() {
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "title": "t", "description": "d", "default": 1,
        "x-guidance": {"lenient": true}, "x-order": 3, "nullable": true, "examples": [{"not": 1}],
        "type": "object", "properties": {"not": {"type": "string", "$comment": "a property of this name"}},
        "uniqueItems": false, "dependencies": {},
    });
    let expected = json!({"type": "object", "properties": {"not": {"type": "string"}}});
    assert_eq!(made(&schema), expected);
    assert_eq!(options(&schema)["lenient"], Value::Null);
}

#[test]
fn what_is_not_kept_is_refused_with_its_place() {
    let cases = [
        (json!({"not": {"multipleOf": 2}}), "#/not: multipleOf"),
        (
            json!({"properties": {"a/b": {"if": {"pattern": "a"}, "then": false}}}),
            "#/properties/a~1b/if: pattern",
        ),
        (
            json!({"items": {"uniqueItems": true}}),
            "#/items/uniqueItems:",
        ),
        (
            json!({"anyOf": [true, {"contains": {"type": "null"}, "minContains": 7}]}),
            "#/anyOf/1/contains: minContains is supported up to 6",
        ),
        (
            json!({"not": {"patternProperties": {"^a": {"type": "null"}}}}),
            "#/not: patternProperties is not supported where a schema is negated, but for patterns of at most 32 names",
        ),
        (json!({"minlength": 3}), "minLength was meant"),
        (
            json!({"$schema": "http://example.com/schema"}),
            "#/$schema:",
        ),
        (json!({"type": "text"}), "#/type:"),
        (json!({"type": []}), "#/type:"),
        (json!({"type": ["string", "string"]}), "#/type:"),
        (json!({"enum": []}), "#/enum:"),
        (json!({"anyOf": []}), "#/anyOf:"),
        (json!({"required": "a"}), "#/required:"),
        (json!({"properties": []}), "#/properties:"),
        (json!({"properties": {"a": 1}}), "#/properties/a:"),
        (json!({"type": "string", "format": "regex"}), "#/format:"),
        (json!({"format": "regex"}), "#/format:"),
        (json!({"pattern": "(?=a)"}), "#/pattern:"),
        (
            json!({"patternProperties": {"(": true}}),
            "#/patternProperties/(:",
        ),
        (json!({"minLength": -1}), "#/minLength:"),
        (json!({"minLength": 1.5}), "#/minLength:"),
        (json!({"minItems": 1_000_000_000}), "#/minItems:"),
        (json!({"maximum": "1"}), "#/maximum:"),
        (json!({"maximum": 1e300}), "#/maximum:"),
        (json!({"multipleOf": 0}), "#/multipleOf:"),
        (json!({"const": 9_007_199_254_740_993_i64}), "#/const:"),
        (json!({"minProperties": 2}), "#/minProperties:"),
        (
            json!({"items": [true], "prefixItems": [true]}),
            "prefixItems",
        ),
        (json!(false), "allows nothing"),
        (json!([]), "must be an object"),
    ];
    for (schema, expected) in cases {
        let problem = problem(&schema);
        assert!(problem.contains(expected), "{schema}: {problem}");
    }
}

#[test]
fn references_are_resolved_within_the_document() {
    let schema = json!({
        "$id": "https://example.com/tree", "components": {"a%b/c": {"type": "null"}},
        "properties": {"up": {"$ref": "#"}, "other": {"$ref": "#/components/a%25b~1c"},
            "named": {"$ref": "https://example.com/tree#here"}, "again": {"$ref": "#/components/a%25b~1c"}},
        "$defs": {"n": {"$anchor": "here", "type": "boolean"}},
    });
    let made = made(&schema);
    assert_eq!(made["properties"]["up"], json!({"$ref": "#/$defs/0"}));
    assert_eq!(made["properties"]["other"], made["properties"]["again"]);
    assert_eq!(made["$defs"]["1"], json!({"type": "null"}));
    assert_eq!(made["$defs"]["2"], json!({"type": "boolean"}));
    assert_eq!(
        made["$defs"]["0"]["properties"]["up"],
        json!({"$ref": "#/$defs/0"})
    );
    let refused = [
        json!({"$ref": "http://localhost/x"}),
        json!({"$ref": "file:///etc/passwd"}),
        json!({"$ref": "other.json"}),
        json!({"$ref": "#/nowhere"}),
        json!({"$ref": "#nowhere"}),
        json!({"$ref": "#/title", "title": "a"}),
        json!({"$ref": "#/%zz"}),
        json!({"$ref": 3}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b", "type": "null"}}}),
        json!({"$ref": "#x", "$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}}),
    ];
    for schema in refused {
        assert!(problem(&schema).contains("$ref"), "{schema}");
    }
}

#[test]
fn older_drafts_are_put_into_words_of_the_newest() {
    let schema = json!({
        "items": [{"type": "null"}], "additionalItems": false, "minimum": 1, "exclusiveMinimum": true,
        "maximum": 5, "exclusiveMaximum": false,
    });
    let expected = json!({
        "exclusiveMinimum": 1.0, "maximum": 5.0, "prefixItems": [{"type": "null"}], "items": false,
    });
    assert_eq!(made(&schema), expected);
    // Without a list of items, additionalItems says nothing; with prefixItems in sight it must not hide them.
    let schema = json!({"prefixItems": [{"type": "null"}], "items": {"type": "string"}, "additionalItems": false});
    let expected = json!({"prefixItems": [{"type": "null"}], "items": {"type": "string"}});
    assert_eq!(made(&schema), expected);
}

#[test]
fn constants_are_spelled_in_one_way() {
    assert_eq!(
        made(&json!({"enum": [1.0, -0.0, 2.5, "a"]})),
        json!({"enum": [1, 0, 2.5, "a"]})
    );
    assert_eq!(
        made(&json!({"type": ["integer", "number"]})),
        json!({"type": ["number"]})
    );
}

#[test]
fn keys_have_one_spelling_where_they_are_told_apart() {
    let plain = |schema: Value| options(&schema).get("json_allowed_escapes").is_some();
    assert!(plain(json!({"properties": {"a": {"type": "null"}}})));
    assert!(plain(json!({"required": ["a"]})));
    assert!(plain(json!({"patternProperties": {"a": true}})));
    assert!(plain(
        json!({"patternProperties": {"a": true}, "properties": {"b": true}, "additionalProperties": false})
    ));
    assert!(!plain(
        json!({"properties": {"a": true}, "additionalProperties": false})
    ));
    assert!(!plain(json!({"additionalProperties": {"type": "null"}})));
    let schema = json!({"properties": {"a": {"const": "\u{1}"}}});
    assert!(problem(&schema).contains("#/properties/a/const"));
    made(&json!({"const": "\u{1}"}));
}

#[test]
fn what_the_engine_would_get_wrong_is_refused() {
    // It takes 0 for allowed.
    assert!(problem(&json!({"exclusiveMinimum": 0, "maximum": 0.5})).contains("exclusiveMinimum"));
    assert!(
        problem(&json!({"allOf": [{"exclusiveMaximum": 0}, {"minimum": -0.25}]}))
            .contains("exclusiveMaximum")
    );
    made(&json!({"exclusiveMinimum": 0, "maximum": 5.5}));
    // It multiplies in 32 bits.
    let schema = json!({"allOf": [{"multipleOf": 9999}, {"multipleOf": 9998}]});
    assert!(problem(&schema).contains("multipleOf"));
}

#[test]
fn products_of_parts_are_bounded() {
    let options = |prefix: &str, count: usize| -> Value {
        (0..count)
            .map(|index| json!({"required": [format!("{prefix}{index}")]}))
            .collect()
    };
    let schema = json!({"allOf": [
        {"anyOf": options("a", 100)}, {"anyOf": options("b", 100)}, {"anyOf": options("c", 100)},
    ]});
    assert!(problem(&schema).contains("too large"));
    made(&json!({"allOf": [{"anyOf": options("a", 3)}, {"anyOf": options("b", 3)}]}));
    let many: Vec<Value> = (0..5000).map(|_| json!({"type": "null"})).collect();
    assert!(problem(&json!({"anyOf": many})).contains("subschemas"));
    let values: Vec<usize> = (0..5000).collect();
    assert!(problem(&json!({"enum": values})).contains("enums"));
    let mut deep = json!({"type": "null"});
    for _ in 0..60 {
        deep = json!({"items": deep});
    }
    assert!(problem(&deep).contains("schemas within schemas"));
}

#[test]
fn white_space_can_be_chosen() {
    let style = |compact, pattern: Option<&str>| JsonStyle {
        compact,
        whitespace_pattern: pattern.map(str::to_owned),
        closed_objects: false,
    };
    let options = |style| normalized(&json!({}), &style).map(|made| made["x-guidance"].clone());
    assert_eq!(
        options(style(true, None)).unwrap()["whitespace_flexible"],
        json!(false)
    );
    let made = options(style(false, Some(r"[ \n]?"))).unwrap();
    assert_eq!(made["whitespace_pattern"], json!(r"(?:[\x{20}\x{A}]){0,1}"));
    let error = options(style(false, Some("x"))).unwrap_err();
    assert!(error.to_string().starts_with("whitespace_pattern:"));
}

#[test]
fn objects_can_be_closed() {
    let style = JsonStyle {
        closed_objects: true,
        ..JsonStyle::default()
    };
    let schema = json!({"properties": {"a": {"type": "object"}, "b": {"properties": {}, "additionalProperties": true}}});
    let made = normalized(&schema, &style).unwrap();
    assert_eq!(made["additionalProperties"], json!(false));
    assert_eq!(made["properties"]["a"], json!({"type": "object"}));
    assert_eq!(made["properties"]["b"]["additionalProperties"], json!(true));
}

#[test]
fn alternatives_are_looked_into() {
    let schema = json!({
        "oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}],
        "$defs": {
            "leaf": {"type": "integer"},
            "node": {"type": "object", "properties": {"child": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]}}},
        },
    });
    let refs = json!([{"anyOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]}]);
    let made = made(&schema);
    assert_eq!(made["allOf"], refs);
    assert_eq!(made["$defs"]["1"]["properties"]["child"]["allOf"], refs);
    // Not seen to be disjoint, and not to be turned round: the engine gets what the references lead to.
    let schema = json!({
        "oneOf": [{"$ref": "#/$defs/even"}, {"$ref": "#/$defs/third"}],
        "$defs": {"even": {"multipleOf": 2}, "third": {"multipleOf": 3}},
    });
    let made = super::normalized(&schema, &JsonStyle::default()).unwrap();
    assert_eq!(made["allOf"], json!([{"$ref": "#/$defs/one0"}]));
    assert_eq!(
        made["$defs"]["one0"]["oneOf"],
        json!([{"multipleOf": 2}, {"multipleOf": 3}])
    );
}

#[test]
fn alternatives_that_overlap_exclude_each_other() {
    let schema = json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"type": "null"}]});
    let without = |name: &str| json!({"type": "object", "properties": {name: false}, "additionalProperties": true});
    let other = json!({"type": ["boolean", "number", "string", "array", "object"]});
    assert_eq!(
        made(&schema)["allOf"][0]["anyOf"],
        json!([
            {"allOf": [{"required": ["a"]}, without("b"), other]},
            {"allOf": [{"required": ["b"]}, without("a"), other]},
            {"allOf": [{"type": "null"}, without("a"), without("b")]},
        ])
    );
    // Patterns without a common text, bounds, constants, lengths of lists: proven apart.
    let apart = [
        (
            json!({"type": "string", "pattern": "^a"}),
            json!({"type": "string", "pattern": "^[b-z]"}),
        ),
        (
            json!({"type": "number", "maximum": 1}),
            json!({"type": "integer", "minimum": 2}),
        ),
        (
            json!({"enum": [1, 2, {"a": 1}]}),
            json!({"enum": [3, "1", {"a": 2}]}),
        ),
        (
            json!({"type": "array", "maxItems": 1}),
            json!({"type": "array", "minItems": 2}),
        ),
        (
            json!({"type": "object", "required": ["k"], "properties": {"k": {"const": 1}}}),
            json!({"type": "object", "properties": {"k": {"anyOf": [{"const": 2}, {"type": "null"}]}}}),
        ),
    ];
    for (first, second) in apart {
        let made = made(&json!({"oneOf": [first, second]}));
        assert_eq!(made["allOf"][0]["anyOf"].as_array().unwrap().len(), 2);
        assert!(
            made["allOf"][0]["anyOf"][0].get("allOf").is_none(),
            "{made}"
        );
    }
}

#[test]
fn conditions_on_one_property_are_taken_together() {
    let when = |kind: Value, name: &str| json!({"if": {"properties": {"kind": kind}}, "then": {"required": [name]}});
    let parts = json!([
        when(json!({"const": "a"}), "x"), {"minProperties": 1}, when(json!({"enum": ["b", "a"]}), "y"),
    ]);
    let made = made(&json!({"type": "object", "allOf": parts}));
    let parts = made["allOf"].as_array().unwrap();
    assert_eq!(parts.len(), 2);
    // "a", "b", something else, no object, no such property.
    let alternatives = parts[1]["anyOf"].as_array().unwrap();
    assert_eq!(alternatives.len(), 5);
    assert_eq!(alternatives[0]["allOf"].as_array().unwrap().len(), 3);
    assert_eq!(alternatives[1]["allOf"].as_array().unwrap().len(), 2);
}

#[test]
fn formats_hold_beside_patterns() {
    let made = made(
        &json!({"type": ["string", "null"], "allOf": [true], "format": "date", "pattern": "^2"}),
    );
    assert_eq!(made["allOf"].as_array().unwrap().len(), 2);
    assert_eq!(made["pattern"], json!("^(?:2(?:[\\x{0}-\\x{10FFFF}])*)$"));
    assert!(made.get("format").is_none());
    let made = super::normalized(
        &json!({"type": "string", "format": "hostname", "maxLength": 9}),
        &JsonStyle::default(),
    );
    assert_eq!(made.unwrap()["maxLength"], json!(9));
}
