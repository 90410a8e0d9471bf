//! What clients send to a process besides its start: streamed input, and numbers in their ways.

use std::io::Write;

use base64::{Engine, prelude::BASE64_STANDARD};
use forkd_protocol::connect::{Code, END_STREAM, Error, encode};
use serde_json::{Value, json};

use crate::agent::tests::{Messages, Response, TestAgent};

/// A client stream under way, in chunks as clients send it.
struct StreamInput(std::net::TcpStream);

impl StreamInput {
    fn begin(agent: &TestAgent, headers: &str) -> Self {
        let mut stream = agent.connect();
        let head = format!(
            "POST /process.Process/StreamInput HTTP/1.1\r\ncontent-type: application/connect+json\r\n\
             transfer-encoding: chunked\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        StreamInput(stream)
    }

    fn chunk(&mut self, bytes: &[u8]) {
        // One that was refused may not read it all.
        let _ = self.0.write_all(&[format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat());
    }

    fn send(&mut self, message: Value) {
        // In two pieces, neither of them a whole message.
        let bytes = encode(0, &message);
        let (first, second) = bytes.split_at(7);
        self.chunk(first);
        self.chunk(second);
    }

    fn data(&mut self, bytes: &[u8]) {
        self.send(json!({"data": {"input": {"stdin": BASE64_STANDARD.encode(bytes)}}}));
    }

    /// The answer: the error of the stream, if it has one.
    fn answer(self) -> Option<Error> {
        let mut messages = Messages::of(Response::read(self.0));
        match messages.next() {
            Ok(message) => {
                assert_eq!(message, json!({}));
                messages.next().unwrap_err()
            }
            Err(error) => error,
        }
    }

    fn end(mut self) -> Option<Error> {
        let _ = self.0.write_all(b"0\r\n\r\n");
        self.answer()
    }
}

#[test]
fn input_is_streamed_in_order_until_the_client_ends_it() {
    let agent = TestAgent::new();
    let mut events = agent.start(json!({"process": {"cmd": "cat"}, "tag": "t"}));
    let pid = events.pid();
    for selector in [json!({"pid": pid}), json!({"tag": "t"}), json!({"pid": pid.to_string()})] {
        let mut input = StreamInput::begin(&agent, "");
        input.send(json!({"start": {"process": selector}}));
        input.data(b"one ");
        input.send(json!({"keepalive": {}}));
        input.data(&[b'x'; 300_000]);
        input.data(b" two\n");
        assert_eq!(input.end(), None);
        assert_eq!(events.until("two\n").len(), 300_009);
    }
    // An end message of the client ends the stream, too; the standard input stays open.
    let mut input = StreamInput::begin(&agent, "");
    input.send(json!({"start": {"process": {"pid": pid}}}));
    input.chunk(&encode(END_STREAM, &json!({})));
    assert_eq!(input.answer(), None);
    agent.call("/process.Process/CloseStdin", json!({"process": {"pid": pid}})).unwrap();
    assert_eq!(events.collect().code(), 0);
}

#[test]
fn streamed_input_that_reaches_no_process_is_refused() {
    let agent = TestAgent::new();
    let refused = |messages: &[Value]| {
        let mut input = StreamInput::begin(&agent, "");
        messages.iter().for_each(|message| input.send(message.clone()));
        input.end().unwrap().code
    };
    let data = json!({"data": {"input": {"stdin": "eA=="}}});
    assert_eq!(refused(&[]), Code::InvalidArgument);
    assert_eq!(refused(&[data]), Code::InvalidArgument);
    assert_eq!(refused(&[json!({"start": {"process": {"pid": 1}}})]), Code::NotFound);
    let pid = agent.sh("true").pid;
    assert_eq!(refused(&[json!({"start": {"process": {"pid": pid}}})]), Code::NotFound);
    let mut events = agent.start(json!({"process": {"cmd": "cat"}}));
    let start = json!({"start": {"process": {"pid": events.pid()}}});
    assert_eq!(refused(&[start.clone(), start]), Code::InvalidArgument);
    let mut input = StreamInput::begin(&agent, "");
    input.chunk(b"\0\xff\xff\xff\xff");
    assert_eq!(input.answer().unwrap().code, Code::ResourceExhausted);
    let mut input = StreamInput::begin(&agent, "content-encoding: gzip\r\n");
    input.chunk(b"\0");
    assert_eq!(input.end().unwrap().code, Code::Unimplemented);
}

#[test]
fn a_silent_stream_of_input_ends_with_its_process_or_its_time_and_not_before() {
    let agent = TestAgent::new();
    let mut events = agent.start(json!({"process": {"cmd": "cat"}}));
    let pid = events.pid();
    let mut timed = StreamInput::begin(&agent, "connect-timeout-ms: 300\r\n");
    let mut input = StreamInput::begin(&agent, "");
    for stream in [&mut timed, &mut input] {
        stream.send(json!({"start": {"process": {"pid": pid}}}));
    }
    assert_eq!(timed.answer().unwrap().code, Code::DeadlineExceeded);
    agent.call("/process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": 9})).unwrap();
    assert_eq!(input.answer().unwrap().code, Code::NotFound);
    assert_eq!(events.collect().end.unwrap().exit_code, -1);
}

#[test]
fn signals_and_processes_may_be_numbers_or_strings() {
    let agent = TestAgent::new();
    for (signal, number) in [(json!(15), 15), (json!("9"), 9), (json!("SIGNAL_SIGKILL"), 9)] {
        let mut events = agent.start(json!({"process": {"cmd": "sleep", "args": ["1000"], "envs": null}}));
        let process = json!({"pid": events.pid().to_string()});
        agent.call("/process.Process/SendSignal", json!({"process": process, "signal": signal})).unwrap();
        assert_eq!(events.collect().end.unwrap().signal, Some(number));
    }
    let unknown = agent.call("/process.Process/SendSignal", json!({"process": {"pid": 1}, "signal": 0}));
    assert_eq!(unknown.unwrap_err().code, Code::InvalidArgument);
}
