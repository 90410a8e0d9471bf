//! Files, over HTTP.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use serde_json::{Value, json};

use crate::agent::tests::{Response, TestAgent};

const BYTES: (&str, &str) = ("content-type", "application/octet-stream");

fn url(path: &Path) -> String {
    format!("/files?path={}", path.display())
}

fn put(agent: &TestAgent, path: &Path, content: &[u8]) -> (u16, Value) {
    let mut response = agent.send("POST", &url(path), &[BYTES], content);
    (response.status, serde_json::from_slice(&response.body()).unwrap())
}

fn get(agent: &TestAgent, path: &Path) -> (u16, Vec<u8>) {
    let mut response = agent.send("GET", &url(path), &[], b"");
    (response.status, response.body())
}

#[test]
fn what_is_written_can_be_read_whatever_its_size() {
    let agent = TestAgent::new();
    for len in [0, 1, 65_535, 65_536, 20_000_000] {
        let content: Vec<u8> = (0..len).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let path = agent.path("file");
        let (status, written) = put(&agent, &path, &content);
        assert_eq!((status, written), (200, json!([{"path": path, "name": "file", "type": "file"}])));
        assert_eq!(fs::read(&path).unwrap(), content);
        let mut response = agent.send("GET", &url(&path), &[], b"");
        assert_eq!(response.header("content-length"), Some(len.to_string().as_str()));
        assert_eq!(response.body(), content);
    }
}

#[test]
fn folders_on_the_way_are_made_and_belong_to_the_user() {
    let agent = TestAgent::new();
    let top = agent.path("open");
    fs::create_dir(&top).unwrap();
    fs::set_permissions(&top, fs::Permissions::from_mode(0o777)).unwrap();
    let path = top.join("a/b/c.txt");
    let response = agent.send("POST", &format!("{}&username=nobody", url(&path)), &[BYTES], b"x");
    assert_eq!(response.status, 200);
    for path in [top.join("a"), top.join("a/b"), path] {
        assert_eq!(fs::metadata(&path).unwrap().uid(), 65534, "{}", path.display());
    }
}

#[test]
fn an_existing_file_keeps_its_owner_and_mode() {
    let agent = TestAgent::new();
    let path = agent.path("script");
    fs::write(&path, "a much longer content than the next one").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o751)).unwrap();
    std::os::unix::fs::chown(&path, Some(1234), Some(1234)).unwrap();
    assert_eq!(put(&agent, &path, b"short").0, 200);
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.uid(), metadata.mode() & 0o7777), (1234, 0o751));
    assert_eq!(fs::read(&path).unwrap(), b"short");
    let open = fs::File::open(&path).unwrap();
    assert_eq!(agent.send("POST", &format!("{}&whole=false", url(&path)), &[BYTES], b"in place").status, 200);
    assert_eq!(std::io::read_to_string(open).unwrap(), "in place");
}

#[test]
fn what_cannot_be_read_or_written_is_refused_for_the_right_reason() {
    let agent = TestAgent::new();
    let secret = agent.path("secret");
    fs::write(&secret, "x").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let fifo = agent.path("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::from_raw_mode(0o666)).unwrap();
    std::os::unix::fs::symlink("loop", agent.path("loop")).unwrap();

    assert_eq!(get(&agent, &agent.path("missing")).0, 404);
    assert_eq!(get(&agent, agent.folder.path()).0, 400, "a folder");
    assert_eq!(get(&agent, &secret.join("below")).0, 400, "below a file");
    assert_eq!(get(&agent, &agent.path("loop")).0, 400);
    assert_eq!(get(&agent, &fifo).0, 400, "a pipe, and without waiting for its writer");
    assert_eq!(get(&agent, Path::new("/dev/zero")).0, 400);
    assert_eq!(put(&agent, agent.folder.path(), b"x").0, 400);
    assert_eq!(put(&agent, &fifo, b"x").0, 400);
    assert_eq!(put(&agent, Path::new("/dev/null"), b"x").0, 400);
    assert_eq!(put(&agent, Path::new("/proc/no/such/place"), b"x").0, 404);

    let as_nobody = |method, path: &Path| {
        let mut response = agent.send(method, &format!("{}&username=nobody", url(path)), &[BYTES], b"y");
        let body: Value = serde_json::from_slice(&response.body()).unwrap();
        assert_eq!(body["code"], response.status);
        assert!(!body["message"].as_str().unwrap().is_empty());
        response.status
    };
    assert_eq!(as_nobody("GET", &secret), 403);
    assert_eq!(as_nobody("POST", &secret), 403);
    assert_eq!(as_nobody("POST", &agent.path("new")), 403);
    assert_eq!(fs::read(&secret).unwrap(), b"x");
    assert_eq!(agent.send("GET", "/files?path=/etc/passwd&username=whoever", &[], b"").status, 401);
    assert_eq!(agent.send("POST", "/files", &[BYTES], b"x").status, 400);
    let mut refused = agent.send("DELETE", &url(&secret), &[], b"");
    let body: Value = serde_json::from_slice(&refused.body()).unwrap();
    assert_eq!((refused.status, &body["code"]), (405, &json!(405)));
    let kind = [("content-type", "application/x-www-form-urlencoded")];
    assert_eq!(agent.send("POST", &url(&secret), &kind, b"x").status, 415);
    let zstd = [BYTES, ("content-encoding", "zstd")];
    assert_eq!(agent.send("POST", &url(&secret), &zstd, b"x").status, 415);
}

#[test]
fn files_that_claim_to_be_empty_are_read_to_their_end() {
    let agent = TestAgent::new();
    let (status, body) = get(&agent, Path::new("/proc/self/status"));
    assert_eq!(status, 200);
    assert!(String::from_utf8_lossy(&body).contains("VmRSS"));
}

#[test]
fn a_full_disk_is_reported_as_one() {
    let agent = TestAgent::new();
    let small = agent.path("small");
    fs::create_dir(&small).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &small, "tmpfs", flags, c"size=64k").expect("this test needs to mount");
    let (status, answer) = put(&agent, &small.join("file"), &[0; 500_000]);
    rustix::mount::unmount(&small, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!((status, &answer["code"]), (507, &json!(507)));
}

#[test]
fn one_connection_carries_uploads_and_downloads_in_turn() {
    let agent = TestAgent::new();
    let path = agent.path("file");
    let mut stream = agent.connect();
    for n in 0..20 {
        let chunked = format!(
            "POST {} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nround\r\n3\r\n{n:03}\r\n0\r\n\r\n",
            url(&path)
        );
        stream.write_all(chunked.as_bytes()).unwrap();
        let mut response = Response::read(stream.try_clone().unwrap());
        assert_eq!(response.status, 200);
        response.body();
        stream.write_all(format!("GET {} HTTP/1.1\r\n\r\n", url(&path)).as_bytes()).unwrap();
        assert_eq!(Response::read(stream.try_clone().unwrap()).body(), format!("round{n:03}").as_bytes());
    }
}

#[test]
fn an_upload_in_place_that_breaks_off_is_not_answered_with_success() {
    let agent = TestAgent::new();
    let path = agent.path("file");
    let mut stream = agent.connect();
    stream
        .write_all(
            format!("POST {}&whole=false HTTP/1.1\r\ncontent-length: 100\r\n\r\nhalf", url(&path)).as_bytes(),
        )
        .unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "");
}

fn put_whole(agent: &TestAgent, path: &Path, more: &str, content: &[u8]) -> (u16, Value) {
    let mut response = agent.send("POST", &format!("{}&whole=true{more}", url(path)), &[BYTES], content);
    (response.status, serde_json::from_slice(&response.body()).unwrap())
}

fn names(agent: &TestAgent) -> Vec<String> {
    let entries = fs::read_dir(agent.path("only")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_whole_write_replaces_the_file_and_keeps_who_it_is() {
    let agent = TestAgent::new();
    let path = agent.path("script");
    let (status, written) = put_whole(&agent, &path, "&mode=750", b"new");
    assert_eq!((status, &written[0]["whole"]), (200, &json!(true)));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o750);
    std::os::unix::fs::chown(&path, Some(1234), Some(1234)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4751)).unwrap();
    std::os::unix::fs::symlink(&path, agent.path("link")).unwrap();
    let old = fs::File::open(&path).unwrap();
    assert_eq!(put_whole(&agent, &agent.path("link"), "", b"newer").0, 200);
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.uid(), metadata.mode() & 0o7777), (1234, 0o751));
    assert_eq!(fs::read(&path).unwrap(), b"newer");
    assert!(agent.path("link").is_symlink());
    assert_eq!(std::io::read_to_string(old).unwrap(), "new", "who has it open keeps the old one");
    for bad in ["8", "+7", "10000", "", "0x1"] {
        assert_eq!(put_whole(&agent, &path, &format!("&mode={bad}"), b"x").0, 400, "{bad}");
    }
    assert_eq!(put_whole(&agent, agent.folder.path(), "", b"x").0, 400);
}

#[test]
fn a_whole_write_that_breaks_off_leaves_what_was_there() {
    let agent = TestAgent::new();
    let path = agent.path("only/file");
    fs::create_dir(agent.path("only")).unwrap();
    fs::write(&path, "before").unwrap();
    for framing in ["content-length: 100\r\n\r\nhalf", "transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"] {
        let mut stream = agent.connect();
        stream.write_all(format!("POST {}&whole=true HTTP/1.1\r\n{framing}", url(&path)).as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "");
        assert_eq!(fs::read(&path).unwrap(), b"before");
        assert_eq!(names(&agent), ["file"], "nothing is left lying about");
    }
}

#[test]
fn a_file_whose_folder_takes_no_other_is_written_in_place_and_that_is_said() {
    let agent = TestAgent::new();
    let path = agent.path("shared");
    fs::write(&path, "before").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    fs::set_permissions(agent.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (status, written) = put_whole(&agent, &path, "&username=nobody", b"after");
    assert_eq!((status, &written[0]["whole"]), (200, &json!(false)));
    assert_eq!(fs::read(&path).unwrap(), b"after");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(put_whole(&agent, &path, "&username=nobody", b"x").0, 403);
    assert_eq!(put_whole(&agent, &agent.path("new"), "&username=nobody", b"x").0, 403);
}
