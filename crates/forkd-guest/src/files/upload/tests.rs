//! Uploads as E2B clients send them: forms, gzip and metadata.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde_json::{Value, json};

use crate::agent::tests::{Response, TestAgent};

const BYTES: (&str, &str) = ("content-type", "application/octet-stream");
const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=--x");

fn post(agent: &TestAgent, query: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, Value) {
    let mut response = agent.send("POST", &format!("/files?{query}"), headers, body);
    (response.status, serde_json::from_slice(&response.body()).unwrap())
}

fn form(parts: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (filename, content) in parts {
        let head = format!(
            "----x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{filename}\"\r\n\
             Content-Type: application/octet-stream\r\n\r\n"
        );
        body.extend(head.into_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"----x--\r\n");
    body
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn stat(agent: &TestAgent, path: &Path) -> Value {
    agent.call("/filesystem.Filesystem/Stat", json!({"path": path})).unwrap()["entry"].clone()
}

#[test]
fn a_form_has_one_file_for_the_path_of_the_query_or_many_with_paths_of_their_own() {
    let agent = TestAgent::new();
    let (a, b) = (agent.path("deep/er/a"), agent.path("b c"));
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let body = form(&[(a.to_str().unwrap(), &content), (b.to_str().unwrap(), b"")]);
    let (status, written) = post(&agent, "", &[FORM], &body);
    let expected = json!([
        {"path": a, "name": "a", "type": "file"},
        {"path": b, "name": "b c", "type": "file"},
    ]);
    assert_eq!((status, written), (200, expected));
    assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (content, vec![]));

    let query = format!("path={}", a.display());
    assert_eq!(post(&agent, &query, &[FORM], &form(&[("ignored", b"new")])).0, 200);
    assert_eq!(fs::read(&a).unwrap(), b"new");
}

#[test]
fn what_is_no_form_with_files_is_refused() {
    let agent = TestAgent::new();
    let path = agent.path("a");
    let name = path.to_str().unwrap();
    let no_file = b"----x\r\ncontent-disposition: form-data; name=\"other\"\r\n\r\nx\r\n----x--";
    for (what, body) in [
        ("two files for one path", form(&[(name, b"1"), (name, b"2")])),
        ("no name", form(&[("", b"1")])),
        ("no file", no_file.to_vec()),
        ("no end", form(&[(name, b"1")])[..90].to_vec()),
        ("garbage", b"garbage".to_vec()),
        ("nothing", Vec::new()),
    ] {
        let (status, answer) = post(&agent, "", &[FORM], &body);
        assert_eq!((status, &answer["code"]), (400, &json!(400)), "{what}: {answer}");
    }
    let two = form(&[("x", b"1"), ("y", b"2")]);
    assert_eq!(post(&agent, &format!("path={name}"), &[FORM], &two).0, 400);
    for kind in ["multipart/form-data", "multipart/form-data; boundary=", "text/plain"] {
        assert!([400, 415].contains(&post(&agent, "", &[("content-type", kind)], &two).0), "{kind}");
    }
}

#[test]
fn an_upload_that_breaks_off_leaves_what_was_there() {
    let agent = TestAgent::new();
    let (old, new) = (agent.path("only/old"), agent.path("only/new"));
    fs::create_dir(agent.path("only")).unwrap();
    fs::write(&old, "before").unwrap();
    let half = &form(&[("x", b"half of a file")])[..120];
    for path in [&old, &new] {
        for (kind, body) in [(BYTES.1, &b"half"[..]), (FORM.1, half)] {
            let mut stream = agent.connect();
            let head = format!(
                "POST /files?path={} HTTP/1.1\r\ncontent-type: {kind}\r\ncontent-length: 1000\r\n\r\n",
                path.display()
            );
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(body).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "");
            assert_eq!(fs::read(&old).unwrap(), b"before");
            assert_eq!(fs::read_dir(agent.path("only")).unwrap().count(), 1, "nothing is left lying about");
        }
    }
}

#[test]
fn a_body_may_be_compressed_and_so_may_an_answer() {
    let agent = TestAgent::new();
    let path = agent.path("file");
    let query = format!("path={}", path.display());
    let content = b"the same again, ".repeat(200_000);
    let headers = [BYTES, ("content-encoding", "gzip")];
    assert_eq!(post(&agent, &query, &headers, &gzip(&content)).0, 200);
    assert_eq!(fs::read(&path).unwrap(), content);

    let get =
        |accept: &str| agent.send("GET", &format!("/files?{query}"), &[("accept-encoding", accept)], b"");
    let mut packed = get("gzip");
    assert_eq!((packed.status, packed.header("content-encoding")), (200, Some("gzip")));
    let packed = packed.body();
    assert!(packed.len() < content.len() / 10);
    let mut unpacked = Vec::new();
    GzDecoder::new(&packed[..]).read_to_end(&mut unpacked).unwrap();
    assert_eq!(unpacked, content);
    // Clients that list what they can read have not asked for it.
    let mut plain = get("gzip, deflate, br");
    assert_eq!(plain.header("content-length"), Some(content.len().to_string().as_str()));
    assert_eq!(plain.body(), content);

    let mut cut = gzip(&content);
    cut.truncate(cut.len() / 2);
    for bad in [&b"no gzip"[..], &cut] {
        let (status, answer) = post(&agent, &query, &headers, bad);
        assert_eq!((status, &answer["code"]), (400, &json!(400)), "{answer}");
        assert_eq!(fs::read(&path).unwrap(), content, "what was there stays");
    }
    assert_eq!(post(&agent, &query, &headers, &gzip(b"")).0, 200);
    let mut empty = get("gzip");
    assert_eq!(empty.header("content-length"), Some("0"));
    assert_eq!(empty.body(), b"");
}

#[test]
fn metadata_is_stored_with_the_file_in_place_of_what_was_there() {
    let agent = TestAgent::new();
    let path = agent.path("file");
    let query = format!("path={}", path.display());
    let (status, written) =
        post(&agent, &query, &[BYTES, ("X-Metadata-Key", "A b"), ("x-metadata-n", "1")], b"x");
    if status == 400 && written["message"].as_str().unwrap().contains("cannot store metadata") {
        let _ = writeln!(
            std::io::stderr(),
            "NOT RUN: metadata of files: no extended attributes in {}",
            path.display()
        );
        return;
    }
    assert_eq!((status, &written[0]["metadata"]), (200, &json!({"key": "A b", "n": "1"})));
    assert_eq!(stat(&agent, &path)["metadata"], json!({"key": "A b", "n": "1"}));
    for (more, headers, expected) in [
        ("", vec![BYTES, ("x-metadata-z", "")], json!({"z": ""})),
        ("&whole=false", vec![BYTES, ("x-metadata-y", "2")], json!({"y": "2"})),
        ("", vec![BYTES], Value::Null),
    ] {
        assert_eq!(post(&agent, &format!("{query}{more}"), &headers, b"x").0, 200);
        assert_eq!(stat(&agent, &path)["metadata"], expected);
    }
    let long = format!("x-metadata-{}", "k".repeat(250));
    assert_eq!(post(&agent, &query, &[BYTES, (&long, "x")], b"x").0, 400);
    assert_eq!(post(&agent, &query, &[BYTES, ("x-metadata-k", "\u{fc}")], b"x").0, 400);
    let list = agent.call("/filesystem.Filesystem/ListDir", json!({"path": agent.folder.path()})).unwrap();
    assert!(list["entries"].as_array().unwrap().iter().all(|entry| entry["metadata"].is_null()));
}

#[test]
fn folders_and_files_of_a_form_belong_to_the_user_and_no_other_users_file_is_touched() {
    let agent = TestAgent::new();
    let top = agent.path("open");
    fs::create_dir(&top).unwrap();
    fs::set_permissions(&top, fs::Permissions::from_mode(0o777)).unwrap();
    let secret = agent.path("secret");
    fs::write(&secret, "x").unwrap();
    std::os::unix::fs::symlink(&secret, top.join("link")).unwrap();
    let path = top.join("a/b");
    let body = form(&[(path.to_str().unwrap(), b"1")]);
    assert_eq!(post(&agent, "username=nobody", &[FORM], &body).0, 200);
    assert_eq!(fs::metadata(&path).unwrap().uid(), 65534);
    assert_eq!(fs::metadata(top.join("a")).unwrap().uid(), 65534);
    let body = form(&[(top.join("link").to_str().unwrap(), b"1")]);
    assert_eq!(post(&agent, "username=nobody", &[FORM], &body).0, 403);
    assert_eq!(fs::read(&secret).unwrap(), b"x");
}

#[test]
fn a_full_disk_is_reported_and_the_connection_goes_on() {
    let agent = TestAgent::new();
    let small = agent.path("small");
    fs::create_dir(&small).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &small, "tmpfs", flags, c"size=64k").expect("this test needs to mount");
    // A bomb is stopped by the disk.
    let bomb = gzip(&vec![0; 50_000_000]);
    let query = format!("path={}/file", small.display());
    let (status, answer) = post(&agent, &query, &[BYTES, ("content-encoding", "gzip")], &bomb);
    assert_eq!((status, &answer["code"]), (507, &json!(507)));
    let body = form(&[(small.join("a").to_str().unwrap(), &[0; 500_000])]);
    assert_eq!(post(&agent, "", &[FORM], &body).0, 507);
    let left = fs::read_dir(&small).unwrap().count();
    rustix::mount::unmount(&small, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(left, 0);

    let mut stream = agent.connect();
    for _ in 0..2 {
        let body = form(&[("~/../no/such\0", b"1")]);
        let head = format!(
            "POST /files HTTP/1.1\r\ncontent-type: {}\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n",
            FORM.1,
            body.len()
        );
        stream.write_all(&[head.as_bytes(), &body, b"\r\n0\r\n\r\n"].concat()).unwrap();
        let mut response = Response::read(stream.try_clone().unwrap());
        assert_eq!(response.status, 400);
        response.body();
    }
}
