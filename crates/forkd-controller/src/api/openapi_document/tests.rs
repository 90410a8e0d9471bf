//! Promises of the document to programs that read it.

use std::collections::BTreeSet;

use super::*;

fn document() -> Value {
    serde_json::from_str(&crate::api::openapi()).unwrap()
}

/// Every operation with its method, its path and its description.
fn operations(document: &Value) -> Vec<(String, String, &Value)> {
    let paths = document["paths"].as_object().unwrap().iter();
    paths
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().iter();
            methods.map(move |(method, operation)| (method.clone(), path.clone(), operation))
        })
        .collect()
}

#[test]
fn every_route_but_the_open_one_needs_a_token_of_its_scope() {
    let document = document();
    let scheme = &document["components"]["securitySchemes"]["bearer"];
    assert_eq!((&scheme["type"], &scheme["scheme"]), (&json!("http"), &json!("bearer")));
    assert!(scheme["description"].as_str().unwrap().contains("unix socket"), "{scheme}");
    for (method, path, operation) in operations(&document) {
        let method: Method = method.to_uppercase().parse().unwrap();
        let expected = match path.as_str() {
            "/healthz" => json!([]),
            _ => json!([{ "bearer": [scope(policy::needed(&method, &path))] }]),
        };
        assert_eq!(operation["security"], expected, "{method} {path}");
    }
}

#[test]
fn every_error_response_has_a_body_and_the_codes_of_its_status() {
    let document = document();
    for (method, path, operation) in operations(&document) {
        let mut seen = BTreeSet::new();
        for (status, response) in operation["responses"].as_object().unwrap() {
            let Some(codes) = response[CODES].as_array() else {
                let status: u16 = status.parse().unwrap();
                assert!(status < 400, "{method} {path} {status} has no codes");
                continue;
            };
            let schema = &response["content"]["application/json"]["schema"]["$ref"];
            assert_eq!(schema, "#/components/schemas/ErrorBody", "{method} {path} {status}");
            assert!(!codes.is_empty(), "{method} {path} never answers {status}; see api/error_codes.rs");
            for code in codes {
                let code = Code::named(code.as_str().unwrap()).unwrap();
                assert!(status == "default" || code.status().to_string() == *status, "{code} at {status}");
                assert!(seen.insert(code.name()), "{method} {path} has {code} twice");
            }
        }
        let verb: Method = method.to_uppercase().parse().unwrap();
        let listed = error_codes::of_route(&verb, &path);
        let listed =
            listed.unwrap_or_else(|| panic!("list the codes of {verb} {path} in api/error_codes.rs"));
        let all: BTreeSet<_> = error_codes::ANY.iter().chain(&listed).map(|code| code.name()).collect();
        assert_eq!(seen, all, "{method} {path}");
    }
}

#[test]
fn both_websockets_have_the_order_of_their_frames() {
    let document = document();
    for (path, request) in
        [("/v1/run", "RunRequest"), ("/v1/sandboxes/{id}/exec/stream", "ExecStreamRequest")]
    {
        let talk = &document["paths"][path]["get"][WEBSOCKET];
        assert_eq!(talk["stdin_window_bytes"], 262_144);
        let frames = talk["frames"].as_array().unwrap();
        assert_eq!(frames[0]["schema"]["$ref"], format!("#/components/schemas/{request}"));
        // Every message that there is has its place, and none is made up.
        for (schema, tag) in [("ServerEvent", "event"), ("ClientMessage", "type")] {
            let cases = document["components"]["schemas"][schema]["oneOf"].as_array().unwrap();
            let known: BTreeSet<_> =
                cases.iter().map(|case| case["properties"][tag]["enum"][0].as_str().unwrap()).collect();
            let reference = format!("#/components/schemas/{schema}");
            let of_schema = frames.iter().filter(|frame| frame["schema"]["$ref"] == reference);
            let listed: BTreeSet<_> = of_schema.map(|frame| frame["property"].as_str().unwrap()).collect();
            let progress = BTreeSet::from(["progress"]);
            let missing: BTreeSet<_> = known.difference(&listed).copied().collect();
            let expected =
                if request != "RunRequest" && schema == "ServerEvent" { progress } else { BTreeSet::new() };
            assert_eq!(missing, expected, "{path} {schema}");
            assert!(listed.is_subset(&known), "{path} {schema}");
        }
        let channels: Vec<_> = frames.iter().filter_map(|frame| frame["channel"].as_u64()).collect();
        assert_eq!(channels, [0, 1, 2]);
    }
    let with_frames = operations(&document).into_iter().filter(|(.., one)| one.get(WEBSOCKET).is_some());
    assert_eq!(with_frames.count(), 2);
}
