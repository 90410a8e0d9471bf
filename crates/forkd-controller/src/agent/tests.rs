//! The client against misbehaving peers. Each peer is a real socket.

use std::time::Instant;

use forkd_protocol::agent::Output;
use forkd_protocol::connect::{self, END_STREAM, EndStream, STREAM_TYPE};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::*;

/// The time limit for peers that respond, on a busy computer too.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for peers that never respond.
const SHORT_TIMEOUT: Duration = Duration::from_millis(600);

/// A peer's behaviour on a connection, after the `CONNECT` line.
trait Behave: Fn(BufReader<UnixStream>) -> Self::Done + Send + Sync + 'static {
    type Done: Future<Output = std::io::Result<()>> + Send;
}
impl<F, D> Behave for F
where
    F: Fn(BufReader<UnixStream>) -> D + Send + Sync + 'static,
    D: Future<Output = std::io::Result<()>> + Send,
{
    type Done = D;
}

/// A client of a peer with this behaviour.
fn agent_of(behave: impl Behave) -> (Agent, tempfile::TempDir) {
    agent_with(TIMEOUT, behave)
}

fn agent_with(patience: Duration, behave: impl Behave) -> (Agent, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vsock.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            assert_eq!(line, "CONNECT 1024\n");
            let _ = behave(stream).await;
        }
    });
    (Agent::new(Endpoint::Vsock { socket, port: 1024 }, patience), folder)
}

/// Sends `OK` and reads a whole request.
async fn accept(stream: &mut BufReader<UnixStream>) -> std::io::Result<String> {
    stream.write_all(b"OK 1073741824\n").await?;
    request(stream).await
}

/// Reads one request: its head, lower-case, and its body.
async fn request(stream: &mut BufReader<UnixStream>) -> std::io::Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    let head = head.to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.trim().parse().unwrap())];
    stream.read_exact(&mut body).await?;
    Ok(head + &String::from_utf8_lossy(&body))
}

async fn respond(
    stream: &mut BufReader<UnixStream>,
    status: &str,
    kind: &str,
    body: &[u8],
) -> std::io::Result<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await
}

/// A peer that streams `body` and closes the connection.
fn streaming(body: Vec<u8>) -> (Agent, tempfile::TempDir) {
    agent_of(move |mut stream: BufReader<UnixStream>| {
        let body = body.clone();
        async move {
            accept(&mut stream).await?;
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: {STREAM_TYPE}\r\ntransfer-encoding: chunked\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await?;
            // Small pieces, so that every boundary is crossed.
            for piece in body.chunks(3) {
                stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).await?;
                stream.write_all(piece).await?;
                stream.write_all(b"\r\n").await?;
            }
            stream.write_all(b"0\r\n\r\n").await
        }
    })
}

fn event(event: Event) -> Vec<u8> {
    connect::encode(0, &ProcessEvent { event })
}

async fn start(agent: &Agent) -> Result<Process> {
    agent.start(&StartRequest::default(), &StartOptions::default()).await
}

#[tokio::test]
async fn an_honest_answer_comes_through() {
    let (agent, _folder) = agent_of(|mut stream: BufReader<UnixStream>| async move {
        let request = accept(&mut stream).await?;
        assert!(request.starts_with("post /forkd.agent/ping http/1.1\r\n"), "{request}");
        respond(&mut stream, "200 OK", "application/json", br#"{"version":"1","python":true}"#).await
    });
    let pong = agent.ping().await.unwrap();
    assert_eq!((pong.version.as_str(), pong.python), ("1", true));
}

#[tokio::test]
async fn the_agents_own_error_keeps_its_code_and_words() {
    let (agent, _folder) = agent_of(|mut stream: BufReader<UnixStream>| async move {
        accept(&mut stream).await?;
        let body = br#"{"code":"failed_precondition","message":"no Python here"}"#;
        respond(&mut stream, "400 Bad Request", "application/json", body).await
    });
    let error = agent.eval(&EvalRequest::default(), TIMEOUT).await.unwrap_err();
    assert!(matches!(&error, Error::Refused(e) if e.code == Code::FailedPrecondition), "{error:?}");
    assert_eq!(error.to_string(), "no Python here");
}

#[tokio::test]
async fn an_agent_without_room_for_a_connection_refuses_no_call() {
    for status in [408, 503] {
        let (agent, _folder) = agent_of(move |mut stream: BufReader<UnixStream>| async move {
            accept(&mut stream).await?;
            let body = format!("{{\"code\":{status},\"message\":\"try again\"}}");
            respond(&mut stream, &format!("{status} Later"), "application/json", body.as_bytes()).await
        });
        let error = agent.ping().await.unwrap_err();
        assert!(matches!(&error, Error::Protocol(text) if text.contains("try again")), "{error:?}");
    }
}

#[tokio::test]
async fn a_port_without_a_listener_is_unreachable() {
    let (agent, _folder) = agent_of(|_| async { Ok(()) });
    assert!(matches!(agent.ping().await.unwrap_err(), Error::Unreachable(_)));
    let gone = Agent::new(Endpoint::Vsock { socket: "/nonexistent".into(), port: 1 }, TIMEOUT);
    assert!(matches!(gone.ping().await.unwrap_err(), Error::Unreachable(_)));
}

#[tokio::test]
async fn garbage_instead_of_ok_is_refused_without_reading_on() {
    for garbage in [&b"NO\n"[..], b"\n", b"OK", &[b'x'; 4096], &[0xff; 100]] {
        // The client waits only for the rest of what may become a valid line.
        let waits = garbage == b"OK";
        let patience = if waits { SHORT_TIMEOUT } else { TIMEOUT };
        let (agent, _folder) = agent_with(patience, move |mut stream: BufReader<UnixStream>| async move {
            stream.write_all(garbage).await?;
            stream.read_u8().await.map(|_| ())
        });
        let error = agent.ping().await.unwrap_err();
        match waits {
            true => assert!(matches!(error, Error::Timeout(_)), "{error:?}"),
            false => assert!(matches!(error, Error::Protocol(_)), "{error:?}"),
        }
    }
}

#[tokio::test]
async fn garbage_instead_of_http_is_an_error() {
    for garbage in
        [&b"SSH-2.0-OpenSSH\r\n\r\n"[..], &[0u8; 512], b"HTTP/9.9 900\r\n\r\n", b"HTTP/1.1 200\r\nx\r\n\r\n"]
    {
        let (agent, _folder) = agent_of(move |mut stream: BufReader<UnixStream>| async move {
            accept(&mut stream).await?;
            stream.write_all(garbage).await
        });
        let error = agent.ping().await.unwrap_err();
        assert!(matches!(error, Error::Protocol(_) | Error::Unreachable(_)), "{error:?}");
    }
}

#[tokio::test]
async fn endless_headers_are_cut_off() {
    let (agent, _folder) = agent_of(|mut stream: BufReader<UnixStream>| async move {
        accept(&mut stream).await?;
        stream.write_all(b"HTTP/1.1 200 OK\r\n").await?;
        loop {
            stream.write_all(b"x-more: and more and more and more and more\r\n").await?;
        }
    });
    let error = agent.ping().await.unwrap_err();
    assert!(matches!(error, Error::Protocol(_)), "{error:?}");
}

#[tokio::test]
async fn an_endless_answer_is_cut_off() {
    let (agent, _folder) = agent_of(|mut stream: BufReader<UnixStream>| async move {
        accept(&mut stream).await?;
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await?;
        loop {
            stream.write_all(b"10\r\n0123456789abcdef\r\n").await?;
        }
    });
    let error = agent.read_file("/etc/passwd", None, 1000).await.unwrap_err();
    assert!(matches!(error, Error::Protocol(_)), "{error:?}");
}

/// An agent that responds with `body` to every call.
fn answering(body: Vec<u8>) -> (Agent, tempfile::TempDir) {
    agent_of(move |mut stream: BufReader<UnixStream>| {
        let body = body.clone();
        async move {
            accept(&mut stream).await?;
            respond(&mut stream, "200 OK", "application/json", &body).await
        }
    })
}

#[tokio::test]
async fn a_long_answer_takes_its_room_and_where_few_words_are_due_there_is_none() {
    let body = format!(r#"{{"stdout":"{}","resultJson":[{{"":0}}, 1]}}"#, "x".repeat(2 << 20)).into_bytes();
    let (agent, _folder) = answering(body.clone());
    let (answer, room) = agent.eval(&EvalRequest::default(), TIMEOUT).await.unwrap();
    assert_eq!((answer.stdout.len(), room.taken()), (2 << 20, body.len()));
    assert_eq!(answer.result_json.unwrap().get(), r#"[{"":0}, 1]"#, "as it came, and no larger");
    let error = agent.ping().await.unwrap_err();
    assert!(matches!(&error, Error::Protocol(why) if why.contains("longer")), "{error:?}");
}

#[tokio::test]
async fn a_listing_that_swells_when_it_is_read_is_refused() {
    let entries = vec!["{}"; forkd_protocol::agent::MAX_ENTRIES + 1].join(",");
    let (agent, _folder) = answering(format!(r#"{{"entries":[{entries}]}}"#).into_bytes());
    let error = agent.list_dir("/", 1, None).await.unwrap_err();
    assert!(matches!(&error, Error::Protocol(why) if why.contains("at most 20000")), "{error:?}");
}

#[tokio::test]
async fn silence_ends_with_a_timeout_wherever_it_begins() {
    let told: [(&[u8], &[u8]); 4] = [
        (b"", b""),
        (b"OK 1\n", b""),
        (b"OK 1\n", b"HTTP/1.1 200 OK\r\n"),
        (b"OK 1\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{"),
    ];
    for (line, answer) in told {
        let (agent, _folder) =
            agent_with(SHORT_TIMEOUT, move |mut stream: BufReader<UnixStream>| async move {
                stream.write_all(line).await?;
                request(&mut stream).await?;
                stream.write_all(answer).await?;
                std::future::pending().await
            });
        let begun = Instant::now();
        assert!(matches!(agent.ping().await.unwrap_err(), Error::Timeout(_)));
        assert!(begun.elapsed() < TIMEOUT / 2);
    }
    // Starting a process waits only for the head of the response.
    let (agent, _folder) = agent_with(SHORT_TIMEOUT, |stream| async move {
        let _open = stream;
        std::future::pending().await
    });
    assert!(matches!(start(&agent).await.unwrap_err(), Error::Timeout(_)));
}

#[tokio::test]
async fn json_that_is_not_the_answer_is_an_error() {
    for body in [&b"7"[..], b"{\"version\":7}", b"{", b"", &[b'['; 100_000]] {
        let (agent, _folder) = agent_of(move |mut stream: BufReader<UnixStream>| async move {
            accept(&mut stream).await?;
            respond(&mut stream, "200 OK", "application/json", body).await
        });
        let error = agent.ping().await.unwrap_err();
        assert!(matches!(error, Error::Protocol(_)), "{error:?}");
    }
}

#[tokio::test]
async fn a_stream_comes_in_order_however_it_is_cut() {
    let output = Output { stdout: Some(b"hi\n".to_vec()), ..Output::default() };
    let mut body = event(Event::Start { pid: 8 });
    body.extend(event(Event::Data(output.clone())));
    body.extend(event(Event::Keepalive {}));
    body.extend(connect::encode(END_STREAM, &EndStream::default()));
    let (agent, _folder) = streaming(body);
    let mut process = start(&agent).await.unwrap();
    assert_eq!(process.next().await.unwrap(), Some(Event::Start { pid: 8 }));
    assert_eq!(process.next().await.unwrap(), Some(Event::Data(output)));
    assert_eq!(process.next().await.unwrap(), Some(Event::Keepalive {}));
    assert_eq!(process.next().await.unwrap(), None);
    assert_eq!(process.next().await.unwrap(), None);
}

#[tokio::test]
async fn a_stream_can_end_with_the_reason() {
    let error = connect::Error::new(Code::DeadlineExceeded, "too slow");
    let (agent, _folder) = streaming(connect::encode(END_STREAM, &EndStream { error: Some(error) }));
    let error = start(&agent).await.unwrap().next().await.unwrap_err();
    assert!(error.is_deadline(), "{error:?}");
}

#[tokio::test]
async fn a_stream_that_breaks_off_or_lies_is_an_error() {
    let giant = [0, 0xff, 0xff, 0xff, 0xff, b'{'].to_vec();
    let flags = [0x40, 0, 0, 0, 0].to_vec();
    let nonsense = [0, 0, 0, 0, 2, b'[', b']'].to_vec();
    for body in [giant, flags, nonsense] {
        let (agent, _folder) = streaming(body);
        let error = start(&agent).await.unwrap().next().await.unwrap_err();
        assert!(matches!(error, Error::Protocol(_)), "{error:?}");
    }
    let (agent, _folder) = streaming(event(Event::Start { pid: 8 })[..9].to_vec());
    let error = start(&agent).await.unwrap().next().await.unwrap_err();
    assert!(matches!(error, Error::Unreachable(_)), "{error:?}");
}

#[tokio::test]
async fn a_stream_of_the_wrong_type_is_refused() {
    let (agent, _folder) = agent_of(|mut stream: BufReader<UnixStream>| async move {
        accept(&mut stream).await?;
        respond(&mut stream, "200 OK", "text/html", b"<html>").await
    });
    assert!(matches!(start(&agent).await.unwrap_err(), Error::Protocol(_)));
}

#[tokio::test]
async fn input_keeps_one_connection_and_its_order() {
    let (agent, _folder) = agent_of(|mut stream: BufReader<UnixStream>| async move {
        let mut seen = accept(&mut stream).await?;
        respond(&mut stream, "200 OK", "application/json", b"{}").await?;
        assert!(seen.contains(r#""stdin":"YQ==""#), "{seen}");
        seen = request(&mut stream).await?;
        respond(&mut stream, "200 OK", "application/json", b"{}").await?;
        assert!(seen.starts_with("post /process.process/closestdin"), "{seen}");
        Ok(())
    });
    let mut input = agent.input(7, false).await.unwrap();
    input.send(b"a").await.unwrap();
    input.close().await.unwrap();
}

#[test]
fn any_path_fits_into_a_query() {
    assert_eq!(files_uri("/a b&c=ä", Some("me")), "/files?path=%2Fa%20b%26c%3D%C3%A4&username=me");
}
