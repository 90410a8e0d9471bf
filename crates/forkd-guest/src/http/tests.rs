//! Requests as bytes, on connections in memory and over sockets.

use std::{
    cell::RefCell,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::*;

/// A peer whose bytes are all there, and that remembers what it was sent.
struct Peer<'b> {
    input: &'b [u8],
    /// The most bytes one read gives.
    cut: usize,
    output: Vec<u8>,
}

impl Read for Peer<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let most = buf.len().min(self.cut);
        self.input.read(&mut buf[..most])
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.output.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Transport for Peer<'_> {
    fn set_timeouts(&self, _: Option<Duration>, _: Option<Duration>) -> io::Result<()> {
        Ok(())
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn has_left(&self) -> bool {
        false
    }

    fn wait_readable(&self, _: Duration) -> io::Result<bool> {
        Ok(true)
    }

    fn shutdown_write(&self) {}
}

/// Sends `input`, read in pieces of `cut`, to a service that answers with `METHOD PATH BODY`.
fn converse(input: &[u8], cut: usize) -> String {
    let mut peer = Peer { input, cut, output: Vec::new() };
    Connection::new(&mut peer).run(&|exchange| {
        let mut body = Vec::new();
        if let Err(error) = exchange.read_to_end(&mut body) {
            return exchange.respond(400, &[], error.to_string().as_bytes());
        }
        let text =
            format!("{} {} {}", exchange.head().method, exchange.head().path, String::from_utf8_lossy(&body));
        exchange.respond(200, &[], text.as_bytes())
    });
    String::from_utf8_lossy(&peer.output).into_owned()
}

fn status(input: &str) -> u16 {
    let output = converse(input.as_bytes(), 1 << 20);
    output.split(' ').nth(1).unwrap_or_else(|| panic!("{output:?}")).parse().unwrap()
}

#[test]
fn requests_follow_each_other_however_the_bytes_arrive() {
    let input = b"GET /a%20b?x=1 HTTP/1.1\r\n\r\nPOST /c HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello\
                  POST /d HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nt: 1\r\n\r\n\
                  GET /e HTTP/1.1\r\nconnection: close\r\n\r\nGET /never HTTP/1.1\r\n\r\n";
    for cut in [1, 2, 7, 64, 1 << 20] {
        let output = converse(input, cut);
        for expected in ["GET /a b ", "POST /c hello", "POST /d abcde", "GET /e "] {
            assert!(output.contains(expected), "{cut}: {expected} in {output}");
        }
        assert!(!output.contains("never"));
    }
}

#[test]
fn what_is_not_a_request_gets_one_answer_and_no_more() {
    for (input, expected) in [
        ("nonsense\r\n\r\n".to_string(), 400),
        ("GET / HTTP/2.0\r\n\r\n".into(), 505),
        ("\x16\x03\x01\x02\x00\x01\x00\x01".into(), 400),
        ("GET /%ff HTTP/1.1\r\n\r\n".into(), 400),
        (format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(MAX_HEAD)), 431),
        (format!("GET / HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(MAX_HEADERS + 1)), 431),
        ("POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab".into(), 400),
        ("POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".into(), 400),
        ("POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n".into(), 400),
        ("POST / HTTP/1.1\r\ncontent-length: +1\r\n\r\na".into(), 400),
        ("POST / HTTP/1.1\r\ncontent-length: 99999999999999999999\r\n\r\n".into(), 400),
        ("POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n".into(), 501),
        ("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n".into(), 400),
        ("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n".into(), 400),
        ("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n".into(), 400),
        ("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n".into(), 400),
        (format!("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n{}", "1".repeat(10_000)), 400),
    ] {
        assert_eq!(status(&input), expected, "{input:?}");
    }
    let output = converse(b"POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 1);
    let (head, body) = output.split_once("\r\n\r\n").unwrap();
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert!(head.contains("content-type: application/json") && body["code"] == 501, "{output}");
    assert_eq!(converse(b"", 1), "");
    assert_eq!(converse(b"GET / HT", 1), "");
}

#[test]
fn a_peer_that_waits_for_permission_gets_it_when_the_body_is_wanted() {
    let head = "POST / HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n";
    let output = converse(format!("{head}hi").as_bytes(), 1 << 20);
    assert!(output.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK"), "{output}");
    // Refused without reading: no permission, and the connection cannot go on.
    let mut peer = Peer { input: head.as_bytes(), cut: 100, output: Vec::new() };
    Connection::new(&mut peer).run(&|exchange| exchange.respond(403, &[], b""));
    assert!(peer.output.starts_with(b"HTTP/1.1 403"), "{}", String::from_utf8_lossy(&peer.output));
}

#[test]
fn a_large_body_that_nobody_wants_does_not_cost_its_sender_the_answer() {
    let agent = crate::agent::tests::TestAgent::new();
    let headers = [("content-type", "text/plain")];
    let response = agent.send("POST", "/files?path=/tmp/x", &headers, &vec![0; 30 << 20]);
    assert_eq!(response.status, 415);
}

#[test]
fn a_head_request_gets_no_body_and_old_clients_no_chunks() {
    let output = converse(b"HEAD /x HTTP/1.1\r\n\r\n", 100);
    assert!(output.contains("content-length: 8") && output.ends_with("\r\n\r\n"), "{output}");
    let stream = |request: &[u8]| {
        let mut peer = Peer { input: request, cut: 100, output: Vec::new() };
        Connection::new(&mut peer).run(&|exchange| {
            exchange.begin(200, &[], None)?;
            exchange.send(b"one")?;
            exchange.send(b"")?;
            exchange.send(b"two")?;
            exchange.finish()
        });
        String::from_utf8_lossy(&peer.output).into_owned()
    };
    assert!(stream(b"GET / HTTP/1.1\r\n\r\n").ends_with("3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"));
    let old = stream(b"GET / HTTP/1.0\r\n\r\n");
    assert!(old.ends_with("\r\n\r\nonetwo") && old.contains("connection: close"), "{old}");
    assert!(stream(b"HEAD / HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
}

#[test]
fn a_response_that_is_not_what_it_announced_ends_the_connection() {
    let requests = b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n";
    let mut peer = Peer { input: requests, cut: 100, output: Vec::new() };
    let calls = RefCell::new(0);
    Connection::new(&mut peer).run(&|exchange| {
        *calls.borrow_mut() += 1;
        exchange.begin(200, &[], Some(10))?;
        exchange.send(b"short")?;
        exchange.finish()
    });
    assert_eq!(*calls.borrow(), 1);
}

#[test]
fn header_values_cannot_break_out_of_their_line() {
    let mut peer = Peer { input: b"GET / HTTP/1.1\r\n\r\n", cut: 100, output: Vec::new() };
    Connection::new(&mut peer).run(&|exchange| exchange.respond(200, &[("x", "a\r\ny: b")], b""));
    assert!(String::from_utf8_lossy(&peer.output).contains("x: ay: b\r\n"));
}

#[test]
fn a_service_that_panics_costs_its_own_connection_only() {
    let handler: server::Handler = Arc::new(|exchange: &mut Exchange| {
        if exchange.head().path == "/panic" {
            panic!("on purpose");
        }
        exchange.respond(200, &[], b"fine")
    });
    let ask = |request: &str| {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let handler = handler.clone();
        let thread =
            thread::spawn(move || server::serve_connection(crate::sys::Socket::from(theirs), &handler));
        ours.write_all(request.as_bytes()).unwrap();
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        ours.read_to_string(&mut answer).unwrap();
        thread.join().unwrap();
        answer
    };
    assert!(ask("GET /panic HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 500"));
    assert!(ask("GET /fine HTTP/1.1\r\n\r\n").ends_with("fine"));
}

#[test]
fn slow_and_silent_peers_hold_nobody_up() {
    let agent = crate::agent::tests::TestAgent::new();
    let idle: Vec<_> = (0..100)
        .map(|n| {
            let mut stream = agent.connect();
            if n % 2 == 0 {
                stream.write_all(b"POST /forkd.Agent/Ping HTTP/1.1\r\nconte").unwrap();
            }
            stream
        })
        .collect();
    let begun = Instant::now();
    assert!(agent.call("/forkd.Agent/Ping", serde_json::json!({})).is_ok());
    assert!(begun.elapsed() < Duration::from_secs(10));
    drop(idle);
}

#[test]
fn more_peers_than_there_are_places_for_are_turned_away_and_come_back_later() {
    let agent = crate::agent::tests::TestAgent::new();
    let crowd: Vec<_> = (0..300).map(|_| agent.connect()).collect();
    let refused = || agent.send("GET", "/health", &[], b"").status;
    assert_eq!(refused(), 503);
    let mut full = agent.send("GET", "/health", &[], b"");
    let body: serde_json::Value = serde_json::from_slice(&full.body()).unwrap();
    assert_eq!(body["code"], 503);
    drop(crowd);
    crate::agent::tests::eventually("a free place", || refused() == 204);
}

#[test]
fn whatever_bytes_come_the_connection_ends() {
    let seeds: [&[u8]; 4] = [
        b"GET /a%20b?x=%41&y HTTP/1.1\r\nhost: x\r\nauthorization: Basic dXNlcjo=\r\n\r\n",
        b"POST /c HTTP/1.1\r\ncontent-length: 5\r\n\r\nhelloGET / HTTP/1.1\r\n\r\n",
        b"POST /d HTTP/1.1\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n3;x=y\r\nabc\r\n0\r\nt: 1\r\n\r\n",
        b"HEAD / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n\r\n",
    ];
    // A small generator of our own: the same bytes in every run.
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    for _ in 0..20_000 {
        let mut bytes = seeds[random(seeds.len())].to_vec();
        for _ in 0..random(6) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => bytes.truncate(at),
                2 => bytes.insert(at, b"\r\n:;%0f "[random(8)]),
                _ => bytes.extend_from_slice(&seeds[random(seeds.len())][..at.min(20)]),
            }
            if bytes.is_empty() {
                break;
            }
        }
        fuzz_request(&bytes);
    }
}

#[test]
fn what_fuzzing_found_stays_harmless() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/guest_http_request");
    let inputs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(!inputs.is_empty(), "{folder} is empty");
    inputs.iter().for_each(|path| fuzz_request(&std::fs::read(path).unwrap()));
}
